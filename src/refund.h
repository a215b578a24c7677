/*
 * refund.h
 *		Refunds of a transaction's grants.
 */
#ifndef REFUND_H
#define REFUND_H

#include "lib/ilist.h"

#include "redis/redis.h"
#include "shared/shared.h"

/* Levels of the queue; grants of the first only are merged with others. */
#define RL_QUEUED			0
#define RL_QUEUED_PART		(-1)	/* part of a grant */
#define RL_HELD				(-2)	/* of an action on several keys; at the end of the queue */
#define RL_RELEASED			(-3)	/* the same, of an action that was refused or failed */
#define RL_LEFTOVER			(-4)	/* of a lease; none is logged when it is lost */

/* The identity of a grant in its transaction; padding is zero. */
typedef struct RlGrantId
{
	uint64		server;			/* rl_refund_server() */
	uint64		redis_key[2];	/* a hash */
	RlStateTag	tag;
	int64		mark;			/* of charges that do not merge */
	uint64		lease;			/* the grant of a lease that had the units; 0: none */
	int			level;			/* of the transaction nest; below 1: in the queue */
	bool		local;
} RlGrantId;

/*
 * The charges of a (sub)transaction to one limit on one key: all of them if
 * they merge, otherwise those with one mark.
 */
typedef struct RlGrant
{
	dlist_node	node;			/* of the transaction's grants, or of rl_refunds */
	dlist_node	of_key;			/* in rl_refunds: of those whose keys have a place in common */
	RlGrantId	id;
	RlLimit		limit;
	RlCharge	charge;
	RlSpan		span;
	int64		asked;			/* monotonic time before the first charge */
	RlKeyHash	key_hash;		/* only with shared memory */
	int64		quota;			/* of the action, if held */
	bool		refused;		/* the refund counts this quota as refused */
	const RlRefundCall *call;	/* which refunds it; NULL: none yet */
	int			redis_key_len;
	char		redis_key[FLEXIBLE_ARRAY_MEMBER];	/* the key's name in Redis */
} RlGrant;

/*
 * The queue of grants to be refunded.  Call rl_refund_settle before each change, and
 * rl_refund_enqueue to add one.
 */
extern dlist_head rl_refunds;

extern bool rl_grant_is_of(const RlGrant *grant, const RlGrantId *key);
extern void rl_refund_enqueue(RlGrant *grant);
extern void rl_refund_dequeue(RlGrant *grant);
extern void rl_refund_advance(const RlGrantId *key);
extern void rl_refund_forget(const RlGrantId *key, const RlLimits *limits);
extern uint64 rl_refund_server(void);
extern bool rl_refund_reserve(int n);
extern void rl_refund_release(void);
extern void rl_refund_settle(void);
extern bool rl_refund_queue(bool no_throw, bool whole, RlUsage *usage, RlError *error);

/* transaction.c */
extern void rl_grant_drop(RlGrant *grant);

#endif							/* REFUND_H */
