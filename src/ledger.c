/*
 * ledger.c
 *		Charges that may have to be refunded: entries of an owner, which keeps its charges
 *		or moves its entries into the queue.  A statement, which may have millions, refunds
 *		them itself, and keeps them in a temporary file until then.
 *
 * The queue is sent ahead of the next command, and at the end of a transaction: each entry
 * to the store that it was charged in, and to Redis those of many keys in one call.  Ahead
 * of an action, only a part of a long queue is sent.  Those of the action's own keys are
 * moved to its beginning before.
 *
 * Entries and the array of calls are allocated while quota is charged, so that refunds at
 * the end of a transaction, in callbacks that must not throw, need no memory.  What the end
 * could not send goes to the list of overdue refunds (shared/overdue.c); without one, it stays in
 * the queue of this session.
 */
#include "postgres.h"

#include "commands/tablespace.h"
#include "common/hashfn.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "algorithm/limits.h"
#include "error.h"
#include "ledger.h"
#include "shared/known.h"
#include "shared/local_store.h"
#include "shared/overdue.h"

/*
 * Room that is kept for the next transaction.  If each allocates it, a transaction
 * of 600 entries of the local store has 30 page faults and takes 25 % longer.
 */
#define MAX_KEPT			1024

/* The most entries that are refunded ahead of an action, so that a long queue costs it little. */
#define MAX_AHEAD			4096

/* Time between two attempts to reach Redis for a statement's refunds */
#define PAUSE_US			50000

/* A batch of a statement's refunds has this many entries, and the rest of a key. */
#define MAX_BATCH			4096

/* Places of keys in the index of the queue; so one has 16 entries at most, usually. */
#define PLACES				4096

/*
 * An entry of a statement in its file, followed by its limit, unless that is the last one's, and the key's
 * name in Redis
 */
typedef struct Spilled
{
	uint64		server;			/* as in RlLedgerId */
	RlKeyHash	key_hash;
	RlCharge	charge;
	uint16		redis_key_len;
	bool		local;
	bool		counted;
	bool		has_limit;
} Spilled;

RlOwner		rl_queue = {.entries = DLIST_STATIC_INIT(rl_queue.entries)};
static dlist_head places[PLACES];	/* the queue's entries, by key */

static MemoryContext context = NULL;	/* of all entries */
static dlist_head merging[PLACES];	/* the entries that others can be merged into, by id: no dynahash, whose
										 * growth may throw */
static int	nentries = 0;
static int64 asked;				/* the time before the store was asked, on the monotonic clock */

static RlKeyRefunds *calls = NULL;
static RlRefund *refunds = NULL;	/* of all calls */
static int	room = 0;			/* of both, in entries */
static RlOwner *unclosed = NULL;	/* its entries have calls that may have run */
static RlError error_reply;		/* the last one */

static void close_interrupted(void);

/*
 * Entries
 */

/*
 * Allocates the memory of entries, unless there is; to be called before a store is asked.
 * Throws if there is no memory.
 */
void
rl_ledger_open(void)
{
	asked = rl_monotonic_now();
	rl_overdue_prepare();
	if (context != NULL)
		return;
	rl_redis_prepare_refunds();
	context = AllocSetContextCreate(TopMemoryContext, "rate-limit charges", ALLOCSET_DEFAULT_SIZES);
}

bool
rl_ledger_is_open(void)
{
	return context != NULL;
}

/*
 * Frees all entries, and the room of their calls if it is large.  The queue must be empty, and no
 * entry be left that others can be merged into.
 */
void
rl_ledger_close(void)
{
	Assert(dlist_is_empty(&rl_queue.entries));
	unclosed = NULL;
	nentries = 0;
	MemoryContextDelete(context);
	context = NULL;
	if (room <= MAX_KEPT)
		return;
	pfree(calls);
	calls = NULL;
	room = 0;
}

/* Returns a mark that no other call has, for RlAction.by_mark: a multiple of RL_MAX_LIMITS. */
uint64
rl_ledger_new_mark(void)
{
	static uint64 last = 0;

	if (last == 0 && !pg_strong_random(&last, sizeof(last)))
		last = (uint64) MyProcPid << 32 ^ (uint64) GetCurrentTimestamp();
	last += RL_MAX_LIMITS - last % RL_MAX_LIMITS;
	return last = Max(last, RL_MAX_LIMITS);
}

