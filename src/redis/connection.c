/*
 * connection.c
 *		A connection to a Redis server: connecting and setting up.
 *
 * Failures are returned, not raised; the only errors raised here are the
 * core's own.  Nobody but the files that include socket.h, and resp.c, knows
 * hiredis.
 */
#include "postgres.h"

#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include "miscadmin.h"
#include "storage/fd.h"
#include "utils/builtins.h"

#include "error.h"
#include "redis/socket.h"
#include "redis/stream.h"
#include "redis/tls.h"
#include "shared/shared.h"

#define MAX_HOST_ADDRESSES	16
#define MAX_ADDRESS_TEXT	64	/* an address of IP version 6 with its scope */

/* Closes the socket, if there is one. */
static void
close_socket(RlConnection *conn)
{
	if (conn->events != NULL)
		FreeWaitEventSet(conn->events);
	conn->events = NULL;
	if (conn->ctx != NULL)
		redisFree(conn->ctx);
	conn->ctx = NULL;
}

/* Drops the connection, if there is one. */
void
rl_connection_close(RlConnection *conn)
{
	if (conn->tls != NULL)
		rl_tls_free(conn->tls);
	close_socket(conn);
	if (conn->fd_acquired)
		ReleaseExternalFD();
	memset(conn, 0, sizeof(*conn));
}

/*
 * True if the server's socket file has a full backlog.  hiredis 0.14 takes
 * this for an error, later ones for a connection in progress, which it is not.
 */
static bool
backlog_is_full(const RlConnection *conn, const RlAddress *address)
{
	struct sockaddr_storage peer;
	socklen_t	len = sizeof(peer);

	if (!address->is_path)
		return false;
	if (conn->ctx->err)
		return conn->ctx->err == REDIS_ERR_IO && errno == EAGAIN;
	return getpeername(conn->ctx->fd, (struct sockaddr *) &peer, &len) != 0;
}

/* Shakes hands.  Returns false with the error set. */
static bool
start_tls(RlConnection *conn, int64 deadline, RlError *error)
{
	if (!rl_tls_attach(conn->tls, conn->ctx->fd))
		return rl_lack_of(conn, error, "out of memory");
	for (bool late = false;; late = rl_monotonic_now() > deadline)
	{
		uint32		wants;
		char		why[RL_TLS_WHY];
		int			done = rl_tls_step(conn->tls, RL_TLS_HANDSHAKE, NULL, 0, &wants, why);

		if (done > 0)
			return true;
		if (done < 0)
			return rl_cannot_connect(conn, error, why);
		if (late || !rl_socket_wait(conn, wants, deadline))
			return rl_cannot_connect(conn, error, "ratelimit.connect_timeout has passed");
	}
}

/*
 * True if there may be one more connection: a descriptor for it, and one that
 * creating its WaitEventSet needs.
 */
bool
rl_connection_has_room(void)
{
	bool		has_room;

	if (!AcquireExternalFD())
		return false;
	has_room = AcquireExternalFD();
	if (has_room)
		ReleaseExternalFD();
	ReleaseExternalFD();
	return has_room;
}

