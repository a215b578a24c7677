/*
 * connection.c
 *		A connection to a Redis server: socket, waiting, set-up.
 *
 * hiredis is used in non-blocking mode and driven by the backend's latch, so
 * that cancel, timeouts, termination and barriers work while Redis is silent.
 * An ERROR may jump out of any wait: in_flight is up from before the first
 * byte until the last reply is read, and whoever wants the connection next
 * drops it if the flag is up.  So no reply is ever read by the wrong call.
 *
 * Failures are returned, not raised; the only errors raised here are the
 * core's own.  Nobody but this file and resp.c knows hiredis.
 */
#include "postgres.h"

#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "miscadmin.h"
#include "storage/fd.h"
#include "storage/latch.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/wait_event.h"
#if PG_VERSION_NUM >= 180000
#include "storage/waiteventset.h"
#endif

#include "connection.h"
#include "tls.h"

#if PG_VERSION_NUM < 170000
#define CreateWaitEventSet(owner, n) CreateWaitEventSet(TopMemoryContext, (n))
#endif

#define MAX_REPLY_BYTES		65536


static uint32 wait_event = 0;

/*
 * Waiting
 */

/* wait_for_socket where nothing may throw. */
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
static bool
wait_for_socket(RlConnection *conn, uint32 what, int64 deadline)
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
		if (WaitEventSetWait(conn->events, (left + 999) / 1000, &event, 1, wait_event) == 0)
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

/* Waits for a moment, until then at most.  May raise what interrupts raise. */
void
rl_connection_pause(int64 until)
{
	int64		left = Max(until - rl_monotonic_now(), 0);

	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT |
					 (IsUnderPostmaster ? WL_EXIT_ON_PM_DEATH : 0),
					 Min((left + 999) / 1000, RL_PAUSE_MS), wait_event);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
}

/*
 * Errors
 */

static bool
cannot_connect(const RlConnection *conn, RlError *error, const char *why)
{
	rl_error_set(error, ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
				 "could not connect to Redis: %s", why);
	rl_error_detail(error, "The server is %s.", conn->server);
	error->unreachable = true;
	return false;
}

/* The same for a reason that is this process's own. */
static bool
lack_of(const RlConnection *conn, RlError *error, const char *why)
{
	cannot_connect(conn, error, why);
	error->unreachable = false;
	return false;
}

static bool
connection_lost(const RlConnection *conn, RlError *error, const char *why)
{
	rl_error_set(error, ERRCODE_CONNECTION_FAILURE,
				 "lost the connection to Redis: %s", why);
	rl_error_detail(error, "The server is %s.", conn->server);
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
		return connection_lost(conn, error, why);
	cannot_connect(conn, error, why);
	rl_error_detail(error, "The server is %s. It may want another certificate than that of ratelimit.tls_cert_file.",
					conn->server);
	return false;
}

static bool
protocol_violation(const RlConnection *conn, RlError *error, const char *what)
{
	rl_error_set(error, ERRCODE_PROTOCOL_VIOLATION,
				 "unexpected reply from Redis: %s", what);
	rl_error_detail(error, "The server is %s.", conn->server);
	return false;
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
	rl_error_set(error, sqlstate, "Redis answered with an error: %s", line);
	rl_error_detail(error, "The server is %s.", conn->server);
	return false;
}

/*
 * Sending and receiving
 */

/*
 * Sends what the socket takes of out, from *sent on.  Returns false with the
 * error set.
 */
static bool
send_some(RlConnection *conn, StringInfo out, int *sent, RlError *error)
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
			return connection_lost(conn, error, strerror(errno));
	}
	*sent += Max(n, 0);
	return true;
}

/* Reads what has come, up to a limit.  Returns false with the error set. */
static bool
receive_some(RlConnection *conn, RlError *error)
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
			return connection_lost(conn, error, n < 0 ? strerror(errno) : "Server closed the connection");
	}
	conn->heard = true;
	conn->reply_bytes += n;
	if (redisReaderFeed(conn->ctx->reader, buffer, n) != REDIS_OK)
		return protocol_violation(conn, error, conn->ctx->reader->errstr);
	return true;
}