/*
 * Sets the members that are the same in all entries of the key, and the others
 * to 0.  Writes the key's name in Redis too, and returns its length.
 */
int
rl_ledger_key(RlLedgerId *id, const RlKey *key, bool local, char *redis_key)
{
	int			len = rl_redis_key(key, redis_key);
	const unsigned char *bytes = (const unsigned char *) redis_key;

	memset(id, 0, sizeof(*id));
	id->server = rl_target_id();
	id->redis_key[0] = hash_bytes_extended(bytes, len, 0);
	id->redis_key[1] = hash_bytes_extended(bytes, len, id->redis_key[0]);
	id->local = local;
	return len;
}

/* Returns true if the entry is of a key with this name, in any store. */
static bool
has_name(const RlLedgerEntry *entry, const RlLedgerId *key)
{
	return entry->id.redis_key[0] == key->redis_key[0] && entry->id.redis_key[1] == key->redis_key[1];
}

/* Returns true if the entry is of the key, and of one of these limits' states, or they are NULL. */
bool
rl_ledger_is_of(const RlLedgerEntry *entry, const RlLedgerId *key, const RlLimits *limits)
{
	if (!has_name(entry, key) || entry->id.server != key->server || entry->id.local != key->local)
		return false;
	for (int i = 0; limits != NULL && i < limits->n; i++)
		if (rl_same_state(&entry->limit, &limits->limit[i]))
			return true;
	return limits == NULL;
}

static dlist_head *
merging_place(const RlLedgerId *id)
{
	return &merging[hash_bytes((const unsigned char *) id, sizeof(*id)) % PLACES];
}

/* Returns the entry with this id that others are merged into, or NULL. */
static RlLedgerEntry *
find_merged(const RlLedgerId *id)
{
	dlist_iter	iter;

	dlist_foreach(iter, merging_place(id))
	{
		RlLedgerEntry *entry = dlist_container(RlLedgerEntry, merging, iter.cur);

		if (memcmp(&entry->id, id, sizeof(*id)) == 0)
			return entry;
	}
	return NULL;
}

