/*
 * several_keys.h
 *		Takes quota for one action on several keys.
 */
#ifndef SEVERAL_KEYS_H
#define SEVERAL_KEYS_H

#include "ratelimit.h"

extern int	rl_sliding_limits(const RlLimits *limits);
extern bool rl_sliding_error(int n, RlError *error);
extern int	rl_equal_key(const RlAction *actions, int n, int *earlier);
extern void rl_check_keys(const RlAction *actions, int n);
extern bool rl_take_all(const RlStore *store, const RlAction *const *actions, int n,
						RlTook took, void *arg, volatile bool *in_parts, RlUsage *usage,
						RlError *error);

#endif							/* SEVERAL_KEYS_H */
