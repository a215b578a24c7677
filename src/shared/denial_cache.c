/*
 * denial_cache.c
 *		The refusals in force: the view rl_denied, and the denial cache, which
 *		refuses calls without asking Redis.
 *
 * If quota c was refused, every quota of c or more is refused until the wait is
 * over, because time only frees quota and other calls only take it.  A refund or
 * reset on this server deletes the key's entries.  Those of other servers are not
 * known here, so an entry answers for MAX_TRUST at most.  When an action on this
 * server takes quota, the figures of earlier refusals are out of date: their entries no
 * longer answer, and those that it contradicts are deleted.  Both increase the key's
 * generation number, so that a refusal that was asked for before is not stored.
 *
 * A key's entries are in one set.  When it is full, the entry with the earliest
 * end is evicted, and counted if it is in force.
 *
 * Locks: the LWLock of a set protects its entries; it serves several sets.  Only
 * "asking" is also changed under the shared lock, as an atomic.  The generation
 * numbers are atomics, and are increased before the entries change.
 */
#include "postgres.h"

#if PG_VERSION_NUM < 190000
#include "commands/dbcommands.h"
#endif
#include "funcapi.h"
#include "miscadmin.h"
#include "port/atomics.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "algorithm/limits.h"
#include "error.h"
#include "shared/denial_cache.h"

#define SETS				256
#define WAYS				8
#define LOCKS				32
#define GENERATIONS			4096

/* How long an entry answers, and when a backend asks Redis again meanwhile. */
#define MAX_TRUST			RL_SECOND
#define ASK_AGAIN			(MAX_TRUST * 6 / 10)

/* Between two notes of the same refusal by a backend. */
#define NOTE_INTERVAL		(RL_SECOND / 10)

#define COLUMNS				7

/* A refusal.  The lock of its set protects all members; "asking" is atomic. */
typedef struct Entry
{
	RlKeyHash	key_hash;
	RlLimits	limits;			/* listed; n = 0: free */
	bool		debug;			/* the times are by ratelimit.debug_now */
	int64		quota;
	int64		asked;			/* on this server's clock, also the next two */
	int64		trusted_until;	/* it answers until then; 0: never */
	int64		refused_until;
	pg_atomic_uint32 asking;	/* 1: a backend asks Redis again */
	int			binding;
	RlDecision	decision;
	TimestampTz since;			/* first of the refusals without a gap */
	Oid			database;		/* of the last refusal */
	int			key_len;
	char		key[RL_MAX_KEY];
} Entry;

typedef struct Set
{
	Entry		entries[WAYS];
} Set;

typedef struct Cache
{
	pg_atomic_uint64 generations[GENERATIONS];	/* several keys share one */
	pg_atomic_uint64 evicted;	/* refusals in force that were evicted */
	Set			sets[SETS];		/* locks[i % LOCKS] protects set i */
} Cache;

static Cache *cache = NULL;
static LWLockPadded *locks;

/*
 * A cache (src/README.md): the last refusal that this backend noted, without the
 * figures and the key.  Without it a refused call of the local store takes 4 %
 * longer, and locks a set exclusively.
 */
static Entry last;

static void
attach(void *memory, LWLockPadded *my_locks, bool found)
{
	cache = memory;
	locks = my_locks;
	if (found)
		return;
	memset(cache, 0, sizeof(Cache));
	pg_atomic_init_u64(&cache->evicted, 0);
	for (int i = 0; i < GENERATIONS; i++)
		pg_atomic_init_u64(&cache->generations[i], 0);
	for (int i = 0; i < SETS; i++)
		for (int j = 0; j < WAYS; j++)
			pg_atomic_init_u32(&cache->sets[i].entries[j].asking, 0);
}

const RlSharedPart rl_denial_part = {sizeof(Cache), LOCKS, NULL, attach};

