/*
 * refusal.c
 *		The report to a refused client.
 */
#include "postgres.h"

#include "mb/pg_wchar.h"

#include "algorithm/limits.h"
#include "error.h"
#include "refusal.h"

/*
 * Raises the error of an action that was refused; error tells why when the
 * store failed, and also, if not NULL, what else there is to say.
 */
void
rl_raise_refused(const RlKey *key, const RlLimit *limit, int64 quota,
				 const RlDecision *decision, const RlError *error, const char *also)
{
	const char *key_text = pg_any_to_server(pnstrdup(key->data, key->len), key->len, PG_UTF8);
	long long	wait_ms = (decision->retry_after + 999) / 1000;

	also = also ? psprintf(" %s", also) : "";

	if (decision->source == RL_FAIL_CLOSED)
		ereport(ERROR,
				(errcode(ERRCODE_RATE_LIMITED),
				 errmsg("rate limit \"%s\" cannot be checked for key \"%s\"",
						rl_limit_text(limit), key_text),
				 errdetail_internal("%s%s", error->message, also),
				 errhint("Actions are refused because ratelimit.on_error is \"deny\".")));
	if (decision->retry_after == RL_NEVER)
		ereport(ERROR,
				(errcode(ERRCODE_RATE_LIMITED),
				 errmsg("rate limit \"%s\" exceeded for key \"%s\"",
						rl_limit_text(limit), key_text),
				 errdetail("The action takes %lld, and the limit never has more than %lld: no wait will help.%s",
						   (long long) quota, (long long) limit->capacity, also),
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
					 (long long) quota, (long long) decision->remaining,
					 (long long) limit->capacity)));
}
