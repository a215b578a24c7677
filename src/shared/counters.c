/*
 * counters.c
 *		Counters by limits and scope, for the view rl_stat.
 *
 * An entry is found by the limits and the scope, and keeps both until all entries are reset.
 * When none is free near the place of a new pair, the last entry counts for it.  So the sums are
 * always right, and a client that invents scopes makes no call slower.
 *
 * Locks, as in pg_stat_statements: to find an entry, hold the lock shared; to give it to a
 * pair, or to reset, exclusively.  An entry's mutex protects its counters.  To count in an entry
 * that it found earlier, a backend takes only the mutex, and then checks that "resets" is
 * unchanged: the entry still belongs to the same pair.
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "storage/spin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "algorithm/limits.h"
#include "key_text.h"
#include "shared/counters.h"

#define ENTRIES				1024
#define OTHERS				ENTRIES	/* the entry that counts for the others */
#define PROBES				32	/* entries that a pair may have */
#define MAX_SCOPE			64	/* bytes; a longer scope is cut */
#define COLUMNS				18
#define FOUND				8192	/* so that few of ENTRIES pairs share a place */

typedef struct Counts
{
	int64		outcomes[RL_OUTCOMES];
	int64		from[RL_STAT_LEASE + 1];	/* by RlStatFrom */
	int64		leased;			/* units */
	int64		leased_unused;	/* units */
	int64		settled;		/* reservations */
	int64		settled_less;	/* units that they cost less than was reserved */
	int64		settled_more;
	int64		round_trips;
	int64		redis_us;
} Counts;

typedef struct CounterEntry
{
	slock_t		mutex;			/* protects the counts */
	Counts		counts;
	/* The lock protects the members from here on. */
	int			scope_len;		/* 0: the key has no scope */
	char		scope[MAX_SCOPE];	/* in UTF-8 */
	RlLimits	limits;			/* none: free.  Last, so that one limit is near the rest */
} CounterEntry;

typedef struct Counters
{
	TimestampTz since;			/* set under the lock, read without it */
	uint32		resets;			/* increased under the lock, before the entries are
								 * emptied; read under it or under a mutex */
	CounterEntry entries[ENTRIES + 1];
} Counters;

/* An entry that this backend has found. */
typedef struct Found
{
	uint64		hash;			/* of the pair */
	CounterEntry *entry;		/* NULL: none */
	uint32		resets;			/* when it was found */
} Found;

static Counters *counters = NULL;
static LWLock *lock;

/* Empties an entry; the lock and its mutex are held, or the memory is not shared yet. */
static void
empty(CounterEntry *entry)
{
	entry->limits.kind = RL_LISTED;
	entry->limits.n = 0;
	memset(&entry->counts, 0, sizeof(Counts));
}

static void
attach(void *memory, LWLockPadded *locks, bool found)
{
	counters = memory;
	lock = &locks->lock;
	if (found)
		return;
	counters->since = GetCurrentTimestamp();
	counters->resets = 0;
	for (int i = 0; i <= ENTRIES; i++)
	{
		SpinLockInit(&counters->entries[i].mutex);
		empty(&counters->entries[i]);
	}
}

const RlSharedPart rl_counters_part = {.size = sizeof(Counters),.nlocks = 1,.attach = attach};

/* Returns the length of the key's scope: the text up to the first ':', 0 without one. */
static int
scope_length(const RlKey *key)
{
	const char *colon = memchr(key->data, ':', key->len);

	if (colon == NULL)
		return 0;
	return pg_encoding_mbcliplen(PG_UTF8, key->data, colon - key->data, MAX_SCOPE);
}

static uint64
pair_hash(const RlLimits *limits, const char *scope, int scope_len)
{
	return scope_len > 0 ?
		hash_bytes_extended((const unsigned char *) scope, scope_len, limits->hash) : limits->hash;
}

static bool
is_entry_of(const CounterEntry *entry, const RlLimits *limits, const char *scope, int scope_len)
{
	return entry->limits.hash == limits->hash && entry->scope_len == scope_len &&
		memcmp(entry->scope, scope, scope_len) == 0 && rl_limits_same(&entry->limits, limits);
}

