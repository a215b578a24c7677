/*
 * transaction.c
 *		What a transaction was granted under limits with refund_on_abort, by
 *		levels of subtransactions.
 *
 * When a subtransaction commits its grants become the parent's.  When it aborts
 * they are queued, and the queue is sent ahead of the next command, or when the
 * transaction ends: in callbacks, which must not throw, and in which there may be
 * no memory.  A prepared transaction counts as committed.
 *
 * rl_refund first refunds what the transaction was granted, and rl_reset deletes
 * the grants of the states that it resets: no rollback refunds these again.
 */
#include "postgres.h"

#include "access/xact.h"
#include "common/hashfn.h"
#include "lib/ilist.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"

#include "algorithm/gcra.h"
#include "algorithm/limits.h"
#include "error.h"
#include "redis/redis.h"
#include "shared/denial_cache.h"
#include "shared/local_store.h"
#include "transaction.h"

/* A transaction's grants beyond these are not refunded, and logged. */
#define MAX_GRANTS			65536

#define QUEUED				0

/* What distinguishes a transaction's grants; padding is zero. */
typedef struct RlGrantId
{
	uint64		server;			/* rl_refund_server() */
	uint64		redis_key[2];	/* a hash */
	RlStateTag	tag;
	int64		mark;			/* of charges that do not merge */
	int			level;			/* of the transaction nest; 0: in the queue */
	bool		local;
} RlGrantId;

/*
 * What one (sub)transaction was granted of one limit on one key, in one sum if
 * that can be refunded as one.
 */
typedef struct RlGrant
{
	dlist_node	node;			/* of the transaction's grants, or of its queue */
	RlGrantId	id;
	RlLimit		limit;
	RlCharge	charge;
	RlKeyHash	key_hash;		/* only with shared memory */
	const RlRefundCall *call;	/* which refunds it; NULL: none yet */
	int			redis_key_len;
	char		redis_key[FLEXIBLE_ARRAY_MEMBER];	/* the key's name in Redis */
} RlGrant;

/* Takes a grant out of the queue and frees it; does not throw. */
typedef void (*RlGrantDrop) (RlGrant *grant);

typedef struct GrantEntry
{
	RlGrantId	id;				/* hash key */
	RlGrant    *grant;
} GrantEntry;

static MemoryContext context = NULL;	/* of all that follows */
static HTAB *entries = NULL;	/* the grants that others can be merged into */
static dlist_head grants = DLIST_STATIC_INIT(grants);	/* by level */
static dlist_head queue = DLIST_STATIC_INIT(queue);
static int	ngrants = 0;		/* in both lists */
static bool overflowed = false;

/*
 * Refunds
 */

static RlRefundCall *calls = NULL;
static RlRefund *refunds = NULL;	/* of all calls */
static int	room = 0;			/* of both, in grants */
static bool unsettled = false;	/* grants in the queue have calls that may have run */
static RlError error_reply;		/* the last one */

/* Returns a hash of the server that the settings name. */
static uint64
rl_refund_server(void)
{
	return hash_bytes_extended((const unsigned char *) rl_redis_url, strlen(rl_redis_url), 0);
}

/*
 * Makes room in the context for the calls of a queue of n grants.  Returns false
 * if there is no memory.  The queue must be settled.
 */
static bool
rl_refund_reserve(MemoryContext context, int n)
{
	int			size = Max(Max(n, 16), 2 * room);
	RlRefundCall *more;

	Assert(!unsettled);
	if (n <= room)
		return true;
	more = MemoryContextAllocExtended(context, size * (sizeof(RlRefundCall) + sizeof(RlRefund)),
									  MCXT_ALLOC_NO_OOM);
	if (more == NULL)
		return false;
	if (calls != NULL)
		pfree(calls);
	calls = more;
	refunds = (RlRefund *) (calls + size);
	room = size;
	return true;
}

/* Forgets the room, to be called when its context is deleted. */
static void
rl_refund_release(void)
{
	calls = NULL;
	room = 0;
	unsettled = false;
}

/* Deletes a queued grant, and the refusals of its key in the denial cache. */
static void
end_grant(RlGrant *grant, RlGrantDrop drop)
{
	if (rl_shared_available())
		rl_denial_delete_hash(grant->key_hash);
	drop(grant);
}

static void
log_lost(int n, const RlError *why)
{
	if (n > 0)
		ereport(LOG,
				(errcode(why->sqlstate),
				 errmsg("could not give back what %d rate-limit charges of an aborted transaction took", n),
				 errdetail_internal("%s", why->message)));
}

