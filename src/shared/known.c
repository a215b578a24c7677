/*
 * known.c
 *		What this server knows of a key under limits: denials and leases.
 *
 * Two answers are known without asking Redis.  A refusal stays true until its wait is over, so this
 * server can repeat it: a denial, which the view rl_denied shows and the denial cache uses.  And
 * quota that this server has taken ahead can be handed out here: a lease.  Both are in one table in
 * shared memory, by key and limits.  The table may forget any of them, because Redis is asked then,
 * but it must never allow an action that Redis would not have allowed.
 *
 * Denials: if quota c was refused, every quota of c or more is refused until the wait is over,
 * because time only frees quota and other calls only take it.  A refund or reset on this server
 * deletes the key's denials.  Those of other servers are not known here, so a denial answers for
 * MAX_TRUST at most.  When an action on this server takes quota, the denials of earlier refusals
 * no longer answer, and those that it contradicts are deleted.  Both increase the key's
 * generation number, so that a refusal that was asked for before is not stored.
 *
 * Leases: a key's use under limits with a lease is counted.  If it is high enough, the call that
 * asks Redis also charges the units that this server is likely to use within the lease's
 * length: a lot.  Other calls take units of it until it ends.  Then the units that are left are
 * leftovers, which the next call that asks Redis refunds.
 *
 * Never one action too many: a lot's time runs from before its call was sent, and units are used
 * when they are taken under the lock.  So no unit is used later than the lease's length after its
 * charge, and windows and lumps have not ended since.  A reset, a refund or a ban on this server
 * ends the key's lots, and changes the generation of its leases, so that a lot that was asked for
 * before becomes a leftover.
 *
 * A key's entries are in one set.  It has LEASES places for entries with a lease, which may also have a
 * denial, and DENIALS for entries with only a denial.  When the places for leases are full, the one
 * that is used least is evicted, and the units of its lots stay charged.  If its lots have units left, a
 * lease counts as used MIN_ACTIONS times more, so leases of rare keys without units go first.  When the
 * others are full, the denial with the earliest end is evicted, and is counted if it is in force.
 *
 * Locks: the LWLock of a set protects its entries; it serves several sets.  Only "asking" is
 * also changed under the shared lock, as an atomic.  The counters' locks may be taken while a
 * set is locked.  The generation numbers of keys are atomics, and are increased before the
 * entries change.
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
#include "key_text.h"
#include "shared/counters.h"
#include "shared/known.h"

#define SETS				256
#define LEASES				16	/* of a set */
#define DENIALS				8	/* of a set, without those of entries with a lease */
#define WAYS				(LEASES + DENIALS)
#define LOCKS				128
#define GENERATIONS			4096
#define LOTS				RL_MAX_LEFTOVERS	/* of a lease */

/* How long a denial answers, and when a backend asks Redis again meanwhile. */
#define MAX_TRUST			RL_SECOND
#define ASK_AGAIN			(MAX_TRUST * 6 / 10)

/* Between two notes of the same refusal by a backend. */
#define NOTE_INTERVAL		(RL_SECOND / 10)

/* With fewer actions within a lease's length, each of them asks Redis. */
#define MIN_ACTIONS			16

#define MAX_WANT			1e9

#define COLUMNS				7

/* A refusal. */
typedef struct Denial
{
	int64		quota;			/* 0: none */
	/* These three times are on this server's clock. */
	int64		asked;
	int64		trusted_until;	/* it answers until then; 0: never */
	int64		refused_until;
	pg_atomic_uint32 asking;	/* 1: a backend asks Redis again */
	int			binding;
	RlDecision	decision;		/* its ban_rule only says whether a text follows the key */
	TimestampTz since;			/* first of the refusals without a gap */
	Oid			database;		/* of the last refusal */
	int			key_len;
	char		key[RL_MAX_KEY];	/* then the limit that set the ban, if there is room */
} Denial;

/* Units that one call has charged ahead. */
typedef struct Lot
{
	int64		units;			/* left */
	/* These two times are on the lease clock. */
	int64		ends;
	int64		renew_at;		/* a quarter of the length before the end; never:
								 * PG_INT64_MAX */
	uint64		id;
	int64		at;				/* of the charge, as in RlCharge */
	int64		place[RL_MAX_LIMITS];
	int64		life;			/* as in RlLeftover */
} Lot;

/* The use of a key, and its lots.  Times are on the lease clock. */
typedef struct Lease
{
	uint64		generation;		/* changes when its lots are ended; 0: no lease */
	int64		length;			/* as real_length */
	int64		window;			/* start of the span in which use is counted */
	double		units;			/* used in it */
	double		units_before;	/* in the span before */
	int64		actions;
	int64		actions_before;
	uint64		claim;			/* of the call that renews */
	int64		claim_ends;
	int64		size;			/* units of all lots after the last one was made */
	int64		decided;		/* the time of the decision */
	RlDecision	decision;		/* of the last lot; its units are not free */
	int			binding;
	Lot			lots[LOTS];
} Lease;

