/*
 * sentinel.c
 *		Asks Sentinels which server is a service's master.
 */
#include "postgres.h"

#include "route.h"

static bool
ask(RlConnection *conn, const RlAddress *sentinel, const char *service, const char *password,
	RlReply *reply, RlError *error)
{
	StringInfoData out;
	int64		deadline = 0;
	bool		answered;

	if (!rl_connection_open(conn, sentinel, password, &deadline, PG_INT64_MAX, error))
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
 * Finds the service's master.  The Sentinels are asked in order, from *first,
 * which is then the one that answered, and without the password unless they
 * want one.  Returns false with the error of the first set; raises an error if
 * a setting for TLS is wrong.
 */
bool
rl_sentinel_find(const RlTarget *target, int *first, const char *password, RlAddress *master,
				 RlError *error)
{
	static RlConnection conn;
	RlError		why;
	bool		unreachable = false;

	for (int i = 0; i < target->n; i++)
	{
		int			asked = (*first + i) % target->n;
		RlAddress	sentinel = target->seeds[asked];
		RlReply		reply;
		bool		found;

		sentinel.db = 0;
		rl_connection_close(&conn);
		found = ask(&conn, &sentinel, target->service, "", &reply, &why);
		if (!found && why.sqlstate == ERRCODE_INVALID_PASSWORD && password[0] != '\0')
		{
			rl_connection_close(&conn);
			found = ask(&conn, &sentinel, target->service, password, &reply, &why);
		}
		rl_connection_close(&conn);
		if (found)
		{
			*first = asked;
			*master = target->seeds[asked];
			master->port = reply.values[0];
			strlcpy(master->host, reply.text, sizeof(master->host));
			return true;
		}
		unreachable |= why.unreachable;
		if (i == 0)
			*error = why;
	}
	error->unreachable = unreachable;
	return false;
}
