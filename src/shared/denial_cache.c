/*
 * denial_cache.c
 *		Whom the limits refuse now: the view rl_denied, and the denial cache,
 *		which answers from it without asking Redis again.
 *
 * A refusal of cost c says that every cost of c or more is refused until the
 * wait is over: time only frees quota, and others only take it.  What gives
 * quota back on this server forgets the key here.  For what other servers give
 * back a refusal is believed for MAX_TRUST at most.  When an action on this
 * server takes quota, the figures of the refusals before it are out of date, and
 * they are not believed any more.  Both change the key's generation number, so
 * that a refusal that was asked for before is not kept.
 *
 * Entries lie in sets that one lock protects; a name's are in the same set.
 * Where a set is full, the entry nearest to its end goes.
 */
#include "postgres.h"

#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "port/atomics.h"
#include "storage/lwlock.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "algorithm/algorithm.h"
#include "algorithm/limits.h"
#include "shared/denial_cache.h"

#define SETS				256
#define WAYS				8
#define LOCKS				32
#define GENERATIONS			4096

/* Microseconds that a refusal is believed for, and until somebody asks anew. */
#define MAX_TRUST			RL_SECOND
#define ASK_ANEW			(MAX_TRUST * 6 / 10)

/* Between two notes of the same refusal by a backend, and a key's log lines. */
#define NOTE_INTERVAL		(RL_SECOND / 10)
#define LOG_INTERVAL		RL_SECOND

#define COLUMNS				6

typedef struct Entry
{
	RlKeyHash		name;
	RlLimits	limits;			/* n = 0: free */
	bool		debug;			/* the times are by ratelimit.debug_now */
	int64		quota;
	int64		asked;			/* on this server's clock, also the next two */
	int64		trusted_until;	/* answers until then; 0: not at all */
	int64		refused_until;
	pg_atomic_uint32 asking;	/* somebody asks anew */
	int			binding;
	RlDecision	decision;
	TimestampTz since;			/* of the first refusal without a gap */
	int64		logged;			/* stays when the entry is another's: so a flood of
								 * keys is no flood of lines */
	int			key_len;
	char		key[RL_MAX_KEY];
} Entry;

typedef struct Set
{
	Entry		entries[WAYS];
} Set;

typedef struct Cache
{
	/* Of keys, several of which share a number; raised before entries change. */
	pg_atomic_uint64 generations[GENERATIONS];
	Set			sets[SETS];		/* each is protected by a lock */
} Cache;

static Cache *cache = NULL;
static Set *sets = NULL;		/* the cache's */
static LWLockPadded *locks;

/* What this backend noted last, unless it has forgotten a key since. */
static struct
{
	bool		valid;
	RlKeyHash		name;
	RlLimits	limits;
	bool		debug;
	int64		asked;
	int64		until;
}			last;

Size
rl_denial_size(void)
{
	return sizeof(Cache);
}

int
rl_denial_locks(void)
{
	return LOCKS;
}

void
rl_denial_attach(void *memory, LWLockPadded *my_locks, bool found)
{
	cache = memory;
	sets = cache->sets;
	locks = my_locks;
	if (found)
		return;
	memset(cache, 0, sizeof(Cache));
	for (int i = 0; i < GENERATIONS; i++)
		pg_atomic_init_u64(&cache->generations[i], 0);
	for (int i = 0; i < SETS; i++)
		for (int j = 0; j < WAYS; j++)
			pg_atomic_init_u32(&sets[i].entries[j].asking, 0);
}

static Set *
lock_set(RlKeyHash name, LWLockMode mode)
{
	int			number = (name.hash >> 32) % SETS;

	LWLockAcquire(&locks[number % LOCKS].lock, mode);
	return &sets[number];
}

static void
unlock_set(const Set *set)
{
	LWLockRelease(&locks[(set - sets) % LOCKS].lock);
}

/* Returns true while ratelimit.debug_now is the clock. */
static bool
clock_is_debug(void)
{
	return rl_debug_now[0] != '\0';
}

/* Returns true if the entry is in use, for these limits and times by this clock. */
static bool
is_entry_of(const Entry *entry, RlKeyHash name, const RlLimits *limits)
{
	return rl_same_key_hash(entry->name, name) && entry->debug == clock_is_debug() &&
		rl_limits_same(&entry->limits, limits);
}

static Entry *
find_entry(Set *set, RlKeyHash name, const RlLimits *limits)
{
	for (int i = 0; i < WAYS; i++)
		if (is_entry_of(&set->entries[i], name, limits))
			return &set->entries[i];
	return NULL;
}

