/*
 * sentinel.h
 *		The search for a service's master.
 */
#ifndef SENTINEL_H
#define SENTINEL_H

#include "redis/node.h"

extern bool rl_sentinels_ask(uint64 route, int64 deadline, RlNode **master, RlError *error);

#endif							/* SENTINEL_H */
