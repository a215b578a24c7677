/*
 * known.h
 *		What this server knows of keys under limits: denials and leases.
 */
#ifndef KNOWN_H
#define KNOWN_H

#include "algorithm/algorithm.h"
#include "shared/shared.h"

extern const RlSharedPart rl_known_part;

#define RL_ANY_GENERATION	PG_UINT64_MAX

/* An action's part in what is known of its key. */
typedef struct RlKnown
{
	RlKeyHash	key_hash;
	bool		may_refuse;		/* the denial cache may answer, and keep a refusal */
	int64		asked;			/* before the store is asked, as rl_local_now */
	uint64		generation;		/* of the key's denials, then */
} RlKnown;

/* How full the table is. */
typedef struct RlKnownFill
{
	int64		leases;			/* keys and limits whose use is counted */
	int64		max_leases;
	int64		denials_evicted;	/* while they were in force */
} RlKnownFill;

/* What ends of a key. */
typedef enum RlKnownEnd
{
	RL_END_LEASES,
	RL_END_DENIALS,
	RL_END_ALL,
	RL_RESET					/* all, and the charges of leases are deleted */
} RlKnownEnd;

extern bool rl_leases_available(void);
extern bool rl_known_answer(const RlKnown *known, const RlAction *action, bool renew,
							bool may_refuse, RlAnswer *answer, RlCharge *charges,
							uint64 *lot);
extern void rl_known_ask(RlKnown *known, const RlAction *action, int64 now);
extern void rl_known_not_asked(const RlKnown *known, const RlAction *action);
extern uint64 rl_known_note(RlKnown *known, const RlAction *action, RlAnswer *answer,
							RlCharge *charges);
extern void rl_known_refunded(RlKeyHash key_hash);
extern void rl_known_end(const RlKey *key, RlKnownEnd end, const RlLimits *limits);
extern bool rl_known_return(RlKeyHash key_hash, uint64 lot, int64 units);
extern bool rl_known_leftover(const RlKey *key, RlLimits *limits, RlLeftover *left);
extern void rl_known_fill(RlKnownFill *fill);

#endif							/* KNOWN_H */