/* What is known of a key under limits: a denial, a lease or both, or else it is free.  Locked by its set. */
typedef struct Entry
{
	RlLimits	limits;			/* listed */
	int			clocks;			/* by which its times are, as clocks() */
	Denial		denial;
	Lease		lease;
} Entry;

typedef struct Set
{
	RlKeyHash	keys[WAYS];		/* of the entries */
	Entry		entries[WAYS];
} Set;

typedef struct Table
{
	pg_atomic_uint64 generations[GENERATIONS];	/* of denials; several keys share one */
	pg_atomic_uint64 evicted;	/* denials in force that were evicted */
	pg_atomic_uint64 ids;		/* the last id of a lot or a claim, or generation of a lease */
	pg_atomic_uint32 leases;
	Set			sets[SETS];		/* locks[i % LOCKS] protects set i */
} Table;

static Table *table = NULL;
static LWLockPadded *locks;

/*
 * A cache (src/README.md): the last refusal that this backend noted.  Without it a refused call
 * of the local store takes 4 % longer, and locks a set exclusively.
 */
static struct
{
	RlKeyHash	key_hash;
	RlLimits	limits;			/* n = 0: none */
	int			clocks;
	int64		asked;
	int64		refused_until;
}			last;

static void
attach(void *memory, LWLockPadded *my_locks, bool found)
{
	table = memory;
	locks = my_locks;
	if (found)
		return;
	memset(table, 0, sizeof(Table));
	pg_atomic_init_u64(&table->evicted, 0);
	pg_atomic_init_u64(&table->ids, 0);
	pg_atomic_init_u32(&table->leases, 0);
	for (int i = 0; i < GENERATIONS; i++)
		pg_atomic_init_u64(&table->generations[i], 0);
}

const RlSharedPart rl_known_part = {.size = sizeof(Table),.nlocks = LOCKS,.attach = attach};

static Set *
lock_set(RlKeyHash key_hash, LWLockMode mode)
{
	int			number = (key_hash.low >> 32) % SETS;

	LWLockAcquire(&locks[number % LOCKS].lock, mode);
	return &table->sets[number];
}

static void
unlock_set(const Set *set)
{
	LWLockRelease(&locks[(set - table->sets) % LOCKS].lock);
}

/*
 * Returns 1 while ratelimit.debug_now is the clock of denials, and 2 more while debug_clock is the lease
 * clock.
 */
static int
clocks(void)
{
	return (rl_debug_now[0] != '\0') + 2 * (rl_debug_clock[0] != '\0');
}

static int64
lease_now(void)
{
	return rl_debug_clock[0] != '\0' ? strtoll(rl_debug_clock, NULL, 10) : rl_boottime_now();
}

/* Returns true if there can be leases: with shared memory, and not on Redis's test clock alone. */
bool
rl_leases_available(void)
{
	return table != NULL && clocks() != 1;
}

