/*
 * redis.c
 *		The backend's connection to Redis: the only file that knows hiredis.
 *
 * hiredis is used in non-blocking mode and driven by the backend's latch, so
 * that cancel, timeouts, termination and barriers work while Redis is silent.
 * An ERROR may jump out of any wait: in_flight is up from before the first
 * byte until the last reply is read, and whoever wants the connection next
 * drops it if the flag is up.  So no reply is ever read by the wrong call.
 *
 * Failures are returned, not raised; the only errors raised here are the
 * core's own, and those of settings that cannot mean what was wanted.
 *
 * hiredis 0.14 ends the process when memory ends, and any version believes
 * the lengths it is told.  So replies are read by object functions of our own
 * into a bounded struct, and no more than MAX_REPLY_BYTES of them.
 */
#include "postgres.h"

#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "common/cryptohash.h"
#include "common/sha1.h"
#include "miscadmin.h"
#include "storage/fd.h"
#include "storage/latch.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/wait_event.h"
#if PG_VERSION_NUM >= 180000
#include "storage/waiteventset.h"
#endif

#include "address.h"
#include "redis.h"
#include "shared.h"

#if PG_VERSION_NUM < 170000
#define CreateWaitEventSet(owner, n) CreateWaitEventSet(TopMemoryContext, (n))
#endif

/* hiredis 1.0 has more reply types, and counts elements by size_t. */
#if HIREDIS_MAJOR >= 1
typedef size_t ElementCount;
#else
typedef int ElementCount;
#endif

#define MAX_REPLY_BYTES		65536
#define MAX_PASSWORD		512
#define BACKLOG_RETRY_MS	5

typedef enum Outcome
{
	DONE,
	FAILED,
	NOT_SENT					/* failed, and Redis cannot have seen a byte */
} Outcome;

static struct
{
	redisContext *ctx;			/* NULL: not connected */
	WaitEventSet *events;
	int			socket_event;	/* the socket's position in events */
	bool		fd_acquired;
	bool		in_flight;		/* bytes out or replies due, or not set up */
	uint32		waiting_for;	/* what events has the socket for */
	char	   *url;			/* settings it was made with, malloc'd */
	char	   *passfile;
	char		server[300];	/* for error details */
	RlReply    *reply;			/* where the object functions put values */
	size_t		reply_bytes;	/* read since the last complete reply */
}			conn;

static uint32 wait_event = 0;

RlRedisUsage rl_redis_usage;

/*
 * Replies
 */

static void *
got_value(const redisReadTask *task, bool valid, int64 value)
{
	RlReply    *reply = conn.reply;
	bool		top = task->parent == NULL;

	if (!valid || (!top && task->parent->parent != NULL) || reply->nvalues == RL_MAX_VALUES)
		reply->kind = RL_REPLY_OTHER;
	else
		reply->values[reply->nvalues++] = value;
	return reply;
}

/* Reads all of the string as a decimal int64. */
static bool
read_int64(const char *str, size_t len, int64 *value)
{
	char		copy[21];
	char	   *end;

	if (len == 0 || len >= sizeof(copy) || strspn(str, "-0123456789") < len)
		return false;
	memcpy(copy, str, len);
	copy[len] = '\0';
	errno = 0;
	*value = strtoll(copy, &end, 10);
	return errno == 0 && end == copy + len;
}

static void *
got_string(const redisReadTask *task, char *str, size_t len)
{
	RlReply    *reply = conn.reply;

	if (task->type == REDIS_REPLY_STRING)
	{
		int64		value = 0;
		bool		valid = read_int64(str, len, &value);

		return got_value(task, valid, value);
	}

	if (task->parent != NULL ||
		(task->type != REDIS_REPLY_ERROR && task->type != REDIS_REPLY_STATUS))
	{
		reply->kind = RL_REPLY_OTHER;
		return reply;
	}
	reply->kind = task->type == REDIS_REPLY_ERROR ? RL_REPLY_ERROR : RL_REPLY_STATUS;
	len = Min(len, sizeof(reply->text) - 1);
	for (size_t i = 0; i < len; i++)
		reply->text[i] = (str[i] >= ' ' && str[i] <= '~') ? str[i] : '?';
	reply->text[len] = '\0';
	return reply;
}

