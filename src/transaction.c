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
 * The grants of concurrent limits are refunded also when the transaction commits: after
 * that, so that no unit is free before, and while the transaction still has its locks.
 * A connection that is lost or that a redirect needs cannot be opened then, so this is done
 * before the commit.
 *
 * rl_refund first refunds the transaction's own grants, and rl_reset deletes
 * the grants of the states that it resets: no rollback refunds these again.
 */
#include "postgres.h"

#include "access/xact.h"
#include "common/hashfn.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"

#include "algorithm/limits.h"
#include "refund.h"
#include "shared/breaker.h"
#include "transaction.h"

/* A transaction's grants beyond these are not refunded, and logged. */
#define MAX_GRANTS			65536

/*
 * A commit asks for the servers of keys that were charged so long ago, at most for so many
 * keys: meanwhile a replica may have taken over, or the slot may have moved.
 */
#define FIND_AFTER			RL_SECOND
#define MAX_FOUND			1000

typedef struct GrantEntry
{
	RlGrantId	id;				/* hash key */
	RlGrant    *grant;
} GrantEntry;

static MemoryContext context = NULL;	/* of all that follows */
static HTAB *entries = NULL;	/* the grants that others can be merged into */
static dlist_head grants = DLIST_STATIC_INIT(grants);	/* by level */
static int	ngrants = 0;		/* in this list and in the queue */
static bool overflowed = false;

/* Those whose units became free before they ended; the first, for the log. */
static int	noutlived = 0;
static RlLimit outlived_limit;
static char outlived_key[RL_MAX_REDIS_KEY + 1];

/* The time before the store was asked, on the monotonic clock. */
static int64 asked;

/*
 * Levels and the queue
 */

/* Deletes a grant, which may be in the queue.  Does not throw. */
void
rl_grant_drop(RlGrant *grant)
{
	hash_search(entries, &grant->id, HASH_REMOVE, NULL);
	if (grant->id.level < 1)
		rl_refund_dequeue(grant);
	else
		dlist_delete(&grant->node);
	pfree(grant);
	ngrants--;
}

/* Adds later charges to a grant; the numbers of their limit apply from now on. */
static void
merge(RlGrant *grant, const RlLimit *limit, const RlCharge *charge, const RlSpan *span)
{
	rl_charge_merge(limit, &grant->charge, &grant->span, charge, span);
	grant->limit = *limit;
}

/*
 * Makes a grant one of another level.  If that level has one of the same state,
 * merges both, so that time that has passed is subtracted from their sum and
 * not from each; then returns false, and the grant is deleted.
 */
static bool
change_level(RlGrant *grant, int level)
{
	GrantEntry *entry = hash_search(entries, &grant->id, HASH_FIND, NULL);
	const GrantEntry *other;
	RlGrantId	id = grant->id;

	id.level = level;
	other = hash_search(entries, &id, HASH_FIND, NULL);
	if (other == NULL)
	{
		hash_update_hash_key(entries, entry, &id);
		grant->id = id;
		return true;
	}
	/* The queue begins with the newest; the numbers of the later call apply. */
	if (level == RL_QUEUED && other->grant->charge.at > grant->charge.at)
	{
		merge(grant, &other->grant->limit, &other->grant->charge, &other->grant->span);
		other->grant->charge = grant->charge;
		other->grant->span = grant->span;
	}
	else
		merge(other->grant, &grant->limit, &grant->charge, &grant->span);
	rl_grant_drop(grant);
	return false;
}

/* Returns true if the grant's units may have become free because its period has passed. */
static bool
is_outlived(const RlGrant *grant)
{
	return rl_algorithm(&grant->limit)->until_end &&
		rl_monotonic_now() - grant->asked >= grant->limit.period;
}

/* Counts a grant that is outlived, for the log.  Does not throw. */
static void
note_outlived(const RlGrant *grant)
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
		ereport(LOG_SERVER_ONLY,
				(errmsg("a transaction has lasted longer than the period of its rate limit \"%s %lld/%.15gs\"",
						rl_algorithm(&outlived_limit)->name, (long long) outlived_limit.count,
						(double) outlived_limit.period / RL_SECOND),
				 errdetail("Others could take its units before it ended. The key in the store is \"%s\". Charges of this transaction that ended so: %d.",
						   outlived_key, noutlived)));
	noutlived = 0;
}

