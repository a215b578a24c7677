/*
 * connection.c
 *		Opens and sets up a connection to a Redis server (AUTH, SELECT, HELLO).
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/guc.h"

#include "redis/node.h"
#include "shared/clock.h"

/* Returns true if the connection can carry the next call. */
bool
rl_connection_is_usable(RlConnection *conn)
{
	return conn->ctx != NULL && !conn->in_flight && !conn->retired && rl_socket_is_silent(conn);
}

/*
 * Appends the connection's name in CLIENT LIST: ratelimit, cluster_name and process ID.  It cannot have
 * spaces.
 */
static void
append_name(StringInfo out)
{
	char		name[128];
	int			len = snprintf(name, sizeof(name), "ratelimit:%.*s:%d", NAMEDATALEN, cluster_name, MyProcPid);

	for (char *c = name; *c != '\0'; c++)
		if (*c <= ' ' || *c > '~')
			*c = '_';
	rl_resp_arg(out, name, len);
}

/*
 * Sends AUTH if there is a password, SELECT if it is not database 0, and the connection's name, by
 * HELLO if the server must be no replica.  A server that does not answer may accept connections.
 * Returns false with the error set.
 */
static bool
set_up(RlConnection *conn, const RlAddress *address, const char *password,
	   StringInfo out, int64 deadline, RlError *error)
{
	RlReply		reply;
	int			n = 1;

	if (password[0] != '\0')
	{
		rl_resp_start(out, address->user[0] ? 3 : 2);
		rl_resp_arg(out, "AUTH", 4);
		if (address->user[0])
			rl_resp_arg(out, address->user, strlen(address->user));
		rl_resp_arg(out, password, strlen(password));
		n++;
	}
	if (address->db != 0)
	{
		char		db[12];

		rl_resp_start(out, 2);
		rl_resp_arg(out, "SELECT", 6);
		rl_resp_arg(out, db, pg_ltoa(address->db, db));
		n++;
	}
	/* Neither touches a key, so it may be sent with AUTH. */
	rl_resp_start(out, conn->needs_master ? 4 : 3);
	if (conn->needs_master)
	{
		rl_resp_arg(out, "HELLO", 5);
		rl_resp_arg(out, "2", 1);
	}
	else
		rl_resp_arg(out, "CLIENT", 6);
	rl_resp_arg(out, "SETNAME", 7);
	append_name(out);
	if (rl_stream_exchange(conn, out, n, deadline, &reply, error) != RL_DONE)
		return false;
	/*
	 * The name does not matter: a server that does not know the command, does not let the user
	 * run it, or cannot run calls now, has answered.  After other errors it closes the connection,
	 * or would fail each call.
	 */
	if (conn->due == 0 && reply.kind == RL_REPLY_ERROR && strncmp(reply.text, "DENIED", 6) != 0 &&
		strncmp(reply.text, "NOAUTH", 6) != 0 &&
		(strncmp(reply.text, "ERR ", 4) != 0 || strncmp(reply.text, "ERR unknown ", 12) == 0 ||
		 strncmp(reply.text, "ERR unsupported ", 16) == 0))
		return true;
	if (reply.kind == RL_REPLY_ERROR)
		return rl_error_reply(conn, true, reply.text, error);
	/* A replica of a Cluster redirects calls to its master. */
	conn->master = reply.kind == RL_REPLY_HELLO && !reply.replica;
	conn->cluster = reply.kind == RL_REPLY_HELLO && reply.cluster;
	if (reply.kind == RL_REPLY_HELLO)
		return !reply.replica || reply.cluster || rl_not_master(conn, error);
	return reply.kind == RL_REPLY_STATUS || rl_protocol_violation(conn, error, "it is not a status");
}

