/*
 * overdue.h
 *		Refunds that outlive the transaction, and the session, that could not send them.
 */
#ifndef OVERDUE_H
#define OVERDUE_H

#include "algorithm/algorithm.h"
#include "shared/shared.h"

/* Entries that one command takes off the list. */
#define RL_MAX_TAKEN		64

#define RL_MAX_OVERDUE_NAME	2048	/* bytes of a key's name in Redis */

/* A refund without its key's name. */
typedef struct RlOverdue
{
	RlLimit		limit;
	RlCharge	charge;
	RlKeyHash	key_hash;
	uint64		lot;			/* of a lease, which had the units; 0: none */
	int64		refused;		/* quota that the refund counts as refused */
	int64		asked;			/* monotonic time before the charge */
	int64		since;			/* monotonic time when it became overdue; 0: it is not yet */
	int16		cause;			/* an RlCause */
	int16		name_len;		/* of the key's name in Redis */
} RlOverdue;

/* Takes an entry off the list.  Returns false if it cannot.  Must not throw. */
typedef bool (*RlOverdueTake) (const RlOverdue *refund, const char *name, void *arg);

typedef struct RlOverdueFill
{
	int64		waiting;		/* also those that a process is sending */
	int64		oldest;			/* microseconds that the oldest has waited */
	int64		sent;
	int64		lost;			/* refunds, also those that were never on the list */
} RlOverdueFill;

extern const RlSharedPart rl_targets_part;
extern const RlSharedPart rl_overdue_part;

extern uint64 rl_target_id(void);
extern void rl_overdue_prepare(void);
extern bool rl_overdue_add(uint64 target, const RlOverdue *refund, const char *name, bool displaces);
extern bool rl_overdue_waits(void);
extern int	rl_overdue_take(const RlKeyHash *first, int most, RlOverdueTake take, void *arg);
extern void rl_overdue_ended(uint64 target, bool sent);
extern void rl_overdue_lost(int64 n);
extern void rl_overdue_pause(uint64 target);
extern void rl_overdue_fill(RlOverdueFill *fill);

/* For the worker */
extern bool rl_overdue_serve(int number, bool at_exit);
extern bool rl_overdue_leave(bool at_once);
extern bool rl_overdue_seat_wanted(void);
extern int64 rl_overdue_pause_left(void);
extern bool rl_overdue_may_log(void);
extern int	rl_overdue_unserved(void);

#endif							/* OVERDUE_H */