/* Puts a grant in the queue. */
static void
enqueue(RlGrant *grant)
{
	note_outlived(grant);
	rl_refund_settle();
	if (!change_level(grant, RL_QUEUED))
		return;
	dlist_delete(&grant->node);
	rl_refund_enqueue(grant);
}

static void
subtransaction_ends(SubXactEvent event, SubTransactionId mine pg_attribute_unused(),
					SubTransactionId parent pg_attribute_unused(),
					void *arg pg_attribute_unused())
{
	int			level = GetCurrentTransactionNestLevel();
	dlist_node *node;
	dlist_node *previous;

	if (event != SUBXACT_EVENT_COMMIT_SUB && event != SUBXACT_EVENT_ABORT_SUB)
		return;
	/* The level's grants are the last: its parent was granted nothing meanwhile. */
	for (node = grants.head.prev; node && node != &grants.head; node = previous)
	{
		RlGrant    *grant = dlist_container(RlGrant, node, node);

		previous = node->prev;
		if (grant->id.level < level)
			break;
		if (event == SUBXACT_EVENT_ABORT_SUB)
			enqueue(grant);
		else
			change_level(grant, level - 1);
	}
}

/*
 * Connects the servers that have the grants of the list which a commit refunds: all of
 * the queue, and those of concurrent limits.  Returns false if a server cannot be connected.
 */
static bool
connect_servers(dlist_head *list, bool is_queue)
{
	uint64		server = rl_refund_server();
	int64		now = rl_monotonic_now();
	RlRefundCall *found = NULL;
	int			nfound = 0;
	dlist_iter	iter;
	RlError		why;

	dlist_foreach(iter, list)
	{
		const RlGrant *grant = dlist_container(RlGrant, node, iter.cur);
		RlError		error;

		if ((!is_queue && !rl_algorithm(&grant->limit)->until_end) || grant->id.local || grant->id.server != server)
			continue;
		if (!rl_redis_connect(grant->redis_key, grant->redis_key_len, &error))
			return false;
		if (now - grant->asked >= FIND_AFTER && nfound < MAX_FOUND)
		{
			if (found == NULL)
				found = palloc0(MAX_FOUND * sizeof(RlRefundCall));
			found[nfound].redis_key = grant->redis_key;
			found[nfound++].redis_key_len = grant->redis_key_len;
		}
		if (!rl_redis_is_cluster())
			break;
	}
	/* To refund nothing is to follow the redirects. */
	return nfound == 0 || rl_redis_refund_charges(found, nfound, false, NULL, &why, &why);
}

/*
 * Connects the servers to which a commit sends refunds, if a connection is lost or another
 * server has the keys by now.  If that fails the refund fails too, and the commit does not.
 * Throws at a cancel.
 */
static void
connect_before_commit(void)
{
	MemoryContext old = CurrentMemoryContext;

	PG_TRY();
	{
		if (connect_servers(&rl_refunds, true))
			(void) connect_servers(&grants, false);
	}
	PG_CATCH();
	{
		rl_breakers_release();
		if (geterrcode() == ERRCODE_QUERY_CANCELED)
			PG_RE_THROW();
		MemoryContextSwitchTo(old);
		FlushErrorState();
	}
	PG_END_TRY();
}

static void
transaction_ends(XactEvent event, void *arg pg_attribute_unused())
{
	bool		aborts = event == XACT_EVENT_ABORT || event == XACT_EVENT_PARALLEL_ABORT;
	dlist_node *previous;
	RlError		error;

	if (context == NULL || event == XACT_EVENT_PARALLEL_PRE_COMMIT)
		return;
	if (event == XACT_EVENT_PRE_COMMIT || event == XACT_EVENT_PRE_PREPARE)
	{
		connect_before_commit();
		return;
	}
	/* The newest first, which are nearest to the end of a log. */
	for (dlist_node *node = grants.head.prev; node && node != &grants.head; node = previous)
	{
		RlGrant    *grant = dlist_container(RlGrant, node, node);

		previous = node->prev;
		if (aborts || rl_algorithm(&grant->limit)->until_end)
			enqueue(grant);
	}
	if (!dlist_is_empty(&rl_refunds))
		rl_refund_queue(true, true, NULL, &error);
	log_outlived();
	rl_refund_release();
	dlist_init(&grants);
	Assert(dlist_is_empty(&rl_refunds));
	ngrants = 0;
	overflowed = false;
	MemoryContextDelete(context);
	context = NULL;
}