/* Returns the entry of the limits and the scope, or a free one, or NULL. */
static CounterEntry *
find_entry(const RlLimits *limits, const char *scope, int scope_len)
{
	uint64		hash = pair_hash(limits, scope, scope_len);

	for (int i = 0; i < PROBES; i++)
	{
		CounterEntry *entry = &counters->entries[(hash + i) % ENTRIES];

		if (!rl_limits_given(&entry->limits) || is_entry_of(entry, limits, scope, scope_len))
			return entry;
	}
	return NULL;
}

/* Does the same, and makes a free entry theirs.  It is while counters->resets is *resets. */
static CounterEntry *
get_entry(const RlLimits *limits, const char *scope, int scope_len, uint32 *resets)
{
	CounterEntry *entry;

	LWLockAcquire(lock, LW_SHARED);
	entry = find_entry(limits, scope, scope_len);
	if (entry != NULL && !rl_limits_given(&entry->limits))
	{
		LWLockRelease(lock);
		LWLockAcquire(lock, LW_EXCLUSIVE);
		/* Another backend may have taken the entry meanwhile. */
		entry = find_entry(limits, scope, scope_len);
		if (entry != NULL)
		{
			rl_limits_copy(&entry->limits, limits);
			entry->scope_len = scope_len;
			memcpy(entry->scope, scope, scope_len);
		}
	}
	*resets = counters->resets;
	LWLockRelease(lock);
	return entry != NULL ? entry : &counters->entries[OTHERS];
}

/*
 * Returns this backend's record of their entry, which may have been reset since.
 *
 * A cache (src/README.md): entries by a hash of their pairs.  A pair without an entry of its own
 * is known by the hash alone, so another pair with the same hash is counted in OTHERS too.
 * Without the cache a local call takes 5 % longer, and calls under alternating limits 0.4 us.
 */
static Found *
get_found(const RlLimits *limits, const char *scope, int scope_len)
{
	static Found found[FOUND];
	static Found *last = &found[0];
	uint64		hash;

	/* The hash is not needed under the limits of the last call. */
	if (last->entry != NULL && last->entry != &counters->entries[OTHERS] &&
		is_entry_of(last->entry, limits, scope, scope_len))
		return last;
	hash = pair_hash(limits, scope, scope_len);
	last = &found[hash % FOUND];
	if (last->entry != NULL && last->hash == hash &&
		(last->entry == &counters->entries[OTHERS] || is_entry_of(last->entry, limits, scope, scope_len)))
		return last;
	last->entry = get_entry(limits, scope, scope_len, &last->resets);
	last->hash = hash;
	return last;
}

/* Returns the entry, with its mutex locked.  The key may be NULL. */
static CounterEntry *
lock_entry(const RlLimits *limits, const RlKey *key)
{
	int			scope_len = key != NULL ? scope_length(key) : 0;

	for (;;)
	{
		Found	   *found = get_found(limits, key != NULL ? key->data : "", scope_len);
		CounterEntry *entry = found->entry;

		SpinLockAcquire(&entry->mutex);
		/* After a reset the entry is free, or of others. */
		if (counters->resets == found->resets)
			return entry;
		SpinLockRelease(&entry->mutex);
		found->entry = NULL;
	}
}

/* Counts an action on the key.  Does nothing without shared memory.  Does not throw. */
void
rl_counters_add(const RlLimits *limits, const RlKey *key, RlStatOutcome outcome, RlStatFrom from,
				int64 round_trips, int64 redis_us)
{
	CounterEntry *entry;

	if (counters == NULL)
		return;
	entry = lock_entry(limits, key);
	entry->counts.outcomes[outcome]++;
	entry->counts.from[from]++;
	entry->counts.round_trips += round_trips;
	entry->counts.redis_us += redis_us;
	SpinLockRelease(&entry->mutex);
}

/* Counts units of leases, and unused ones.  The key may be NULL.  Needs shared memory.  Does not throw. */
void
rl_counters_add_lease(const RlLimits *limits, const RlKey *key, int64 leased, int64 unused)
{
	CounterEntry *entry = lock_entry(limits, key);

	entry->counts.leased += leased;
	/* The units that come back may have been counted before a reset. */
	entry->counts.leased_unused = Max(entry->counts.leased_unused + unused, 0);
	SpinLockRelease(&entry->mutex);
}

