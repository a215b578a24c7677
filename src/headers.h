/*
 * headers.h
 *		The header fields that tell an HTTP client of its limits.
 */
#ifndef HEADERS_H
#define HEADERS_H

#include "ratelimit.h"

#define RL_MAX_HEADERS		3
#define RL_MAX_POLICY_NAME	128

typedef struct RlHeader
{
	const char *name;
	char	   *value;			/* palloc'd */
} RlHeader;

extern bool rl_policy_name_is_valid(const char *name);
extern int	rl_headers(const char *name, const RlLimits *limits, int binding,
					   const RlDecision *decision, RlHeader *headers);
extern RlHeader rl_header_retry_after(int64 us);

#endif							/* HEADERS_H */