/*
 * Deletes the queue's grants whose calls may have run, or all, and logs how many
 * of them are lost, by error replies or for the reason in error.
 */
static void
settle(dlist_head *queue, RlGrantDrop drop, bool all, const RlError *error)
{
	int			n[RL_REFUND_FAILED + 1] = {0};
	dlist_mutable_iter iter;

	dlist_foreach_modify(iter, queue)
	{
		RlGrant    *grant = dlist_container(RlGrant, node, iter.cur);
		RlRefundOutcome outcome = grant->call ? grant->call->outcome : RL_REFUND_UNSENT;

		grant->call = NULL;
		if (outcome == RL_REFUND_UNSENT && !all)
			continue;
		end_grant(grant, drop);
		n[outcome]++;
	}
	unsettled = false;
	log_lost(n[RL_REFUND_FAILED], &error_reply);
	log_lost(n[RL_REFUND_SENT], error);
	log_lost(n[RL_REFUND_UNSENT], error);
}

/*
 * Deletes the grants that rl_refund_queue may have refunded before an error or the
 * end of the backend interrupted it, and logs how many are lost.  Does not throw.
 * To be called before the queue or its room is changed.
 */
static void
rl_refund_settle(dlist_head *queue, RlGrantDrop drop)
{
	RlError		error;

	if (!unsettled)
		return;
	rl_error_set(&error, ERRCODE_CONNECTION_FAILURE, "the call that gave it back was interrupted");
	settle(queue, drop, false, &error);
}

/*
 * Refunds the queue's grants of the local store, deletes those of another Redis,
 * and prepares calls for the others.  Returns the number of calls.
 */
static int
prepare_calls(dlist_head *queue, RlGrantDrop drop)
{
	uint64		server = rl_refund_server();
	int			elsewhere = 0;
	int			n = 0;
	RlRefund   *refund = refunds;
	RlRefundCall *call = NULL;
	RlError		error;
	dlist_mutable_iter iter;

	dlist_foreach_modify(iter, queue)
	{
		RlGrant    *grant = dlist_container(RlGrant, node, iter.cur);

		if (grant->id.local)
			rl_local_refund_charge(grant->key_hash, &grant->limit, &grant->charge);
		if (grant->id.local || grant->id.server != server)
		{
			elsewhere += !grant->id.local;
			end_grant(grant, drop);
			continue;
		}
		if (call == NULL || call->n == RL_MAX_REFUNDS || call->redis_key_len != grant->redis_key_len ||
			memcmp(call->redis_key, grant->redis_key, grant->redis_key_len) != 0)
		{
			call = &calls[n++];
			*call = (RlRefundCall) {grant->redis_key, grant->redis_key_len, 0, refund, RL_REFUND_UNSENT};
		}
		*refund++ = (RlRefund) {&grant->limit, &grant->charge};
		call->n++;
		grant->call = call;
	}
	rl_error_set(&error, ERRCODE_CONNECTION_DOES_NOT_EXIST, "ratelimit.redis_url was changed meanwhile");
	log_lost(elsewhere, &error);
	return n;
}

/*
 * Refunds the queue's grants in their order; there must be room for its calls.
 * Deletes each grant that is refunded or lost, and logs how many are lost.  Returns
 * false with the error set when Redis cannot be reached; the grants for which
 * nothing was sent are then still in the queue.  With no_throw, which is for the
 * end of a transaction, it does not throw, allocates no memory, and empties the
 * queue.
 */
static bool
rl_refund_queue(dlist_head *queue, RlGrantDrop drop, bool no_throw, RlError *error)
{
	bool		done;
	bool		all;
	int			n;

	rl_refund_settle(queue, drop);
	n = prepare_calls(queue, drop);
	if (n == 0)
		return true;
	unsettled = true;
	done = rl_redis_refund_charges(calls, n, no_throw, &error_reply, error);
	/* Of a cluster only a part has failed, and calls for other keys do not wait for it. */
	all = !done && (no_throw || rl_redis_is_cluster());
	settle(queue, drop, all, error);
	return done || all;
}

/*
 * Levels and the queue
 */

/* Deletes a grant. */
static void
drop(RlGrant *grant)
{
	const GrantEntry *entry = hash_search(entries, &grant->id, HASH_FIND, NULL);

	if (entry != NULL && entry->grant == grant)
		hash_search(entries, &grant->id, HASH_REMOVE, NULL);
	dlist_delete(&grant->node);
	pfree(grant);
	ngrants--;
}