/*
 * Finds the next reply, to which the reader is attached, in what was read.
 * Returns false with the error set; *found is false if more must be read.
 */
static bool
find_reply(RlConnection *conn, const RlReply *reply, bool *found, RlError *error)
{
	redisReader *reader = conn->ctx->reader;
	void	   *object = NULL;

	/* The reader would begin a reply with nothing, and could not be left then. */
	if (reader->pos < reader->len && redisReaderGetReply(reader, &object) != REDIS_OK)
		return protocol_violation(conn, error, conn->ctx->reader->errstr);
	*found = object != NULL;
	if (!*found && conn->reply_bytes > MAX_REPLY_BYTES)
		return protocol_violation(conn, error, "it is too long");
	if (!*found)
		return true;
	conn->reply_bytes = 0;
	if (reply->kind == RL_REPLY_OTHER)
		return protocol_violation(conn, error, "it does not answer the command");
	return true;
}

/* After the last reply: what is left over would be taken for the next call's. */
static bool
nothing_left(RlConnection *conn, RlError *error)
{
	if (conn->ctx->reader->pos < conn->ctx->reader->len)
		return protocol_violation(conn, error, "it is followed by another");
	conn->in_flight = false;
	return true;
}

/* Reads the next reply.  Returns false with the error set. */
static bool
read_reply(RlConnection *conn, RlReply *reply, int64 deadline, RlError *error)
{
	rl_resp_attach(conn->ctx->reader, reply);
	for (bool late = false;; late = rl_monotonic_now() > deadline)
	{
		bool		found;

		if (!find_reply(conn, reply, &found, error))
			return false;
		if (found)
			return true;
		if (late || !wait_for_socket(conn, conn->receive_wants, deadline))
			return connection_lost(conn, error, "ratelimit.command_timeout has passed");
		if (!receive_some(conn, error))
			return false;
	}
}

/*
 * Sends what out holds, n commands of which all but the last must answer with a
 * status, and reads their replies up to the first that does not; the last one
 * read is in *reply.
 */
RlOutcome
rl_connection_exchange(RlConnection *conn, StringInfo out, int n, int64 deadline,
					   RlReply *reply, RlError *error)
{
	int			sent = 0;

	conn->in_flight = true;
	conn->due = -1;
	for (;;)
	{
		if (!send_some(conn, out, &sent, error))
			return sent > 0 ? RL_FAILED : RL_NOT_SENT;
		if (sent == out->len)
			break;
		if (!wait_for_socket(conn, conn->send_wants, deadline))
		{
			connection_lost(conn, error, "ratelimit.command_timeout has passed");
			return RL_FAILED;
		}
	}
	for (int i = 0; i < n; i++)
	{
		conn->due = n - i;
		if (!read_reply(conn, reply, deadline, error))
			return RL_FAILED;
		if (reply->kind != RL_REPLY_STATUS && i < n - 1)
			return RL_DONE;
	}
	return nothing_left(conn, error) ? RL_DONE : RL_FAILED;
}

/*
 * Streams: many commands under way on a connection.  Neither side ever holds
 * more than RL_MAX_DUE replies, nor this one more than RL_MAX_UNSENT bytes and a
 * command.
 */

/* Begins a stream; out is for what is not sent yet. */
void
rl_stream_begin(RlStream *stream, RlConnection *conn, StringInfo out)
{
	resetStringInfo(out);
	stream->conn = conn;
	stream->out = out;
	stream->sent = 0;
	stream->due = 0;
	stream->wrote = false;
	stream->ready = false;
	conn->in_flight = true;
	conn->due = 0;
	rl_resp_attach(conn->ctx->reader, &stream->reply);
}

/* True if commands may be appended to out, each followed by rl_stream_appended. */
bool
rl_stream_has_room(RlStream *stream)
{
	if (stream->sent == stream->out->len)
	{
		resetStringInfo(stream->out);
		stream->sent = 0;
	}
	/* A command may have another ahead of it. */
	return stream->due < RL_MAX_DUE - 1 && stream->out->len < RL_MAX_UNSENT;
}

