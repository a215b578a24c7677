/*
 * sentinel.h
 *		The search for a service's master.
 */
#ifndef SENTINEL_H
#define SENTINEL_H

#include "redis/address.h"

/* A search for a service's master, in which each Sentinel is asked at most once. */
typedef struct RlSentinelSearch
{
	const RlTarget *target;
	const char *password;		/* empty: none */
	int			first;			/* the Sentinel to be asked first */
	int			passed;			/* how many were asked, or not admitted */
	int64		deadline;
	bool		failed;			/* a Sentinel did, and why tells why the first one did */
	bool		unreachable;	/* one of them was */
	RlError		why;
} RlSentinelSearch;

extern void rl_sentinel_begin(RlSentinelSearch *search, const RlTarget *target, int first,
							  const char *password);
extern bool rl_sentinel_next(RlSentinelSearch *search, RlAddress *master, int *which,
							 RlError *error);

#endif							/* SENTINEL_H */