/* rl_connection_open, whose buffers the caller wipes.  Inlined, gcc's -Wclobbered warns. */
static pg_noinline bool
open_and_set_up(RlConnection *conn, const RlAddress *address, const char *password,
				StringInfo out, int64 *deadline, int64 until, RlError *error)
{
	int64		start = rl_monotonic_now();

	conn->in_flight = true;
	conn->due = -1;
	conn->made = start;
	if (!rl_socket_open(conn, address, Min(start + (int64) rl_connect_timeout * 1000, until), error))
		return false;
	if (*deadline == 0)
		*deadline = start + (int64) rl_command_timeout * 1000;
	*deadline = Min(*deadline + rl_monotonic_now() - start, until);
	if (!set_up(conn, address, password, out, *deadline, error))
		return false;
	conn->in_flight = false;
	return true;
}

static bool
open_with_password(RlConnection *conn, const RlAddress *address, bool with_password,
				   int64 *deadline, int64 until, RlError *error)
{
	char		password[RL_MAX_PASSWORD] = "";
	StringInfoData out;
	bool		opened;

	/* It must not move later, as that would leave a copy of the password. */
	initStringInfo(&out);
	enlargeStringInfo(&out, RL_MAX_PASSWORD + sizeof(address->user) + 128);
	PG_TRY();
	{
		if (with_password)
			rl_password_read(password);
		opened = open_and_set_up(conn, address, password, &out, deadline, until, error);
	}
	PG_FINALLY();
	{
		explicit_bzero(password, sizeof(password));
		explicit_bzero(out.data, out.maxlen);
		/* No later call may read the replies that an interrupted set-up has left due. */
		conn->due = -1;
	}
	PG_END_TRY();
	pfree(out.data);
	if (!opened)
		rl_connection_close(conn);
	return opened;
}

/*
 * Connects a connection that is closed and sets it up, with the password of
 * ratelimit.redis_passfile if that is wanted; the server has answered then.  Setting up is a
 * round trip of its own: a command sent with it would run even if the server did not accept the
 * password or the database.  If needs_master of the connection is set before, a replica is an
 * error, unless it is a Cluster's.
 *
 * Only so many backends connect one server at a time: first waits for up to *patience
 * microseconds, from which the wait is subtracted.  *deadline is the set-up's.  If it is 0 it is
 * set; otherwise it is moved by the time that waiting takes, and the socket to be up.  No wait
 * goes past until.  Returns false with the error set and the connection closed.  Raises an
 * error if a setting is wrong, or at an interrupt; the connection is not usable then, and the
 * caller's transaction ends the attempt (rl_breakers_release).
 */
bool
rl_connection_open(RlConnection *conn, const RlAddress *address, bool with_password,
				   int64 *patience, int64 *deadline, int64 until, RlError *error)
{
	int64		enough = (int64) rl_command_timeout * 500;
	int64		start = rl_monotonic_now();
	char		name[RL_MAX_SERVER];
	RlAttempt	attempt;
	bool		has_time;
	bool		opened;

	/* Before it takes a place: reading the authorities of the system takes milliseconds. */
	if (address->tls)
		rl_tls_prepare();
	rl_address_name(address, name);
	if (!rl_attempt_begin(&attempt, name, false, patience, until, error))
		return false;
	if (*deadline != 0)
		*deadline += attempt.began - start;
	/* With less than half of its time a server that is well may be late. */
	has_time = Min(until, *deadline == 0 ? until : *deadline) - attempt.began >= enough;
	opened = open_with_password(conn, address, with_password, deadline, until, error);
	/* A Sentinel that wants the password is well. */
	if (opened || (error->wrong_password && !with_password))
		rl_attempt_succeeded(&attempt);
	else
		rl_attempt_failed(&attempt, error->answered ||
						  (error->unreachable && (has_time || !error->timed_out)), error);
	return opened;
}

/*
 * Returns true if a server of a list says that it is a master.  Asks on a connection of its own,
 * notes nothing, and ends by the time.  Raises an error if a setting is wrong, or at an interrupt.
 */
bool
rl_connection_finds_master(const RlAddress *address, int64 until)
{
	static RlConnection conn;
	int64		deadline = until;
	RlError		error;
	bool		master;

	rl_connection_close(&conn);
	if (address->tls)
		rl_tls_prepare();
	conn.needs_master = true;
	master = open_with_password(&conn, address, true, &deadline, until, &error) && conn.master;
	rl_connection_close(&conn);
	return master;
}