void
rl_stream_appended(RlStream *stream)
{
	if (stream->due++ == 0)
		stream->deadline = rl_monotonic_now() + (int64) rl_command_timeout * 1000;
	stream->conn->due = -1;
}

bool
rl_stream_is_sent(const RlStream *stream)
{
	return stream->sent == stream->out->len;
}

/* Sends what the socket takes. */
RlOutcome
rl_stream_send(RlStream *stream, RlError *error)
{
	if (rl_stream_is_sent(stream))
		return RL_DONE;
	if (!send_some(stream->conn, stream->out, &stream->sent, error))
		return stream->wrote || stream->sent > 0 ? RL_FAILED : RL_NOT_SENT;
	stream->wrote = true;
	if (rl_stream_is_sent(stream))
		stream->conn->due = stream->due;
	return RL_DONE;
}

/* What the stream's socket must be waited for. */
static uint32
stream_wants(const RlStream *stream)
{
	return stream->conn->receive_wants |
		(rl_stream_is_sent(stream) ? 0 : stream->conn->send_wants);
}

static WaitEventSet *joint_events = NULL;	/* of the streams that are waited for together */
static int	joint_members = 0;

/* To be called before streams are waited for, and when they change. */
void
rl_streams_changed(void)
{
	WaitEventSet *events = joint_events;

	joint_events = NULL;
	joint_members = 0;
	if (events != NULL)
		FreeWaitEventSet(events);
}

static void
watch_streams(RlStream **streams, int n)
{
	if (joint_events == NULL)
	{
		joint_events = CreateWaitEventSet(NULL, n + 2);
		AddWaitEventToSet(joint_events, WL_LATCH_SET, PGINVALID_SOCKET, MyLatch, NULL);
		if (IsUnderPostmaster)
			AddWaitEventToSet(joint_events, WL_EXIT_ON_PM_DEATH, PGINVALID_SOCKET, NULL, NULL);
	}
	for (int i = 0; i < n; i++)
	{
		RlStream   *stream = streams[i];
		uint32		wants = stream_wants(stream);

		if (i >= joint_members)
		{
			stream->joint_event = AddWaitEventToSet(joint_events, wants, stream->conn->ctx->fd,
													NULL, stream);
			joint_members = i + 1;
		}
		else if (stream->joint_wants != wants)
			ModifyWaitEvent(joint_events, stream->joint_event, wants, NULL);
		stream->joint_wants = wants;
	}
}

/*
 * Waits until one of the streams is ready to go on, or until then; those that
 * are get their flag set.  May raise what CHECK_FOR_INTERRUPTS raises, and the
 * lack of a descriptor if there are several.
 */
void
rl_streams_wait(RlStream **streams, int n, int64 until)
{
	WaitEvent	events[RL_MAX_STREAMS];
	int			nevents;
	int64		left = Max(until - rl_monotonic_now(), 0);

	if (n == 1)
	{
		streams[0]->ready = wait_for_socket(streams[0]->conn, stream_wants(streams[0]), until);
		return;
	}
	watch_streams(streams, n);
	nevents = WaitEventSetWait(joint_events, (left + 999) / 1000, events, lengthof(events), wait_event);
	for (int i = 0; i < nevents; i++)
	{
		if (events[i].events & WL_LATCH_SET)
		{
			ResetLatch(MyLatch);
			CHECK_FOR_INTERRUPTS();
		}
		else
			((RlStream *) events[i].user_data)->ready = true;
	}
}

/* Reads what has come, if something has.  Returns false with the error set. */
bool
rl_stream_receive(RlStream *stream, RlError *error)
{
	int64		quiet_until = stream->conn->quiet_until;

	/* However steadily replies come. */
	if (quiet_until != 0 && rl_monotonic_now() > quiet_until)
		return connection_lost(stream->conn, error, "ratelimit.command_timeout has passed");
	if (stream->ready && !receive_some(stream->conn, error))
		return false;
	stream->ready = false;
	return true;
}

/*
 * Finds the next reply, which is then in reply.  Returns false with the error
 * set; *found is false if none is there.
 */
