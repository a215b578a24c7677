/*
 * transaction.c
 *		The grants of a transaction under limits with refund_on_abort and under
 *		concurrent limits, by levels of subtransactions.
 *
 * When a subtransaction commits its grants become the parent's.  When it aborts
 * they are queued, and the queue is sent ahead of the next command, or when the
 * transaction ends: in callbacks, which must not throw, and in which there may be
 * no memory.  A prepared transaction counts as committed.
 *
 * The grants of concurrent limits are refunded also when the transaction commits: after the
 * commit, so that no unit is free before it, and while the transaction still has its locks.
 *
 * rl_refund first refunds the transaction's own grants, and rl_reset deletes
 * the grants of the states that it resets: no rollback refunds these again.
 */
#include "postgres.h"

#include <limits.h>

#include "access/xact.h"
#include "miscadmin.h"
#include "storage/ipc.h"

#include "algorithm/limits.h"
#include "error.h"
#include "ledger.h"
#include "shared/breaker.h"
#include "transaction.h"
#include "worker.h"

static RlOwner transaction = {.entries = DLIST_STATIC_INIT(transaction.entries)};	/* by level */
static bool overflowed = false;

/*
 * Grants of deeper levels belong to this level, because their subtransactions have committed.
 * The next grant sets their level.  The release of an outer savepoint cannot be cancelled, so it
 * must not go through the grants once for each savepoint in it.
 */
static int	committed_to = INT_MAX;

/* Those whose units became free before they ended; the first, for the log. */
static int	noutlived = 0;
static RlLimit outlived_limit;
static char outlived_key[RL_MAX_REDIS_KEY + 1];

/* Returns true if the grant's units may have become free because its period has passed. */
static bool
is_outlived(const RlLedgerEntry *grant)
{
	return rl_algorithm(&grant->limit)->until_end &&
		rl_monotonic_now() - grant->asked >= grant->limit.period;
}

/* Counts a grant that is outlived, for the log.  Does not throw. */
static void
note_outlived(const RlLedgerEntry *grant)
{
	if (!is_outlived(grant) || noutlived++ > 0)
		return;
	outlived_limit = grant->limit;
	for (int i = 0; i < grant->redis_key_len; i++)
	{
		char		c = grant->redis_key[i];

		outlived_key[i] = c >= ' ' && c <= '~' ? c : '?';
	}
	outlived_key[grant->redis_key_len] = '\0';
}

/* Logs at the end of the transaction that grants were outlived.  Does not throw. */
static void
log_outlived(void)
{
	if (noutlived > 0)
		rl_log_no_throw((errmsg("a transaction has lasted longer than the period of its rate limit \"%s %lld/%.15gs\"",
								 rl_algorithm(&outlived_limit)->name, (long long) outlived_limit.count,
								 (double) outlived_limit.period / RL_SECOND),
						 errdetail("Others could take its units before it ended. The key in the store is \"%s\". Charges of this transaction that ended so: %d.",
									outlived_key, noutlived)));
	noutlived = 0;
}

/* Puts a grant in the queue. */
static void
queue_grant(RlLedgerEntry *grant)
{
	note_outlived(grant);
	rl_ledger_queue(grant);
}

/* Sets the level of grants whose subtransactions have committed.  Does not throw. */
static void
join_levels(void)
{
	dlist_head *grants = &transaction.entries;
	dlist_node *node = NULL;
	dlist_iter	iter;

	dlist_foreach(iter, grants)
	{
		if (dlist_container(RlLedgerEntry, node, iter.cur)->id.level <= committed_to)
			break;
		node = iter.cur;
	}
	/* The oldest first, so that later charges are added to earlier ones. */
	while (node != NULL)
	{
		dlist_node *newer = dlist_has_prev(grants, node) ? dlist_prev_node(grants, node) : NULL;

		(void) rl_ledger_set_level(dlist_container(RlLedgerEntry, node, node), committed_to);
		node = newer;
	}
	committed_to = INT_MAX;
}