/*
 * For actions
 */

/*
 * Allocates the memory that the end of the transaction needs; to be called
 * before limits that have refund_on_abort or are concurrent are asked.  Throws if
 * there is no memory.
 */
void
rl_grants_prepare(void)
{
	static bool registered = false;
	HASHCTL		ctl = {.keysize = sizeof(RlGrantId),.entrysize = sizeof(GrantEntry)};
	MemoryContext new;

	asked = rl_monotonic_now();
	/* An action that a lease serves sends no refunds, and changes the room of their calls. */
	rl_refund_settle();
	if (context != NULL)
		return;
	rl_redis_reserve_refunds();
	if (!registered)
	{
		RegisterXactCallback(transaction_ends, NULL);
		RegisterSubXactCallback(subtransaction_ends, NULL);
		registered = true;
	}
	new = AllocSetContextCreate(TopMemoryContext, "rate-limit charges", ALLOCSET_DEFAULT_SIZES);
	ctl.hcxt = new;
	entries = hash_create("rate-limit charges", 64, &ctl, HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	context = new;
}

/*
 * Sets the members that are the same in all grants of the key, and the others
 * to 0.  Writes the key's name in Redis too, and returns its length.
 */
static int
set_key(RlGrantId *id, const RlKey *key, bool local, char *redis_key)
{
	int			len = rl_redis_key(key, redis_key);
	const unsigned char *bytes = (const unsigned char *) redis_key;

	memset(id, 0, sizeof(*id));
	id->server = rl_refund_server();
	id->redis_key[0] = hash_bytes_extended(bytes, len, 0);
	id->redis_key[1] = hash_bytes_extended(bytes, len, id->redis_key[0]);
	id->local = local;
	return len;
}

/*
 * Returns a new grant of a charge, which the caller puts into a list, or NULL if there is
 * no memory.  redis_key has len bytes.  Does not throw.
 */
static RlGrant *
make_grant(const RlGrantId *id, const RlKey *key, const char *redis_key, int len,
		   const RlLimit *limit, RlCharge charge)
{
	RlGrant    *grant = MemoryContextAllocExtended(context, offsetof(RlGrant, redis_key) + len,
												   MCXT_ALLOC_NO_OOM | MCXT_ALLOC_ZERO);

	if (grant == NULL)
		return NULL;
	grant->id = *id;
	grant->limit = *limit;
	grant->charge = charge;
	grant->span = (RlSpan) {.at = charge.at,.mark = charge.mark};
	grant->asked = asked;
	if (rl_shared_available())
		grant->key_hash = rl_key_hash(key);
	grant->redis_key_len = len;
	memcpy(grant->redis_key, redis_key, len);
	ngrants++;
	return grant;
}

/* Adds a charge to the grant that it belongs to; false if there is no room for a new one. */
static bool
note(const RlKey *key, const RlLimit *limit, const RlCharge *charge, bool local, uint64 lease)
{
	RlGrantId	id;
	GrantEntry *entry;
	RlGrant    *grant;
	char		redis_key[RL_MAX_REDIS_KEY];
	int			len = set_key(&id, key, local, redis_key);
	bool		found;

	id.tag = rl_state_tag(limit);
	id.lease = lease;
	if (rl_algorithm(limit)->left == NULL)
		id.mark = charge->mark;
	id.level = GetCurrentTransactionNestLevel();

	if (ngrants >= MAX_GRANTS && hash_search(entries, &id, HASH_FIND, NULL) == NULL)
		return false;
	entry = hash_search(entries, &id, HASH_ENTER_NULL, &found);
	if (entry == NULL)
		return false;
	if (found)
	{
		merge(entry->grant, limit, charge, &(RlSpan) {.at = charge->at,.mark = charge->mark});
		return true;
	}
	grant = !rl_refund_reserve(ngrants + 1) ? NULL :
		make_grant(&id, key, redis_key, len, limit, *charge);
	if (grant == NULL)
	{
		hash_search(entries, &id, HASH_REMOVE, NULL);
		return false;
	}
	entry->grant = grant;
	dlist_push_tail(&grants, &grant->node);
	return true;
}

/*
 * Notes an action that was allowed: charges has that of each limit, of the amount 0 if the
 * limit was not charged.  lease is the grant of a lease that had the units, or 0.  Does
 * not throw; a charge without room is not refunded, and logged.
 */
void
rl_grants_note(const RlKey *key, const RlLimits *limits, const RlCharge *charges, bool local,
			   uint64 lease)
{
	/* Units of a lease are charged to all limits, so a rollback returns them only if it refunds all. */
	if (limits->n > 1)
		lease = 0;
	for (int i = 0; i < limits->n; i++)
	{
		if (!limits->limit[i].refund_on_abort || charges[i].amount == 0 ||
			note(key, &limits->limit[i], &charges[i], local, lease) ||
			overflowed)
			continue;
		overflowed = true;
		ereport(LOG_SERVER_ONLY,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("too many rate-limit charges in one transaction to refund all of them"),
				 errdetail("There is room for %d.", MAX_GRANTS)));
	}
}

