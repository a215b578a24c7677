/*
 * sentinel.h
 *		The search for a service's master.
 */
#ifndef SENTINEL_H
#define SENTINEL_H

#include "redis/address.h"

typedef bool (*RlSentinelAccept) (const RlAddress *master, void *arg);

extern bool rl_sentinels_ask(RlTarget *target, RlSentinelAccept accept, void *arg, RlError *error);

#endif							/* SENTINEL_H */
