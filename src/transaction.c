/*
 * transaction.c
 *		Gives back what a transaction or savepoint that rolls back was granted
 *		under limits with refund_on_abort.
 *
 * A grant is what one (sub)transaction took of one limit on one key, in one
 * sum where that can be taken back as one.  When a subtransaction commits its
 * grants become the parent's; when it aborts they are queued, and the queue
 * goes out ahead of the next command, or when the transaction ends: by
 * callbacks, in which nothing may throw, and no memory is to be had.  What
 * could not be given back is logged.  A prepared transaction counts as
 * committed.
 *
 * What rl_refund refunds is first of all what the transaction was granted, and
 * what rl_reset resets it holds no longer: no rollback refunds it again.
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

/* More than this of a transaction is not given back, and logged. */
#define MAX_GRANTS			65536

#define QUEUED				0

/* What tells grants apart; padding is zero. */
typedef struct GrantId
{
	uint64		place[2];		/* a hash of server, prefix and key */
	RlStateTag	tag;
	int64		mark;			/* of charges that do not merge */
	int			level;			/* of the transaction nest, or QUEUED */
	bool		local;
} GrantId;

typedef struct Grant
{
	dlist_node	node;
	GrantId		id;
	RlLimit		limit;
	RlCharge	charge;
	RlKeyHash		name;			/* only with shared memory */
	uint64		server;
	bool		sent;			/* in the queue: perhaps taken back */
	int			call;			/* in the queue: which call takes it back */
	int			place_len;
	char		place[FLEXIBLE_ARRAY_MEMBER];	/* its name in Redis */
} Grant;

typedef struct GrantEntry
{
	GrantId		id;				/* hash key */
	Grant	   *grant;
} GrantEntry;

static MemoryContext context = NULL;	/* of the transaction's grants */
static HTAB *entries = NULL;	/* of those that were not sent */
static dlist_head grants = DLIST_STATIC_INIT(grants);	/* the same, by level */
static dlist_head queue = DLIST_STATIC_INIT(queue);
static int	ngrants = 0;		/* in both lists */
static bool overflowed = false;
static int	nrefused = 0;		/* that were to be given back */
static RlError refusal;			/* of the last of these */

/*
 * Flushing the queue
 */

/* Which server the settings name. */
static uint64
server_hash(void)
{
	return hash_bytes_extended((const unsigned char *) rl_redis_url, strlen(rl_redis_url), 0);
}

/* Where in the queue the next call to be sent is, and where the last one answered was. */
static dlist_node *sending = NULL;
static dlist_node *answered = NULL;

static void
drop(Grant *grant)
{
	if (sending == &grant->node)
		sending = grant->node.prev;
	if (answered == &grant->node)
		answered = grant->node.prev;
	dlist_delete(&grant->node);
	pfree(grant);
	ngrants--;
}

/* Makes sure that a queued grant is not found any more. */
static void
leave_entries(const Grant *grant)
{
	const GrantEntry *entry = hash_search(entries, &grant->id, HASH_FIND, NULL);

	if (entry != NULL && entry->grant == grant)
		hash_search(entries, &grant->id, HASH_REMOVE, NULL);
}

static bool
same_place(const Grant *a, const Grant *b)
{
	return a->place_len == b->place_len && memcmp(a->place, b->place, a->place_len) == 0;
}

/* Numbers the queue's grants by the calls that take them back; returns their number. */
static int
number_calls(void)
{
	Grant	   *last = NULL;
	int			together = 0;
	int			calls = 0;
	dlist_iter	iter;

	dlist_foreach(iter, &queue)
	{
		Grant	   *grant = dlist_container(Grant, node, iter.cur);

		if (last == NULL || together == RL_MAX_UNDO || !same_place(last, grant))
		{
			calls++;
			together = 0;
		}
		grant->call = calls - 1;
		together++;
		last = grant;
	}
	sending = answered = NULL;
	return calls;
}

/*
 * The queue's first grant of the call or of a later one, or the list's head.
 * The search starts from where the last one ended, if that is not past it.
 */
static dlist_node *
find_call(dlist_node **last, int i)
{
	dlist_node *node = *last;

	if (node == NULL || node == &queue.head || dlist_container(Grant, node, node)->call >= i)
		node = queue.head.next;
	while (node != &queue.head && dlist_container(Grant, node, node)->call < i)
		node = node->next;
	return *last = node;
}

