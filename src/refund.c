/*
 * refund.c
 *		The queue of grants to be refunded: each to the store that granted it,
 *		and to Redis those of one key that follow one another in one call.
 *
 * Ahead of an action, only a part of a long queue is sent.  Those of the action's own keys
 * are moved to its beginning before.
 *
 * The array of calls is allocated while quota is granted, so that refunds at the
 * end of a transaction need no memory.
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "utils/memutils.h"

#include "algorithm/limits.h"
#include "error.h"
#include "refund.h"
#include "shared/known.h"
#include "shared/local_store.h"

/*
 * Room that is kept for the next transaction.  If each allocates it, a transaction
 * of 600 grants of the local store has 30 page faults and takes 25 % longer.
 */
#define MAX_KEPT			1024

/* The most grants that are refunded ahead of an action, so that a long queue costs it little. */
#define MAX_AHEAD			4096

/* Places of keys in the index of the queue; so one has 16 grants at most, usually. */
#define PLACES				4096

dlist_head	rl_refunds = DLIST_STATIC_INIT(rl_refunds);
static dlist_head places[PLACES];	/* the queue's grants, by key */

static RlRefundCall *calls = NULL;
static RlRefund *refunds = NULL;	/* of all calls */
static int	room = 0;			/* of both, in grants */
static bool unsettled = false;	/* grants in the queue have calls that may have run */
static RlError error_reply;		/* the last one */

static dlist_head *
place_of(const RlGrantId *key)
{
	return &places[key->redis_key[0] % PLACES];
}

/* Adds a grant to the end of the queue.  Does not throw. */
void
rl_refund_enqueue(RlGrant *grant)
{
	dlist_push_tail(&rl_refunds, &grant->node);
	dlist_push_tail(place_of(&grant->id), &grant->of_key);
}

/* Removes a grant from the queue.  Does not throw. */
void
rl_refund_dequeue(RlGrant *grant)
{
	dlist_delete(&grant->node);
	dlist_delete(&grant->of_key);
}

/* Returns true if the grant is of a key with this name, in any store. */
static bool
has_name(const RlGrant *grant, const RlGrantId *key)
{
	return grant->id.redis_key[0] == key->redis_key[0] && grant->id.redis_key[1] == key->redis_key[1];
}

/* Returns true if the grant is of the key. */
bool
rl_grant_is_of(const RlGrant *grant, const RlGrantId *key)
{
	return has_name(grant, key) && grant->id.server == key->server && grant->id.local == key->local;
}

/* Moves the grants of a key to the beginning of the queue, in their order.  Does not throw. */
void
rl_refund_advance(const RlGrantId *key)
{
	dlist_iter	iter;

	rl_refund_settle();
	dlist_reverse_foreach(iter, place_of(key))
	{
		RlGrant    *grant = dlist_container(RlGrant, of_key, iter.cur);

		if (has_name(grant, key))
			dlist_move_head(&rl_refunds, &grant->node);
	}
}

/*
 * Deletes the grants of a key of one store under these limits' states, or if they are NULL
 * all of the key's.  Does not throw.
 */
void
rl_refund_forget(const RlGrantId *key, const RlLimits *limits)
{
	dlist_mutable_iter iter;

	rl_refund_settle();
	dlist_foreach_modify(iter, place_of(key))
	{
		RlGrant    *grant = dlist_container(RlGrant, of_key, iter.cur);
		bool		found = limits == NULL;

		for (int i = 0; limits != NULL && i < limits->n; i++)
			found |= rl_same_state(&grant->limit, &limits->limit[i]);
		if (found && rl_grant_is_of(grant, key))
			rl_grant_drop(grant);
	}
}

/* Returns a hash of the server that the settings name. */
uint64
rl_refund_server(void)
{
	return hash_bytes_extended((const unsigned char *) rl_redis_url, strlen(rl_redis_url), 0);
}

/*
 * Makes room for the calls of a queue of n grants, until rl_refund_release.
 * Returns false if there is no memory.  The queue must be settled.
 */