/* Makes room for the calls of n entries.  Returns false if there is no memory. */
static bool
make_room(int n)
{
	int			size = Max(Max(n, 16), 2 * room);
	RlKeyRefunds *more;

	if (n <= room)
		return true;
	close_interrupted();
	more = MemoryContextAllocExtended(TopMemoryContext, size * (sizeof(RlKeyRefunds) + sizeof(RlRefund)),
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

static Size
entry_size(int redis_key_len)
{
	return offsetof(RlLedgerEntry, redis_key) + redis_key_len;
}

/* Adds later charges to an entry; the numbers of their limit apply from now on. */
static void
merge(RlLedgerEntry *entry, const RlLimit *limit, const RlCharge *charge, const RlSpan *span)
{
	rl_charge_merge(limit, &entry->charge, &entry->span, charge, span);
	entry->limit = *limit;
}

/*
 * Adds a charge to the owner; lot is that of a lease that had the units, or 0.  At a
 * level of the transaction nest the charge is merged into the entry that it belongs to.
 * Returns the entry, or NULL if there is no room or no memory for a new one.  Does not throw.
 * Needs rl_ledger_open.
 */
RlLedgerEntry *
rl_ledger_add(RlOwner *owner, const RlKey *key, const RlLimit *limit, const RlCharge *charge,
			  bool local, uint64 lot, int level)
{
	RlSpan		span = {.at = charge->at,.place = charge->place};
	RlLedgerId	id;
	RlLedgerEntry *entry;
	char		redis_key[RL_MAX_REDIS_KEY];
	int			len = rl_ledger_key(&id, key, local, redis_key);

	id.level = level;
	id.lot = lot;
	id.life = charge->life;
	id.by_mark = charge->by_mark;
	if (level != RL_APART)
	{
		id.tag = rl_state_tag(limit);
		if (rl_algorithm(limit)->left == NULL)
			id.place = charge->place;
		entry = find_merged(&id);
		if (entry != NULL)
		{
			merge(entry, limit, charge, &span);
			return entry;
		}
		if (nentries >= RL_MAX_ENTRIES)
			return NULL;
	}
	entry = !make_room(nentries + 1) ? NULL :
		MemoryContextAllocExtended(context, entry_size(len), MCXT_ALLOC_NO_OOM | MCXT_ALLOC_ZERO);
	if (entry == NULL)
		return NULL;
	if (level != RL_APART)
		dlist_push_head(merging_place(&id), &entry->merging);
	entry->id = id;
	entry->cause = owner->cause == RL_OF_ABORT && rl_algorithm(limit)->until_end ? RL_OF_CONCURRENT :
		owner->cause;
	entry->limit = *limit;
	entry->charge = *charge;
	entry->span = span;
	entry->asked = asked;
	if (rl_shared_available())
		entry->key_hash = rl_key_hash(key);
	entry->redis_key_len = len;
	memcpy(entry->redis_key, redis_key, len);
	dlist_push_head(&owner->entries, &entry->node);
	nentries++;
	return entry;
}

/* Deletes an entry, which may be in the queue.  Does not throw. */
void
rl_ledger_drop(RlLedgerEntry *entry)
{
	if (entry->id.level != RL_APART)
		dlist_delete(&entry->merging);
	dlist_delete(&entry->node);
	if (entry->queued)
		dlist_delete(&entry->of_key);
	if (entry->since != 0)
		rl_overdue_ended(entry->id.server, false);
	pfree(entry);
	nentries--;
}

/*
 * Makes an entry one of another level.  If that level has one of the same state,
 * merges both, so that time that has passed is subtracted from their sum and
 * not from each; then returns false, and the entry is deleted.  Does not throw.
 */
bool
rl_ledger_set_level(RlLedgerEntry *entry, int level)
{
	RlLedgerEntry *other;
	RlLedgerId	id = entry->id;

	id.level = level;
	other = find_merged(&id);
	if (other == NULL)
	{
		dlist_delete(&entry->merging);
		dlist_push_head(merging_place(&id), &entry->merging);
		entry->id = id;
		return true;
	}
	/* The queue begins with the newest; the numbers of the later call apply. */
	if (level == RL_QUEUED && other->charge.at > entry->charge.at)
	{
		merge(entry, &other->limit, &other->charge, &other->span);
		other->charge = entry->charge;
		other->span = entry->span;
	}
	else
		merge(other, &entry->limit, &entry->charge, &entry->span);
	rl_ledger_drop(entry);
	return false;
}

/*
 * The queue
 */

/* Moves an entry to the end of the queue.  Does not throw. */
void
rl_ledger_queue(RlLedgerEntry *entry)
{
	close_interrupted();
	if (entry->id.level != RL_APART && !rl_ledger_set_level(entry, RL_QUEUED))
		return;
	dlist_delete(&entry->node);
	dlist_push_tail(&rl_queue.entries, &entry->node);
	dlist_push_tail(&places[entry->id.redis_key[0] % PLACES], &entry->of_key);
	entry->queued = true;
}

/* Returns true if charges are queued. */
bool
rl_refunds_pending(void)
{
	return !dlist_is_empty(&rl_queue.entries);
}

/* Moves the entries of a key to the beginning of the queue, in their order.  Does not throw. */
void
rl_refunds_advance(const RlKey *key)
{
	RlLedgerId	id;
	char		redis_key[RL_MAX_REDIS_KEY];
	dlist_iter	iter;

	if (!rl_refunds_pending())
		return;
	close_interrupted();
	rl_ledger_key(&id, key, false, redis_key);
	dlist_reverse_foreach(iter, &places[id.redis_key[0] % PLACES])
	{
		RlLedgerEntry *entry = dlist_container(RlLedgerEntry, of_key, iter.cur);

		if (has_name(entry, &id))
			dlist_move_head(&rl_queue.entries, &entry->node);
	}
}

/*
 * Sending
 */

/* Logs how many charges of each cause could not be refunded.  Does not throw. */
static void
log_lost(const int64 *lost, const RlError *why)
{
	static const char *const texts[RL_CAUSES] = {
		[RL_OF_ABORT] = "could not refund %lld rate-limit charges of an aborted transaction",
		[RL_OF_CONCURRENT] = "could not refund %lld charges of concurrent rate limits",
		[RL_OF_ACTION] = "could not refund %lld rate-limit charges of a refused or failed action",
		[RL_OF_CALLS] = "could not refund the charges of up to %lld calls of a refused or failed action",
		[RL_OF_STATEMENT] = "could not refund the charges of up to %lld keys of a failed statement"
	};

	for (RlCause cause = 0; cause < RL_CAUSES; cause++)
	{
		if (lost[cause] == 0 || texts[cause] == NULL)
			continue;
		rl_overdue_lost(lost[cause]);
		rl_log_no_throw((errcode(why->sqlstate),
							 errmsg_internal(texts[cause], (long long) lost[cause]),
							 errdetail_internal("%s", why->message),
							 cause == RL_OF_CONCURRENT ? errhint("Their units become free when the period of their limit has passed.") : 0));
	}
}

/* Deletes an entry that is refunded or lost, and the refusals of its key in the denial cache. */
static void
end_entry(RlLedgerEntry *entry)
{
	if (rl_shared_available())
		rl_known_refunded(entry->key_hash);
	rl_ledger_drop(entry);
}

/* Moves an entry to the list of overdue refunds.  Returns false if it stays.  Does not throw. */
static bool
hand_over(RlLedgerEntry *entry)
{
	/* A statement, which may have millions, displaces no refunds of others. */
	bool		displaces = proc_exit_inprogress && entry->cause != RL_OF_STATEMENT;
	RlOverdue	refund = {.limit = entry->limit,.charge = entry->charge,.key_hash = entry->key_hash,
		.lot = entry->id.lot,.refused = entry->refused,.asked = entry->asked,.since = entry->since,
	.cause = entry->cause,.name_len = entry->redis_key_len};

	StaticAssertStmt(RL_MAX_REDIS_KEY <= RL_MAX_OVERDUE_NAME, "a name does not fit");
	if (!rl_overdue_add(entry->id.server, &refund, entry->redis_key, displaces))
		return false;
	entry->since = 0;
	rl_ledger_drop(entry);
	return true;
}

/* What becomes of the queue's entries for which nothing was sent. */
typedef enum Unsent
{
	KEEP,
	PASS_CALLED,				/* those with a call for which there was time are overdue, or lost */
	PASS_ALL					/* all are overdue, or stay; a statement's are overdue, or lost */
} Unsent;

/* Returns true if another call may still refund what this outcome has not. */
static bool
may_refund(const RlLedgerEntry *entry, RlRefundOutcome outcome)
{
	return outcome == RL_REFUND_UNSENT || outcome == RL_REFUND_LATER ||
		(outcome == RL_REFUND_SENT && entry->charge.by_mark != 0);
}

/*
 * Deletes the entries of an owner whose calls may have run, or that are lost, and logs how
 * many are lost: by error replies, or for the reason "why".  Those of the queue that another
 * call may refund become overdue.  Does not throw.
 */
static void
close_calls(RlOwner *owner, Unsent unsent, const RlError *why)
{
	int64		by_reply[RL_CAUSES] = {0};
	int64		lost[RL_CAUSES] = {0};
	bool		paused = false;
	dlist_mutable_iter iter;

	dlist_foreach_modify(iter, &owner->entries)
	{
		RlLedgerEntry *entry = dlist_container(RlLedgerEntry, node, iter.cur);
		const RlKeyRefunds *call = entry->call;
		RlRefundOutcome outcome = call ? call->outcome : RL_REFUND_UNSENT;

		/* Those with calls are at the beginning. */
		if (call == NULL && unsent != PASS_ALL)
			break;
		entry->call = NULL;
		if (outcome == RL_REFUND_UNSENT && (unsent == KEEP || (unsent == PASS_CALLED && call->late)))
			continue;
		/* All entries with calls are of one target. */
		if (outcome == RL_REFUND_LATER && !paused)
			rl_overdue_pause(entry->id.server);
		paused |= outcome == RL_REFUND_LATER;
		if (outcome == RL_REFUND_DONE)
		{
			if (entry->since != 0)
				rl_overdue_ended(entry->id.server, true);
			entry->since = 0;
		}
		else if (owner->cause == RL_OF_STATEMENT)
		{
			bool		counted = entry->counted;

			if (unsent == PASS_ALL && may_refund(entry, outcome) && hand_over(entry))
				continue;
			owner->lost += counted;
		}
		else if (may_refund(entry, outcome) && entry->cause != RL_OF_LEASE)
		{
			if (hand_over(entry) || unsent != PASS_CALLED)
				continue;
			lost[entry->cause]++;
		}
		else
			(outcome == RL_REFUND_FAILED ? by_reply : lost)[entry->cause]++;
		end_entry(entry);
	}
	if (unclosed == owner)
		unclosed = NULL;
	log_lost(by_reply, &error_reply);
	log_lost(lost, why);
}

/*
 * Deletes the entries that a call may have refunded before an error or the end of the
 * backend interrupted it.  To be called before the queue or the array of calls is changed.
 */
static void
close_interrupted(void)
{
	RlError		error;

	if (unclosed == NULL)
		return;
	rl_error_set(&error, ERRCODE_STORE_FAILED, "the call that refunds them was interrupted");
	close_calls(unclosed, KEEP, &error);
}

/*
 * Returns the units of an entry to the lease that had them.  Returns false if it has ended, or there is none.
 */
static bool
return_to_lease(const RlLedgerEntry *entry)
{
	int64		unit = rl_algorithm(&entry->limit)->in_ns ? entry->limit.interval_ns : 1;

	return entry->id.lot != 0 &&
		rl_known_return(entry->key_hash, entry->id.lot, entry->charge.amount / unit);
}

/*
 * Refunds the owner's first entries, as many as "most", if they are of the local store or of
 * leases, makes those of another Redis overdue, and prepares calls for the others.  Returns the
 * number of calls.
 */
static int
prepare_calls(RlOwner *owner, int most)
{
	uint64		server = rl_target_id();
	int64		elsewhere[RL_CAUSES] = {0};
	int			n = 0;
	RlRefund   *refund = refunds;
	RlKeyRefunds *call = NULL;
	RlError		error;
	dlist_mutable_iter iter;

	close_interrupted();
	dlist_foreach_modify(iter, &owner->entries)
	{
		RlLedgerEntry *entry = dlist_container(RlLedgerEntry, node, iter.cur);

		if (most-- == 0)
			break;
		if (entry->id.local)
			rl_local_refund_charge(entry->key_hash, &entry->limit, &entry->charge);
		else if (return_to_lease(entry))
		{
			rl_ledger_drop(entry);
			continue;
		}
		if (!entry->id.local && entry->id.server != server && owner == &rl_queue && hand_over(entry))
			continue;
		if (entry->id.local || entry->id.server != server)
		{
			elsewhere[entry->cause] += !entry->id.local;
			end_entry(entry);
			continue;
		}
		if (call == NULL || call->n == RL_MAX_REFUNDS || call->refused != entry->refused ||
			call->redis_key_len != entry->redis_key_len ||
			memcmp(call->redis_key, entry->redis_key, entry->redis_key_len) != 0)
		{
			call = &calls[n++];
			*call = (RlKeyRefunds) {.redis_key = entry->redis_key,.redis_key_len = entry->redis_key_len,
			.refunds = refund,.refused = entry->refused};
		}
		*refund++ = (RlRefund) {&entry->limit, &entry->charge};
		call->n++;
		entry->call = call;
	}
	rl_error_set(&error, ERRCODE_STORE_FAILED, "the settings of the connection were changed meanwhile");
	log_lost(elsewhere, &error);
	unclosed = n > 0 ? owner : NULL;
	return n;
}

/* Adds a refund from the list of overdue ones to the queue; an RlOverdueTake. */
static bool
take_overdue(const RlOverdue *refund, const char *name, void *arg pg_attribute_unused())
{
	const unsigned char *bytes = (const unsigned char *) name;
	RlLedgerEntry *entry = nentries >= RL_MAX_ENTRIES || !make_room(nentries + 1) ? NULL :
		MemoryContextAllocExtended(context, entry_size(refund->name_len),
								   MCXT_ALLOC_NO_OOM | MCXT_ALLOC_ZERO);

	if (entry == NULL)
		return false;
	entry->id = (RlLedgerId) {.server = rl_target_id(),.lot = refund->lot,.life = refund->charge.life,
	.by_mark = refund->charge.by_mark,.level = RL_APART};
	entry->id.redis_key[0] = hash_bytes_extended(bytes, refund->name_len, 0);
	entry->id.redis_key[1] = hash_bytes_extended(bytes, refund->name_len, entry->id.redis_key[0]);
	entry->cause = refund->cause;
	entry->limit = refund->limit;
	entry->charge = refund->charge;
	entry->span = (RlSpan) {.at = refund->charge.at,.place = refund->charge.place};
	entry->asked = refund->asked;
	entry->since = refund->since;
	entry->key_hash = refund->key_hash;
	entry->refused = refund->refused;
	entry->redis_key_len = refund->name_len;
	memcpy(entry->redis_key, name, refund->name_len);
	dlist_push_tail(&rl_queue.entries, &entry->node);
	dlist_push_tail(&places[entry->id.redis_key[0] % PLACES], &entry->of_key);
	entry->queued = true;
	nentries++;
	return true;
}

/*
 * Moves overdue refunds of the present settings into the queue, those of the key first unless it is
 * NULL, "most" at most.  Returns how many have left the list.  Throws if there is no memory.  Needs
 * rl_overdue_waits().
 */
int
rl_refunds_take_overdue(const RlKeyHash *first, int most)
{
	rl_ledger_open();
	close_interrupted();
	return rl_overdue_take(first, most, take_overdue, NULL);
}

/*
 * Refunds queued charges ahead of a command, as many as half of ratelimit.command_timeout allows, or
 * all if there is little room for later charges; and adds the cost to the usage, unless that
 * is NULL.  Logs how many are lost.  Returns false with the error set when Redis cannot be
 * reached; the entries for which nothing was sent are then still in the queue.  Throws when
 * it is interrupted.
 */
bool
rl_refunds_flush(RlUsage *usage, RlError *error)
{
	bool		whole = nentries > RL_MAX_ENTRIES / 2;
	bool		done;
	bool		lost;
	int			n;

	if (!rl_refunds_pending())
		return true;
	n = prepare_calls(&rl_queue, whole ? INT_MAX : MAX_AHEAD);
	if (n == 0)
		return true;
	done = rl_redis_refund_until(calls, n,
								 whole ? PG_INT64_MAX : rl_monotonic_now() + (int64) rl_command_timeout * 500,
								 usage, &error_reply, error);
	/* Of a cluster only a part has failed, and calls for other keys do not wait for it. */
	lost = !done && rl_slots_known();
	close_calls(&rl_queue, lost ? PASS_CALLED : KEEP, error);
	return done || lost;
}

/*
 * Refunds the queue's charges at the end of a transaction, for as long as rl_redis_refund_no_throw
 * tries.  Those that it has not sent go to the list of overdue refunds, and stay in the queue if the list
 * does not take them.  Logs how many are lost.  Returns false if Redis did not answer.  Does not throw,
 * and needs no memory.
 */
bool
rl_refunds_end(void)
{
	RlError		error;
	bool		done;
	int			n;

	n = prepare_calls(&rl_queue, INT_MAX);
	if (n == 0)
		return true;
	done = rl_redis_refund_no_throw(calls, n, &error_reply, &error);
	close_calls(&rl_queue, PASS_ALL, &error);
	return done || !error.timed_out;
}

/* Deletes the queue's entries, and logs that they are lost, because the session ends.  Does not throw. */
void
rl_refunds_lose(void)
{
	int64		lost[RL_CAUSES] = {0};
	RlError		error;
	dlist_mutable_iter iter;

	close_interrupted();
	dlist_foreach_modify(iter, &rl_queue.entries)
	{
		RlLedgerEntry *entry = dlist_container(RlLedgerEntry, node, iter.cur);

		lost[entry->cause]++;
		end_entry(entry);
	}
	rl_error_set(&error, ERRCODE_STORE_FAILED, "the session has ended");
	log_lost(lost, &error);
}

/*
 * Owners
 */

/* Begins an owner without entries. */
void
rl_owner_begin(RlOwner *owner, RlCause cause)
{
	memset(owner, 0, sizeof(*owner));
	owner->cause = cause;
	dlist_init(&owner->entries);
	rl_error_set(&owner->why, ERRCODE_STORE_FAILED, "there was no answer to some calls");
}

/*
 * Adds charges of an action of this quota, one for each limit; not those of the amount 0.
 * Does not throw: if there is no memory, charges are lost.
 */
void
rl_owner_add(RlOwner *owner, const RlKey *key, const RlLimits *limits, const RlCharge *charges,
			 bool local, int64 quota)
{
	bool		counted = true;

	for (int i = 0; i < limits->n; i++)
	{
		RlLedgerEntry *entry;

		/* The transaction refunds these when a statement fails. */
		if (charges[i].amount == 0 || (owner->cause == RL_OF_STATEMENT && limits->limit[i].refund_on_abort))
			continue;
		entry = rl_ledger_add(owner, key, &limits->limit[i], &charges[i], local, 0, RL_APART);
		if (entry == NULL)
		{
			owner->lost++;
			rl_error_set(&owner->why, ERRCODE_OUT_OF_MEMORY, "out of memory");
			continue;
		}
		entry->refused = quota;
		entry->counted = counted;
		counted = owner->cause != RL_OF_STATEMENT;
	}
}

/* Ends the owner's charges; they stay.  Does not throw. */
void
rl_owner_keep(RlOwner *owner)
{
	dlist_mutable_iter iter;

	dlist_foreach_modify(iter, &owner->entries)
		rl_ledger_drop(dlist_container(RlLedgerEntry, node, iter.cur));
	if (owner->file != 0)
		FileClose(owner->file);
}

/*
 * Logs the charges of an owner that are lost, or perhaps were made without an answer, and
 * returns how many there are.  Does not throw.
 */
int64
rl_owner_lost(RlOwner *owner)
{
	int64		lost[RL_CAUSES] = {0};
	RlCause		cause = owner->cause == RL_OF_ACTION ? RL_OF_CALLS : owner->cause;

	close_calls(owner, PASS_ALL, &owner->why);
	lost[cause] = owner->unanswered + owner->lost + owner->nspilled;
	log_lost(lost, &owner->why);
	return lost[cause];
}

/*
 * Moves the owner's entries to the end of the queue, and logs how many charges are lost.  If
 * the action was refused, the refund counts its quota as refused, where limits have
 * count_denied.  Does not throw.
 */
void
rl_owner_queue(RlOwner *owner, bool refused)
{
	dlist_mutable_iter iter;

	dlist_foreach_modify(iter, &owner->entries)
	{
		RlLedgerEntry *entry = dlist_container(RlLedgerEntry, node, iter.cur);

		if (!refused)
			entry->refused = 0;
		rl_ledger_queue(entry);
	}
	(void) rl_owner_lost(owner);
}

/*
 * Statements
 */

/* Writes to the owner's file at its end, as far as *written.  Throws, and the entries stay as they are. */
static void
write_spilled(RlOwner *owner, int64 *written, char *data, int len)
{
	if (FileWrite(owner->file, data, len, owner->spilled + *written, PG_WAIT_EXTENSION) != len)
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not write to temporary file: %m")));
	*written += len;
}

/*
 * Moves the owner's entries, of whole keys, into its temporary file.  Throws if that has no room
 * (temp_file_limit, a full disk); then all of them are still entries, and no others can be moved.
 * No other resource owner and no shorter memory context may be current in later calls.
 */
void
rl_owner_spill(RlOwner *owner)
{
	PGAlignedBlock block;
	int64		written = 0;
	int			used = 0;
	RlLimit    *last;
	dlist_mutable_iter iter;

	if (owner->file == 0)
	{
		owner->limits = palloc0(RL_MAX_LIMITS * sizeof(RlLimit));
		PrepareTempTablespaces();
		owner->file = OpenTemporaryFile(false);
	}
	last = owner->limits;
	dlist_foreach_modify(iter, &owner->entries)
	{
		RlLedgerEntry *entry = dlist_container(RlLedgerEntry, node, iter.cur);
		Spilled		spilled = {entry->id.server, entry->key_hash, entry->charge, entry->redis_key_len,
		entry->id.local, entry->counted, memcmp(last, &entry->limit, sizeof(RlLimit)) != 0};

		if (used + sizeof(spilled) + sizeof(RlLimit) + entry->redis_key_len > sizeof(block))
		{
			write_spilled(owner, &written, block.data, used);
			used = 0;
		}
		memcpy(block.data + used, &spilled, sizeof(spilled));
		used += sizeof(spilled);
		if (spilled.has_limit)
		{
			*last = entry->limit;
			memcpy(block.data + used, last, sizeof(RlLimit));
			used += sizeof(RlLimit);
		}
		memcpy(block.data + used, entry->redis_key, entry->redis_key_len);
		used += entry->redis_key_len;
		last = entry->counted ? owner->limits : last + 1;
	}
	write_spilled(owner, &written, block.data, used);
	owner->spilled += written;
	dlist_foreach_modify(iter, &owner->entries)
	{
		RlLedgerEntry *entry = dlist_container(RlLedgerEntry, node, iter.cur);

		owner->nspilled += entry->counted;
		rl_ledger_drop(entry);
	}
}

/*
 * Reads the next entry of the owner's file; *last is the limit of the last one in its place, or
 * becomes its own.  Throws if it cannot be read, or if there is no memory.
 */
static RlLedgerEntry *
load_entry(RlOwner *owner, RlLimit *last)
{
	char		data[sizeof(Spilled) + sizeof(RlLimit) + RL_MAX_REDIS_KEY];
	const char *next = data + sizeof(Spilled);
	int			len = Min((int64) sizeof(data), owner->spilled - owner->loaded);
	RlLedgerEntry *entry;
	Spilled		spilled;

	if (FileRead(owner->file, data, len, owner->loaded, PG_WAIT_EXTENSION) != len)
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not read from temporary file: %m")));
	if (!make_room(nentries + 1))
		ereport(ERROR, (errcode(ERRCODE_OUT_OF_MEMORY), errmsg("out of memory")));
	memcpy(&spilled, data, sizeof(spilled));
	if (spilled.has_limit)
	{
		memcpy(last, next, sizeof(RlLimit));
		next += sizeof(RlLimit);
	}
	entry = MemoryContextAllocZero(context, entry_size(spilled.redis_key_len));
	entry->id = (RlLedgerId) {.server = spilled.server,.level = RL_APART,.local = spilled.local};
	entry->cause = owner->cause;
	entry->limit = *last;
	entry->charge = spilled.charge;
	entry->key_hash = spilled.key_hash;
	entry->counted = spilled.counted;
	entry->redis_key_len = spilled.redis_key_len;
	memcpy(entry->redis_key, next, spilled.redis_key_len);
	owner->loaded += next + spilled.redis_key_len - data;
	return entry;
}

/* Reads entries of whole keys back from the owner's file.  Returns false if there are none. */
static bool
load_batch(RlOwner *owner)
{
	RlLedgerEntry *entry = NULL;
	RlLimit    *last = owner->limits;
	int			n = 0;

	while (owner->loaded < owner->spilled && (n < MAX_BATCH || !entry->counted))
	{
		entry = load_entry(owner, last);
		last = entry->counted ? owner->limits : last + 1;
		dlist_push_head(&owner->entries, &entry->node);
		nentries++;
		n++;
		owner->nspilled -= entry->counted;
	}
	return n > 0;
}

/*
 * Waits until Redis answers, until the time at most.  Returns false with the error set if
 * it does not answer.
 */
static bool
await_redis(int64 until, RlError *error)
{
	char		version[64];

	while (!rl_redis_version(version, sizeof(version), error))
	{
		if (rl_monotonic_now() >= until)
			return false;
		/* An open breaker lets no call through earlier, but it may close. */
		rl_sleep_until(rl_monotonic_now() + Max(Min(error->retry_after, PAUSE_US), PAUSE_US / 10),
					   rl_wait_event());
	}
	return rl_monotonic_now() < until;
}

/*
 * Refunds a statement's charges, as far as that is possible: waits for a Redis that has just
 * failed, but not longer than a second and ratelimit.command_timeout without an answer.
 * Throws when it is interrupted.  With no_throw, which is for the end of the backend, it does
 * not wait so, no call to Redis throws, and none begins after ratelimit.command_timeout.
 * Needs rl_ledger_open.
 */
void
rl_owner_refund(RlOwner *owner, bool no_throw)
{
	int64		end = rl_monotonic_now() + (int64) rl_command_timeout * 1000;
	int64		patience = (int64) (Min(rl_retry_interval, 1000) + rl_command_timeout) * 1000;
	bool		silent = !no_throw && owner->unanswered > 0;
	bool		failed = false;

	do
	{
		int64		progress = rl_monotonic_now();
		int			n;

		/* Those of the local store are refunded also when Redis has failed; it is not waited for again. */
		while ((n = prepare_calls(owner, INT_MAX)) > 0 && !failed)
		{
			if (no_throw && rl_monotonic_now() >= end)
			{
				rl_error_set(&owner->why, ERRCODE_STORE_FAILED, "there was no time left");
				break;
			}
			/* Calls to a Redis that is still silent would be lost. */
			failed = silent && !await_redis(progress + patience, &owner->why);
			if (failed)
				break;
			silent = !(no_throw ? rl_redis_refund_no_throw(calls, n, &owner->why, &owner->why) :
					   rl_redis_refund_until(calls, n, PG_INT64_MAX, NULL, &owner->why, &owner->why));
			for (int i = 0; i < n; i++)
				if (calls[i].outcome == RL_REFUND_DONE || calls[i].outcome == RL_REFUND_FAILED)
					progress = rl_monotonic_now();
			close_calls(owner, KEEP, &owner->why);
			silent |= !dlist_is_empty(&owner->entries);
			failed = silent && no_throw;
		}
		close_calls(owner, PASS_ALL, &owner->why);
	} while (load_batch(owner));
}
