/*
 * refusal.c
 *		The report to a refused client.
 *
 * A message never holds the key: PostgREST puts it into the reason phrase of the
 * HTTP answer.  The detail does, unless the client may not read the columns that
 * the key was made of.
 */
#include "postgres.h"

#include "catalog/pg_trigger.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/rls.h"

#include "algorithm/algorithm.h"
#include "algorithm/limits.h"
#include "decision.h"
#include "error.h"
#include "key_text.h"
#include "refusal.h"
#include "shared/refusal_log.h"

/* The name of the policy in header fields where no trigger names it. */
#define DEFAULT_POLICY		"default"

/* Returns true if the role may read the columns of the key, and no row security is in force for it. */
static bool
may_read_columns(const RlOrigin *origin, Oid role)
{
	Oid			table = RelationGetRelid(origin->rel);
	int			column = -1;

	if (check_enable_rls(table, role, true) == RLS_ENABLED)
		return false;
	if (pg_class_aclcheck(table, role, ACL_SELECT) == ACLCHECK_OK)
		return true;
	while ((column = bms_next_member(origin->columns, column)) >= 0)
		if (pg_attribute_aclcheck(table, column, role, ACL_SELECT) != ACLCHECK_OK)
			return false;
	return true;
}

/*
 * Returns true if the client may see a key that was made of the trigger's columns.
 * The rule is that of core for index values in errors.  A foreign key's query is an
 * exception: it runs as the owner of the table, for any client.
 */
static bool
may_show_key(const RlOrigin *origin)
{
	if (origin == NULL || bms_is_empty(origin->columns))
		return true;
	if (InNoForceRLSOperation() || !may_read_columns(origin, GetUserId()))
		return false;
#if PG_VERSION_NUM >= 180000
	/* An AFTER trigger runs as the role that wrote the row, so as the owner after a foreign key's query. */
	if (InLocalUserIdChange() && TRIGGER_FOR_AFTER(origin->trigger->tgtype))
		return may_read_columns(origin, GetOuterUserId());
#endif
	return true;
}

/* Sets the detail to a fact about the key, for the client without the key if it is hidden. */
static void
set_detail(RlReport *report, const RlAction *action, const char *fact, const char *also)
{
	const char *key = rl_key_shown(action->key.data, action->key.len);

	also = also ? psprintf(" %s", also) : "";
	report->detail_log = psprintf("Key \"%s\" %s%s", key, fact, also);
	report->detail = may_show_key(action->origin) ? report->detail_log :
		psprintf("The key %s%s", fact, also);
}

/*
 * Raises the error of an action that was refused.  also is one more sentence for
 * the detail, or NULL.
 */
void
rl_raise_refused(const RlAction *action, const RlAnswer *answer, const char *also)
{
	const char *limit = rl_limit_text(action->limits, answer->binding);
	const RlDecision *decision = &answer->decision;
	const char *policy = action->origin != NULL ? action->origin->trigger->tgname : DEFAULT_POLICY;
	RlReport	report = {.sqlstate = ERRCODE_RATE_LIMITED,.origin = action->origin};
	int64		wait;

	if (decision->source == RL_FAIL_CLOSED)
		rl_raise_for(answer->error, action->origin);
	if (decision->source == RL_FROM_BLOCKED)
	{
		report.sqlstate = ERRCODE_BLOCKED;
		report.message = psprintf("rate limit \"%s\" forbids the action", limit);
		set_detail(&report, action, "is blocked.", also);
	}
	else if (decision->retry_after == RL_NEVER)
	{
		/* What takes too much although the action alone would fit, or NULL. */
		const char *whole = action->quota > decision->capacity ? NULL :
			action->limits->limit[answer->binding].refund_on_abort ? "transaction" : "statement";

		report.sqlstate = ERRCODE_ACTION_TOO_LARGE;
		report.message = whole == NULL ?
			psprintf("action of %lld is larger than rate limit \"%s\" allows", (long long) action->quota,
					 limit) :
			psprintf("%s takes more than rate limit \"%s\" ever allows", whole, limit);
		if (whole != NULL)
			report.hint = psprintf("Take at most %lld for a key in one %s, or use a larger limit.",
								   (long long) decision->capacity, whole);
		set_detail(&report, action,
				   psprintf("never has more than %lld.", (long long) decision->capacity), also);
	}
	else if (decision->ban_left > 0)
	{
		report.message = "rate limit ban in force";
		set_detail(&report, action, decision->ban_rule == NULL ? "is banned." :
				   psprintf("is banned by \"%s\".", decision->ban_rule), also);
	}
	else
	{
		report.message = psprintf("rate limit \"%s\" exceeded", limit);
		set_detail(&report, action,
				   psprintf("has %lld of %lld left; the action takes %lld.",
							(long long) decision->remaining, (long long) decision->capacity,
							(long long) action->quota), also);
	}
	wait = rl_told_wait(action->limits, answer->binding, decision);
	if (report.sqlstate == ERRCODE_RATE_LIMITED && wait != RL_NEVER)
		report.hint = rl_retry_hint(wait);
	if (report.sqlstate != ERRCODE_ACTION_TOO_LARGE)
		report.domain = rl_refusal_domain(&action->key);
	if (!rl_policy_name_is_valid(policy))
		policy = DEFAULT_POLICY;
	report.nheaders = rl_headers(policy, action->limits, answer->binding, decision, report.headers);
	rl_report(&report);
}

/*
 * Returns the index of the key whose limits refused an action on n keys, or -1 if it is
 * allowed: a key for which no wait helps, otherwise the key with the longest wait; of
 * equal keys the first.
 */
int
rl_refused_key(const RlAnswer *answers, int n)
{
	int			found = -1;

	for (int i = 0; i < n; i++)
		if (!answers[i].decision.allowed && answers[i].binding >= 0 &&
			(found < 0 ||
			 rl_longer_wait(answers[i].decision.retry_after, answers[found].decision.retry_after)))
			found = i;
	return found;
}

/*
 * Raises the error of an action on n keys that was refused: that of the key that
 * rl_refused_key returns.  The hint is the longest wait of all keys.
 */
void
rl_raise_refused_all(const RlAction *actions, int n, const RlAnswer *answers, const char *also)
{
	int			refused = rl_refused_key(answers, n);
	RlAnswer	answer = answers[refused];

	for (int i = 0; i < n; i++)
		if (rl_longer_wait(answers[i].decision.retry_after, answer.decision.retry_after))
			answer.decision.retry_after = answers[i].decision.retry_after;
	rl_raise_refused(&actions[refused], &answer, also);
}

/*
 * Logs that this limit would refuse the action: once a second at most for each key, and
 * no more often than rl_shadow_may_log allows for all keys.  why is a sentence.  Does not throw.
 */
void
rl_log_shadow(const RlAction *action, int limit, const char *why)
{
	uint64		left_out;

	if (action->quota == 0 || !rl_shadow_may_log(&action->key, &left_out))
		return;
	rl_log_no_throw((errmsg("rate limit \"%s\" would refuse key \"%s\"",
							rl_limit_text(action->limits, limit),
							rl_key_shown(action->key.data, action->key.len)),
					 errdetail("The action takes %lld. %s%s", (long long) action->quota, why,
							   rl_left_out_text(left_out))));
}