/* True if the error is a lack of this process or machine, and says nothing of the server. */
static bool
is_lack(int error)
{
	return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

/*
 * Writes the host's addresses as text, those of IP version 4 first, as
 * redis-cli has it.  Returns how many there are, or 0 with the error set.
 */
static int
look_up(const RlConnection *conn, const char *host, char (*found)[MAX_ADDRESS_TEXT],
		RlError *error)
{
	struct addrinfo hints = {.ai_family = AF_UNSPEC,.ai_socktype = SOCK_STREAM};
	struct addrinfo *list;
	int			status = getaddrinfo(host, NULL, &hints, &list);
	int			n = 0;

	if (status == EAI_MEMORY || (status == EAI_SYSTEM && is_lack(errno)))
		rl_lack_of(conn, error, status == EAI_MEMORY ? "out of memory" : strerror(errno));
	else if (status != 0)
		rl_cannot_connect(conn, error, status == EAI_SYSTEM ? strerror(errno) : gai_strerror(status));
	if (status != 0)
		return 0;
	for (int pass = 0; pass < 2; pass++)
		for (struct addrinfo *info = list; info != NULL && n < MAX_HOST_ADDRESSES; info = info->ai_next)
			if ((info->ai_family == AF_INET) == (pass == 0) &&
				getnameinfo(info->ai_addr, info->ai_addrlen, found[n], MAX_ADDRESS_TEXT,
							NULL, 0, NI_NUMERICHOST) == 0)
				n++;
	freeaddrinfo(list);
	if (n == 0)
		rl_cannot_connect(conn, error, "the host has no address");
	return n;
}

/* Begins to connect the socket to a path, or to a host's address. */
static bool
begin_socket(RlConnection *conn, const RlAddress *address, const char *host, int64 deadline,
			 RlError *error)
{
	for (;;)
	{
		conn->ctx = address->is_path ? redisConnectUnixNonBlock(host)
			: redisConnectNonBlock(host, address->port);
		if (conn->ctx == NULL)
			return rl_lack_of(conn, error, "out of memory");
		if (!backlog_is_full(conn, address))
			break;
		if (rl_monotonic_now() >= deadline)
			return rl_cannot_connect(conn, error, "ratelimit.connect_timeout has passed");
		close_socket(conn);
		rl_pause(deadline);
	}
	if (conn->ctx->err && is_lack(errno))
		return rl_lack_of(conn, error, conn->ctx->errstr);
	if (conn->ctx->err)
		return rl_cannot_connect(conn, error, conn->ctx->errstr);
	if (conn->ctx->reader == NULL)
		return rl_lack_of(conn, error, "out of memory");
	return true;
}

/*
 * Opens a socket to a path, or to a host's address, and waits until it is up.
 * On failure returns false with the error set, and leaves what is to be closed.
 */
static bool
open_socket(RlConnection *conn, const RlAddress *address, const char *host, int64 deadline,
			RlError *error)
{
	int			spare;
	int			socket_error = 0;
	socklen_t	len = sizeof(socket_error);

	if (!begin_socket(conn, address, host, deadline, error))
		return false;
	/* Programs that the server starts must not inherit it. */
	(void) fcntl(conn->ctx->fd, F_SETFD, FD_CLOEXEC);

	/* Creating the WaitEventSet would raise an error of its own. */
	spare = dup(conn->ctx->fd);
	if (spare < 0)
		return rl_lack_of(conn, error, strerror(errno));
	(void) close(spare);
	conn->events = CreateWaitEventSet(NULL, 3);
	AddWaitEventToSet(conn->events, WL_LATCH_SET, PGINVALID_SOCKET, MyLatch, NULL);
	if (IsUnderPostmaster)
		AddWaitEventToSet(conn->events, WL_EXIT_ON_PM_DEATH, PGINVALID_SOCKET, NULL, NULL);
	conn->socket_event = AddWaitEventToSet(conn->events, WL_SOCKET_WRITEABLE,
										  conn->ctx->fd, NULL, NULL);
	conn->waiting_for = WL_SOCKET_WRITEABLE;

	if (!rl_socket_wait(conn, WL_SOCKET_WRITEABLE, deadline))
		return rl_cannot_connect(conn, error, "ratelimit.connect_timeout has passed");
	if (getsockopt(conn->ctx->fd, SOL_SOCKET, SO_ERROR, &socket_error, &len) != 0)
		socket_error = errno;
	if (socket_error != 0)
		return rl_cannot_connect(conn, error, strerror(socket_error));
	return true;
}

/*
 * Connects to the first of the server's addresses that accepts, with TLS if
 * there is to be.  Each has an equal share of the time that is left, so that
 * the last is tried too.  On failure returns false with the first address's
 * error set, and leaves what is to be dropped.
 */
static bool
connect_server(RlConnection *conn, const RlAddress *address, int64 deadline, RlError *error)
{
	char		hosts[MAX_HOST_ADDRESSES][MAX_ADDRESS_TEXT];
	int			n = 1;
	bool		up = false;
	RlError		why;

	if (!rl_connection_has_room())
		return rl_lack_of(conn, error, "too many files are open in this server process");
	conn->fd_acquired = AcquireExternalFD();
	if (!address->is_path)
		n = look_up(conn, address->host, hosts, error);

	for (int i = 0; i < n && !up; i++)
	{
		int64		now = rl_monotonic_now();

		close_socket(conn);
		up = open_socket(conn, address, address->is_path ? address->host : hosts[i],
						 now + (deadline - now) / (n - i), &why);
		if (!up && (i == 0 || !why.unreachable))
			*error = why;
		if (!up && !why.unreachable)
			break;
	}
	if (!up)
		return false;
	conn->send_wants = WL_SOCKET_WRITEABLE;
	conn->receive_wants = WL_SOCKET_READABLE;
	return conn->tls == NULL || start_tls(conn, deadline, error);
}

/* Writes what people call the server. */
void
rl_connection_name(const RlAddress *address, char *name, size_t size)
{
	if (address->is_path)
		snprintf(name, size, "\"%s\"", address->host);
	else
		snprintf(name, size, strchr(address->host, ':') ? "\"[%s]:%d\"" : "\"%s:%d\"",
				 address->host, address->port);
}

/*
 * rl_connection_exchange, which wipes what was to be sent also when an ERROR is
 * raised.  Not inlined, because of gcc's -Wclobbered.
 */
static pg_noinline RlOutcome
exchange_and_wipe(RlConnection *conn, StringInfo out, int n, int64 deadline, RlReply *reply,
				  RlError *error)
{
	RlOutcome	outcome;

	PG_TRY();
	{
		outcome = rl_connection_exchange(conn, out, n, deadline, reply, error);
	}
	PG_CATCH();
	{
		explicit_bzero(out->data, out->len);
		PG_RE_THROW();
	}
	PG_END_TRY();
	explicit_bzero(out->data, out->len);
	return outcome;
}

/*
 * Connects and sets the connection up (AUTH, SELECT); the password may be
 * empty.  That is a round trip of its own: a command sent with it would be run
 * although the password or the database was refused, as another user or in
 * another database.  *deadline, which is the set-up's, is set if it is 0, and
 * else moved by the time that it takes until the socket is up; nothing is
 * waited for past until.  Returns false with the error set, and leaves what is
 * to be closed.  Raises an error if a setting for TLS is wrong.
 */
bool
rl_connection_open(RlConnection *conn, const RlAddress *address, const char *password,
				   int64 *deadline, int64 until, RlError *error)
{
	StringInfoData out;
	RlReply		reply;
	int64		start = rl_monotonic_now();
	bool		ping;
	int			n = 0;

	rl_connection_name(address, conn->server, sizeof(conn->server));
	conn->in_flight = true;
	conn->due = -1;
	if (address->tls)
	{
		conn->tls = rl_tls_new(address->host);
		if (conn->tls == NULL)
			return rl_lack_of(conn, error, "out of memory");
	}
	if (!connect_server(conn, address, Min(start + (int64) rl_connect_timeout * 1000, until), error))
		return false;
	if (*deadline == 0)
		*deadline = start + (int64) rl_command_timeout * 1000;
	*deadline = Min(*deadline + rl_monotonic_now() - start, until);

	initStringInfo(&out);
	/* The buffer must not move later: that would leave a copy of the password. */
	enlargeStringInfo(&out, RL_MAX_PASSWORD + sizeof(address->user) + 128);
	if (password[0] != '\0')
	{
		rl_resp_start(&out, address->user[0] ? 3 : 2);
		rl_resp_arg(&out, "AUTH", 4);
		if (address->user[0])
			rl_resp_arg(&out, address->user, strlen(address->user));
		rl_resp_arg(&out, password, strlen(password));
		n++;
	}
	if (address->db != 0)
	{
		char		db[12];

		rl_resp_start(&out, 2);
		rl_resp_arg(&out, "SELECT", 6);
		rl_resp_arg(&out, db, pg_ltoa(address->db, db));
		n++;
	}
	/* The connection is up when the server has said something. */
	ping = n == 0 && conn->tls != NULL;
	if (ping)
	{
		rl_resp_start(&out, 1);
		rl_resp_arg(&out, "PING", 4);
		n++;
	}
	if (n > 0)
	{
		RlOutcome	outcome = exchange_and_wipe(conn, &out, n, *deadline, &reply, error);

		pfree(out.data);
		if (outcome != RL_DONE)
			return false;
		if (reply.kind == RL_REPLY_ERROR && ping && strncmp(reply.text, "NOPERM", 6) == 0)
			reply.kind = RL_REPLY_STATUS;
		if (reply.kind == RL_REPLY_ERROR)
			return rl_connection_refused(conn, true, reply.text, error);
		if (reply.kind != RL_REPLY_STATUS)
			return rl_protocol_violation(conn, error, "it is not a status");
	}
	conn->is_set_up = true;
	conn->in_flight = false;
	return true;
}

/* True if the connection can carry the next command. */
bool
rl_connection_is_usable(RlConnection *conn)
{
	char		byte;
	char		why[RL_TLS_WHY];

	if (conn->ctx == NULL || conn->in_flight || conn->retired)
		return false;
	/* An idle connection must be silent: no end, no error, no stray bytes. */
	if (conn->tls != NULL)
		return rl_tls_step(conn->tls, RL_TLS_PEEK, &byte, 1, &conn->receive_wants, why) == 0;
	return recv(conn->ctx->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 &&
		(errno == EAGAIN || errno == EWOULDBLOCK);
}
