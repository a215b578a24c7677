/*
 * limits.h
 *		The type rl_limits, the rules for a limit's numbers, and state tags.
 */
#ifndef LIMITS_H
#define LIMITS_H

#include "ratelimit.h"

/* A unit of periods. */
typedef struct RlUnit
{
	const char *name;
	const char *word;
	const char *words;
	int64		duration;
} RlUnit;

#define RL_UNITS			6

extern const RlUnit rl_units[RL_UNITS];
extern const char *const rl_kind_texts[];

static inline RlStateTag
rl_state_tag(const RlLimit *limit)
{
	return (RlStateTag) {limit->period, limit->algorithm, limit->from_first, limit->shadow, limit->step};
}

static inline bool
rl_same_tag(RlStateTag a, RlStateTag b)
{
	uint64		x[2];
	uint64		y[2];

	/* For memcmp, gcc would make a call. */
	memcpy(x, &a, sizeof(x));
	memcpy(y, &b, sizeof(y));
	return x[0] == y[0] && x[1] == y[1];
}

/* Returns true if the two limits have one state on one key. */
static inline bool
rl_same_state(const RlLimit *a, const RlLimit *b)
{
	return rl_same_tag(rl_state_tag(a), rl_state_tag(b));
}

/* Returns true unless they mark a free entry. */
static inline bool
rl_limits_given(const RlLimits *limits)
{
	return limits->n > 0 || limits->kind != RL_LISTED;
}

/* Returns the bytes of the limits, without room for more. */
static inline Size
rl_limits_size(const RlLimits *limits)
{
	return offsetof(RlLimits, limit) + limits->n * sizeof(RlLimit);
}

static inline void
rl_limits_copy(RlLimits *to, const RlLimits *from)
{
	memcpy(to, from, rl_limits_size(from));
}

/* Returns true if all limits are shadow limits, so that no action is refused. */
static inline bool
rl_all_shadow(const RlLimits *limits)
{
	for (int i = 0; i < limits->n; i++)
		if (!limits->limit[i].shadow)
			return false;
	return limits->n > 0;
}

/* Returns the number of rows in rl_check_each: unlimited and blocked have a row too. */
static inline int
rl_limits_rows(const RlLimits *limits)
{
	return Max(limits->n, 1);
}

extern bool rl_limits_parse(const char *text, int len, RlLimits *limits, RlError *error);
extern bool rl_limit_complete(RlLimit *limit, const char *count_name, RlError *error);
extern bool rl_limit_is_too_long(RlError *error);
extern int	rl_limit_write(const RlLimit *limit, char *text);
extern char *rl_limit_text(const RlLimits *limits, int i);
extern int	rl_limit_why(const RlLimit *limit, char *why);
extern const char *rl_ban_rule(const char *why, int len);
extern char *rl_limits_text(const RlLimits *limits);
extern bool rl_limits_same(const RlLimits *a, const RlLimits *b);
extern bool rl_limits_share_state(const RlLimits *a, const RlLimits *b);
extern int64 rl_lease_length(const RlLimits *limits);
extern void rl_limits_complete(RlLimits *limits);

#endif							/* LIMITS_H */
