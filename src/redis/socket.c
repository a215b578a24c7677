/*
 * socket.c
 *		A connection's socket: waiting, bytes out and in, and what is said when
 *		that fails.
 *
 * The socket does not block and is driven by the backend's latch, so that
 * cancel, timeouts, termination and barriers work while Redis is silent.
 */
#include "postgres.h"

#include <hiredis/hiredis.h>
#include <poll.h>
#include <sys/socket.h>

#include "miscadmin.h"

#include "error.h"
#include "redis/socket.h"
#include "redis/tls.h"
#include "shared/shared.h"

/*
 * Waiting
 */

/* What pg_stat_activity calls all waits for Redis. */
uint32
rl_wait_event(void)
{
#if PG_VERSION_NUM >= 170000
	static uint32 event = 0;

	if (event == 0)
		event = WaitEventExtensionNew("RatelimitRedis");
	return event;
#else
	return PG_WAIT_EXTENSION;
#endif
}

/* rl_socket_wait where nothing may throw. */
static bool
poll_socket(const RlConnection *conn, uint32 what, int64 deadline)
{
	struct pollfd fd = {.fd = conn->ctx->fd};

	fd.events = ((what & WL_SOCKET_READABLE) ? POLLIN : 0) | ((what & WL_SOCKET_WRITEABLE) ? POLLOUT : 0);
	for (;;)
	{
		int64		left = Max(deadline - rl_monotonic_now(), 0);

		if (poll(&fd, 1, (left + 999) / 1000) > 0)
			return true;
		if (left == 0)
			return false;
	}
}

/*
 * Waits until the socket is ready for what (WL_SOCKET_READABLE or
 * _WRITEABLE).  Returns false once the deadline has passed.  May raise what
 * CHECK_FOR_INTERRUPTS raises.
 */
bool
rl_socket_wait(RlConnection *conn, uint32 what, int64 deadline)
{
	if (conn->quiet_until != 0)
		return poll_socket(conn, what, Min(deadline, conn->quiet_until));
	if (conn->waiting_for != what)
	{
		ModifyWaitEvent(conn->events, conn->socket_event, what, NULL);
		conn->waiting_for = what;
	}
	for (;;)
	{
		int64		left = Max(deadline - rl_monotonic_now(), 0);
		WaitEvent	event;

		/* Late, look once more: this process may have been what was slow. */
		if (WaitEventSetWait(conn->events, (left + 999) / 1000, &event, 1, rl_wait_event()) == 0)
		{
			if (left == 0)
				return false;
		}
		else if (event.events & WL_LATCH_SET)
		{
			ResetLatch(MyLatch);
			CHECK_FOR_INTERRUPTS();
		}
		else
			return true;
	}
}

/*
 * Sleeps for RL_PAUSE_MS, until the deadline at most.  May raise what
 * CHECK_FOR_INTERRUPTS raises.
 */
void
rl_pause(int64 deadline)
{
	rl_sleep_until(Min(deadline, rl_monotonic_now() + RL_PAUSE_MS * 1000), rl_wait_event());
}

/*
 * Errors
 */

static bool
set_error(const RlConnection *conn, RlError *error, int sqlstate, const char *what, const char *why)
{
	rl_error_set(error, sqlstate, "%s: %s", what, why);
	rl_error_detail(error, "The server is %s.", conn->server);
	return false;
}

bool
rl_cannot_connect(const RlConnection *conn, RlError *error, const char *why)
{
	set_error(conn, error, ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
			  "could not connect to Redis", why);
	error->unreachable = true;
	return false;
}

/* The same for a reason that is this process's own. */
bool
rl_lack_of(const RlConnection *conn, RlError *error, const char *why)
{
	return set_error(conn, error, ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
					 "could not connect to Redis", why);
}

bool
rl_connection_lost(const RlConnection *conn, RlError *error, const char *why)
{
	set_error(conn, error, ERRCODE_CONNECTION_FAILURE, "lost the connection to Redis", why);
	error->unreachable = true;
	return false;
}

/*
 * The server judges a client's certificate when the client's part of the
 * handshake is over already, and what it says then may get lost.
 */
static bool
tls_failed(const RlConnection *conn, RlError *error, const char *why)
{
	if (conn->heard)
		return rl_connection_lost(conn, error, why);
	rl_cannot_connect(conn, error, why);
	rl_error_detail(error, "The server is %s. It may want another certificate than that of ratelimit.tls_cert_file.",
					conn->server);
	return false;
}

bool
rl_protocol_violation(const RlConnection *conn, RlError *error, const char *what)
{
	return set_error(conn, error, ERRCODE_PROTOCOL_VIOLATION, "unexpected reply from Redis", what);
}

/* An error reply, when setting the connection up or to a command. */
bool
rl_connection_refused(const RlConnection *conn, bool set_up, const char *line,
					  RlError *error)
{
	int			sqlstate = ERRCODE_PROTOCOL_VIOLATION;

	if (strstr(line, "max number of clients") != NULL)
		sqlstate = ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION;
	else if (strncmp(line, "NOAUTH", 6) == 0 ||
			 (set_up && (strstr(line, "AUTH") || strstr(line, "PASS") || strstr(line, "password"))))
		sqlstate = ERRCODE_INVALID_PASSWORD;
	return set_error(conn, error, sqlstate, "Redis answered with an error", line);
}

/*
 * Sending and receiving
 */

/*
 * Sends what the socket takes of out, from *sent on.  Returns false with the
 * error set.
 */
bool
rl_socket_send(RlConnection *conn, StringInfo out, int *sent, RlError *error)
{
	char	   *data = out->data + *sent;
	int			len = out->len - *sent;
	char		why[RL_TLS_WHY];
	int			n;

	if (conn->tls != NULL)
	{
		n = rl_tls_step(conn->tls, RL_TLS_SEND, data, len, &conn->send_wants, why);
		if (n < 0)
			return tls_failed(conn, error, why);
	}
	else
	{
		n = send(conn->ctx->fd, data, len, 0);
		if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
			return rl_connection_lost(conn, error, strerror(errno));
	}
	*sent += Max(n, 0);
	return true;
}

/* Reads what has come, up to a limit.  Returns false with the error set. */
bool
rl_socket_receive(RlConnection *conn, RlError *error)
{
	char		buffer[16384];	/* as much as TLS may hold back */
	char		why[RL_TLS_WHY];
	int			n;

	if (conn->tls != NULL)
	{
		n = rl_tls_step(conn->tls, RL_TLS_RECEIVE, buffer, sizeof(buffer),
						&conn->receive_wants, why);
		if (n == 0)
			return true;
		if (n < 0)
			return tls_failed(conn, error, why);
	}
	else
	{
		n = recv(conn->ctx->fd, buffer, sizeof(buffer), 0);
		if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
			return true;
		if (n <= 0)
			return rl_connection_lost(conn, error, n < 0 ? strerror(errno) : "Server closed the connection");
	}
	conn->heard = true;
	conn->reply_bytes += n;
	if (redisReaderFeed(conn->ctx->reader, buffer, n) != REDIS_OK)
		return rl_protocol_violation(conn, error, conn->ctx->reader->errstr);
	return true;
}
