/*
 * refusal.c
 *		The error of a refused action.
 */
#include "postgres.h"

#include "mb/pg_wchar.h"

#include "algorithm/limits.h"
#include "error.h"
#include "refusal.h"

/* Raises the error of a refused action.  also is one more sentence for the detail, or NULL. */
void
rl_raise_refused(const RlAction *action, const RlAnswer *answer, const char *also)
{
	const RlKey *key = &action->key;
	const RlLimit *limit = &action->limits->limit[answer->binding];
	const RlDecision *decision = &answer->decision;
	const char *key_text = pg_any_to_server(pnstrdup(key->data, key->len), key->len, PG_UTF8);
	long long	wait_ms = (decision->retry_after + 999) / 1000;

	also = also ? psprintf(" %s", also) : "";

	if (decision->source == RL_FAIL_CLOSED)
		ereport(ERROR,
				(errcode(ERRCODE_RATE_LIMITED),
				 errmsg("rate limit \"%s\" cannot be checked for key \"%s\"",
						rl_limit_text(limit), key_text),
				 errdetail_internal("%s%s", answer->error->message, also),
				 errhint("Actions are refused because ratelimit.on_error is \"deny\".")));
	if (decision->retry_after == RL_NEVER)
		ereport(ERROR,
				(errcode(ERRCODE_RATE_LIMITED),
				 errmsg("rate limit \"%s\" exceeded for key \"%s\"",
						rl_limit_text(limit), key_text),
				 errdetail("The action takes %lld, and the limit never has more than %lld: no wait will help.%s",
						   (long long) action->quota, (long long) limit->capacity, also),
				 errhint("Split the action into smaller ones.")));
	if (decision->ban_left > 0)
		ereport(ERROR,
				(errcode(ERRCODE_RATE_LIMITED),
				 errmsg("key \"%s\" is banned", key_text),
				 errdetail("Retry after %lld.%03lld seconds.%s", wait_ms / 1000, wait_ms % 1000, also),
				 errhint("rl_unban lifts a ban.")));
	ereport(ERROR,
			(errcode(ERRCODE_RATE_LIMITED),
			 errmsg("rate limit \"%s\" exceeded for key \"%s\"",
					rl_limit_text(limit), key_text),
			 errdetail("Retry after %lld.%03lld seconds.%s", wait_ms / 1000, wait_ms % 1000, also),
			 errhint("The action takes %lld, and %lld of %lld are free now.",
					 (long long) action->quota, (long long) decision->remaining,
					 (long long) limit->capacity)));
}
