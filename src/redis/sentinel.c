/*
 * sentinel.c
 *		Asks Sentinels which server is a service's master.
 */
#include "postgres.h"

#include "error.h"
#include "redis/route.h"
#include "redis/sentinel.h"
#include "redis/socket.h"

/* Asks one Sentinel, until then at most.  Returns false with the error set. */
static bool
ask(RlConnection *conn, const RlAddress *sentinel, const char *service, const char *password,
	int64 until, RlReply *reply, RlError *error)
{
	StringInfoData out;
	int64		deadline = 0;
	bool		answered;

	rl_connection_close(conn);
	if (!rl_connection_open(conn, sentinel, password, &deadline, until, error))
		return false;
	initStringInfo(&out);
	rl_resp_start(&out, 3);
	rl_resp_arg(&out, "SENTINEL", 8);
	rl_resp_arg(&out, "get-master-addr-by-name", 23);
	rl_resp_arg(&out, service, strlen(service));
	answered = rl_connection_exchange(conn, &out, 1, deadline, reply, error) == RL_DONE;
	pfree(out.data);
	if (!answered)
		return false;
	if (reply->kind == RL_REPLY_ERROR)
		return rl_connection_refused(conn, false, reply->text, error);
	if (reply->kind == RL_REPLY_ADDRESS && reply->nvalues == 1 &&
		reply->values[0] >= 1 && reply->values[0] <= 65535)
		return true;
	if (reply->kind == RL_REPLY_NIL)
		rl_error_set(error, ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
					 "could not connect to Redis: the Sentinel knows no service \"%s\"", service);
	else
		rl_error_set(error, ERRCODE_PROTOCOL_VIOLATION,
					 "unexpected reply from the Sentinel: it is no address");
	rl_error_detail(error, "The server is %s.", conn->server);
	return false;
}

/*
 * Asks one Sentinel if its breaker admits the call, without the password
 * unless it wants one.  Returns false with the error set.
 */
static bool
ask_admitted(const RlSentinelSearch *search, int which, int64 until, RlAddress *master,
			 RlError *error)
{
	static RlConnection conn;
	RlAddress	sentinel = search->target->seeds[which];
	const char *service = search->target->service;
	char		name[RL_MAX_SERVER];
	RlBreaker  *breaker;
	RlReply		reply;
	bool		found;
	bool		in_haste = until - rl_monotonic_now() < (int64) rl_command_timeout * 500;

	rl_connection_name(&sentinel, name, sizeof(name));
	breaker = rl_breaker_find(name);
	if (!rl_breaker_admits(breaker, error))
		return false;
	sentinel.db = 0;
	found = ask(&conn, &sentinel, service, "", until, &reply, error);
	if (!found && error->sqlstate == ERRCODE_INVALID_PASSWORD && search->password[0] != '\0')
		found = ask(&conn, &sentinel, service, search->password, until, &reply, error);
	rl_connection_close(&conn);
	if (found || !error->unreachable)
		rl_breaker_succeeded(breaker);
	/* A Sentinel that had little time may be well. */
	else if (!in_haste)
		rl_breaker_failed(breaker, error);
	if (!found)
		return false;
	*master = search->target->seeds[which];
	master->port = reply.values[0];
	strlcpy(master->host, reply.text, sizeof(master->host));
	return true;
}

/*
 * Begins a search for the service's master: all of it ends within
 * ratelimit.connect_timeout and ratelimit.command_timeout together.
 */
void
rl_sentinel_begin(RlSentinelSearch *search, const RlTarget *target, int first,
				  const char *password)
{
	search->target = target;
	search->password = password;
	search->first = first;
	search->passed = 0;
	search->failed = search->unreachable = false;
	search->deadline = rl_monotonic_now() +
		((int64) rl_connect_timeout + rl_command_timeout) * 1000;
}

/*
 * Asks the Sentinels that were not asked yet, in order, until one names a
 * master; *which is then that Sentinel.  Each has an equal share of the time
 * that is left.  Returns false with the error of the first that failed set, if
 * no Sentinel is left.  Raises an error if a setting for TLS is wrong.
 */
bool
rl_sentinel_next(RlSentinelSearch *search, RlAddress *master, int *which, RlError *error)
{
	int			n = search->target->n;
	RlError		why;

	while (search->passed < n)
	{
		int64		now = rl_monotonic_now();
		int64		until = now + (search->deadline - now) / (n - search->passed);

		*which = (search->first + search->passed++) % n;
		if (ask_admitted(search, *which, until, master, &why))
			return true;
		search->unreachable |= why.unreachable;
		if (!search->failed)
			search->why = why;
		search->failed = true;
	}
	*error = search->why;
	error->unreachable = search->unreachable;
	return false;
}