static Set *
lock_set(RlKeyHash key_hash, LWLockMode mode)
{
	int			number = (key_hash.low >> 32) % SETS;

	LWLockAcquire(&locks[number % LOCKS].lock, mode);
	return &cache->sets[number];
}

static void
unlock_set(const Set *set)
{
	LWLockRelease(&locks[(set - cache->sets) % LOCKS].lock);
}

/* Returns true while ratelimit.debug_now is the clock. */
static bool
clock_is_debug(void)
{
	return rl_debug_now[0] != '\0';
}

/* Returns true if the entry is the key's under these limits, on the present clock. */
static bool
is_entry_of(const Entry *entry, RlKeyHash key_hash, const RlLimits *limits)
{
	return rl_same_key_hash(entry->key_hash, key_hash) && entry->debug == clock_is_debug() &&
		rl_limits_same(&entry->limits, limits);
}

static Entry *
find_entry(Set *set, RlKeyHash key_hash, const RlLimits *limits)
{
	for (int i = 0; i < WAYS; i++)
		if (is_entry_of(&set->entries[i], key_hash, limits))
			return &set->entries[i];
	return NULL;
}

/*
 * Returns true if the limits are known to refuse the quota, and sets the decision
 * and the index of the binding limit, as they are now.  After ASK_AGAIN it returns
 * false to one caller, whose call renews the entry.  Needs shared memory.
 */
bool
rl_denial_lookup(RlKeyHash key_hash, const RlLimits *limits, int64 quota,
				 RlDecision *decision, int *binding)
{
	Set		   *set = lock_set(key_hash, LW_SHARED);
	Entry	   *entry = find_entry(set, key_hash, limits);
	bool		known = false;
	int64		now;
	int64		passed;

	if (entry != NULL && quota >= entry->quota && entry->trusted_until > 0)
	{
		uint32		none = 0;

		now = rl_local_now();
		passed = now - entry->asked;
		known = passed >= 0 && now < entry->trusted_until;
		for (int i = 0; i < limits->n; i++)
			known &= quota <= limits->limit[i].capacity || limits->limit[i].shadow;
		/* A refusal of more quota would tell nothing about this quota. */
		if (known && passed >= ASK_AGAIN && entry->trusted_until < entry->refused_until &&
			quota == entry->quota &&
			pg_atomic_compare_exchange_u32(&entry->asking, &none, 1))
			known = false;
		if (known)
		{
			*decision = entry->decision;
			*binding = entry->binding;
			decision->source = RL_FROM_DENIAL_CACHE;
			decision->retry_after -= passed;
			decision->reset_after = Max(decision->reset_after - passed, 0);
			if (decision->ban_left > 0)
				decision->ban_left = Max(decision->ban_left - passed, 1);
		}
	}
	unlock_set(set);
	return known;
}

static pg_atomic_uint64 *
generation_of(RlKeyHash key_hash)
{
	return &cache->generations[key_hash.high % GENERATIONS];
}

/*
 * Returns the key's generation number, for rl_denial_note.  Must be called before
 * the request is sent.  Needs shared memory.
 */
uint64
rl_denial_generation(RlKeyHash key_hash)
{
	uint64		generation = pg_atomic_read_u64(generation_of(key_hash));

	/* The request must not be sent before the read. */
	pg_memory_barrier();
	return generation;
}

/* Returns for how long the refusal holds, whichever actions this server takes. */
static int64
trusted_for(const RlLimits *limits, const RlDecision *decision)
{
	int64		wait = Min(decision->retry_after, MAX_TRUST);

	/* Each refusal must reach Redis to be counted, except during a ban. */
	for (int i = 0; i < limits->n; i++)
		if (limits->limit[i].count_denied || limits->limit[i].ban > 0)
			wait = Min(wait, decision->ban_left);
	return wait;
}

