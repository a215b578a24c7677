/*
 * cluster.h
 *		The owners of a cluster's slots.
 */
#ifndef CLUSTER_H
#define CLUSTER_H

#include "redis/redis.h"

#define RL_SLOTS			16384

extern int	rl_slot(const char *key, int len);
extern int	rl_slot_owner(int slot, bool *guess);
extern void rl_slot_learn(int slot, int owner);
extern void rl_slots_forget(int owner);
extern void rl_slots_reset(void);

#endif							/* CLUSTER_H */