/* From now on no other grant can be put together with this one. */
static void
set_sent(Grant *grant)
{
	leave_entries(grant);
	grant->sent = true;
}

static int
next_call(int i, const char **place, int *place_len, const RlLimit **limits, const RlCharge **charges,
		  void *arg pg_attribute_unused())
{
	int			n = 0;

	for (dlist_node *node = find_call(&sending, i); node != &queue.head; node = node->next)
	{
		Grant	   *grant = dlist_container(Grant, node, node);

		if (grant->call > i)
			break;
		*place = grant->place;
		*place_len = grant->place_len;
		limits[n] = &grant->limit;
		charges[n++] = &grant->charge;
		set_sent(grant);
	}
	return n;
}

/* Ends a queued grant, which others may have been refused for until now. */
static void
drop_queued(Grant *grant)
{
	leave_entries(grant);
	if (rl_shared_available())
		rl_denial_delete_hash(grant->name);
	drop(grant);
}

static void
call_done(int i, const RlError *why, void *arg pg_attribute_unused())
{
	dlist_node *node;

	if (why != NULL)
		refusal = *why;
	node = find_call(&answered, i);
	while (node != &queue.head && dlist_container(Grant, node, node)->call == i)
	{
		node = node->next;
		nrefused += (why != NULL);
		drop_queued(dlist_container(Grant, node, node->prev));
	}
}

static void
log_lost(int n, const RlError *error)
{
	if (n > 0)
		ereport(LOG,
				(errcode(error->sqlstate),
				 errmsg("could not give back what %d rate-limit charges of an aborted transaction took", n),
				 errdetail_internal("%s", error->message)));
}

/* Takes the grants that pass out of the queue, and logs why. */
static void
give_up(bool (*passes) (const Grant *), const RlError *error)
{
	int			lost = 0;
	dlist_mutable_iter iter;

	dlist_foreach_modify(iter, &queue)
	{
		Grant	   *grant = dlist_container(Grant, node, iter.cur);

		if (!passes(grant))
			continue;
		drop_queued(grant);
		lost++;
	}
	log_lost(lost, error);
}

static bool
was_sent(const Grant *grant)
{
	return grant->sent;
}

static bool
is_elsewhere(const Grant *grant)
{
	return grant->server != server_hash();
}

static bool
is_any(const Grant *grant pg_attribute_unused())
{
	return true;
}

/*
 * Sends out the queue's grants.  Returns false with the error set when the
 * store fails; what was not sent is then still in the queue.
 */
static bool
flush(bool quietly, RlError *error)
{
	dlist_mutable_iter iter;
	bool		done;

	rl_error_set(error, ERRCODE_CONNECTION_FAILURE, "the call that gave it back was interrupted");
	give_up(was_sent, error);
	dlist_foreach_modify(iter, &queue)
	{
		Grant	   *grant = dlist_container(Grant, node, iter.cur);

		if (!grant->id.local)
			continue;
		rl_local_undo(grant->name, &grant->limit, &grant->charge);
		drop_queued(grant);
	}
	rl_error_set(error, ERRCODE_CONNECTION_DOES_NOT_EXIST, "ratelimit.redis_url was changed meanwhile");
	give_up(is_elsewhere, error);
	done = dlist_is_empty(&queue) ||
		rl_redis_undo(number_calls(), next_call, call_done, quietly, NULL, error);
	log_lost(nrefused, &refusal);
	nrefused = 0;
	if (!done)
		give_up(was_sent, error);
	/* Of a cluster only a part has failed, which other keys do not wait for. */
	if (!done && rl_redis_is_cluster())
	{
		give_up(is_any, error);
		return true;
	}
	return done;
}

/* True if savepoints were rolled back whose charges are not given back yet. */
bool
rl_charges_pending(void)
{
	return !dlist_is_empty(&queue);
}

/* Gives these back.  Returns false with the error set when the store fails. */
bool
rl_charges_flush(RlError *error)
{
	return dlist_is_empty(&queue) || flush(false, error);
}

/*
 * The transaction
 */