/*
 * Holding
 *
 * A held charge is in the queue from the time when it is charged, so that it is
 * refunded whatever ends the action, unless rl_holds_drop is called.
 */

/* Returns the last of the queue's grants if it is of a held charge, or NULL. */
static RlGrant *
last_hold(void)
{
	RlGrant    *grant = dlist_is_empty(&rl_refunds) ? NULL :
		dlist_container(RlGrant, node, dlist_tail_node(&rl_refunds));

	return grant != NULL && grant->id.level == RL_HELD ? grant : NULL;
}

/* Makes room for n held charges.  Throws if there is no memory. */
void
rl_holds_prepare(int n)
{
	rl_grants_prepare();
	rl_refund_settle();
	/* Those of an action that was interrupted. */
	rl_holds_release(false);
	if (!rl_refund_reserve(ngrants + n))
		ereport(ERROR, (errcode(ERRCODE_OUT_OF_MEMORY), errmsg("out of memory")));
}

/*
 * Puts charges of Redis, one for each limit, into the queue: held charges of this quota,
 * or at the level RL_LEFTOVER.  Those of the amount 0 are left out.  Returns false if
 * there is no memory for all; does not throw.  Needs rl_holds_prepare.
 */
bool
rl_queue_charges(const RlKey *key, const RlLimits *limits, const RlCharge *charges, int64 quota, int level)
{
	RlGrantId	id;
	char		redis_key[RL_MAX_REDIS_KEY];
	int			len = set_key(&id, key, false, redis_key);
	bool		all = true;

	id.level = level;
	for (int i = 0; i < limits->n; i++)
	{
		RlGrant    *grant;

		if (charges[i].amount == 0)
			continue;
		grant = make_grant(&id, key, redis_key, len, &limits->limit[i], charges[i]);
		all &= grant != NULL;
		if (grant == NULL)
			continue;
		grant->quota = quota;
		rl_refund_enqueue(grant);
	}
	return all;
}

/*
 * Ends the hold of all charges: the action does not happen.  If it was refused, their refund
 * counts their quota as refused, where limits have count_denied.
 */
void
rl_holds_release(bool refused)
{
	dlist_iter	iter;

	dlist_reverse_foreach(iter, &rl_refunds)
	{
		RlGrant    *grant = dlist_container(RlGrant, node, iter.cur);

		if (grant->id.level != RL_HELD)
			break;
		grant->id.level = RL_RELEASED;
		grant->refused = refused;
	}
}

/* Ends the hold of all charges: the action happens. */
void
rl_holds_drop(void)
{
	for (RlGrant *grant; (grant = last_hold()) != NULL;)
		rl_grant_drop(grant);
}

/* Returns true if savepoints were rolled back whose charges are not refunded yet. */
bool
rl_refunds_pending(void)
{
	return !dlist_is_empty(&rl_refunds);
}

