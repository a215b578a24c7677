/*
 * sentinel.c
 *		Asks Sentinels which server is a service's master.
 */
#include "postgres.h"

#include "error.h"
#include "redis/route.h"
#include "shared/clock.h"

/* Asks one Sentinel for the master.  Returns false with the error set.  The caller closes the connection. */
static bool
ask(RlConnection *conn, const RlAddress *sentinel, bool with_password, int64 *patience, int64 until,
	RlReply *reply, RlError *error)
{
	StringInfoData out;
	int64		deadline = 0;
	bool		answered;

	rl_connection_close(conn);
	if (!rl_connection_open(conn, sentinel, with_password, patience, &deadline, until, error))
		return false;
	initStringInfo(&out);
	rl_resp_start(&out, 3);
	rl_resp_arg(&out, "SENTINEL", 8);
	rl_resp_arg(&out, "get-master-addr-by-name", 23);
	rl_resp_arg(&out, rl_target.service, strlen(rl_target.service));
	answered = rl_stream_exchange(conn, &out, 1, deadline, reply, error) == RL_DONE;
	pfree(out.data);
	if (!answered)
		return false;
	if (reply->kind == RL_REPLY_ERROR)
		return rl_error_reply(conn, false, reply->text, error);
	if (reply->kind == RL_REPLY_ADDRESS && reply->nvalues == 1 &&
		reply->values[0] >= 1 && reply->values[0] <= 65535)
		return true;
	if (reply->kind == RL_REPLY_NIL)
		rl_error_set(error, ERRCODE_STORE_FAILED,
					 "could not connect to Redis: the Sentinel knows no service \"%s\"",
					 rl_target.service);
	else
		rl_error_set(error, ERRCODE_STORE_FAILED,
					 "unexpected reply from the Sentinel: it is no address");
	rl_error_detail(error, "The server is %s.", conn->server);
	error->answered = true;
	return false;
}

/* Asks a Sentinel, with the password only if it wants one.  Returns false with the error set. */
static bool
ask_with_password_if_wanted(RlAddress sentinel, int64 *patience, int64 until, RlAddress *master,
							RlError *error)
{
	static RlConnection conn;
	RlReply		reply;
	bool		found;

	*master = sentinel;
	sentinel.db = 0;
	found = ask(&conn, &sentinel, false, patience, until, &reply, error);
	if (!found && error->wrong_password && rl_redis_passfile[0] != '\0')
		found = ask(&conn, &sentinel, true, patience, until, &reply, error);
	rl_connection_close(&conn);
	if (!found)
		return false;
	master->port = reply.values[0];
	strlcpy(master->host, reply.text, sizeof(master->host));
	return true;
}

/*
 * Asks the Sentinels, the first one first, until one names a master that the route has not
 * lost; the next search begins with that one.  *master is set to the node of the last named
 * master; NULL if the route uses all nodes.  Each Sentinel has an equal share of the time until
 * the deadline.  Returns false with the error of the first that failed set if one did.  Raises an
 * error if a setting is wrong.
 */
bool
rl_sentinels_ask(uint64 route, int64 *patience, int64 deadline, RlNode **master, RlError *error)
{
	int			first = rl_target.first;
	bool		failed = false;
	RlError		failure;

	for (int i = 0; i < rl_target.n; i++)
	{
		int			which = (first + i) % rl_target.n;
		int64		now = rl_monotonic_now();
		RlAddress	address;

		if (ask_with_password_if_wanted(rl_target.seeds[which], patience,
										now + (deadline - now) / (rl_target.n - i), &address, &failure))
		{
			rl_target.first = which;
			*master = rl_node_find(&address, route);
			if (*master == NULL || (*master)->lost != route)
				return true;
			continue;
		}
		if (rl_error_is_own(&failure))
		{
			*error = failure;
			return false;
		}
		if (failed)
			error->unreachable |= failure.unreachable;
		else
			*error = failure;
		failed = true;
	}
	return false;
}
