/*
 * lease.c
 *		Leases: quota that this server has taken ahead, and hands out without
 *		asking Redis.
 *
 * A key's use under limits with a lease is counted in an entry.  If it is high
 * enough, the call that asks Redis also charges the units that this server is likely
 * to use within the lease's length: a grant.  Other calls take units of the grant,
 * until it ends.  The units that are left then are leftovers, which the next call that
 * asks Redis refunds.
 *
 * Never one action too many: an action under a grant happens at the time that is
 * read under the lock that takes its units, and a grant's end is counted from a time
 * before the call was sent that charged it.  So an action was charged at most the
 * lease's length before, and windows and lumps have not ended since.
 *
 * A reset, a refund or a ban on this server ends the key's grants, and changes the
 * generation number of its entries, so that a grant that was asked for before becomes a
 * leftover.
 *
 * A key's entries are in one set.  When it is full, the entry that is used least is
 * evicted, with its grants: their units stay charged.  An entry with units counts as
 * used, so that entries of rare keys are evicted before it.
 *
 * Locks: the LWLock of a set protects its entries; it serves several sets.  The
 * counters' locks may be taken while a set is locked.
 */
#include "postgres.h"

#include "port/atomics.h"

#include "algorithm/limits.h"
#include "shared/counters.h"
#include "shared/lease_table.h"

#define SETS				512
#define LOCKS				128

/* With fewer actions within a lease's length, each of them asks Redis. */
#define MIN_ACTIONS			16

#define MAX_WANT			1e9

typedef struct Table
{
	pg_atomic_uint64 ids;		/* the last id of a grant or a claim, or generation */
	pg_atomic_uint32 used;		/* entries in use */
	Set			sets[SETS];		/* locks[i % LOCKS] protects set i */
} Table;

static Table *table = NULL;
static LWLockPadded *locks;

static void
attach(void *memory, LWLockPadded *my_locks, bool found)
{
	table = memory;
	locks = my_locks;
	if (!found)
	{
		memset(table, 0, sizeof(Table));
		pg_atomic_init_u64(&table->ids, 0);
		pg_atomic_init_u32(&table->used, 0);
	}
}

const RlSharedPart rl_lease_part = {sizeof(Table), LOCKS, NULL, attach};

static bool
clock_is_debug(void)
{
	return rl_debug_clock[0] != '\0';
}

/* Returns microseconds on the lease clock. */
int64
rl_lease_now(void)
{
	return clock_is_debug() ? strtoll(rl_debug_clock, NULL, 10) : rl_boottime_now();
}

/* Returns true if there can be leases: with shared memory, and not on Redis's test clock alone. */
bool
rl_lease_may_use(void)
{
	return table != NULL && (rl_debug_now[0] == '\0' || clock_is_debug());
}

uint64
rl_lease_new_id(void)
{
	return pg_atomic_add_fetch_u64(&table->ids, 1);
}

Set *
rl_lease_lock(RlKeyHash key_hash)
{
	int			number = (key_hash.low >> 32) % SETS;

	LWLockAcquire(&locks[number % LOCKS].lock, LW_EXCLUSIVE);
	return &table->sets[number];
}

void
rl_lease_unlock(const Set *set)
{
	LWLockRelease(&locks[(set - table->sets) % LOCKS].lock);
}

/* Returns a length as this server counts it: the clocks may run 10 % apart. */
static int64
real_length(int64 length)
{
	return length - rl_divide_up(length, 10);
}

/*
 * Entries
 */

/* Moves the span in which use is counted on to the present. */
static void
roll(Entry *entry, int64 now)
{
	int64		length = real_length(rl_lease_length(&entry->limits));
	int64		passed = now - entry->window;

	if (passed >= 0 && passed < length)
		return;
	if (passed >= 0 && passed < 2 * length)
	{
		entry->units_before = entry->units;
		entry->actions_before = entry->actions;
		entry->window += length;
	}
	else
	{
		entry->units_before = entry->actions_before = 0;
		entry->window = now;
	}
	entry->units = entry->actions = 0;
}

/*
 * Returns the units that were used within the last real length, or 0 if there were too
 * few actions for a lease.  The entry is rolled to now.
 */
static int64
recent_use(const Entry *entry, int64 now)
{
	double		length = Max(real_length(rl_lease_length(&entry->limits)), 1);
	double		part = 1 - (now - entry->window) / length;

	/* An estimate for the last length would count actions that are longer ago. */
	if (Max(entry->actions, entry->actions_before) < MIN_ACTIONS)
		return 0;
	return (int64) Min(entry->units + part * entry->units_before, MAX_WANT);
}