static uint64
new_id(void)
{
	return pg_atomic_add_fetch_u64(&table->ids, 1);
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

static bool
has_denial(const Entry *entry)
{
	return entry->denial.quota > 0;
}

static bool
has_lease(const Entry *entry)
{
	return entry->lease.generation != 0;
}

static bool
has_present_lease(const Entry *entry)
{
	return has_lease(entry) && entry->clocks == clocks();
}

static bool
is_free(const Entry *entry)
{
	return !has_denial(entry) && !has_lease(entry);
}

/* Returns the key's next entry after that one, or its first, or NULL.  It may be free. */
static inline Entry *
next_entry(Set *set, RlKeyHash key_hash, const Entry *entry)
{
	for (int i = entry != NULL ? entry - set->entries + 1 : 0; i < WAYS; i++)
		if (rl_same_key_hash(set->keys[i], key_hash))
			return &set->entries[i];
	return NULL;
}

#define foreach_entry(entry, set, key_hash) \
	for (Entry *entry = next_entry(set, key_hash, NULL); entry != NULL; \
		 entry = next_entry(set, key_hash, entry))

static bool
is_entry_of(const Entry *entry, const RlLimits *limits)
{
	return !is_free(entry) && entry->clocks == clocks() && rl_limits_same(&entry->limits, limits);
}

/* Returns the key's entry under these limits, on the present clocks, or NULL. */
static Entry *
find_entry(Set *set, RlKeyHash key_hash, const RlLimits *limits)
{
	foreach_entry(entry, set, key_hash)
		if (is_entry_of(entry, limits))
			return entry;
	return NULL;
}

static void
roll(Lease *lease, int64 now)
{
	int64		passed = now - lease->window;
	bool		next = passed >= 0 && passed < 2 * lease->length;

	if (passed >= 0 && passed < lease->length)
		return;
	lease->units_before = next ? lease->units : 0;
	lease->actions_before = next ? lease->actions : 0;
	lease->window = next ? lease->window + lease->length : now;
	lease->units = lease->actions = 0;
}

/* Returns the lease's actions in two spans, and a lease's fewest actions more if it has units. */
static int64
worth(const Lease *lease)
{
	int64		actions = lease->actions + lease->actions_before;

	for (const Lot *lot = lease->lots; lot < lease->lots + LOTS; lot++)
		if (lot->units > 0)
			return actions + MIN_ACTIONS;
	return actions;
}

/* Returns the lot's units, and counts them as unused, unless the key is not known. */
static int64
end_lot(const RlLimits *limits, const RlKey *key, Lot *lot)
{
	int64		units = lot->units;

	if (units > 0)
		rl_counters_add_lease(limits, key, 0, units);
	lot->units = 0;
	lot->ends = 0;
	return units;
}

/* If the set has more than "most", evicts the least used lease, or denial without one that ends first. */
static void
evict(Set *set, bool leases, int most)
{
	int64		now = leases ? lease_now() : rl_local_now();
	Entry	   *worst = NULL;
	int64		least = 0;
	int			n = 0;

	for (int i = 0; i < WAYS; i++)
	{
		Entry	   *entry = &set->entries[i];
		int64		value;

		if (has_lease(entry) != leases || is_free(entry))
			continue;
		if (leases && (entry->clocks & 2) == (clocks() & 2))
			roll(&entry->lease, now);
		value = leases ? worth(&entry->lease) : entry->denial.refused_until;
		if (n++ == 0 || value < least)
		{
			worst = entry;
			least = value;
		}
	}
	if (n <= most)
		return;
	if (leases)
	{
		for (int i = 0; i < LOTS; i++)
			end_lot(&worst->limits, NULL, &worst->lease.lots[i]);
		worst->lease.generation = 0;
		pg_atomic_fetch_sub_u32(&table->leases, 1);
		return;
	}
	if (worst->denial.refused_until > now && (worst->clocks & 1) == (clocks() & 1))
		pg_atomic_fetch_add_u64(&table->evicted, 1);
	worst->denial.quota = 0;
}

/* Returns a new entry.  A lease that is evicted may leave a denial, which then needs a place of its own. */
static Entry *
make_entry(Set *set, RlKeyHash key_hash, const RlLimits *limits, bool lease)
{
	int			i = 0;

	if (lease)
		evict(set, true, LEASES - 1);
	evict(set, false, lease ? DENIALS : DENIALS - 1);
	while (!is_free(&set->entries[i]))
		i++;
	Assert(i < WAYS);
	set->keys[i] = key_hash;
	rl_limits_copy(&set->entries[i].limits, limits);
	set->entries[i].clocks = clocks();
	return &set->entries[i];
}

/*
 * Denials
 */

static pg_atomic_uint64 *
generation_of(RlKeyHash key_hash)
{
	return &table->generations[key_hash.high % GENERATIONS];
}

/*
 * Returns true if the entry refuses the quota, and sets the answer, as it is now.  After
 * ASK_AGAIN it returns false to one caller, whose call renews the denial.
 */
static bool
refuses(Entry *entry, int64 quota, RlAnswer *answer)
{
	Denial	   *denial = &entry->denial;
	RlDecision *decision = &answer->decision;
	uint32		none = 0;
	int64		now;
	int64		passed;

	if (!has_denial(entry) || quota < denial->quota || denial->trusted_until == 0)
		return false;
	now = rl_local_now();
	passed = now - denial->asked;
	if (passed < 0 || now >= denial->trusted_until)
		return false;
	for (int i = 0; i < entry->limits.n; i++)
		if (quota > entry->limits.limit[i].capacity && !entry->limits.limit[i].shadow)
			return false;
	/* A refusal of more quota would tell nothing about this quota. */
	if (passed >= ASK_AGAIN && denial->trusted_until < denial->refused_until &&
		quota == denial->quota && pg_atomic_compare_exchange_u32(&denial->asking, &none, 1))
		return false;
	*decision = denial->decision;
	answer->binding = denial->binding;
	decision->source = RL_FROM_DENIAL_CACHE;
	decision->retry_after -= passed;
	decision->reset_after = Max(decision->reset_after - passed, 0);
	if (decision->ban_left > 0)
	{
		char	   *rule = palloc_extended(RL_MAX_LIMIT_TEXT, MCXT_ALLOC_NO_OOM);

		decision->ban_left = Max(decision->ban_left - passed, 1);
		decision->ban_rule = decision->ban_rule && rule ? strcpy(rule, denial->key + denial->key_len) : NULL;
	}
	return true;
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

static bool
is_to_note(const RlKnown *known, const RlAction *action, const RlAnswer *answer)
{
	int64		late = known->asked + answer->decision.retry_after - last.refused_until;

	/* Skip requests above capacity, and quota 0. */
	if (answer->decision.allowed || answer->decision.retry_after == RL_NEVER || action->quota == 0 ||
		(action->how != RL_TAKE && rl_mode != RL_MODE_SHADOW))
		return false;
	return (known->may_refuse && !answer->local) ||
		!rl_same_key_hash(last.key_hash, known->key_hash) || last.clocks != clocks() ||
		!rl_limits_same(&last.limits, action->limits) ||
		known->asked - last.asked >= NOTE_INTERVAL || known->asked < last.asked ||
		late >= NOTE_INTERVAL || -late >= NOTE_INTERVAL;
}

/* Does nothing if the key's generation has changed since the store was asked. */
static void
note_denial(Set *set, Entry *entry, const RlKnown *known, const RlAction *action, const RlAnswer *answer)
{
	const RlDecision *decision = &answer->decision;
	int64		until = known->asked + decision->retry_after;
	size_t		room = RL_MAX_KEY - action->key.len;
	Denial	   *denial;

	last.key_hash = known->key_hash;
	rl_limits_copy(&last.limits, action->limits);
	last.clocks = clocks();
	last.asked = known->asked;
	last.refused_until = until;

	if (known->generation != RL_ANY_GENERATION &&
		known->generation != pg_atomic_read_u64(generation_of(known->key_hash)))
		return;
	if (entry == NULL)
		entry = make_entry(set, known->key_hash, action->limits, false);
	denial = &entry->denial;
	if (!has_denial(entry))
	{
		denial->since = GetCurrentTimestamp();
		denial->key_len = action->key.len;
		memcpy(denial->key, action->key.data, action->key.len);
	}
	/* One that answers for a smaller quota stays. */
	else if (denial->quota < action->quota && denial->trusted_until > known->asked)
		return;
	else if (denial->refused_until < known->asked)
		denial->since = GetCurrentTimestamp();
	denial->database = MyDatabaseId;
	denial->quota = action->quota;
	denial->asked = known->asked;
	denial->trusted_until = known->may_refuse && !answer->local ?
		known->asked + trusted_for(action->limits, decision) : 0;
	denial->refused_until = until;
	denial->decision = *decision;
	if (decision->ban_left > 0 && decision->ban_rule != NULL &&
		strlcpy(denial->key + denial->key_len, decision->ban_rule, room) >= room)
		denial->decision.ban_rule = NULL;
	denial->binding = answer->binding;
	pg_atomic_init_u32(&denial->asking, 0);
}

/*
 * Ends answers from denials whose figures the action has changed: those under limits that share
 * a state with its limits, or all of the key.  Deletes those that it contradicts: if it was
 * allowed, those of at most its quota under its limits, and bans.  Without "change" only returns
 * true if there are some.
 */
static bool
outdate(Set *set, RlKeyHash key_hash, const RlAction *action, bool allowed, bool all, bool change)
{
	bool		any = false;

	foreach_entry(entry, set, key_hash)
	{
		Denial	   *denial = &entry->denial;
		bool		contradicted;
		bool		concerned;

		if (!has_denial(entry))
			continue;
		contradicted = allowed &&
			((denial->decision.ban_left > 0 && !rl_all_shadow(action->limits)) ||
			 (action->quota >= denial->quota && is_entry_of(entry, action->limits)));
		concerned = denial->trusted_until > 0 &&
			(all || rl_limits_share_state(action->limits, &entry->limits));
		any |= contradicted || concerned;
		if (change && contradicted)
			last.limits.n = denial->quota = 0;
		else if (change && concerned)
			denial->trusted_until = 0;
	}
	return any;
}

static void
delete_denials(Set *set, RlKeyHash key_hash)
{
	last.limits.n = 0;
	pg_atomic_fetch_add_u64(generation_of(key_hash), 1);
	foreach_entry(entry, set, key_hash)
		entry->denial.quota = 0;
}

/*
 * Taking from a lease
 */

/* Returns the units used within the last real length; 0: too few actions.  The lease is rolled to now. */
static int64
recent_use(const Lease *lease, int64 now)
{
	double		part = 1 - (now - lease->window) / (double) Max(lease->length, 1);

	/* An estimate for the last length would count actions that are longer ago. */
	if (Max(lease->actions, lease->actions_before) < MIN_ACTIONS)
		return 0;
	return (int64) Min(lease->units + part * lease->units_before, MAX_WANT);
}

/* Returns the units of lots that are live, or of those that have ended. */
static int64
units_of(const Lease *lease, int64 now, bool live)
{
	int64		units = 0;

	for (const Lot *lot = lease->lots; lot < lease->lots + LOTS; lot++)
		if ((now < lot->ends) == live)
			units += lot->units;
	return units;
}

/* Returns the lot that ends first of those that have the units, or NULL. */
static Lot *
find_lot(Lease *lease, int64 quota, int64 now)
{
	Lot		   *found = NULL;

	for (Lot *lot = lease->lots; lot < lease->lots + LOTS; lot++)
		if (now < lot->ends && lot->units >= quota && (found == NULL || lot->ends < found->ends))
			found = lot;
	return found;
}

/* Returns true if a call is to renew the lease: a quarter of the units or of the time is left. */
static bool
wants_renewal(const Lease *lease, int64 now)
{
	int64		units = units_of(lease, now, true);
	int64		renew_at = 0;
	int64		use;

	for (const Lot *lot = lease->lots; lot < lease->lots + LOTS; lot++)
		if (lot->units > 0 && now < lot->ends)
			renew_at = Max(renew_at, lot->renew_at);
	/* Most calls end here, without the division of recent_use. */
	if ((now < renew_at && units > lease->size / 4) || (lease->claim != 0 && now < lease->claim_ends))
		return false;
	use = recent_use(lease, now);
	return use > 0 && (now >= renew_at || units <= Min(lease->size, use) / 4);
}

/*
 * Answers the action, which happens now, from the key's lease, and sets the charges and the
 * lot.  Otherwise returns false, and sets *ask if the store is to be asked: to refund leftovers,
 * or with "renew" to renew the lease, also if it has the units.
 */
static bool
take_leased(Entry *entry, const RlAction *action, bool renew, RlAnswer *answer, RlCharge *charges,
			uint64 *lot_id, bool *ask)
{
	Lease	   *lease = &entry->lease;
	RlDecision *decision = &answer->decision;
	int64		now;
	Lot		   *lot;

	if (!has_lease(entry))
		return false;
	now = lease_now();
	lot = find_lot(lease, action->quota, now);
	roll(lease, now);
	if (lot == NULL || (renew && wants_renewal(lease, now)))
	{
		*ask = lot != NULL || units_of(lease, now, false) > 0;
		return false;
	}
	lot->units -= action->quota;
	lease->units += action->quota;
	lease->actions++;
	*decision = lease->decision;
	decision->source = RL_FROM_LEASE;
	decision->remaining = Min(decision->remaining + units_of(lease, now, true), decision->capacity);
	decision->reset_after = Max(decision->reset_after - Max(now - lease->decided, 0), 0);
	for (int i = 0; i < entry->limits.n; i++)
		charges[i] = rl_charge_of(&entry->limits.limit[i], action->quota, lot->at, lot->place[i], 0);
	answer->binding = lease->binding;
	answer->at = (RlTimes) {lot->at, lot->at};
	answer->local = false;
	*lot_id = lot->id;
	return true;
}

/*
 * Asking for a lease
 */

static void
take_leftover(const Entry *entry, const RlKey *key, Lot *lot, RlLeftover *left)
{
	left->at = lot->at;
	left->life = lot->life;
	memcpy(left->place, lot->place, sizeof(left->place));
	left->units = end_lot(&entry->limits, key, lot);
}

/* Returns the lot whose place a new one gets: that with the fewest units, or none. */
static Lot *
replaced_lot(Lease *lease)
{
	Lot		   *fewest = lease->lots;

	for (Lot *lot = lease->lots + 1; lot < lease->lots + LOTS; lot++)
		if (lot->units < fewest->units || (lot->units == fewest->units && lot->ends < fewest->ends))
			fewest = lot;
	return fewest;
}

static void
ask_lease(Entry *entry, const RlKey *key, RlLeaseCall *call)
{
	Lease	   *lease = &entry->lease;
	int64		now = call->asked;
	double		length = Max(lease->length, 1);
	int64		use;

	roll(lease, now);
	call->generation = lease->generation;
	for (Lot *lot = lease->lots; lot < lease->lots + LOTS; lot++)
		if (lot->units > 0 && now >= lot->ends)
			take_leftover(entry, key, lot, &call->left[call->nleft++]);
	use = recent_use(lease, now);
	if (use == 0 || (lease->claim != 0 && now < lease->claim_ends))
		return;
	/* The new lot needs a place. */
	if (replaced_lot(lease)->units > 0)
		take_leftover(entry, key, replaced_lot(lease), &call->left[call->nleft++]);
	call->want = use;
	/* Units of a lot that ends soon are used until then. */
	for (const Lot *lot = lease->lots; lot < lease->lots + LOTS; lot++)
		if (lot->units > 0 && now < lot->ends)
			call->want -= Min(lot->units, (int64) (use * Min((lot->ends - now) / length, 1.0)));
	call->want = Max(call->want, 1);
	call->claim = lease->claim = new_id();
	lease->claim_ends = now + (int64) rl_command_timeout * 1000;
}

/* If "stale", the key was repaired during the call, and the lot is a leftover. */
static void
store_lot(Entry *entry, const RlKey *key, const RlLeaseCall *call, const RlAnswer *answer,
		  const RlCharge *charges, bool stale)
{
	Lease	   *lease = &entry->lease;
	Lot		   *lot = replaced_lot(lease);
	int64		length = real_length(call->valid);

	/* Units came during the call, by a rollback or by other calls after a repair.  They are lost. */
	end_lot(&entry->limits, key, lot);
	lot->units = call->granted;
	lot->ends = stale ? 0 : call->asked + length;
	/* A lot that ends with a window cannot be renewed before. */
	lot->renew_at = call->valid < call->length ? PG_INT64_MAX : lot->ends - length / 4;
	lot->id = new_id();
	lot->at = answer->at.store;
	lot->life = call->life;
	for (int i = 0; i < entry->limits.n; i++)
		lot->place[i] = charges[i].place;
	if (stale)
		return;
	lease->decision = answer->decision;
	lease->binding = answer->binding;
	lease->decided = call->asked;
}

/*
 * Counts the use of an action that is allowed, and stores its lot, whose units the decision
 * does not count as free.  Returns the key's entry, if it has or gets one.
 */
static Entry *
note_lease(Set *set, Entry *entry, const RlKnown *known, const RlAction *action, const RlAnswer *answer,
		   const RlCharge *charges)
{
	const RlLeaseCall *call = action->lease;
	bool		allowed = answer->decision.allowed;
	int64		now = lease_now();
	Lease	   *lease;

	if (entry == NULL || !has_lease(entry))
	{
		if (!allowed)
			return entry;
		if (entry == NULL)
			entry = make_entry(set, known->key_hash, action->limits, true);
		else
			evict(set, true, LEASES - 1);
		entry->lease = (Lease) {.generation = new_id(),.window = now};
		entry->lease.length = real_length(rl_lease_length(action->limits));
		pg_atomic_fetch_add_u32(&table->leases, 1);
	}
	lease = &entry->lease;
	roll(lease, now);
	/* No later call renews because of a time for which this one has renewed. */
	if (call->claim != 0 && lease->claim == call->claim)
	{
		lease->claim = 0;
		for (int i = 0; i < LOTS; i++)
			lease->lots[i].renew_at = PG_INT64_MAX;
	}
	lease->units += allowed ? action->quota : 0;
	lease->actions += allowed;
	if (allowed && call->granted > 0)
	{
		rl_counters_add_lease(action->limits, &action->key, call->granted, 0);
		store_lot(entry, &action->key, call, answer, charges, call->generation != lease->generation);
	}
	if (call->claim != 0)
		lease->size = units_of(lease, now, true);
	return entry;
}

/*
 * Ends the key's leases, under whatever limits.  Their units become leftovers, unless their
 * charges are deleted: by a reset of all of the key, or of the states of the limits if not
 * NULL.
 */
static void
end_leases(Set *set, RlKeyHash key_hash, const RlKey *key, bool reset, const RlLimits *limits)
{
	foreach_entry(entry, set, key_hash)
	{
		if (!has_lease(entry))
			continue;
		entry->lease.generation = new_id();
		for (Lot *lot = entry->lease.lots; lot < entry->lease.lots + LOTS; lot++)
		{
			if (reset && (limits == NULL || rl_limits_share_state(limits, &entry->limits)))
				end_lot(&entry->limits, key, lot);
			lot->ends = 0;
		}
	}
}

/*
 * The sequence of an action
 */

/*
 * Answers the action from its key's lease if action->lease is not NULL, or with may_refuse from
 * its denial.  Sets the charges and *lot if the lease has answered.  Returns false if the store
 * is to be asked: neither answers, or with "renew" this call is to renew the lease.  Needs
 * shared memory; a lease needs rl_leases_available.  Does not throw.
 */
bool
rl_known_answer(const RlKnown *known, const RlAction *action, bool renew, bool may_refuse,
				RlAnswer *answer, RlCharge *charges, uint64 *lot)
{
	Set		   *set = lock_set(known->key_hash, action->lease != NULL ? LW_EXCLUSIVE : LW_SHARED);
	Entry	   *entry = find_entry(set, known->key_hash, action->limits);
	bool		answered = false;
	bool		ask = false;

	if (entry != NULL && action->lease != NULL)
		answered = take_leased(entry, action, renew, answer, charges, lot, &ask);
	if (entry != NULL && !answered && !ask && may_refuse)
		answered = refuses(entry, action->quota, answer);
	unlock_set(set);
	return answered;
}

/*
 * Begins a call that asks Redis for the action at that time (rl_local_now), before it is sent,
 * and sets what it asks for the lease.  If it is not sent, rl_known_not_asked must be called; if
 * it fails otherwise, its leftovers are lost.  Needs shared memory.  Does not throw.
 */
void
rl_known_ask(RlKnown *known, const RlAction *action, int64 now)
{
	RlLeaseCall *call = action->lease;

	known->asked = now;
	if (call != NULL)
	{
		Set		   *set = lock_set(known->key_hash, LW_EXCLUSIVE);
		Entry	   *entry = find_entry(set, known->key_hash, action->limits);

		memset(call, 0, offsetof(RlLeaseCall, left));
		call->granted = 0;
		call->asked = lease_now();
		call->length = rl_lease_length(action->limits);
		if (entry != NULL && has_lease(entry))
			ask_lease(entry, &action->key, call);
		/* The refund may free quota that a denial believes taken. */
		if (call->nleft > 0)
			delete_denials(set, known->key_hash);
		unlock_set(set);
	}
	known->generation = pg_atomic_read_u64(generation_of(known->key_hash));
	/* The request must not be sent before the read. */
	pg_memory_barrier();
}

/* Returns a call's leftovers to the key, because it was not sent.  Does not throw. */
void
rl_known_not_asked(const RlKnown *known, const RlAction *action)
{
	RlLeaseCall *call = action->lease;
	Set		   *set;
	Entry	   *entry;

	if (call == NULL || call->nleft == 0)
		return;
	set = lock_set(known->key_hash, LW_EXCLUSIVE);
	entry = find_entry(set, known->key_hash, action->limits);
	/* The lease may have been evicted meanwhile, or have new lots. */
	while (call->nleft > 0 && entry != NULL && has_lease(entry) && replaced_lot(&entry->lease)->units == 0)
	{
		const RlLeftover *left = &call->left[--call->nleft];
		Lot		   *lot = replaced_lot(&entry->lease);

		*lot = (Lot) {
			.units = left->units,.renew_at = PG_INT64_MAX,.id = new_id(),
			.at = left->at,.life = left->life
		};
		memcpy(lot->place, left->place, sizeof(lot->place));
		rl_counters_add_lease(action->limits, &action->key, 0, -left->units);
	}
	call->nleft = 0;
	unlock_set(set);
}

/*
 * Notes what a store has answered: outdates denials, ends leases if the key is banned, stores
 * the lot or the refusal. charges has the charge of each limit if the action has a lease and is
 * allowed.  If it is refused, the lease may have the units: then sets the answer and the
 * charges, and returns the lot, otherwise 0.  Needs shared memory.  Does not throw.
 */
uint64
rl_known_note(RlKnown *known, const RlAction *action, RlAnswer *answer, RlCharge *charges)
{
	const RlLimits *limits = action->limits;
	RlDecision *decision = &answer->decision;
	bool		allowed = decision->allowed;
	bool		by_redis = decision->source == RL_FROM_REDIS && action->quota > 0;
	bool		changed = by_redis && allowed;
	bool		may_ban = false;	/* a ban is in force under all limits */
	bool		banned = decision->ban_left > 0 || decision->ban_started;
	bool		leases = action->lease != NULL && !answer->local;
	bool		refused = is_to_note(known, action, answer);
	uint64		lot = 0;
	Set		   *set;
	Entry	   *entry = NULL;

	for (int i = 0; by_redis && i < limits->n && !allowed && action->how == RL_TAKE; i++)
	{
		changed |= limits->limit[i].count_denied;
		may_ban |= limits->limit[i].ban > 0;
	}
	changed |= may_ban;
	if (changed)
	{
		uint64		before = pg_atomic_fetch_add_u64(generation_of(known->key_hash), 1);

		/* A refusal of the same action can still be noted. */
		if (known->generation == before)
			known->generation++;
	}
	if (!banned && !leases && !refused)
	{
		if (!changed)
			return 0;
		set = lock_set(known->key_hash, LW_SHARED);
		changed = outdate(set, known->key_hash, action, allowed, may_ban, false);
		unlock_set(set);
		if (!changed)
			return 0;
	}
	set = lock_set(known->key_hash, LW_EXCLUSIVE);
	if (changed)
		outdate(set, known->key_hash, action, allowed, may_ban, true);
	if (banned)
		end_leases(set, known->key_hash, &action->key, false, NULL);
	if (leases && action->lease->nleft > 0)
		delete_denials(set, known->key_hash);
	if (leases || refused)
		entry = find_entry(set, known->key_hash, limits);
	if (leases)
	{
		bool		ask;

		entry = note_lease(set, entry, known, action, answer, charges);
		if (allowed)
			decision->remaining = Min(decision->remaining + action->lease->granted, decision->capacity);
		else if (entry != NULL)
			(void) take_leased(entry, action, false, answer, charges, &lot, &ask);
	}
	if (refused && lot == 0)
		note_denial(set, entry, known, action, answer);
	unlock_set(set);
	return lot;
}

/*
 * Other changes of a key
 */

/* Deletes the key's denials, for a refund that may have been.  Needs shared memory.  Does not throw. */
void
rl_known_refunded(RlKeyHash key_hash)
{
	Set		   *set = lock_set(key_hash, LW_EXCLUSIVE);

	delete_denials(set, key_hash);
	unlock_set(set);
}

/*
 * Ends the key's leases, deletes its denials, or both.  To be called before and after a command
 * that resets, refunds or bans the key, or settles (denials only), and after a report of a ban
 * (leases only).  With RL_RESET, the limits are those whose states are deleted, or NULL.  Needs
 * no shared memory.  Does not throw.
 */
void
rl_known_end(const RlKey *key, RlKnownEnd end, const RlLimits *limits)
{
	RlKeyHash	key_hash;
	Set		   *set;

	if (!rl_shared_available())
		return;
	key_hash = rl_key_hash(key);
	set = lock_set(key_hash, LW_EXCLUSIVE);
	if (end != RL_END_LEASES)
		delete_denials(set, key_hash);
	if (end != RL_END_DENIALS)
		end_leases(set, key_hash, key, end == RL_RESET, limits);
	unlock_set(set);
}

/* Returns units to the lot that had them, or returns false if it has ended.  Does not throw. */
bool
rl_known_return(RlKeyHash key_hash, uint64 lot, int64 units)
{
	Set		   *set;
	bool		found = false;

	if (!rl_leases_available())
		return false;
	set = lock_set(key_hash, LW_EXCLUSIVE);
	foreach_entry(entry, set, key_hash)
		for (Lot *l = entry->lease.lots; l < entry->lease.lots + LOTS && has_present_lease(entry) &&
			 !found; l++)
		{
			found = l->id == lot && lease_now() < l->ends;
			l->units += found ? units : 0;
		}
	unlock_set(set);
	return found;
}

/* Takes a leftover, and sets the limits that it was charged to.  Returns false if none.  Does not throw. */
bool
rl_known_leftover(const RlKey *key, RlLimits *limits, RlLeftover *left)
{
	RlKeyHash	key_hash;
	Set		   *set;

	if (!rl_leases_available() || pg_atomic_read_u32(&table->leases) == 0)
		return false;
	left->units = 0;
	key_hash = rl_key_hash(key);
	set = lock_set(key_hash, LW_EXCLUSIVE);
	foreach_entry(entry, set, key_hash)
		for (Lot *lot = entry->lease.lots; lot < entry->lease.lots + LOTS && has_present_lease(entry); lot++)
			if (left->units == 0 && lot->units > 0 && lease_now() >= lot->ends)
			{
				*limits = entry->limits;
				take_leftover(entry, key, lot, left);
			}
	unlock_set(set);
	return left->units > 0;
}

/*
 * What users see
 */

/* Sets how full the table is.  Needs shared memory. */
void
rl_known_fill(RlKnownFill *fill)
{
	fill->leases = pg_atomic_read_u32(&table->leases);
	fill->max_leases = SETS * LEASES;
	fill->denials_evicted = pg_atomic_read_u64(&table->evicted);
}

PG_FUNCTION_INFO_V1(rl_denied);
Datum
rl_denied(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	Entry	   *copy;
	int64		now;

	rl_require_shared("rl_denied");
	InitMaterializedSRF(fcinfo, 0);
	copy = palloc(WAYS * sizeof(Entry));
	now = rl_local_now();
	for (int i = 0; i < SETS; i++)
	{
		int			n = 0;

		LWLockAcquire(&locks[i % LOCKS].lock, LW_SHARED);
		for (int j = 0; j < WAYS; j++)
		{
			const Entry *entry = &table->sets[i].entries[j];

			if (has_denial(entry) && entry->denial.refused_until > now &&
				(entry->clocks & 1) == (clocks() & 1))
				copy[n++] = *entry;
		}
		LWLockRelease(&locks[i % LOCKS].lock);
		for (int j = 0; j < n; j++)
		{
			const Denial *denial = &copy[j].denial;
			const char *database = get_database_name(denial->database);
			Datum		values[COLUMNS];
			bool		nulls[COLUMNS] = {false};

			values[0] = CStringGetTextDatum(rl_key_shown(denial->key, denial->key_len));
			values[1] = CStringGetTextDatum(rl_limits_text(&copy[j].limits));
			values[2] = Int64GetDatum(denial->quota);
			values[3] = BoolGetDatum(denial->decision.ban_left > 0);
			values[4] = TimestampTzGetDatum(denial->since);
			values[5] = Float8GetDatum((double) (denial->refused_until - now) / RL_SECOND);
			nulls[6] = database == NULL;
			if (database != NULL)
				values[6] = DirectFunctionCall1(namein, CStringGetDatum(database));
			tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
		}
	}
	return (Datum) 0;
}