/* Adds a later charge to a grant; the numbers of its limit apply from now on. */
static void
merge(RlGrant *grant, const RlLimit *limit, const RlCharge *charge)
{
	rl_charge_merge(limit, &grant->charge, charge);
	grant->limit = *limit;
}

/*
 * Makes a grant one of another level.  If that level has one of the same state,
 * merges both, so that time that has passed since is subtracted from their sum and
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
	if (level == QUEUED && other->grant->charge.at > grant->charge.at)
	{
		merge(grant, &other->grant->limit, &other->grant->charge);
		other->grant->charge = grant->charge;
	}
	else
		merge(other->grant, &grant->limit, &grant->charge);
	drop(grant);
	return false;
}

/* Puts a grant in the queue. */
static void
enqueue(RlGrant *grant)
{
	rl_refund_settle(&queue, drop);
	if (!change_level(grant, QUEUED))
		return;
	dlist_delete(&grant->node);
	dlist_push_tail(&queue, &grant->node);
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

static void
transaction_ends(XactEvent event, void *arg pg_attribute_unused())
{
	RlError		error;

	if (context == NULL || event == XACT_EVENT_PRE_COMMIT ||
		event == XACT_EVENT_PARALLEL_PRE_COMMIT || event == XACT_EVENT_PRE_PREPARE)
		return;
	/* The newest first, which are nearest to the end of a log. */
	if (event == XACT_EVENT_ABORT || event == XACT_EVENT_PARALLEL_ABORT)
		while (!dlist_is_empty(&grants))
			enqueue(dlist_tail_element(RlGrant, node, &grants));
	if (!dlist_is_empty(&queue))
		rl_refund_queue(&queue, drop, true, &error);
	rl_refund_release();
	dlist_init(&grants);
	dlist_init(&queue);
	ngrants = 0;
	overflowed = false;
	MemoryContextDelete(context);
	context = NULL;
}

/*
 * For actions
 */

/*
 * Allocates what the end of the transaction needs; to be called before limits that
 * have refund_on_abort are asked.  Throws if there is no memory.
 */
void
rl_charges_prepare(void)
{
	static bool registered = false;
	HASHCTL		ctl = {.keysize = sizeof(RlGrantId),.entrysize = sizeof(GrantEntry)};
	MemoryContext new;

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
 * Sets what is the same in all grants of the key, and the rest to 0.  Writes the
 * key's name in Redis too, and returns its length.
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

/* Adds a charge to the grant that it belongs to; false if there is no room for a new one. */
static bool
note(const RlKey *key, const RlLimit *limit, RlCharge charge, bool local)
{
	RlGrantId	id;
	GrantEntry *entry;
	RlGrant    *grant;
	char		redis_key[RL_MAX_REDIS_KEY];
	int			len = set_key(&id, key, local, redis_key);

	id.tag = rl_state_tag(limit);
	if (!rl_charges_merge(limit))
		id.mark = charge.mark;
	id.level = GetCurrentTransactionNestLevel();

	entry = hash_search(entries, &id, HASH_FIND, NULL);
	if (entry != NULL)
	{
		merge(entry->grant, limit, &charge);
		return true;
	}
	if (ngrants >= MAX_GRANTS || !rl_refund_reserve(context, ngrants + 1))
		return false;
	grant = MemoryContextAllocExtended(context, offsetof(RlGrant, redis_key) + len,
									   MCXT_ALLOC_NO_OOM | MCXT_ALLOC_ZERO);
	if (grant == NULL)
		return false;
	entry = hash_search(entries, &id, HASH_ENTER_NULL, NULL);
	if (entry == NULL)
	{
		pfree(grant);
		return false;
	}
	entry->grant = grant;
	grant->id = id;
	grant->limit = *limit;
	grant->charge = charge;
	if (rl_shared_available())
		grant->key_hash = rl_key_hash(key);
	grant->redis_key_len = len;
	memcpy(grant->redis_key, redis_key, len);
	dlist_push_tail(&grants, &grant->node);
	ngrants++;
	return true;
}

/*
 * Notes an action that was allowed at the store's time "at": decisions has one
 * for each limit.  Does not throw; a charge without room is not refunded, and logged.
 */
void
rl_charges_note(const RlKey *key, const RlLimits *limits, int64 quota,
			   const RlDecision *decisions, int64 at, bool local)
{
	if (!limits->refunds || quota == 0)
		return;
	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];

		if (!limit->refund_on_abort ||
			note(key, limit, rl_charge(limit, quota, at, decisions[i].reset_after), local) ||
			overflowed)
			continue;
		overflowed = true;
		ereport(LOG,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("too many rate-limit charges in one transaction to give all of them back"),
				 errdetail("Room is for %d.", MAX_GRANTS)));
	}
}