/* Returns the entry for a refusal: its own, a free one, or the one with the earliest end. */
static Entry *
choose_entry(Set *set, RlKeyHash key_hash, const RlLimits *limits)
{
	Entry	   *entry = find_entry(set, key_hash, limits);

	if (entry != NULL)
		return entry;
	entry = &set->entries[0];
	for (int i = 1; i < WAYS && entry->limits.n > 0; i++)
		if (set->entries[i].limits.n == 0 || set->entries[i].refused_until < entry->refused_until)
			entry = &set->entries[i];
	return entry;
}

/*
 * Stores a refusal that was asked for at that time (rl_local_now) and generation;
 * with may_answer it can answer calls.  Does nothing if it is the last one that
 * was noted, or the generation has changed.  Needs shared memory.
 */
void
rl_denial_note(RlKeyHash key_hash, const RlKey *key, const RlLimits *limits, int64 quota,
			   const RlDecision *decision, int binding, int64 asked,
			   uint64 generation, bool may_answer)
{
	int64		until = asked + decision->retry_after;
	Set		   *set;
	Entry	   *entry;
	bool		is_new;

	/* Skip requests above capacity, and quota 0. */
	if (decision->retry_after == RL_NEVER || quota == 0)
		return;
	if (!may_answer && is_entry_of(&last, key_hash, limits) &&
		asked - last.asked < NOTE_INTERVAL && asked >= last.asked &&
		until - last.refused_until < NOTE_INTERVAL && last.refused_until - until < NOTE_INTERVAL)
		return;
	last.key_hash = key_hash;
	rl_limits_copy(&last.limits, limits);
	last.debug = clock_is_debug();
	last.asked = asked;
	last.refused_until = until;

	set = lock_set(key_hash, LW_EXCLUSIVE);
	entry = choose_entry(set, key_hash, limits);
	is_new = !is_entry_of(entry, key_hash, limits);
	/* An entry that answers for a smaller quota stays. */
	if ((generation == RL_ANY_GENERATION ||
		 generation == pg_atomic_read_u64(generation_of(key_hash))) &&
		(is_new || entry->quota >= quota || entry->trusted_until <= asked))
	{
		if (is_new)
		{
			if (entry->limits.n > 0 && entry->refused_until > asked && entry->debug == clock_is_debug())
				pg_atomic_fetch_add_u64(&cache->evicted, 1);
			entry->key_hash = key_hash;
			rl_limits_copy(&entry->limits, limits);
			entry->debug = clock_is_debug();
			entry->since = GetCurrentTimestamp();
			entry->key_len = key->len;
			memcpy(entry->key, key->data, key->len);
		}
		else if (entry->refused_until < asked)
			entry->since = GetCurrentTimestamp();
		entry->database = MyDatabaseId;
		entry->quota = quota;
		entry->asked = asked;
		entry->trusted_until = may_answer ? asked + trusted_for(limits, decision) : 0;
		entry->refused_until = until;
		entry->decision = *decision;
		entry->binding = binding;
		pg_atomic_write_u32(&entry->asking, 0);
	}
	unlock_set(set);
}

/*
 * Deletes the key's entries.  To be called before and after quota is refunded to
 * it, or may have been.  Needs shared memory.  Does not throw.
 */
void
rl_denial_delete_hash(RlKeyHash key_hash)
{
	Set		   *set;

	last.limits.n = 0;
	pg_atomic_fetch_add_u64(generation_of(key_hash), 1);
	set = lock_set(key_hash, LW_EXCLUSIVE);
	for (int i = 0; i < WAYS; i++)
		if (rl_same_key_hash(set->entries[i].key_hash, key_hash))
			set->entries[i].limits.n = 0;
	unlock_set(set);
}

/* The same by the key; does nothing without shared memory. */
void
rl_denial_delete(const RlKey *key)
{
	if (cache != NULL)
		rl_denial_delete_hash(rl_key_hash(key));
}

/* Returns true if the entry answers for the key under limits that share a state with these. */
static bool
is_concerned(const Entry *entry, RlKeyHash key_hash, const RlLimits *limits)
{
	if (entry->trusted_until == 0 || !rl_same_key_hash(entry->key_hash, key_hash))
		return false;
	return limits == NULL || rl_limits_share_state(limits, &entry->limits);
}