/*
 * Puts a grant in the queue instead of among those that may be kept, together
 * with one of the same state that waits there: time that has passed since both is
 * subtracted from both together, and not from each.
 */
static void
give_back(Grant *grant)
{
	GrantEntry *entry = hash_search(entries, &grant->id, HASH_FIND, NULL);
	GrantEntry *queued;
	GrantId		id = grant->id;

	id.level = QUEUED;
	queued = hash_search(entries, &id, HASH_FIND, NULL);
	if (queued == NULL)
	{
		hash_update_hash_key(entries, entry, &id);
		grant->id = id;
		dlist_delete(&grant->node);
		dlist_push_tail(&queue, &grant->node);
		return;
	}
	/* The numbers of the later call apply, as in hand_up. */
	if (queued->grant->charge.at <= grant->charge.at)
	{
		rl_charge_merge(&grant->limit, &queued->grant->charge, &grant->charge);
		queued->grant->limit = grant->limit;
	}
	else
	{
		rl_charge_merge(&queued->grant->limit, &grant->charge, &queued->grant->charge);
		queued->grant->charge = grant->charge;
	}
	hash_search(entries, &grant->id, HASH_REMOVE, NULL);
	drop(grant);
}

/* Makes a grant the parent's, together with one that it has. */
static void
hand_up(Grant *grant)
{
	GrantEntry *entry = hash_search(entries, &grant->id, HASH_FIND, NULL);
	GrantEntry *parents;
	GrantId		id = grant->id;

	id.level--;
	parents = hash_search(entries, &id, HASH_FIND, NULL);
	if (parents == NULL)
	{
		hash_update_hash_key(entries, entry, &id);
		grant->id = id;
		return;
	}
	rl_charge_merge(&grant->limit, &parents->grant->charge, &grant->charge);
	parents->grant->limit = grant->limit;
	hash_search(entries, &grant->id, HASH_REMOVE, NULL);
	drop(grant);
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
	/* The lists' ends: no parent was granted anything while a child runs. */
	for (node = grants.head.prev; node && node != &grants.head; node = previous)
	{
		Grant	   *grant = dlist_container(Grant, node, node);

		previous = node->prev;
		if (grant->id.level < level)
			break;
		if (event == SUBXACT_EVENT_ABORT_SUB)
			give_back(grant);
		else
			hand_up(grant);
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
			give_back(dlist_tail_element(Grant, node, &grants));
	if (!dlist_is_empty(&queue) && !flush(true, &error))
		give_up(is_any, &error);
	dlist_init(&grants);
	dlist_init(&queue);
	ngrants = 0;
	overflowed = false;
	entries = NULL;
	MemoryContextDelete(context);
	context = NULL;
}

/* Prepares for the transaction's first grant. */
static void
begin(void)
{
	static bool registered = false;
	HASHCTL		ctl = {.keysize = sizeof(GrantId),.entrysize = sizeof(GrantEntry)};
	MemoryContext new;

	rl_redis_reserve_undo();
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

/* Sets where a key's grants are, and what else tells them apart to 0. */
static void
set_place(GrantId *id, const char *place, int len, uint64 server, bool local)
{
	memset(id, 0, sizeof(*id));
	id->place[0] = hash_bytes_extended((const unsigned char *) place, len, server);
	id->place[1] = hash_bytes_extended((const unsigned char *) place, len, id->place[0]);
	id->local = local;
}

/* Adds a charge to the grant that it belongs to; a new one is at the list's end. */
static bool
note(const RlKey *key, const RlLimit *limit, RlCharge charge, bool local)
{
	GrantId		id;
	GrantEntry *entry;
	Grant	   *grant;
	char		place[RL_MAX_PLACE];
	int			len = rl_redis_place(key, place);
	uint64		server = server_hash();
	bool		found;

	set_place(&id, place, len, server, local);
	id.tag = rl_state_tag(limit);
	if (!rl_charges_merge(limit))
		id.mark = charge.mark;
	id.level = GetCurrentTransactionNestLevel();

	if (ngrants >= MAX_GRANTS && hash_search(entries, &id, HASH_FIND, NULL) == NULL)
		return false;
	entry = hash_search(entries, &id, HASH_ENTER_NULL, &found);
	if (entry == NULL)
		return false;
	if (found)
	{
		rl_charge_merge(limit, &entry->grant->charge, &charge);
		entry->grant->limit = *limit;
		return true;
	}
	grant = MemoryContextAllocExtended(context, offsetof(Grant, place) + len,
									   MCXT_ALLOC_NO_OOM | MCXT_ALLOC_ZERO);
	if (grant == NULL)
	{
		hash_search(entries, &id, HASH_REMOVE, NULL);
		return false;
	}
	entry->grant = grant;
	grant->id = id;
	grant->limit = *limit;
	grant->charge = charge;
	if (rl_shared_available())
		grant->name = rl_key_hash(key);
	grant->server = server;
	grant->place_len = len;
	memcpy(grant->place, place, len);
	dlist_push_tail(&grants, &grant->node);
	ngrants++;
	return true;
}

/*
 * Notes an action that was allowed at the store's time "at": decisions has one
 * for each limit.  What has no room is not given back, and logged.
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

/* To be called before limits that have refund_on_abort are asked. */
void
rl_charges_prepare(void)
{
	if (context == NULL)
		begin();
}

/*
 * Refunding and resetting within the transaction
 *
 * Both search all grants, from the newest on: the search ends at once in a
 * transaction without grants, and soon in one that refunds what it took last.
 */

/* The key of the search, without what limits tell apart. */
static GrantId
searched_place(const RlKey *key, bool local)
{
	GrantId		id;
	char		place[RL_MAX_PLACE];

	set_place(&id, place, rl_redis_place(key, place), server_hash(), local);
	return id;
}

/* True if the grant is of the key, and of the limit's state unless that is NULL. */
static bool
is_of(const Grant *grant, const GrantId *place, const RlLimit *limit)
{
	const GrantId *id = &grant->id;

	return id->place[0] == place->place[0] && id->place[1] == place->place[1] &&
		id->local == place->local &&
		(limit == NULL || rl_same_tag(id->tag, rl_state_tag(limit)));
}

/* Deletes a grant that is not in the queue. */
static void
forget(Grant *grant)
{
	hash_search(entries, &grant->id, HASH_REMOVE, NULL);
	drop(grant);
}

/* Puts a part of a grant in the queue. */
static void
give_back_part(const Grant *grant, int64 amount)
{
	Size		size = offsetof(Grant, place) + grant->place_len;
	Grant	   *part = MemoryContextAlloc(context, size);

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
 * in the same way, whoever took it.
 */
int64
rl_charges_refund(const RlKey *key, const RlLimit *limit, int64 quota, bool local)
{
	bool		has_entries = rl_algorithm(limit)->skip != NULL;
	int64		left = limit->algorithm == RL_THROTTLE ? rl_throttle_refund(limit, quota) : quota;
	GrantId		place;
	dlist_node *previous;

	if (context == NULL || dlist_is_empty(&grants))
		return quota;
	place = searched_place(key, local);
	for (dlist_node *node = grants.head.prev; node != &grants.head && left > 0; node = previous)
	{
		Grant	   *grant = dlist_container(Grant, node, node);
		int64		part = Min(left, grant->charge.amount);

		previous = node->prev;
		if (!is_of(grant, &place, limit))
			continue;
		left -= part;
		if (part < grant->charge.amount)
		{
			if (has_entries)
				give_back_part(grant, part);
			grant->charge.amount -= part;
		}
		else if (has_entries)
			give_back(grant);
		else
			forget(grant);
	}
	return has_entries ? left : quota;
}

/*
 * Deletes the grants of the key under these limits' states, or if they are NULL
 * all of the key's: what others take after a reset must not be refunded.
 */
void
rl_charges_forget(const RlKey *key, const RlLimits *limits, bool local)
{
	GrantId		place;
	dlist_mutable_iter iter;

	if (context == NULL || dlist_is_empty(&grants))
		return;
	place = searched_place(key, local);
	dlist_foreach_modify(iter, &grants)
	{
		Grant	   *grant = dlist_container(Grant, node, iter.cur);
		bool		found = limits == NULL && is_of(grant, &place, NULL);

		for (int i = 0; limits != NULL && i < limits->n; i++)
			found |= is_of(grant, &place, &limits->limit[i]);
		if (found)
			forget(grant);
	}
}