static void *
got_array(const redisReadTask *task, ElementCount n)
{
	if (task->parent != NULL || n > RL_MAX_VALUES)
		conn.reply->kind = RL_REPLY_OTHER;
	conn.reply->is_array = true;
	return conn.reply;
}

static void *
got_integer(const redisReadTask *task, long long value)
{
	return got_value(task, true, value);
}

static void *
got_nil(const redisReadTask *task)
{
	return got_value(task, false, 0);
}

#if HIREDIS_MAJOR >= 1
static void *
got_double(const redisReadTask *task, double value pg_attribute_unused(),
		   char *str pg_attribute_unused(), size_t len pg_attribute_unused())
{
	return got_value(task, false, 0);
}

static void *
got_bool(const redisReadTask *task, int value pg_attribute_unused())
{
	return got_value(task, false, 0);
}
#endif

static void
free_nothing(void *object pg_attribute_unused())
{
}

static redisReplyObjectFunctions object_functions = {
	.createString = got_string,
	.createArray = got_array,
	.createInteger = got_integer,
	.createNil = got_nil,
#if HIREDIS_MAJOR >= 1
	.createDouble = got_double,
	.createBool = got_bool,
#endif
	.freeObject = free_nothing
};

/*
 * Waiting
 */

/*
 * Waits until the socket is ready for what (WL_SOCKET_READABLE or
 * _WRITEABLE).  Returns false once the deadline has passed.  May raise what
 * CHECK_FOR_INTERRUPTS raises.
 */
