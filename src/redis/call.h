/*
 * call.h
 *		Calls that take quota, for store.c.  RlStore describes the functions.
 */
#ifndef CALL_H
#define CALL_H

#include "algorithm/algorithm.h"
#include "redis/command.h"

extern void rl_append_tag(RlCommand *command, const RlLimit *limit);
extern void rl_append_windows(RlCommand *command, const RlLimit *limit);
extern void rl_append_limit(RlCommand *command, const RlLimit *limit, int64 quota, bool trace);
extern void rl_append_keys(RlCommand *command, const RlReserve *reserve);
extern bool rl_in_one_slot(const RlKey *keys, int n);
extern bool rl_learn_slots(const RlReply *reply, const RlKey *key);
extern void rl_append_charge(RlCommand *command, const RlLimit *limit, const RlCharge *charge);

extern bool rl_redis_take(const RlAction *action, RlDecision *each, RlAnswer *answer,
						  RlError *error);
extern bool rl_redis_take_many(const RlAction *const *actions, int n, RlTook took, void *arg,
							   int64 *unanswered, RlUsage *usage, RlError *error);
extern bool rl_redis_take_all(const RlAction *const *actions, int n, RlTook took, void *arg,
							  bool *apart, RlUsage *usage, RlError *error);
extern bool rl_redis_take_parts(const RlAction *const *actions, int n, RlTook took, void *arg,
								int64 *unanswered, RlUsage *usage, RlError *error);

#endif							/* CALL_H */