bool
rl_refund_reserve(int n)
{
	int			size = Max(Max(n, 16), 2 * room);
	RlRefundCall *more;

	Assert(!unsettled);
	if (n <= room)
		return true;
	more = MemoryContextAllocExtended(TopMemoryContext, size * (sizeof(RlRefundCall) + sizeof(RlRefund)),
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

/* Frees the room that a transaction with many grants has reserved; to be called at its end. */
void
rl_refund_release(void)
{
	unsettled = false;
	if (room <= MAX_KEPT)
		return;
	pfree(calls);
	calls = NULL;
	room = 0;
}

/* Deletes a queued grant, and the refusals of its key in the denial cache. */
static void
end_grant(RlGrant *grant)
{
	if (rl_shared_available())
		rl_known_refunded(grant->key_hash);
	rl_grant_drop(grant);
}

/* Why grants are refunded, for the log. */
typedef enum Cause
{
	OF_ABORT,
	OF_ACTION,					/* a held charge */
	OF_CONCURRENT,
	OF_LEASE,					/* a leftover, whose loss is not logged */
	CAUSES
} Cause;

static Cause
cause_of(const RlGrant *grant)
{
	if (grant->id.level == RL_HELD || grant->id.level == RL_RELEASED)
		return OF_ACTION;
	if (grant->id.level == RL_LEFTOVER)
		return OF_LEASE;
	return rl_algorithm(&grant->limit)->until_end ? OF_CONCURRENT : OF_ABORT;
}

/* Logs n charges that could not be refunded. */
static void
log_lost(int n, Cause cause, const RlError *why)
{
	if (n > 0 && cause != OF_LEASE)
		ereport(LOG_SERVER_ONLY,
				(errcode(why->sqlstate),
				 cause == OF_ACTION ? errmsg("could not refund %d rate-limit charges of a refused or failed action", n) :
				 cause == OF_ABORT ? errmsg("could not refund %d rate-limit charges of an aborted transaction", n) :
				 errmsg("could not refund %d charges of concurrent rate limits", n),
				 errdetail_internal("%s", why->message),
				 cause == OF_CONCURRENT ? errhint("Their units become free when the period of their limit has passed.") : 0));
}

/*
 * Deletes the queue's grants whose calls may have run, or that are lost: those that had a
 * call, and were not late, or all.  Logs how many are lost, by error replies or for the
 * reason in error.
 */
static void
settle(bool called, bool all, const RlError *error)
{
	int			n[CAUSES][RL_REFUND_FAILED + 1] = {{0}};
	dlist_mutable_iter iter;

	dlist_foreach_modify(iter, &rl_refunds)
	{
		RlGrant    *grant = dlist_container(RlGrant, node, iter.cur);
		const RlRefundCall *call = grant->call;
		RlRefundOutcome outcome = call ? call->outcome : RL_REFUND_UNSENT;

		/* Those with calls are at the beginning. */
		if (call == NULL && !all)
			break;
		grant->call = NULL;
		if (outcome == RL_REFUND_UNSENT && !all && !(called && !call->late))
			continue;
		n[cause_of(grant)][outcome]++;
		end_grant(grant);
	}
	unsettled = false;
	for (Cause cause = 0; cause < CAUSES; cause++)
	{
		log_lost(n[cause][RL_REFUND_FAILED], cause, &error_reply);
		log_lost(n[cause][RL_REFUND_SENT], cause, error);
		log_lost(n[cause][RL_REFUND_UNSENT], cause, error);
	}
}

/*
 * Deletes the grants that rl_refund_queue may have refunded before an error or the
 * end of the backend interrupted it, and logs how many are lost.  Does not throw.
 * To be called before the queue or its room is changed.
 */
void
rl_refund_settle(void)
{
	RlError		error;

	if (!unsettled)
		return;
	rl_error_set(&error, ERRCODE_STORE_FAILED, "the call that refunds them was interrupted");
	settle(false, false, &error);
}

/* Returns the units of a grant to the lease that had them.  Returns false if it has ended, or there is none. */
static bool
return_to_lease(const RlGrant *grant)
{
	int64		unit = rl_algorithm(&grant->limit)->in_ns ? grant->limit.interval_ns : 1;

	return grant->id.lease != 0 &&
		rl_known_return(grant->key_hash, grant->id.lease, grant->charge.amount / unit);
}

/*
 * Refunds the queue's first grants, as many as "most", if they are of the local store or of
 * leases, deletes those of another Redis, and prepares calls for the others.  Returns the
 * number of calls.
 */
static int
prepare_calls(int most)
{
	uint64		server = rl_refund_server();
	int			elsewhere[CAUSES] = {0};
	int			n = 0;
	RlRefund   *refund = refunds;
	RlRefundCall *call = NULL;
	RlError		error;
	dlist_mutable_iter iter;

	dlist_foreach_modify(iter, &rl_refunds)
	{
		RlGrant    *grant = dlist_container(RlGrant, node, iter.cur);
		int64		refused = grant->refused ? grant->quota : 0;

		if (most-- == 0)
			break;
		if (grant->id.local)
			rl_local_refund_charge(grant->key_hash, &grant->limit, &grant->charge);
		else if (return_to_lease(grant))
		{
			rl_grant_drop(grant);
			continue;
		}
		if (grant->id.local || grant->id.server != server)
		{
			elsewhere[cause_of(grant)] += !grant->id.local;
			end_grant(grant);
			continue;
		}
		if (call == NULL || call->n == RL_MAX_REFUNDS || call->refused != refused ||
			call->redis_key_len != grant->redis_key_len ||
			memcmp(call->redis_key, grant->redis_key, grant->redis_key_len) != 0)
		{
			call = &calls[n++];
			*call = (RlRefundCall) {.redis_key = grant->redis_key,.redis_key_len = grant->redis_key_len,
			.refunds = refund,.refused = refused};
		}
		*refund++ = (RlRefund) {&grant->limit, &grant->charge};
		call->n++;
		grant->call = call;
	}
	rl_error_set(&error, ERRCODE_STORE_FAILED, "ratelimit.redis_url was changed meanwhile");
	for (Cause cause = 0; cause < CAUSES; cause++)
		log_lost(elsewhere[cause], cause, &error);
	return n;
}

/*
 * Refunds the queue's grants in their order, the whole queue or as many as
 * ratelimit.command_timeout allows; there must be room for its calls.  Deletes each grant that is refunded or lost, and
 * logs how many are lost.  Returns false with the error set when Redis cannot be
 * reached; the grants for which nothing was sent are then still in the queue.  With
 * no_throw, which is for the end of a transaction, it does not throw, allocates no
 * memory, and empties the queue.
 */
bool
rl_refund_queue(bool no_throw, bool whole, RlUsage *usage, RlError *error)
{
	bool		done;
	bool		lost;
	int			n;

	rl_refund_settle();
	n = prepare_calls(whole ? INT_MAX : MAX_AHEAD);
	if (n == 0)
		return true;
	unsettled = true;
	done = whole ? rl_redis_refund_charges(calls, n, no_throw, usage, &error_reply, error) :
		rl_redis_refund_until(calls, n, rl_monotonic_now() + (int64) rl_command_timeout * 1000,
							  usage, &error_reply, error);
	/* Of a cluster only a part has failed, and calls for other keys do not wait for it. */
	lost = !done && (no_throw || rl_redis_is_cluster());
	settle(lost, no_throw, error);
	return done || lost;
}