static bool
wait_for_socket(uint32 what, int64 deadline)
{
	if (conn.waiting_for != what)
	{
		ModifyWaitEvent(conn.events, conn.socket_event, what, NULL);
		conn.waiting_for = what;
	}
	for (;;)
	{
		int64		left = Max(deadline - rl_monotonic_now(), 0);
		WaitEvent	event;

		/* Late, look once more: this process may have been what was slow. */
		if (WaitEventSetWait(conn.events, (left + 999) / 1000, &event, 1, wait_event) == 0)
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
 * Connecting
 */

static void
disconnect(void)
{
	if (conn.events != NULL)
		FreeWaitEventSet(conn.events);
	if (conn.ctx != NULL)
		redisFree(conn.ctx);
	if (conn.fd_acquired)
		ReleaseExternalFD();
	free(conn.url);
	free(conn.passfile);
	memset(&conn, 0, sizeof(conn));
}

static bool
cannot_connect(RlError *error, const char *why)
{
	rl_error_set(error, ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
				 "could not connect to Redis: %s", why);
	rl_error_detail(error, "The server is %s.", conn.server);
	error->unreachable = true;
	return false;
}

/* The same for a reason that is this process's own. */
static bool
lack_of(RlError *error, const char *why)
{
	cannot_connect(error, why);
	error->unreachable = false;
	return false;
}

static bool
connection_lost(RlError *error, const char *why)
{
	rl_error_set(error, ERRCODE_CONNECTION_FAILURE,
				 "lost the connection to Redis: %s", why);
	rl_error_detail(error, "The server is %s.", conn.server);
	error->unreachable = true;
	return false;
}

static bool
protocol_violation(RlError *error, const char *what)
{
	rl_error_set(error, ERRCODE_PROTOCOL_VIOLATION,
				 "unexpected reply from Redis: %s", what);
	rl_error_detail(error, "The server is %s.", conn.server);
	return false;
}

/* An error reply, when setting the connection up or to a command. */
static bool
refused_by_server(RlError *error, bool set_up, const char *line)
{
	int			sqlstate = ERRCODE_PROTOCOL_VIOLATION;

	if (strstr(line, "max number of clients") != NULL)
		sqlstate = ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION;
	else if (strncmp(line, "NOAUTH", 6) == 0 ||
			 (set_up && (strstr(line, "AUTH") || strstr(line, "PASS") || strstr(line, "password"))))
		sqlstate = ERRCODE_INVALID_PASSWORD;
	rl_error_set(error, sqlstate, "Redis answered with an error: %s", line);
	rl_error_detail(error, "The server is %s.", conn.server);
	return false;
}

/*
 * Reads the password, the first line of ratelimit.redis_passfile, into a
 * buffer of MAX_PASSWORD bytes.  Raises an error if the file cannot be trusted.
 */
static void
read_password(char *password)
{
	FILE	   *file;
	struct stat st;

	/* Before it is opened, because opening a pipe would wait for its writer. */
	if (stat(rl_redis_passfile, &st) != 0)
		ereport(ERROR,
				(errcode_for_file_access(),
				 errmsg("could not stat file \"%s\": %m", rl_redis_passfile)));
	if (!S_ISREG(st.st_mode))
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("Redis password file \"%s\" is not a plain file", rl_redis_passfile)));
	if (st.st_mode & (S_IRWXG | S_IRWXO))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("Redis password file \"%s\" has group or world access", rl_redis_passfile),
				 errdetail("Permissions should be u=rw (0600) or less.")));
	file = AllocateFile(rl_redis_passfile, "r");
	if (file == NULL)
		ereport(ERROR,
				(errcode_for_file_access(),
				 errmsg("could not open file \"%s\": %m", rl_redis_passfile)));
	if (fgets(password, MAX_PASSWORD, file) == NULL)
		password[0] = '\0';
	if (ferror(file))
		ereport(ERROR,
				(errcode_for_file_access(),
				 errmsg("could not read file \"%s\": %m", rl_redis_passfile)));
	if (strlen(password) == MAX_PASSWORD - 1)
		ereport(ERROR,
				(errcode(ERRCODE_CONFIG_FILE_ERROR),
				 errmsg("Redis password file \"%s\" has too long a line", rl_redis_passfile)));
	password[strcspn(password, "\r\n")] = '\0';
	if (password[0] == '\0')
		ereport(ERROR,
				(errcode(ERRCODE_CONFIG_FILE_ERROR),
				 errmsg("Redis password file \"%s\" holds no password", rl_redis_passfile)));
	FreeFile(file);
}

/* Appends one argument in Redis's protocol. */
static void
append_arg(StringInfo out, const char *data, int len)
{
	char	   *p;

	/* Room for "$", the length, two ends of line, and a terminator. */
	enlargeStringInfo(out, len + 16);
	p = out->data + out->len;
	*p++ = '$';
	p += pg_ultoa_n(len, p);
	*p++ = '\r';
	*p++ = '\n';
	memcpy(p, data, len);
	p += len;
	*p++ = '\r';
	*p++ = '\n';
	out->len = p - out->data;
}

/* Appends the start of a command: how many arguments, its name included. */
static void
append_start(StringInfo out, int nargs)
{
	char		header[16];
	int			n;

	header[0] = '*';
	n = 1 + pg_ultoa_n(nargs, header + 1);
	header[n++] = '\r';
	header[n++] = '\n';
	appendBinaryStringInfo(out, header, n);
}

/*
 * True if the server's socket file has a full backlog.  hiredis 0.14 takes
 * this for an error, later ones for a connection in progress, which it is not.
 */
static bool
backlog_is_full(const RlAddress *address)
{
	struct sockaddr_storage peer;
	socklen_t	len = sizeof(peer);

	if (!address->is_path)
		return false;
	if (conn.ctx->err)
		return conn.ctx->err == REDIS_ERR_IO && errno == EAGAIN;
	return getpeername(conn.ctx->fd, (struct sockaddr *) &peer, &len) != 0;
}

/*
 * Opens a socket to the server and waits until it is up.  On failure returns
 * false with the error set, and leaves what is to be dropped.
 */
