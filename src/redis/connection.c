/*
 * connection.c
 *		Opens and sets up a connection to a Redis server (AUTH, SELECT, HELLO).
 */
#include "postgres.h"

#include "utils/builtins.h"

#include "redis/node.h"
#include "shared/shared.h"

/* Returns true if the connection can carry the next call. */
bool
rl_connection_is_usable(RlConnection *conn)
{
	return conn->ctx != NULL && !conn->in_flight && !conn->retired && rl_socket_is_silent(conn);
}

/*
 * Sends AUTH if there is a password, SELECT if it is not database 0, and HELLO if the server
 * must be no replica.  If it sends none of them, sends PING if the server is to be checked, and
 * with TLS, which is not up before the server has sent something.  Returns false with the error
 * set.
 */
static bool
set_up(RlConnection *conn, const RlAddress *address, const char *password, bool check,
	   StringInfo out, int64 deadline, RlError *error)
{
	RlReply		reply;
	int			n = 0;
	bool		asks = false;

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
	/* Both change nothing, so they may be sent with AUTH. */
	if (conn->needs_master || (n == 0 && (check || conn->tls != NULL)))
	{
		asks = true;
		rl_resp_start(out, 1);
		rl_resp_arg(out, conn->needs_master ? "HELLO" : "PING", conn->needs_master ? 5 : 4);
		n++;
	}
	if (n == 0)
		return true;
	if (rl_stream_exchange(conn, out, n, deadline, &reply, error) != RL_DONE)
		return false;
	/*
	 * A server that does not know the question, does not let the user ask, or cannot run
	 * calls now, has answered.  After other errors it closes the connection.
	 */
	if (asks && conn->due == 0 && reply.kind == RL_REPLY_ERROR && strncmp(reply.text, "DENIED", 6) != 0 &&
		(strncmp(reply.text, "ERR ", 4) != 0 || strncmp(reply.text, "ERR unknown command", 19) == 0))
		return true;
	if (reply.kind == RL_REPLY_ERROR)
		return rl_error_reply(conn, true, reply.text, error);
	/* A replica of a Cluster redirects calls to its master. */
	if (asks && reply.kind == RL_REPLY_HELLO)
		return !reply.replica || reply.cluster || rl_not_master(conn, error);
	return reply.kind == RL_REPLY_STATUS || rl_protocol_violation(conn, error, "it is not a status");
}

/* rl_connection_open, whose buffers the caller wipes.  Inlined, gcc's -Wclobbered warns. */
static pg_noinline bool
open_and_set_up(RlConnection *conn, const RlAddress *address, const char *password, bool check,
				StringInfo out, int64 *deadline, int64 until, RlError *error)
{
	int64		start = rl_monotonic_now();

	conn->in_flight = true;
	conn->due = -1;
	if (!rl_socket_open(conn, address, Min(start + (int64) rl_connect_timeout * 1000, until), error))
		return false;
	if (*deadline == 0)
		*deadline = start + (int64) rl_command_timeout * 1000;
	*deadline = Min(*deadline + rl_monotonic_now() - start, until);
	if (!set_up(conn, address, password, check, out, *deadline, error))
		return false;
	conn->in_flight = false;
	return true;
}

/*
 * Connects a connection that is closed and sets it up, with the password of
 * ratelimit.redis_passfile if that is wanted.  With check, the server must have sent an answer.
 * Setting up is a round trip of its own: a command sent with it would run even if the server
 * did not accept the password or the database.  If needs_master of the connection is set before,
 * a replica is an error, unless it is a Cluster's.
 *
 * *deadline is the set-up's.  If it is 0 it is set; otherwise it is moved by the time that the
 * socket takes to be up.  No wait goes past until.  Returns false with the error set and the
 * connection closed.  Raises an error if a setting is wrong, or at an interrupt; the connection
 * is not usable then.
 */
bool
rl_connection_open(RlConnection *conn, const RlAddress *address, bool with_password,
				   bool check, int64 *deadline, int64 until, RlError *error)
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
		opened = open_and_set_up(conn, address, password, check, &out, deadline, until, error);
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