/* Returns entry i if it is the key's, on the present clock, and otherwise NULL. */
Entry *
rl_lease_entry_of(Set *set, int i, RlKeyHash key_hash)
{
	Entry	   *entry = &set->entries[i];

	return rl_same_key_hash(set->keys[i], key_hash) && entry->limits.n > 0 &&
		entry->debug == clock_is_debug() ? entry : NULL;
}

Entry *
rl_lease_find(Set *set, RlKeyHash key_hash, const RlLimits *limits)
{
	for (int i = 0; i < WAYS; i++)
	{
		Entry	   *entry = rl_lease_entry_of(set, i, key_hash);

		if (entry != NULL && rl_limits_same(&entry->limits, limits))
			return entry;
	}
	return NULL;
}

/* Ends a grant.  Counts its units as unused, unless the key is not known. */
int64
rl_lease_end_grant(const RlLimits *limits, const RlKey *key, Grant *grant)
{
	int64		units = grant->units;

	if (units > 0)
		rl_counters_add_lease(limits, key, 0, units);
	grant->units = 0;
	grant->ends = 0;
	return units;
}

/* Returns the entry's actions in two spans, and a lease's fewest actions more if it has units. */
static int64
worth(const Entry *entry)
{
	int64		actions = entry->actions + entry->actions_before;

	for (int g = 0; g < GRANTS; g++)
		if (entry->grants[g].units > 0)
			return actions + MIN_ACTIONS;
	return actions;
}

/* Returns a new entry: a free one, or the one that is worth least. */
static Entry *
make_entry(Set *set, RlKeyHash key_hash, const RlLimits *limits, int64 now)
{
	int			chosen = 0;
	int64		least = 0;
	Entry	   *entry;

	for (int i = 0; i < WAYS; i++)
	{
		entry = &set->entries[i];
		if (entry->limits.n == 0)
		{
			chosen = i;
			break;
		}
		if (entry->debug == clock_is_debug())
			roll(entry, now);
		if (i == 0 || worth(entry) < least)
		{
			chosen = i;
			least = worth(entry);
		}
	}
	entry = &set->entries[chosen];
	if (entry->limits.n == 0)
		pg_atomic_fetch_add_u32(&table->used, 1);
	else
		for (int g = 0; g < GRANTS; g++)
			rl_lease_end_grant(&entry->limits, NULL, &entry->grants[g]);
	memset(entry, 0, sizeof(*entry));
	set->keys[chosen] = key_hash;
	rl_limits_copy(&entry->limits, limits);
	entry->debug = clock_is_debug();
	entry->generation = rl_lease_new_id();
	entry->window = now;
	return entry;
}

/*
 * Taking
 */

/* Returns the units of grants that are live, or of those that have ended. */
static int64
units_of(const Entry *entry, int64 now, bool live)
{
	int64		units = 0;

	for (int g = 0; g < GRANTS; g++)
		if ((now < entry->grants[g].ends) == live)
			units += entry->grants[g].units;
	return units;
}

/* Returns the grant that ends first of those that have the units, or NULL. */
static Grant *
find_grant(Entry *entry, int64 quota, int64 now)
{
	Grant	   *found = NULL;

	for (int g = 0; g < GRANTS; g++)
	{
		Grant	   *grant = &entry->grants[g];

		if (now < grant->ends && grant->units >= quota &&
			(found == NULL || grant->ends < found->ends))
			found = grant;
	}
	return found;
}

/* Returns true if a call is to renew the lease: a quarter of the units or of the time is left. */
static bool
wants_renewal(const Entry *entry, int64 now)
{
	int64		use = recent_use(entry, now);
	int64		renew_at = 0;

	if (use == 0 || (entry->claim != 0 && now < entry->claim_ends))
		return false;
	for (int g = 0; g < GRANTS; g++)
		if (entry->grants[g].units > 0 && now < entry->grants[g].ends)
			renew_at = Max(renew_at, entry->grants[g].renew_at);
	return now >= renew_at || units_of(entry, now, true) <= Min(entry->size, use) / 4;
}