/*
 * Counts the settlement of a reservation, whose limits have this hash, at fewer or more units
 * than it had.  If this server has counted no action under these limits, the last entry counts
 * it.  Does nothing without shared memory.  Does not throw.
 */
void
rl_counters_add_settled(uint64 limits, const RlKey *key, int64 less, int64 more)
{
	RlLimits	hashed = {.hash = limits};
	int			scope_len = scope_length(key);
	CounterEntry *entry = NULL;

	if (counters == NULL)
		return;
	LWLockAcquire(lock, LW_SHARED);
	for (int i = 0; i < PROBES && entry == NULL; i++)
	{
		CounterEntry *at = &counters->entries[(pair_hash(&hashed, key->data, scope_len) + i) % ENTRIES];

		if (rl_limits_given(&at->limits) && at->limits.hash == limits && at->scope_len == scope_len &&
			memcmp(at->scope, key->data, scope_len) == 0)
			entry = at;
	}
	if (entry == NULL)
		entry = &counters->entries[OTHERS];
	SpinLockAcquire(&entry->mutex);
	entry->counts.settled++;
	entry->counts.settled_less += less;
	entry->counts.settled_more += more;
	SpinLockRelease(&entry->mutex);
	LWLockRelease(lock);
}

/* Returns the time of the last reset or of the server's start.  Needs shared memory. */
TimestampTz
rl_counters_since(void)
{
	return counters->since;
}

PG_FUNCTION_INFO_V1(rl_stat);
Datum
rl_stat(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;

	rl_require_shared("rl_stat");
	InitMaterializedSRF(fcinfo, 0);
	for (int i = 0; i <= ENTRIES; i++)
	{
		CounterEntry entry;
		int64		calls = 0;
		Datum		values[COLUMNS];
		bool		nulls[COLUMNS] = {false};
		int			n = 0;

		/* The texts are made without the lock: a scope's conversion may read catalogs. */
		LWLockAcquire(lock, LW_SHARED);
		SpinLockAcquire(&counters->entries[i].mutex);
		entry = counters->entries[i];
		SpinLockRelease(&counters->entries[i].mutex);
		LWLockRelease(lock);
		for (int o = 0; o < RL_OUTCOMES; o++)
			calls += entry.counts.outcomes[o];
		if (calls + entry.counts.leased_unused + entry.counts.settled == 0)
			continue;

		nulls[n] = (i == OTHERS);
		values[n++] = i == OTHERS ? (Datum) 0 : CStringGetTextDatum(rl_limits_text(&entry.limits));
		nulls[n] = (i == OTHERS || entry.scope_len == 0);
		values[n++] = nulls[1] ? (Datum) 0 :
			CStringGetTextDatum(rl_key_shown(entry.scope, entry.scope_len));
		for (int o = 0; o < RL_OUTCOMES; o++)
			values[n++] = Int64GetDatum(entry.counts.outcomes[o]);
		for (RlStatFrom from = RL_STAT_CACHE; from <= RL_STAT_LEASE; from++)
			values[n++] = Int64GetDatum(entry.counts.from[from]);
		values[n++] = Int64GetDatum(entry.counts.leased);
		values[n++] = Int64GetDatum(entry.counts.leased_unused);
		values[n++] = Int64GetDatum(entry.counts.settled);
		values[n++] = Int64GetDatum(entry.counts.settled_less);
		values[n++] = Int64GetDatum(entry.counts.settled_more);
		values[n++] = Int64GetDatum(entry.counts.round_trips);
		values[n++] = Float8GetDatum((double) entry.counts.redis_us / RL_SECOND);
		tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
	}
	return (Datum) 0;
}

PG_FUNCTION_INFO_V1(rl_stat_reset);
Datum
rl_stat_reset(PG_FUNCTION_ARGS pg_attribute_unused())
{
	rl_require_shared("rl_stat_reset");
	LWLockAcquire(lock, LW_EXCLUSIVE);
	counters->since = GetCurrentTimestamp();
	counters->resets++;
	for (int i = 0; i <= ENTRIES; i++)
	{
		SpinLockAcquire(&counters->entries[i].mutex);
		empty(&counters->entries[i]);
		SpinLockRelease(&counters->entries[i].mutex);
	}
	LWLockRelease(lock);
	PG_RETURN_VOID();
}