/* Returns true if savepoints were rolled back whose charges are not refunded yet. */
bool
rl_charges_pending(void)
{
	return !dlist_is_empty(&queue);
}

/*
 * Refunds these charges.  Returns false with the error set when Redis cannot be
 * reached; throws when it is interrupted.
 */
bool
rl_charges_flush(RlError *error)
{
	return dlist_is_empty(&queue) || rl_refund_queue(&queue, drop, false, error);
}

/*
 * For rl_refund() and rl_reset()
 *
 * Both search all grants, from the newest on: the search ends at once in a
 * transaction without grants, and soon in one that refunds what it took last.
 */

/* Returns true if the grant is of the key for which set_key was called. */
static bool
is_of_key(const RlGrant *grant, const RlGrantId *key)
{
	const RlGrantId *id = &grant->id;

	return id->server == key->server && id->redis_key[0] == key->redis_key[0] &&
		id->redis_key[1] == key->redis_key[1] && id->local == key->local;
}

/* Puts a part of a grant in the queue. */
static void
enqueue_part(const RlGrant *grant, int64 amount)
{
	Size		size = offsetof(RlGrant, redis_key) + grant->redis_key_len;
	RlGrant    *part = MemoryContextAlloc(context, size);

	rl_refund_settle(&queue, drop);
	if (!rl_refund_reserve(context, ngrants + 1))
		ereport(ERROR, (errcode(ERRCODE_OUT_OF_MEMORY), errmsg("out of memory")));
	memcpy(part, grant, size);
	part->id.level = QUEUED;
	part->charge.amount = amount;
	dlist_push_tail(&queue, &part->node);
	ngrants++;
}

/*
 * Takes the quota from what the transaction was granted of the limit's state,
 * from the newest grant first, so that no rollback refunds it, even if the store
 * then fails and it is not known whether it was refunded.  Of an algorithm with
 * entries it is queued, because it has its place in the state, and the quota that
 * is left is returned.  Of any other all quota is returned: the store refunds it
 * in the same way, whichever transaction took it.  Throws if there is no memory.
 */
int64
rl_charges_refund(const RlKey *key, const RlLimit *limit, int64 quota, bool local)
{
	bool		has_entries = rl_algorithm(limit)->skip != NULL;
	int64		left = limit->algorithm == RL_THROTTLE ? rl_throttle_refund(limit, quota) : quota;
	RlGrantId	searched;
	char		redis_key[RL_MAX_REDIS_KEY];
	dlist_node *previous;

	if (context == NULL || dlist_is_empty(&grants))
		return quota;
	set_key(&searched, key, local, redis_key);
	for (dlist_node *node = grants.head.prev; node != &grants.head && left > 0; node = previous)
	{
		RlGrant    *grant = dlist_container(RlGrant, node, node);
		int64		part = Min(left, grant->charge.amount);

		previous = node->prev;
		if (!is_of_key(grant, &searched) || !rl_same_state(&grant->limit, limit))
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
			drop(grant);
	}
	return has_entries ? left : quota;
}

/*
 * Deletes the grants of the key under these limits' states, or if they are NULL
 * all of the key's: a rollback after a reset must not refund what others took.
 */
void
rl_charges_forget(const RlKey *key, const RlLimits *limits, bool local)
{
	RlGrantId	searched;
	char		redis_key[RL_MAX_REDIS_KEY];
	dlist_mutable_iter iter;

	if (context == NULL || dlist_is_empty(&grants))
		return;
	set_key(&searched, key, local, redis_key);
	dlist_foreach_modify(iter, &grants)
	{
		RlGrant    *grant = dlist_container(RlGrant, node, iter.cur);
		bool		found = limits == NULL;

		for (int i = 0; limits != NULL && i < limits->n; i++)
			found |= rl_same_state(&grant->limit, &limits->limit[i]);
		if (found && is_of_key(grant, &searched))
			drop(grant);
	}
}
