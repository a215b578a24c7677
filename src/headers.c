/*
 * headers.c
 *		The header fields that tell an HTTP client of its limits: RateLimit-Policy
 *		and RateLimit, as draft-ietf-httpapi-ratelimit-headers defines them, and
 *		Retry-After.
 */
#include "postgres.h"

#include "lib/stringinfo.h"

#include "algorithm/algorithm.h"
#include "algorithm/limits.h"
#include "decision.h"
#include "headers.h"

/* The largest integer of a Structured Field */
#define MAX_INTEGER			INT64CONST(999999999999999)

/*
 * Returns true if the name can be a Structured Field's string: printable ASCII,
 * at least one character and at most RL_MAX_POLICY_NAME.
 */
bool
rl_policy_name_is_valid(const char *name)
{
	size_t		len = strlen(name);

	for (const char *p = name; *p; p++)
		if (*p < ' ' || *p > '~')
			return false;
	return len >= 1 && len <= RL_MAX_POLICY_NAME;
}

/* Returns the header field Retry-After, rounded up, so that no client retries too early. */
RlHeader
rl_header_retry_after(int64 us)
{
	return (RlHeader) {"Retry-After", psprintf("%lld", (long long) rl_divide_up(us, RL_SECOND))};
}

/* Appends the name of limit i: the policy's name, from the second policy on with a number. */
static void
append_name(StringInfo field, const char *name, const RlLimits *limits, int i)
{
	int			number = 1;

	for (int before = 0; before < i; before++)
		number += !limits->limit[before].shadow;
	appendStringInfoChar(field, '"');
	for (const char *p = name; *p; p++)
	{
		if (*p == '"' || *p == '\\')
			appendStringInfoChar(field, '\\');
		appendStringInfoChar(field, *p);
	}
	if (number > 1)
		appendStringInfo(field, "-%d", number);
	appendStringInfoChar(field, '"');
}

static void
append_integer(StringInfo field, char parameter, int64 value)
{
	appendStringInfo(field, ";%c=%lld", parameter, (long long) Min(value, MAX_INTEGER));
}

/*
 * Sets the header fields of a decision, up to RL_MAX_HEADERS, and returns
 * their number.  binding is the index of the limit that the decision's figures
 * describe.  The name must be valid.  A figure that is not known is left out.
 * So is the time until quota is free, if the action is allowed: the decision
 * does not have it then.  A shadow limit is no policy.
 */
int
rl_headers(const char *name, const RlLimits *limits, int binding, const RlDecision *decision,
		   RlHeader *headers)
{
	StringInfoData field;
	int64		wait = rl_told_wait(limits, binding, decision);
	bool		retry = !decision->allowed && wait != RL_NEVER;
	int			n = 0;

	/* unlimited and blocked have no policy, and no figures. */
	if (limits->kind != RL_LISTED || rl_all_shadow(limits))
		return 0;
	initStringInfo(&field);
	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];

		if (limit->shadow)
			continue;
		if (field.len > 0)
			appendStringInfoString(&field, ", ");
		append_name(&field, name, limits, i);
		/* Where the burst is the count, the quota is what the lease leaves of it. */
		append_integer(&field, 'q',
					   limit->capacity + limit->held_back == limit->count ? limit->capacity : limit->count);
		/* The windows of a calendar have no one length, and a concurrent limit has no window. */
		if (limit->period % RL_SECOND == 0 && limit->calendar == RL_NO_CALENDAR &&
			!rl_algorithm(limit)->until_end)
			append_integer(&field, 'w', limit->period / RL_SECOND);
	}
	headers[n++] = (RlHeader) {"RateLimit-Policy", field.data};

	if (decision->remaining != RL_UNKNOWN)
	{
		initStringInfo(&field);
		append_name(&field, name, limits, binding);
		append_integer(&field, 'r', decision->remaining);
		if (retry && decision->remaining == 0)
			append_integer(&field, 't', rl_divide_up(wait, RL_SECOND));
		headers[n++] = (RlHeader) {"RateLimit", field.data};
	}
	if (retry)
		headers[n++] = rl_header_retry_after(wait);
	return n;
}