static bool
open_socket(const RlAddress *address, RlError *error)
{
	int64		deadline = rl_monotonic_now() + (int64) rl_connect_timeout * 1000;
	int			socket_error = 0;
	socklen_t	len = sizeof(socket_error);

	/* Room for the second is what creating the WaitEventSet needs. */
	if (!AcquireExternalFD())
		return lack_of(error, "too many files are open in this server process");
	conn.fd_acquired = true;
	if (!AcquireExternalFD())
		return lack_of(error, "too many files are open in this server process");
	ReleaseExternalFD();

	for (;;)
	{
		conn.ctx = address->is_path ? redisConnectUnixNonBlock(address->host)
			: redisConnectNonBlock(address->host, address->port);
		if (conn.ctx == NULL)
			return lack_of(error, "out of memory");
		if (!backlog_is_full(address))
			break;
		if (rl_monotonic_now() >= deadline)
			return cannot_connect(error, "ratelimit.connect_timeout has passed");
		redisFree(conn.ctx);
		conn.ctx = NULL;
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT |
						 (IsUnderPostmaster ? WL_EXIT_ON_PM_DEATH : 0),
						 BACKLOG_RETRY_MS, wait_event);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}
	if (conn.ctx->err)
		return cannot_connect(error, conn.ctx->errstr);
	if (conn.ctx->reader == NULL)
		return lack_of(error, "out of memory");
	conn.ctx->reader->fn = &object_functions;
	/* Programs that the server starts must not inherit it. */
	(void) fcntl(conn.ctx->fd, F_SETFD, FD_CLOEXEC);

	conn.events = CreateWaitEventSet(NULL, 3);
	AddWaitEventToSet(conn.events, WL_LATCH_SET, PGINVALID_SOCKET, MyLatch, NULL);
	if (IsUnderPostmaster)
		AddWaitEventToSet(conn.events, WL_EXIT_ON_PM_DEATH, PGINVALID_SOCKET, NULL, NULL);
	conn.socket_event = AddWaitEventToSet(conn.events, WL_SOCKET_WRITEABLE,
										  conn.ctx->fd, NULL, NULL);
	conn.waiting_for = WL_SOCKET_WRITEABLE;

	if (!wait_for_socket(WL_SOCKET_WRITEABLE, deadline))
		return cannot_connect(error, "ratelimit.connect_timeout has passed");
	if (getsockopt(conn.ctx->fd, SOL_SOCKET, SO_ERROR, &socket_error, &len) != 0)
		socket_error = errno;
	if (socket_error != 0)
		return cannot_connect(error, strerror(socket_error));
	return true;
}

/* What people call the server. */
static void
name_server(const RlAddress *address, char *name, size_t size)
{
	if (address->is_path)
		snprintf(name, size, "\"%s\"", address->host);
	else
		snprintf(name, size, strchr(address->host, ':') ? "\"[%s]:%d\"" : "\"%s:%d\"",
				 address->host, address->port);
}

/*
 * Opens a socket, and appends to out the commands that set the connection up
 * (AUTH, SELECT).  Returns false with the error set; raises an error if a
 * setting is wrong.
 */
static bool
connect_to_server(StringInfo out, int *nsetup, RlError *error)
{
	RlAddress	address;
	char		password[MAX_PASSWORD] = "";

	if (!rl_address_parse(rl_redis_url, &address, error))
		rl_raise(error);
	if (address.tls)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("rediss:// is not supported because ratelimit was built without TLS")));
	if (rl_redis_passfile[0] != '\0')
		read_password(password);
	else if (address.user[0] != '\0')
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("ratelimit.redis_url names a user, but ratelimit.redis_passfile is empty")));

#if PG_VERSION_NUM >= 170000
	if (wait_event == 0)
		wait_event = WaitEventExtensionNew("RatelimitRedis");
#else
	wait_event = PG_WAIT_EXTENSION;
