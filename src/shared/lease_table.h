/*
 * lease_table.h
 *		The entries of leases in shared memory, for lease.c and lease_end.c.
 */
#ifndef LEASE_TABLE_H
#define LEASE_TABLE_H

#include "shared/lease.h"

#define WAYS				8	/* entries of a set */
#define GRANTS				RL_MAX_LEFTOVERS	/* of an entry */

/* Units that one call has charged ahead. */
typedef struct Grant
{
	int64		units;			/* left */
	int64		ends;			/* on the lease clock, as the next */
	int64		renew_at;		/* a quarter of the length before the end; never:
								 * PG_INT64_MAX */
	uint64		id;
	int64		at;				/* of the charge, as in RlCharge */
	int64		mark[RL_MAX_LIMITS];
	int64		life;			/* as in RlLeftover */
} Grant;

/* The use of a key under limits, and its lease.  The lock of its set protects it. */
typedef struct Entry
{
	RlLimits	limits;			/* listed; n = 0: free */
	bool		debug;			/* the times are by ratelimit.debug_clock */
	uint64		generation;		/* changes when its grants are ended */
	int64		window;			/* start of the span in which use is counted */
	double		units;			/* used in it */
	double		units_before;	/* in the span before */
	int64		actions;
	int64		actions_before;
	uint64		claim;			/* of the call that renews */
	int64		claim_ends;
	int64		size;			/* units of all grants after the last one was made */
	int64		decided;		/* when the next two were made */
	RlDecision	decision;		/* of the last grant; its units are not free */
	int			binding;
	Grant		grants[GRANTS];
} Entry;

typedef struct Set
{
	RlKeyHash	keys[WAYS];		/* of the entries */
	Entry		entries[WAYS];
} Set;

extern Set *rl_lease_lock(RlKeyHash key_hash);
extern void rl_lease_unlock(const Set *set);
extern Entry *rl_lease_entry_of(Set *set, int i, RlKeyHash key_hash);
extern Entry *rl_lease_find(Set *set, RlKeyHash key_hash, const RlLimits *limits);
extern Grant *rl_lease_replaced(Entry *entry);
extern int64 rl_lease_end_grant(const RlLimits *limits, const RlKey *key, Grant *grant);
extern int64 rl_lease_now(void);
extern uint64 rl_lease_new_id(void);

#endif							/* LEASE_TABLE_H */