static void
subtransaction_ends(SubXactEvent event, SubTransactionId mine pg_attribute_unused(),
					SubTransactionId parent pg_attribute_unused(),
					void *arg pg_attribute_unused())
{
	int			level = GetCurrentTransactionNestLevel();
	dlist_mutable_iter iter;

	if (event != SUBXACT_EVENT_COMMIT_SUB && event != SUBXACT_EVENT_ABORT_SUB)
		return;
	if (event == SUBXACT_EVENT_COMMIT_SUB)
	{
		if (!dlist_is_empty(&transaction.entries))
			committed_to = Min(committed_to, level - 1);
		return;
	}
	rl_breakers_release();
	/* Nothing was granted since that level's subtransaction has committed. */
	if (level > committed_to)
		return;
	/* The level's grants are the newest: its parent was granted nothing meanwhile. */
	dlist_foreach_modify(iter, &transaction.entries)
	{
		RlLedgerEntry *grant = dlist_container(RlLedgerEntry, node, iter.cur);

		if (grant->id.level < level)
			break;
		queue_grant(grant);
	}
}

static void
transaction_ends(XactEvent event, void *arg pg_attribute_unused())
{
	bool		aborts = event == XACT_EVENT_ABORT || event == XACT_EVENT_PARALLEL_ABORT;
	bool		answers;
	dlist_mutable_iter iter;

	if (aborts)
		rl_breakers_release();
	if (!rl_ledger_is_open() || event == XACT_EVENT_PARALLEL_PRE_COMMIT ||
		event == XACT_EVENT_PRE_COMMIT || event == XACT_EVENT_PRE_PREPARE)
		return;
	/* The newest first, which are nearest to the end of a log. */
	dlist_foreach_modify(iter, &transaction.entries)
	{
		RlLedgerEntry *grant = dlist_container(RlLedgerEntry, node, iter.cur);

		if (aborts || grant->cause == RL_OF_CONCURRENT)
			queue_grant(grant);
	}
	answers = rl_refunds_end();
	if (proc_exit_inprogress)
		rl_refunds_lose();
	if (proc_exit_inprogress && answers)
		rl_refunds_at_exit();
	log_outlived();
	rl_owner_keep(&transaction);
	overflowed = false;
	committed_to = INT_MAX;
	/* Without a list of overdue refunds, some may be left. */
	if (!rl_refunds_pending())
		rl_ledger_close();
}

/* Tries once more to send what is left. */
static void
session_ends(int code pg_attribute_unused(), Datum arg pg_attribute_unused())
{
	if (!rl_refunds_pending())
		return;
	(void) rl_refunds_end();
	rl_refunds_lose();
}

/* Registers the callbacks; called once, when the library is loaded. */
void
rl_transaction_init(void)
{
	/* If the library is preloaded, there is a list of overdue refunds, and nothing is left. */
	if (IsUnderPostmaster)
		before_shmem_exit(session_ends, (Datum) 0);
	RegisterXactCallback(transaction_ends, NULL);
	RegisterSubXactCallback(subtransaction_ends, NULL);
}

/* Logs that charges of the transaction will not be refunded.  Does not throw. */
static void
log_overflow(void)
{
	rl_log_no_throw((errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
					 errmsg("too many rate-limit charges in one transaction to refund all of them"),
					 errdetail("There is room for %d.", RL_MAX_ENTRIES)));
}

/*
 * Notes an action that was allowed: charges has that of each limit, of the amount 0 if the
 * limit was not charged.  lot is that of a lease that had the units, or 0.  Does
 * not throw; a charge without room is not refunded, and logged.
 */
void
rl_grants_note(const RlKey *key, const RlLimits *limits, const RlCharge *charges, bool local,
			   uint64 lot)
{
	int			level = GetCurrentTransactionNestLevel();

	if (committed_to < INT_MAX)
		join_levels();
	/* Units of a lot are charged to all limits, so a rollback returns them only if it refunds all. */
	if (limits->n > 1)
		lot = 0;
	for (int i = 0; i < limits->n; i++)
	{
		if (!limits->limit[i].refund_on_abort || charges[i].amount == 0 ||
			rl_ledger_add(&transaction, key, &limits->limit[i], &charges[i], local, lot, level) ||
			overflowed)
			continue;
		overflowed = true;
		log_overflow();
	}
}

/*
 * For rl_refund() and rl_reset()
 *
 * Both search all grants, from the newest on: the search is short in a
 * transaction without grants, and in a transaction that refunds its last
 * charges.
 */