#endif

	name_server(&address, conn.server, sizeof(conn.server));
	conn.in_flight = true;
	conn.url = strdup(rl_redis_url);
	conn.passfile = strdup(rl_redis_passfile);
	if (conn.url == NULL || conn.passfile == NULL)
		return lack_of(error, "out of memory");
	if (!open_socket(&address, error))
		return false;

	*nsetup = 0;
	if (password[0] != '\0')
	{
		append_start(out, address.user[0] ? 3 : 2);
		append_arg(out, "AUTH", 4);
		if (address.user[0])
			append_arg(out, address.user, strlen(address.user));
		append_arg(out, password, strlen(password));
		(*nsetup)++;
	}
	if (address.db != 0)
	{
		char		db[12];

		append_start(out, 2);
		append_arg(out, "SELECT", 6);
		append_arg(out, db, pg_ltoa(address.db, db));
		(*nsetup)++;
	}
	return true;
}

/* True if the connection can carry the next command. */
static bool
is_usable(void)
{
	char		byte;

	if (conn.ctx == NULL || conn.in_flight || conn.ctx->err ||
		strcmp(conn.url, rl_redis_url) != 0 ||
		strcmp(conn.passfile, rl_redis_passfile) != 0)
		return false;
	/* An idle socket must be silent: no end, no error, no stray bytes. */
	return recv(conn.ctx->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 &&
		(errno == EAGAIN || errno == EWOULDBLOCK);
}

/*
 * Sending and receiving
 */

/* Reads the next reply.  Returns false with the error set. */
static bool
read_reply(RlReply *reply, int64 deadline, RlError *error)
{
	void	   *object = NULL;

	reply->kind = RL_REPLY_NUMBERS;
	reply->is_array = false;
	reply->nvalues = 0;
	conn.reply = reply;
	conn.reply_bytes = 0;

	for (bool late = false;; late = rl_monotonic_now() > deadline)
	{
		size_t		had;

		if (redisGetReplyFromReader(conn.ctx, &object) != REDIS_OK)
			return protocol_violation(error, conn.ctx->errstr);
		if (object != NULL)
			return true;
		if (conn.reply_bytes > MAX_REPLY_BYTES)
			return protocol_violation(error, "it is too long");
		if (late || !wait_for_socket(WL_SOCKET_READABLE, deadline))
			return connection_lost(error, "ratelimit.command_timeout has passed");
		had = conn.ctx->reader->len;
		if (redisBufferRead(conn.ctx) != REDIS_OK)
			return connection_lost(error, conn.ctx->errstr);
		conn.reply_bytes += conn.ctx->reader->len - had;
	}
}

/*
 * Sends what out holds, n commands, and reads their replies up to the first
 * error; the last one read is in *reply.
 */
static Outcome
exchange(StringInfo out, int n, int64 deadline, RlReply *reply, RlError *error)
{
	bool		sent_some = false;
	int			done = 0;

	conn.in_flight = true;
	if (redisAppendFormattedCommand(conn.ctx, out->data, out->len) != REDIS_OK)
	{
		lack_of(error, "out of memory");
		return FAILED;
	}
	for (;;)
	{
		if (redisBufferWrite(conn.ctx, &done) != REDIS_OK)
		{
			connection_lost(error, conn.ctx->errstr);
			return sent_some ? FAILED : NOT_SENT;
		}
		if (done)
			break;
		sent_some = true;
		if (!wait_for_socket(WL_SOCKET_WRITEABLE, deadline))
		{
			connection_lost(error, "ratelimit.command_timeout has passed");
			return FAILED;
		}
	}

	for (int i = 0; i < n; i++)
	{
		if (!read_reply(reply, deadline, error))
			return FAILED;
		if (reply->kind == RL_REPLY_OTHER)
		{
			protocol_violation(error, "it does not answer the command");
			return FAILED;
		}
		if (reply->kind == RL_REPLY_ERROR && i < n - 1)
			return DONE;
	}
	/* What is left over would be taken for the next call's reply. */
	if (conn.ctx->reader->pos < conn.ctx->reader->len)
	{
		protocol_violation(error, "it is followed by another");
		return FAILED;
	}
	conn.in_flight = false;
	return DONE;
}

/*
 * Connects and sets the connection up.  That is a round trip of its own: a
 * command sent with it would be run although the password or the database was
 * refused, as another user or in another database.
 */
static bool
set_up(StringInfo out, int64 *deadline, RlError *error)
{
	int			nsetup;
	RlReply		reply;

	resetStringInfo(out);
	if (!connect_to_server(out, &nsetup, error))
		return false;
	if (*deadline == 0)
		*deadline = rl_monotonic_now() + (int64) rl_command_timeout * 1000;
	if (nsetup == 0)
		return true;
	if (exchange(out, nsetup, *deadline, &reply, error) != DONE)
		return false;
	if (reply.kind == RL_REPLY_ERROR)
		return refused_by_server(error, true, reply.text);
	if (reply.kind != RL_REPLY_STATUS)
		return protocol_violation(error, "it is not a status");
	return true;
}

/* The breaker of the server that the settings name; NULL: there is none. */
static RlBreaker *
server_breaker(void)
{
	static uint64 version = 0;
	static RlBreaker *breaker = NULL;
	RlAddress	address;
	RlError		error;
	char		name[sizeof(conn.server)];

	if (version == rl_settings_version)
		return breaker;
	breaker = NULL;
	if (rl_address_parse(rl_redis_url, &address, &error))
	{
		name_server(&address, name, sizeof(name));
		breaker = rl_breaker_find(name);
	}
	version = rl_settings_version;
	return breaker;
}

/*
 * Sends a command and reads its reply, connecting first if need be.  A
 * connection that turns out to be dead before a byte was sent is made anew,
 * once.  *deadline is set if it is 0.  Returns false with the error set, and
 * drops the connection.
 */
static bool
call_server(void (*append_command) (StringInfo out, const void *arg), const void *arg,
			int64 *deadline, RlReply *reply, RlError *error)
{
	static StringInfoData out;
	Outcome		outcome;

	if (out.data == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);

		initStringInfo(&out);
		MemoryContextSwitchTo(old);
	}

	do
	{
		bool		reused = is_usable();

		if (!reused)
		{
			disconnect();
			if (!set_up(&out, deadline, error))
			{
				disconnect();
				return false;
			}
		}
		resetStringInfo(&out);
		append_command(&out, arg);
		if (*deadline == 0)
			*deadline = rl_monotonic_now() + (int64) rl_command_timeout * 1000;
		rl_redis_usage.round_trips++;
		outcome = exchange(&out, 1, *deadline, reply, error);
		if (outcome != DONE)
			disconnect();
		if (!reused && outcome == NOT_SENT)
			outcome = FAILED;
	} while (outcome == NOT_SENT);
	return outcome == DONE;
}