/* Sets the decision and the charges of units that were just taken from the grant. */
static void
set_leased(const Entry *entry, const Grant *grant, int64 quota, int64 now, RlLeased *leased)
{
	const RlLimits *limits = &entry->limits;
	RlDecision *decision = &leased->decision;

	leased->id = grant->id;
	leased->binding = entry->binding;
	*decision = entry->decision;
	decision->source = RL_FROM_LEASE;
	decision->remaining = Min(decision->remaining + units_of(entry, now, true), decision->capacity);
	decision->reset_after = Max(decision->reset_after - Max(now - entry->decided, 0), 0);
	for (int i = 0; i < limits->n; i++)
	{
		leased->charges[i] = rl_algorithm(&limits->limit[i])->charge(&limits->limit[i], quota, grant->at, 0);
		leased->charges[i].mark = grant->mark[i];
	}
}

/*
 * Takes the quota, which is not 0, from the key's lease.  If it returns RL_LEASE_TAKEN,
 * the action happens now, and *leased is set.  With renew, returns RL_LEASE_ASK to a
 * call that is to renew the lease, also if there are units.  Needs rl_lease_may_use.
 * Does not throw.
 */
RlLeaseState
rl_lease_take(RlKeyHash key_hash, const RlLimits *limits, int64 quota, bool renew, RlLeased *leased)
{
	Set		   *set = rl_lease_lock(key_hash);
	Entry	   *entry = rl_lease_find(set, key_hash, limits);
	RlLeaseState state = RL_LEASE_NONE;

	if (entry != NULL)
	{
		int64		now = rl_lease_now();
		Grant	   *grant = find_grant(entry, quota, now);

		roll(entry, now);
		if (grant != NULL && !(renew && wants_renewal(entry, now)))
		{
			grant->units -= quota;
			entry->units += quota;
			entry->actions++;
			set_leased(entry, grant, quota, now, leased);
			state = RL_LEASE_TAKEN;
		}
		else if (grant != NULL || units_of(entry, now, false) > 0)
			state = RL_LEASE_ASK;
	}
	rl_lease_unlock(set);
	return state;
}

/*
 * Asking
 */

/* Ends a grant that has units, and moves these into the call. */
static void
take_leftover(const Entry *entry, const RlKey *key, Grant *grant, RlLeaseCall *call)
{
	RlLeftover *left = &call->left[call->nleft++];

	left->at = grant->at;
	left->life = grant->life;
	memcpy(left->mark, grant->mark, sizeof(left->mark));
	left->units = rl_lease_end_grant(&entry->limits, key, grant);
}

/* Moves leftovers into the call, as far as it has room. */
static void
take_leftovers(Entry *entry, const RlKey *key, int64 now, RlLeaseCall *call)
{
	for (int g = 0; g < GRANTS && call->nleft < RL_MAX_LEFTOVERS; g++)
		if (entry->grants[g].units > 0 && now >= entry->grants[g].ends)
			take_leftover(entry, key, &entry->grants[g], call);
}

/* Returns the grant whose place a new one gets: that with the fewest units, or none. */
Grant *
rl_lease_replaced(Entry *entry)
{
	Grant	   *grant = &entry->grants[0];

	for (int g = 1; g < GRANTS; g++)
		if (entry->grants[g].units < grant->units ||
			(entry->grants[g].units == grant->units && entry->grants[g].ends < grant->ends))
			grant = &entry->grants[g];
	return grant;
}

/*
 * Begins a call that asks Redis for an action on the key, and sets what it asks for
 * the lease.  Must be called before the call is sent.  If it is not sent,
 * rl_lease_not_asked must be called.  If it fails otherwise, its leftovers are lost.
 * Needs rl_lease_may_use.  Does not throw.
 */
void
rl_lease_ask(const RlKey *key, RlKeyHash key_hash, const RlLimits *limits, RlLeaseCall *call)
{
	Set		   *set = rl_lease_lock(key_hash);
	Entry	   *entry = rl_lease_find(set, key_hash, limits);
	int64		now = rl_lease_now();
	int64		use;

	memset(call, 0, offsetof(RlLeaseCall, left));
	call->granted = 0;
	call->asked = now;
	call->length = rl_lease_length(limits);
	if (entry != NULL)
	{
		roll(entry, now);
		call->generation = entry->generation;
		take_leftovers(entry, key, now, call);
		use = recent_use(entry, now);
		if (use > 0 && (entry->claim == 0 || now >= entry->claim_ends))
		{
			double		length = Max(real_length(call->length), 1);

			/* The new grant needs a place. */
			if (rl_lease_replaced(entry)->units > 0)
				take_leftover(entry, key, rl_lease_replaced(entry), call);
			call->want = use;
			/* Units of a grant that ends soon are used until then. */
			for (int g = 0; g < GRANTS; g++)
				if (entry->grants[g].units > 0 && now < entry->grants[g].ends)
					call->want -= Min(entry->grants[g].units,
									  (int64) (use * Min((entry->grants[g].ends - now) / length, 1.0)));
			call->want = Max(call->want, 1);
			call->claim = entry->claim = rl_lease_new_id();
			entry->claim_ends = now + (int64) rl_command_timeout * 1000;
		}
	}
	rl_lease_unlock(set);
}