/*
 * Returns how many units of the limit this transaction was granted for the key, less what
 * has been replenished at the store's time now; 0 subtracts nothing.  Those whose refund
 * is queued do not count.
 */
int64
rl_grants_held(const RlKey *key, const RlLimit *limit, bool local, int64 now)
{
	RlLedgerId	searched;
	char		redis_key[RL_MAX_REDIS_KEY];
	dlist_iter	iter;
	int64		held = 0;

	if (dlist_is_empty(&transaction.entries))
		return 0;
	rl_ledger_key(&searched, key, local, redis_key);
	dlist_foreach(iter, &transaction.entries)
	{
		const RlLedgerEntry *grant = dlist_container(RlLedgerEntry, node, iter.cur);

		if (rl_ledger_is_of(grant, &searched, NULL) && rl_same_state(&grant->limit, limit) &&
			!is_outlived(grant))
			held += rl_charge_left(&grant->limit, &grant->charge, now);
	}
	return held;
}

/* Moves a part of a grant of this key into the queue.  Throws if there is no memory. */
static void
queue_part(RlLedgerEntry *grant, const RlKey *key, int64 amount)
{
	RlCharge	charge = grant->charge;
	RlLedgerEntry *part;

	charge.amount = amount;
	/* The mark stays for the rest of the grant. */
	charge.by_mark = 0;
	note_outlived(grant);
	part = rl_ledger_add(&transaction, key, &grant->limit, &charge, grant->id.local, grant->id.lot, RL_APART);
	if (part == NULL)
		ereport(ERROR, (errcode(ERRCODE_OUT_OF_MEMORY), errmsg("out of memory")));
	rl_ledger_queue(part);
}

/*
 * Takes the quota from the transaction's grants of the limit's state, from the
 * newest grant first, so that no rollback refunds it, even if the store then
 * fails and it is not known whether it was refunded.  Of an algorithm with
 * entries it is queued, because it has its place in the state, and the quota
 * that is left is returned.  Of any other all quota is returned: the store
 * refunds it in the same way, whichever transaction took it.  Throws if there
 * is no memory.
 */
int64
rl_grants_refund(const RlKey *key, const RlLimit *limit, int64 quota, bool local)
{
	bool		has_entries = rl_algorithm(limit)->skip != NULL;
	int64		left;
	RlLedgerId	searched;
	char		redis_key[RL_MAX_REDIS_KEY];
	dlist_mutable_iter iter;

	if (dlist_is_empty(&transaction.entries))
		return quota;
	left = rl_algorithm(limit)->charge(limit, quota, 0, 0).amount;
	rl_ledger_key(&searched, key, local, redis_key);
	dlist_foreach_modify(iter, &transaction.entries)
	{
		RlLedgerEntry *grant = dlist_container(RlLedgerEntry, node, iter.cur);
		int64		part = Min(left, grant->charge.amount);

		if (left == 0)
			break;
		if (!rl_ledger_is_of(grant, &searched, NULL) || !rl_same_state(&grant->limit, limit))
			continue;
		left -= part;
		if (part < grant->charge.amount)
		{
			if (has_entries)
				queue_part(grant, key, part);
			grant->charge.amount -= part;
		}
		else if (has_entries)
			queue_grant(grant);
		else
			rl_ledger_drop(grant);
	}
	return has_entries ? left : quota;
}

/* Deletes the owner's entries of the key under these limits' states, or if they are NULL all of the key's. */
static void
forget(RlOwner *owner, const RlLedgerId *key, const RlLimits *limits)
{
	dlist_mutable_iter iter;

	dlist_foreach_modify(iter, &owner->entries)
	{
		RlLedgerEntry *entry = dlist_container(RlLedgerEntry, node, iter.cur);

		if (rl_ledger_is_of(entry, key, limits))
			rl_ledger_drop(entry);
	}
}

/* Deletes the grants of states after a reset: a rollback must not refund quota that others took. */
void
rl_grants_forget(const RlKey *key, const RlLimits *limits, bool local)
{
	RlLedgerId	searched;
	char		redis_key[RL_MAX_REDIS_KEY];

	rl_ledger_key(&searched, key, local, redis_key);
	forget(&rl_queue, &searched, limits);
	forget(&transaction, &searched, limits);
}