bool
rl_stream_next(RlStream *stream, bool *found, RlError *error)
{
	*found = false;
	if (stream->due == 0)
		return true;
	if (!find_reply(stream->conn, &stream->reply, found, error))
		return false;
	if (!*found)
	{
		int64		now = rl_monotonic_now();

		if (now <= stream->deadline && (stream->conn->quiet_until == 0 || now <= stream->conn->quiet_until))
			return true;
		return connection_lost(stream->conn, error, "ratelimit.command_timeout has passed");
	}
	stream->due--;
	if (stream->conn->due > 0)
		stream->conn->due--;
	stream->deadline = rl_monotonic_now() + (int64) rl_command_timeout * 1000;
	return true;
}

/* The reply was taken: makes room for the next one. */
void
rl_stream_taken(RlStream *stream)
{
	rl_resp_attach(stream->conn->ctx->reader, &stream->reply);
}

/* After the last reply.  Returns false with the error set. */
bool
rl_stream_end(RlStream *stream, RlError *error)
{
	return nothing_left(stream->conn, error);
}

/*
 * Makes the connection usable again by reading what an interrupted call has
 * left due.  Does not throw if quiet_until is set.  Returns false with the
 * error set.
 */
bool
rl_connection_settle(RlConnection *conn, RlError *error)
{
	RlReply		reply;

	if (!conn->in_flight)
		return rl_connection_is_usable(conn) || connection_lost(conn, error, "it is not usable");
	/* The reader must not be within a reply: that goes to memory long gone. */
	if (conn->ctx == NULL || !conn->is_set_up || conn->due < 0 || conn->ctx->reader->ridx != -1)
		return connection_lost(conn, error, "a call was interrupted");
	for (; conn->due > 0; conn->due--)
		if (!read_reply(conn, &reply, conn->quiet_until, error))
			return false;
	return nothing_left(conn, error);
}


/*
 * Connecting
 */