/*
 * True if it is known that the limits refuse the quota; sets the decision as
 * it is now.  Now and then it says false to one caller, who is to ask.
 */
bool
rl_denial_lookup(RlKeyHash name, const RlLimits *limits, int64 quota,
				 RlDecision *decision, int *binding)
{
	Set		   *set = lock_set(name, LW_SHARED);
	Entry	   *entry = find_entry(set, name, limits);
	bool		known = false;
	int64		now;
	int64		passed;

	if (entry != NULL && quota >= entry->quota && entry->trusted_until > 0)
	{
		uint32		nobody = 0;

		now = rl_local_now();
		passed = now - entry->asked;
		known = passed >= 0 && now < entry->trusted_until;
		for (int i = 0; i < limits->n; i++)
			known &= quota <= limits->limit[i].capacity;
		/* Who wants more than was refused would learn nothing of the rest. */
		if (known && passed >= ASK_ANEW && entry->trusted_until < entry->refused_until &&
			quota == entry->quota &&
			pg_atomic_compare_exchange_u32(&entry->asking, &nobody, 1))
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
generation_of(RlKeyHash name)
{
	return &cache->generations[name.rest % GENERATIONS];
}

/* To be read before asking, and handed to rl_denial_note after it. */
uint64
rl_denial_generation(RlKeyHash name)
{
	uint64		generation = pg_atomic_read_u64(generation_of(name));

	/* Before the request is sent. */
	pg_memory_barrier();
	return generation;
}

/* Until when the refusal holds, whatever this server's actions are. */
static int64
trusted_for(const RlLimits *limits, const RlDecision *decision)
{
	int64		wait = Min(decision->retry_after, MAX_TRUST);

	/* While a ban is in force attempts leave no trace that would be missed. */
	for (int i = 0; i < limits->n; i++)
		if (limits->limit[i].count_denied || limits->limit[i].ban > 0)
			wait = Min(wait, decision->ban_left);
	return wait;
}

/* The entry to put a refusal in: the one it has, a free one, or the first to end. */
static Entry *
choose_entry(Set *set, RlKeyHash name, const RlLimits *limits)
{
	Entry	   *entry = find_entry(set, name, limits);

	for (int i = 0; i < WAYS && entry == NULL; i++)
		if (set->entries[i].limits.n == 0)
			entry = &set->entries[i];
	if (entry != NULL)
		return entry;
	entry = &set->entries[0];
	for (int i = 1; i < WAYS; i++)
		if (set->entries[i].refused_until < entry->refused_until)
			entry = &set->entries[i];
	return entry;
}

/*
 * Notes a refusal that was asked for at that time and generation; cache says
 * whether it may serve as an answer.
 */
void
rl_denial_note(RlKeyHash name, const RlKey *key, const RlLimits *limits, int64 quota,
			   const RlDecision *decision, int binding, int64 asked,
			   uint64 generation, bool cache)
{
	int64		until = asked + decision->retry_after;
	Set		   *set;
	Entry	   *entry;

	/* Impossible is not refused for now, and a look is no action. */
	if (decision->retry_after == RL_NEVER || quota == 0)
		return;
	if (!cache && last.valid && rl_same_key_hash(name, last.name) && last.debug == clock_is_debug() &&
		rl_limits_same(&last.limits, limits) &&
		asked - last.asked < NOTE_INTERVAL && asked >= last.asked &&
		until - last.until < NOTE_INTERVAL && last.until - until < NOTE_INTERVAL)
		return;
	last.valid = true;
	last.name = name;
	last.limits = *limits;
	last.debug = clock_is_debug();
	last.asked = asked;
	last.until = until;

	set = lock_set(name, LW_EXCLUSIVE);
	if (generation == RL_ANY_GENERATION ||
		generation == pg_atomic_read_u64(generation_of(name)))
	{
		entry = find_entry(set, name, limits);
		if (entry != NULL && entry->quota < quota && entry->trusted_until > asked)
		{
			unlock_set(set);
			return;
		}
		entry = choose_entry(set, name, limits);
		if (!is_entry_of(entry, name, limits))
		{
			entry->name = name;
			entry->limits = *limits;
			entry->debug = clock_is_debug();
			entry->since = GetCurrentTimestamp();
			entry->key_len = key->len;
			memcpy(entry->key, key->data, key->len);
		}
		else if (entry->refused_until < asked)
			entry->since = GetCurrentTimestamp();
		entry->quota = quota;
		entry->asked = asked;
		entry->trusted_until = cache ? asked + trusted_for(limits, decision) : 0;
		entry->refused_until = until;
		entry->decision = *decision;
		entry->binding = binding;
		pg_atomic_write_u32(&entry->asking, 0);
	}
	unlock_set(set);
}

/* Forgets the key, to which quota is or may have been given back. */
void
rl_denial_delete_hash(RlKeyHash name)
{
	Set		   *set;

	last.valid = false;
	pg_atomic_fetch_add_u64(generation_of(name), 1);
	set = lock_set(name, LW_EXCLUSIVE);
	for (int i = 0; i < WAYS; i++)
		if (rl_same_key_hash(set->entries[i].name, name))
			set->entries[i].limits.n = 0;
	unlock_set(set);
}

/* The same; does nothing without shared memory. */
void
rl_denial_delete(const RlKey *key)
{
	if (sets != NULL)
		rl_denial_delete_hash(rl_key_hash(key));
}

/* Returns true if the entry would answer for limits that share a state with these. */
static bool
is_concerned(const Entry *entry, RlKeyHash name, const RlLimits *limits)
{
	if (entry->trusted_until == 0 || !rl_same_key_hash(entry->name, name))
		return false;
	for (int i = 0; limits != NULL && i < limits->n; i++)
		for (int j = 0; j < entry->limits.n; j++)
			if (rl_same_state(&limits->limit[i], &entry->limits.limit[j]))
				return true;
	return limits == NULL;
}

/*
 * Ends answers from refusals whose figures an action under these limits has
 * changed; NULL: under any limits.  A refusal of the same action may be noted
 * after that, for which *generation is corrected.  Does not throw.
 */
void
rl_denial_outdate(RlKeyHash name, const RlLimits *limits, uint64 *generation)
{
	uint64		before = pg_atomic_fetch_add_u64(generation_of(name), 1);
	Set		   *set = lock_set(name, LW_SHARED);
	bool		any = false;

	if (*generation == before)
		(*generation)++;
	for (int i = 0; i < WAYS; i++)
		any |= is_concerned(&set->entries[i], name, limits);
	unlock_set(set);
	if (!any)
		return;
	set = lock_set(name, LW_EXCLUSIVE);
	for (int i = 0; i < WAYS; i++)
		if (is_concerned(&set->entries[i], name, limits))
			set->entries[i].trusted_until = 0;
	unlock_set(set);
}

/* True if the refusal that was just noted may be logged: once a second. */
bool
rl_denial_may_log(RlKeyHash name, const RlLimits *limits)
{
	Set		   *set = lock_set(name, LW_EXCLUSIVE);
	Entry	   *entry = find_entry(set, name, limits);
	int64		now = rl_monotonic_now();
	bool		may = entry != NULL && (entry->logged == 0 || now - entry->logged >= LOG_INTERVAL);

	if (may)
		entry->logged = now;
	unlock_set(set);
	return may;
}

/* A key as text; where the encoding may lack a character it is escaped. */
static text *
key_text(const char *key, int len)
{
	StringInfoData text;

	if (GetDatabaseEncoding() == PG_UTF8)
		return cstring_to_text_with_len(key, len);
	initStringInfo(&text);
	for (int i = 0; i < len; i++)
	{
		if (IS_HIGHBIT_SET(key[i]))
			appendStringInfo(&text, "\\x%02x", (unsigned char) key[i]);
		else
			appendStringInfoChar(&text, key[i]);
	}
	return cstring_to_text_with_len(text.data, text.len);
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
		memcpy(copy, &sets[i], sizeof(Set));
		LWLockRelease(&locks[i % LOCKS].lock);
		for (int j = 0; j < WAYS; j++)
		{
			const Entry *entry = &copy->entries[j];
			const RlDecision *d = &entry->decision;
			Datum		values[COLUMNS];
			bool		nulls[COLUMNS] = {false};

			if (entry->limits.n == 0 || entry->refused_until <= now ||
				entry->debug != clock_is_debug())
				continue;
			values[0] = PointerGetDatum(key_text(entry->key, entry->key_len));
			values[1] = CStringGetTextDatum(rl_limits_text(&entry->limits));
			values[2] = Int64GetDatum(entry->quota);
			values[3] = BoolGetDatum(d->ban_left > 0);
			values[4] = TimestampTzGetDatum(entry->since);
			values[5] = Float8GetDatum((double) (entry->refused_until - now) / RL_SECOND);
			tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
		}
	}
	return (Datum) 0;
}