/*
 * Stores the grant of a call that has just been answered.  If it is stale, the key was
 * repaired during the call, and the grant is a leftover.
 */
static void
store_grant(Entry *entry, const RlKey *key, const RlLeaseCall *call, const RlAnswer *answer,
			const RlCharge *charges, bool stale)
{
	Grant	   *grant = rl_lease_replaced(entry);
	int64		length = real_length(call->valid);

	/*
	 * It has units only if they came during the call: from a rollback, or from
	 * other calls after a repair.  They are lost.
	 */
	rl_lease_end_grant(&entry->limits, key, grant);
	grant->units = call->granted;
	grant->ends = stale ? 0 : call->asked + length;
	/* A grant that ends with a window cannot be renewed before. */
	grant->renew_at = call->valid < call->length ? PG_INT64_MAX : grant->ends - length / 4;
	grant->id = rl_lease_new_id();
	grant->at = answer->at;
	grant->life = call->life;
	for (int i = 0; i < entry->limits.n; i++)
		grant->mark[i] = charges[i].mark;
	if (stale)
		return;
	entry->decision = answer->decision;
	entry->binding = answer->binding;
	entry->decided = call->asked;
}

/* No later call renews because of a time for which this one has renewed. */
static void
end_claim(Entry *entry, const RlLeaseCall *call)
{
	if (call->claim == 0 || entry->claim != call->claim)
		return;
	entry->claim = 0;
	for (int g = 0; g < GRANTS; g++)
		entry->grants[g].renew_at = PG_INT64_MAX;
}

/*
 * Notes the answer to a call for which rl_lease_ask was called: counts the use of an
 * action that is allowed, and stores the grant.  charges has the charge of each limit.
 * The answer's decision does not count the grant's units as free.  Needs rl_lease_may_use.  Does not throw.
 */
void
rl_lease_note(const RlKey *key, RlKeyHash key_hash, const RlLimits *limits, int64 quota,
			  const RlLeaseCall *call, const RlAnswer *answer, const RlCharge *charges)
{
	Set		   *set = rl_lease_lock(key_hash);
	Entry	   *entry = rl_lease_find(set, key_hash, limits);
	int64		now = rl_lease_now();
	bool		allowed = answer->decision.allowed;

	if (entry == NULL && allowed)
		entry = make_entry(set, key_hash, limits, now);
	if (entry != NULL)
	{
		roll(entry, now);
		end_claim(entry, call);
		entry->units += allowed ? quota : 0;
		entry->actions += allowed;
	}
	if (allowed && call->granted > 0)
	{
		rl_counters_add_lease(limits, key, call->granted, 0);
		store_grant(entry, key, call, answer, charges, call->generation != entry->generation);
	}
	if (entry != NULL && call->claim != 0)
		entry->size = units_of(entry, now, true);
	rl_lease_unlock(set);
}

/*
 * Takes one leftover of the key, and sets the limits that it was charged to.  Returns
 * false if there is none.  Does not throw.
 */
bool
rl_lease_leftover(const RlKey *key, RlLimits *limits, RlLeftover *left)
{
	RlKeyHash	key_hash;
	Set		   *set;
	RlLeaseCall call;

	if (!rl_lease_may_use() || pg_atomic_read_u32(&table->used) == 0)
		return false;
	call.nleft = RL_MAX_LEFTOVERS - 1;
	key_hash = rl_key_hash(key);
	set = rl_lease_lock(key_hash);
	for (int i = 0; i < WAYS && call.nleft < RL_MAX_LEFTOVERS; i++)
	{
		Entry	   *entry = rl_lease_entry_of(set, i, key_hash);

		if (entry == NULL)
			continue;
		*limits = entry->limits;
		take_leftovers(entry, key, rl_lease_now(), &call);
	}
	rl_lease_unlock(set);
	if (call.nleft < RL_MAX_LEFTOVERS)
		return false;
	*left = call.left[RL_MAX_LEFTOVERS - 1];
	return true;
}

/* Returns the number of keys and limits whose use is counted, and the most that there can be. */
void
rl_lease_fill(int64 *keys, int64 *max_keys)
{
	*keys = pg_atomic_read_u32(&table->used);
	*max_keys = SETS * WAYS;
}
