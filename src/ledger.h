/*
 * ledger.h
 *		Charges that may have to be refunded.
 */
#ifndef LEDGER_H
#define LEDGER_H

#include "lib/ilist.h"
#include "storage/fd.h"

#include "redis/redis.h"
#include "shared/shared.h"

/* A transaction's charges beyond these entries are not refunded, and logged. */
#define RL_MAX_ENTRIES		65536

/* Levels of entries; those of the transaction nest are above. */
#define RL_QUEUED			0	/* of the transaction, in the queue */
#define RL_APART			(-1)	/* never merged */

/* Why charges are refunded, for the log. */
typedef enum RlCause
{
	RL_OF_ABORT,
	RL_OF_CONCURRENT,
	RL_OF_ACTION,				/* on several keys */
	RL_OF_CALLS,				/* of such an action, which perhaps charged their keys */
	RL_OF_STATEMENT,			/* counted by key */
	RL_OF_LEASE					/* a leftover, whose loss is not logged */
} RlCause;

#define RL_CAUSES			(RL_OF_LEASE + 1)

/* The identity of an entry among those that merge; padding is zero. */
typedef struct RlLedgerId
{
	uint64		server;			/* rl_target_id() */
	uint64		redis_key[2];	/* a hash */
	RlStateTag	tag;
	int64		place;			/* of charges that do not merge */
	int64		life;			/* as in RlCharge */
	uint64		by_mark;		/* as in RlCharge */
	uint64		lot;			/* of a lease, which had the units; 0: none */
	int			level;
	bool		local;
} RlLedgerId;

/*
 * Charges of an owner to one limit on one key: of a transaction's level all of them if
 * they merge, otherwise those with one mark.
 */
typedef struct RlLedgerEntry
{
	dlist_node	node;			/* of the owner's entries */
	dlist_node	merging;		/* unless it is apart: of those whose ids have a place in common */
	dlist_node	of_key;			/* in the queue: of those whose keys have a place in common */
	RlLedgerId	id;
	RlCause		cause;
	RlLimit		limit;
	RlCharge	charge;
	RlSpan		span;
	int64		asked;			/* monotonic time before the first charge */
	int64		since;			/* as in RlOverdue */
	RlKeyHash	key_hash;		/* only with shared memory */
	int64		refused;		/* quota that the refund counts as refused */
	bool		counted;		/* by the log; of a statement's key, one entry is */
	bool		queued;
	const RlKeyRefunds *call;	/* which refunds it; NULL: none yet */
	int			redis_key_len;
	char		redis_key[FLEXIBLE_ARRAY_MEMBER];	/* the key's name in Redis */
} RlLedgerEntry;

/*
 * An owner of entries: the transaction, an action on several keys, a statement, a lease that
 * ends, the queue.
 */
typedef struct RlOwner
{
	RlCause		cause;
	dlist_head	entries;		/* the newest first; of the queue, the first to be refunded */
	int64		unanswered;		/* calls, or a statement's keys, that were perhaps charged */
	int64		lost;			/* charges without memory for an entry, or a statement's
								 * keys that were not refunded */
	/* Of a statement: */
	File		file;			/* has charges that are no entries; 0: there is none */
	int64		spilled;		/* bytes in it */
	int64		loaded;			/* of these, bytes that are entries again */
	int64		nspilled;		/* keys in the others */
	RlLimit    *limits;			/* the last ones: of a key's first entry in the file, of its second, ... */
	RlError		why;			/* the last reason why keys were not refunded */
} RlOwner;

/* The entries that are to be refunded. */
extern RlOwner rl_queue;

extern void rl_ledger_open(void);
extern bool rl_ledger_is_open(void);
extern void rl_ledger_close(void);
extern uint64 rl_ledger_new_mark(void);
extern int	rl_ledger_key(RlLedgerId *id, const RlKey *key, bool local, char *redis_key);
extern bool rl_ledger_is_of(const RlLedgerEntry *entry, const RlLedgerId *key, const RlLimits *limits);
extern RlLedgerEntry *rl_ledger_add(RlOwner *owner, const RlKey *key, const RlLimit *limit,
									const RlCharge *charge, bool local, uint64 lot, int level);
extern void rl_ledger_drop(RlLedgerEntry *entry);
extern bool rl_ledger_set_level(RlLedgerEntry *entry, int level);
extern void rl_ledger_queue(RlLedgerEntry *entry);

extern void rl_owner_begin(RlOwner *owner, RlCause cause);
extern void rl_owner_add(RlOwner *owner, const RlKey *key, const RlLimits *limits,
						 const RlCharge *charges, bool local, int64 quota);
extern void rl_owner_spill(RlOwner *owner);
extern void rl_owner_refund(RlOwner *owner, bool no_throw);
extern int64 rl_owner_lost(RlOwner *owner);
extern void rl_owner_keep(RlOwner *owner);
extern void rl_owner_queue(RlOwner *owner, bool refused);

extern bool rl_refunds_pending(void);
extern int	rl_refunds_take_overdue(const RlKeyHash *first, int most);
extern void rl_refunds_advance(const RlKey *key);
extern bool rl_refunds_flush(RlUsage *usage, RlError *error);
extern bool rl_refunds_end(void);
extern void rl_refunds_lose(void);

#endif							/* LEDGER_H */