/* Lets the charges of a key be refunded first.  Does not throw. */
void
rl_refunds_advance(const RlKey *key)
{
	RlGrantId	id;
	char		redis_key[RL_MAX_REDIS_KEY];

	if (dlist_is_empty(&rl_refunds))
		return;
	set_key(&id, key, false, redis_key);
	rl_refund_advance(&id);
}

/*
 * Refunds these charges, as many as ratelimit.command_timeout allows, or all if there is
 * little room for the grants of later charges; and adds the cost to the usage, unless that is NULL.
 * Returns false with the error set when Redis cannot be reached; throws when it is
 * interrupted.
 */
bool
rl_refunds_flush(RlUsage *usage, RlError *error)
{
	return dlist_is_empty(&rl_refunds) || rl_refund_queue(false, ngrants > MAX_GRANTS / 2, usage, error);
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
	RlGrantId	searched;
	char		redis_key[RL_MAX_REDIS_KEY];
	dlist_iter	iter;
	int64		held = 0;

	if (context == NULL || dlist_is_empty(&grants))
		return 0;
	set_key(&searched, key, local, redis_key);
	dlist_foreach(iter, &grants)
	{
		const RlGrant *grant = dlist_container(RlGrant, node, iter.cur);

		if (rl_grant_is_of(grant, &searched) && rl_same_state(&grant->limit, limit) && !is_outlived(grant))
			held += rl_charge_left(&grant->limit, &grant->charge, now);
	}
	return held;
}

/* Puts a part of a grant in the queue. */
static void
enqueue_part(const RlGrant *grant, int64 amount)
{
	Size		size = offsetof(RlGrant, redis_key) + grant->redis_key_len;
	RlGrant    *part = MemoryContextAlloc(context, size);

	note_outlived(grant);
	rl_refund_settle();
	if (!rl_refund_reserve(ngrants + 1))
		ereport(ERROR, (errcode(ERRCODE_OUT_OF_MEMORY), errmsg("out of memory")));
	memcpy(part, grant, size);
	part->id.level = RL_QUEUED_PART;
	part->charge.amount = amount;
	rl_refund_enqueue(part);
	ngrants++;
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
	RlGrantId	searched;
	char		redis_key[RL_MAX_REDIS_KEY];
	dlist_node *previous;

	if (context == NULL || dlist_is_empty(&grants))
		return quota;
	left = rl_algorithm(limit)->charge(limit, quota, 0, 0).amount;
	set_key(&searched, key, local, redis_key);
	for (dlist_node *node = grants.head.prev; node != &grants.head && left > 0; node = previous)
	{
		RlGrant    *grant = dlist_container(RlGrant, node, node);
		int64		part = Min(left, grant->charge.amount);

		previous = node->prev;
		if (!rl_grant_is_of(grant, &searched) || !rl_same_state(&grant->limit, limit))
			continue;
		left -= part;
		if (part < grant->charge.amount)
		{
			if (has_entries)
				enqueue_part(grant, part);
			grant->charge.amount -= part;
		}
		else if (has_entries)
			enqueue(grant);
		else
			rl_grant_drop(grant);
	}
	return has_entries ? left : quota;
}

/*
 * Deletes the grants of the key under these limits' states, or if they are
 * NULL all of the key's: a rollback after a reset must not refund quota that
 * others took.
 */
void
rl_grants_forget(const RlKey *key, const RlLimits *limits, bool local)
{
	RlGrantId	searched;
	char		redis_key[RL_MAX_REDIS_KEY];
	dlist_mutable_iter iter;

	if (context == NULL)
		return;
	set_key(&searched, key, local, redis_key);
	rl_refund_forget(&searched, limits);
	dlist_foreach_modify(iter, &grants)
	{
		RlGrant    *grant = dlist_container(RlGrant, node, iter.cur);
		bool		found = limits == NULL;

		for (int i = 0; limits != NULL && i < limits->n; i++)
			found |= rl_same_state(&grant->limit, &limits->limit[i]);
		if (found && rl_grant_is_of(grant, &searched))
			rl_grant_drop(grant);
	}
}