/*
 * Returns true if the entry says that an action is refused which was allowed: that of at
 * least its quota under its limits, or during a ban.
 */
static bool
is_contradicted(const Entry *entry, RlKeyHash key_hash, const RlLimits *limits, int64 allowed)
{
	if (allowed == 0 || entry->limits.n == 0 || !rl_same_key_hash(entry->key_hash, key_hash))
		return false;
	return (entry->decision.ban_left > 0 && !rl_all_shadow(limits)) ||
		(allowed >= entry->quota && is_entry_of(entry, key_hash, limits));
}

/*
 * Ends answers from refusals whose figures an action under these limits has
 * changed; NULL: all of the key's.  Deletes those that it contradicts: "allowed" is its
 * quota, or 0 if it was refused.  Corrects *generation, so that a refusal of the
 * same action can still be noted.  Needs shared memory.  Does not throw.
 */
void
rl_denial_outdate(RlKeyHash key_hash, const RlLimits *limits, int64 allowed, uint64 *generation)
{
	uint64		before = pg_atomic_fetch_add_u64(generation_of(key_hash), 1);
	Set		   *set = lock_set(key_hash, LW_SHARED);
	bool		any = false;

	if (*generation == before)
		(*generation)++;
	for (int i = 0; i < WAYS; i++)
		any |= is_concerned(&set->entries[i], key_hash, limits) ||
			is_contradicted(&set->entries[i], key_hash, limits, allowed);
	unlock_set(set);
	if (!any)
		return;
	set = lock_set(key_hash, LW_EXCLUSIVE);
	for (int i = 0; i < WAYS; i++)
	{
		if (is_contradicted(&set->entries[i], key_hash, limits, allowed))
			last.limits.n = set->entries[i].limits.n = 0;
		else if (is_concerned(&set->entries[i], key_hash, limits))
			set->entries[i].trusted_until = 0;
	}
	unlock_set(set);
}

/* Returns the number of refusals that were evicted while in force.  Needs shared memory. */
int64
rl_denials_evicted(void)
{
	return pg_atomic_read_u64(&cache->evicted);
}

PG_FUNCTION_INFO_V1(rl_denied);
Datum
rl_denied(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	Set		   *copy;
	int64		now;

	rl_require_shared("rl_denied");
	InitMaterializedSRF(fcinfo, 0);
	copy = palloc(sizeof(Set));
	now = rl_local_now();
	for (int i = 0; i < SETS; i++)
	{
		LWLockAcquire(&locks[i % LOCKS].lock, LW_SHARED);
		memcpy(copy, &cache->sets[i], sizeof(Set));
		LWLockRelease(&locks[i % LOCKS].lock);
		for (int j = 0; j < WAYS; j++)
		{
			const Entry *entry = &copy->entries[j];
			const RlDecision *d = &entry->decision;
			Datum		values[COLUMNS];
			bool		nulls[COLUMNS] = {false};
			const char *database;

			if (entry->limits.n == 0 || entry->refused_until <= now ||
				entry->debug != clock_is_debug())
				continue;
			values[0] = CStringGetTextDatum(rl_key_shown(entry->key, entry->key_len));
			values[1] = CStringGetTextDatum(rl_limits_text(&entry->limits));
			values[2] = Int64GetDatum(entry->quota);
			values[3] = BoolGetDatum(d->ban_left > 0);
			values[4] = TimestampTzGetDatum(entry->since);
			values[5] = Float8GetDatum((double) (entry->refused_until - now) / RL_SECOND);
			database = get_database_name(entry->database);
			nulls[6] = database == NULL;
			if (database != NULL)
				values[6] = DirectFunctionCall1(namein, CStringGetDatum(database));
			tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
		}
	}
	return (Datum) 0;
}