/* Drops the connection, if there is one. */
void
rl_connection_close(RlConnection *conn)
{
	if (conn->events != NULL)
		FreeWaitEventSet(conn->events);
	if (conn->tls != NULL)
		rl_tls_free(conn->tls);
	if (conn->ctx != NULL)
		redisFree(conn->ctx);
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
		return lack_of(conn, error, "out of memory");
	for (bool late = false;; late = rl_monotonic_now() > deadline)
	{
		uint32		wants;
		char		why[RL_TLS_WHY];
		int			done = rl_tls_step(conn->tls, RL_TLS_HANDSHAKE, NULL, 0, &wants, why);

		if (done > 0)
			return true;
		if (done < 0)
			return cannot_connect(conn, error, why);
		if (late || !wait_for_socket(conn, wants, deadline))
			return cannot_connect(conn, error, "ratelimit.connect_timeout has passed");
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

/*
 * Opens a socket to the server and waits until it is up, with TLS if there is
 * to be.  On failure returns false with the error set, and leaves what is to
 * be dropped.
 */
static bool
open_socket(RlConnection *conn, const RlAddress *address, RlError *error)
{
	int			spare;
	int64		deadline = rl_monotonic_now() + (int64) rl_connect_timeout * 1000;
	int			socket_error = 0;
	socklen_t	len = sizeof(socket_error);

	if (!rl_connection_has_room())
		return lack_of(conn, error, "too many files are open in this server process");
	conn->fd_acquired = AcquireExternalFD();

	for (;;)
	{
		conn->ctx = address->is_path ? redisConnectUnixNonBlock(address->host)
			: redisConnectNonBlock(address->host, address->port);
		if (conn->ctx == NULL)
			return lack_of(conn, error, "out of memory");
		if (!backlog_is_full(conn, address))
			break;
		if (rl_monotonic_now() >= deadline)
			return cannot_connect(conn, error, "ratelimit.connect_timeout has passed");
		redisFree(conn->ctx);
		conn->ctx = NULL;
		rl_connection_pause(deadline);
	}
	if (conn->ctx->err && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM))
		return lack_of(conn, error, conn->ctx->errstr);
	if (conn->ctx->err)
		return cannot_connect(conn, error, conn->ctx->errstr);
	if (conn->ctx->reader == NULL)
		return lack_of(conn, error, "out of memory");
	/* Programs that the server starts must not inherit it. */
	(void) fcntl(conn->ctx->fd, F_SETFD, FD_CLOEXEC);

	/* Creating the WaitEventSet would raise an error of its own. */
	spare = dup(conn->ctx->fd);
	if (spare < 0)
		return lack_of(conn, error, strerror(errno));
	(void) close(spare);
	conn->events = CreateWaitEventSet(NULL, 3);
	AddWaitEventToSet(conn->events, WL_LATCH_SET, PGINVALID_SOCKET, MyLatch, NULL);
	if (IsUnderPostmaster)
		AddWaitEventToSet(conn->events, WL_EXIT_ON_PM_DEATH, PGINVALID_SOCKET, NULL, NULL);
	conn->socket_event = AddWaitEventToSet(conn->events, WL_SOCKET_WRITEABLE,
										  conn->ctx->fd, NULL, NULL);
	conn->waiting_for = WL_SOCKET_WRITEABLE;

	if (!wait_for_socket(conn, WL_SOCKET_WRITEABLE, deadline))
		return cannot_connect(conn, error, "ratelimit.connect_timeout has passed");
	if (getsockopt(conn->ctx->fd, SOL_SOCKET, SO_ERROR, &socket_error, &len) != 0)
		socket_error = errno;
	if (socket_error != 0)
		return cannot_connect(conn, error, strerror(socket_error));
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
 * Connects and sets the connection up (AUTH, SELECT); the password may be
 * empty.  That is a round trip of its own: a command sent with it would be run
 * although the password or the database was refused, as another user or in
 * another database.  *deadline, which is the set-up's, is set if it is 0, and
 * else moved by the time that it takes until the socket is up.  Returns false with the error set, and leaves what is to be closed.  Raises an error if a
 * setting for TLS is wrong.
 */
bool
rl_connection_open(RlConnection *conn, const RlAddress *address, const char *password,
				   int64 *deadline, RlError *error)
{
	StringInfoData out;
	RlReply		reply;
	int64		start = rl_monotonic_now();
	bool		ping;
	int			n = 0;

#if PG_VERSION_NUM >= 170000
	if (wait_event == 0)
		wait_event = WaitEventExtensionNew("RatelimitRedis");
#else
	wait_event = PG_WAIT_EXTENSION;
#endif

	rl_connection_name(address, conn->server, sizeof(conn->server));
	conn->in_flight = true;
	conn->due = -1;
	if (address->tls)
	{
		conn->tls = rl_tls_new(address->host);
		if (conn->tls == NULL)
			return lack_of(conn, error, "out of memory");
	}
	if (!open_socket(conn, address, error))
		return false;
	if (*deadline == 0)
		*deadline = start + (int64) rl_command_timeout * 1000;
	*deadline += rl_monotonic_now() - start;

	initStringInfo(&out);
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
		RlOutcome	outcome = rl_connection_exchange(conn, &out, n, *deadline, &reply, error);

		pfree(out.data);
		if (outcome != RL_DONE)
			return false;
		if (reply.kind == RL_REPLY_ERROR && ping && strncmp(reply.text, "NOPERM", 6) == 0)
			reply.kind = RL_REPLY_STATUS;
		if (reply.kind == RL_REPLY_ERROR)
			return rl_connection_refused(conn, true, reply.text, error);
		if (reply.kind != RL_REPLY_STATUS)
			return protocol_violation(conn, error, "it is not a status");
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

	if (conn->ctx == NULL || conn->in_flight)
		return false;
	/* An idle connection must be silent: no end, no error, no stray bytes. */
	if (conn->tls != NULL)
		return rl_tls_step(conn->tls, RL_TLS_PEEK, &byte, 1, &conn->receive_wants, why) == 0;
	return recv(conn->ctx->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 &&
		(errno == EAGAIN || errno == EWOULDBLOCK);
}