/* call_server, unless others have found that the server cannot be reached. */
static bool
call(void (*append_command) (StringInfo out, const void *arg), const void *arg,
	 int64 *deadline, RlReply *reply, RlError *error)
{
	RlBreaker  *breaker = server_breaker();
	int64		start = rl_monotonic_now();
	bool		answered;

	if (!rl_breaker_admits(breaker, error))
		return false;
	answered = call_server(append_command, arg, deadline, reply, error);
	rl_redis_usage.us += rl_monotonic_now() - start;
	if (answered)
		rl_breaker_succeeded(breaker);
	else if (error->unreachable)
		rl_breaker_failed(breaker, error);
	return answered;
}

/* Drops the connection, of which a reply made no sense. */
void
rl_redis_distrust(void)
{
	disconnect();
}

/*
 * What people call the server that the settings name, NULL if they name none;
 * whether this backend is connected to it; and how its breaker stands.
 */
const char *
rl_redis_server(bool *connected, const char **breaker, int64 *breaker_left)
{
	static char name[sizeof(conn.server)];
	RlAddress	address;
	RlError		error;

	*connected = is_usable();
	*breaker = rl_breaker_state(server_breaker(), breaker_left);
	if (!rl_address_parse(rl_redis_url, &address, &error))
		return NULL;
	name_server(&address, name, sizeof(name));
	return name;
}

