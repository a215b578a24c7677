/*
 * error.c
 *		Errors as values, which the caller raises, returns, or treats as
 *		ratelimit.on_error says.
 */
#include "postgres.h"

#include "mb/pg_wchar.h"

#include "error.h"
#include "shared/clock.h"

/* If text fills its buffer, cuts it where a character ends. */
static void
clip(char *text, size_t size)
{
	if (strlen(text) == size - 1)
		text[pg_mbcliplen(text, size - 1, size - 2)] = '\0';
}

/*
 * Sets the error's SQLSTATE and message, and nothing else.  A message that is too long
 * is cut.  Returns false, for a caller that fails with this error.  Does not throw.
 */
bool
rl_error_set(RlError *error, int sqlstate, const char *fmt,...)
{
	va_list		args;

	memset(error, 0, offsetof(RlError, message));
	error->sqlstate = sqlstate;
	error->detail[0] = '\0';
	va_start(args, fmt);
	vsnprintf(error->message, sizeof(error->message), fmt, args);
	va_end(args);
	clip(error->message, sizeof(error->message));
	return false;
}

/* Sets the detail, a sentence, of an error that has a message.  Returns false.  Does not throw. */
bool
rl_error_detail(RlError *error, const char *fmt,...)
{
	va_list		args;

	va_start(args, fmt);
	vsnprintf(error->detail, sizeof(error->detail), fmt, args);
	va_end(args);
	clip(error->detail, sizeof(error->detail));
	return false;
}

/*
 * Returns true if this session is short of descriptors or memory.  Any role can cause that in its
 * own session, so it must not lift limits as the failure of a store can.
 */
bool
rl_error_is_own(const RlError *error)
{
	return error->sqlstate == ERRCODE_INSUFFICIENT_RESOURCES || error->sqlstate == ERRCODE_OUT_OF_MEMORY;
}

/* Returns the message and the detail as one text: palloc'd, or the error's own. */
const char *
rl_error_text(const RlError *error)
{
	return error->detail[0] ? psprintf("%s: %s", error->message, error->detail) : error->message;
}

/* Logs, once a second at most, an error that on_error hides, and its consequence.  Does not throw. */
void
rl_log_failure(const RlError *error, const char *consequence)
{
	static int64 last = 0;
	int64		now = rl_monotonic_now();

	if (now - last < RL_SECOND)
		return;
	last = now;
	rl_log_no_throw((errcode(error->sqlstate),
					 errmsg_internal("%s", error->message),
					 errdetail_internal("%s%s%s", error->detail, error->detail[0] ? " " : "", consequence)));
}

/*
 * Sets the error of a call by the id of a reservation of another action, which has so many keys.  Returns
 * false.
 */
bool
rl_reserved_otherwise(int nkeys, RlError *error)
{
	rl_error_set(error, ERRCODE_RESERVED_OTHERWISE, "reservation exists for another action");
	error->of_action = true;
	return rl_error_detail(error, "The id of a reservation names one action: its keys, limits and quotas. This reservation has %d %s.",
						   nkeys, nkeys == 1 ? "key" : "keys");
}

/* Sets the error of a reservation for which the key has too many.  Returns false. */
bool
rl_too_many_reservations(RlError *error)
{
	rl_error_set(error, ERRCODE_PROGRAM_LIMIT_EXCEEDED, "key has too many reservations");
	error->of_action = true;
	return rl_error_detail(error,
						   "A key has at most %d reservations. In Redis, its other fields count as well.",
						   RL_MAX_RESERVATIONS);
}

/* Sets the error of a reservation whose keys are in several slots of a Cluster.  Returns false. */
bool
rl_reserved_apart(RlError *error)
{
	rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE,
				 "the keys of a reservation must be in one slot of the Redis Cluster");
	error->of_action = true;
	error->hint = "Begin the keys with the same tag in braces, such as \"{acme}user:7\".";
	return false;
}
