/*
 * report.c
 *		Errors to clients, in the format of ratelimit.error_format.
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_authid.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/json.h"

#include "error.h"
#include "report.h"

/* Returns the hint from which clients read when to retry; its form is a contract. */
char *
rl_retry_hint(int64 retry_after)
{
	long long	ms = (retry_after + 999) / 1000;

	return psprintf("Retry after %lld.%03lld seconds.", ms / 1000, ms % 1000);
}

/* Appends a member to an object of JSON that is not closed; NULL becomes null. */
void
rl_append_member(StringInfo json, const char *name, const char *value)
{
	appendStringInfoString(json, json->data[json->len - 1] == '{' ? "" : ", ");
	escape_json(json, name);
	appendStringInfoString(json, ": ");
	if (value != NULL)
		escape_json(json, value);
	else
		appendStringInfoString(json, "null");
}

/* Returns the body of the HTTP answer, as PostgREST reads it from the message. */
static char *
postgrest_message(const RlReport *report)
{
	StringInfoData json;

	initStringInfo(&json);
	appendStringInfoChar(&json, '{');
	rl_append_member(&json, "code", unpack_sql_state(report->sqlstate));
	rl_append_member(&json, "message", report->message);
	rl_append_member(&json, "details", report->detail);
	rl_append_member(&json, "hint", report->hint);
	appendStringInfoChar(&json, '}');
	return json.data;
}

/* Returns status and headers of the HTTP answer, as PostgREST reads them from the detail. */
static char *
postgrest_detail(const RlReport *report)
{
	StringInfoData json;

	/* The digits of a SQLSTATE PTxyz are the status. */
	initStringInfo(&json);
	appendStringInfo(&json, "{\"status\": %s, \"headers\": {", unpack_sql_state(report->sqlstate) + 2);
	for (int i = 0; i < report->nheaders; i++)
		rl_append_member(&json, report->headers[i].name, report->headers[i].value);
	appendStringInfoString(&json, "}}");
	return json.data;
}

/* Raises the error. */
void
rl_report(const RlReport *report)
{
	const RlOrigin *origin = report->origin;
	bool		postgrest = rl_error_format == RL_FORMAT_POSTGREST &&
		strncmp(unpack_sql_state(report->sqlstate), "PT", 2) == 0;
	const char *detail = postgrest ? postgrest_detail(report) : report->detail;
	const char *detail_log = report->detail_log ? report->detail_log : report->detail;

	ereport_domain(ERROR, report->domain,
				   (errcode(postgrest ? ERRCODE_POSTGREST : report->sqlstate),
					errmsg_internal("%s", postgrest ? postgrest_message(report) : report->message),
					detail ? errdetail_internal("%s", detail) : 0,
					detail_log ? errdetail_log("%s", detail_log) : 0,
					report->hint && !postgrest ? errhint("%s", report->hint) : 0,
					origin ? errtableconstraint(origin->rel, origin->trigger->tgname) : 0));
}

/*
 * Adds a sentence without quotes to the detail of an error that is being handled.  Of errors in
 * PostgREST's format, only the failure of a store gets it.
 */
void
rl_report_add_detail(ErrorData *error, const char *sentence)
{
	static const char status[] = "{\"status\": 504,";
	const char *end;

	if (error->sqlerrcode != ERRCODE_POSTGREST)
		error->detail = error->detail ? psprintf("%s %s", error->detail, sentence) : pstrdup(sentence);
	if (error->sqlerrcode != ERRCODE_POSTGREST || !error->detail ||
		strncmp(error->detail, status, strlen(status)) != 0)
		return;
	/* A quote within a text has a backslash before it. */
	end = strstr(error->message, "\", \"hint\": ");
	if (end != NULL)
		error->message = psprintf("%.*s %s%s", (int) (end - error->message), error->message, sentence, end);
}

/* Returns true if the client may read ratelimit.redis_url, also within a function of another owner. */
static bool
client_may_see_server(void)
{
	return IsTransactionState() && has_privs_of_role(GetOuterUserId(), ROLE_PG_READ_ALL_SETTINGS);
}

/*
 * Raises the error.  That of a store is raised in ratelimit.error_format.  If Redis is tried again only
 * after a pause, the hint says how long to wait.  The detail names the server, so not every client sees it.
 */
void
rl_raise_for(const RlError *error, const RlOrigin *origin)
{
	RlReport	report = {
		.sqlstate = error->sqlstate,
		.message = error->message,
		.detail = error->detail[0] ? error->detail : NULL,
		.hint = error->hint,
		.origin = origin
	};

	if ((error->sqlstate == ERRCODE_STORE_FAILED || rl_error_is_own(error)) && !client_may_see_server())
	{
		report.detail_log = report.detail;
		report.detail = NULL;
	}
	if (error->retry_after > 0)
	{
		report.hint = rl_retry_hint(error->retry_after);
		report.headers[report.nheaders++] = rl_header_retry_after(error->retry_after);
	}
	rl_report(&report);
}

/* Raises the error as rl_raise_for does, without naming a trigger. */
void
rl_raise(const RlError *error)
{
	rl_raise_for(error, NULL);
}