/*
 * Commands
 */

/* Starts a command in the one buffer there is; append its arguments next. */
RlCommand *
rl_command_start(void)
{
	static RlCommand command;

	if (command.args.data == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);

		initStringInfo(&command.args);
		MemoryContextSwitchTo(old);
	}
	resetStringInfo(&command.args);
	command.nargs = 0;
	return &command;
}

/* Appends an argument of the given bytes. */
void
rl_command_arg(RlCommand *command, const char *data, int len)
{
	append_arg(&command->args, data, len);
	command->nargs++;
}

/* Appends a number as an argument. */
void
rl_command_number(RlCommand *command, int64 number)
{
	char		text[32];

	rl_command_arg(command, text, pg_lltoa(number, text));
}

static void
append_plain(StringInfo out, const void *arg)
{
	const RlCommand *command = arg;

	append_start(out, command->nargs);
	appendBinaryStringInfo(out, command->args.data, command->args.len);
}

typedef struct ScriptCall
{
	const RlScript *script;
	const RlCommand *command;
	bool		by_source;
} ScriptCall;

static void
append_script(StringInfo out, const void *arg)
{
	const ScriptCall *sc = arg;

	append_start(out, sc->command->nargs + 2);
	if (sc->by_source)
	{
		append_arg(out, "EVAL", 4);
		append_arg(out, sc->script->source, strlen(sc->script->source));
	}
	else
	{
		append_arg(out, "EVALSHA", 7);
		append_arg(out, sc->script->sha1, 40);
	}
	appendBinaryStringInfo(out, sc->command->args.data, sc->command->args.len);
}

static void
compute_sha1(RlScript *script)
{
	pg_cryptohash_ctx *ctx = pg_cryptohash_create(PG_SHA1);
	uint8		digest[SHA1_DIGEST_LENGTH];

	if (pg_cryptohash_init(ctx) < 0 ||
		pg_cryptohash_update(ctx, (const uint8 *) script->source, strlen(script->source)) < 0 ||
		pg_cryptohash_final(ctx, digest, sizeof(digest)) < 0)
	{
		pg_cryptohash_free(ctx);
		elog(ERROR, "could not compute the SHA1 of a script");
	}
	pg_cryptohash_free(ctx);
	for (int i = 0; i < SHA1_DIGEST_LENGTH; i++)
		snprintf(script->sha1 + 2 * i, 3, "%02x", digest[i]);
}

/* An error reply is the store failing, never a verdict. */
static bool
check_reply(const RlReply *reply, RlError *error)
{
	if (reply->kind != RL_REPLY_ERROR)
		return true;
	return refused_by_server(error, false, reply->text);
}

/*
 * Runs a plain command.  Returns true with a reply that is not an error, or
 * false with the error set.
 */
bool
rl_redis_command(RlCommand *command, RlReply *reply, RlError *error)
{
	int64		deadline = 0;

	return call(append_plain, command, &deadline, reply, error) && check_reply(reply, error);
}

/*
 * Runs a script; the command holds what follows its name: the number of keys,
 * the keys, the arguments.  Like rl_redis_command otherwise.
 */
bool
rl_redis_script(RlScript *script, RlCommand *command, RlReply *reply, RlError *error)
{
	ScriptCall	sc = {script, command, false};
	int64		deadline = 0;

	if (script->sha1[0] == '\0')
		compute_sha1(script);
	if (!call(append_script, &sc, &deadline, reply, error))
		return false;
	/* NOSCRIPT means that nothing was run. */
	if (reply->kind == RL_REPLY_ERROR && strncmp(reply->text, "NOSCRIPT", 8) == 0)
	{
		sc.by_source = true;
		if (!call(append_script, &sc, &deadline, reply, error))
			return false;
	}
	return check_reply(reply, error);
}
