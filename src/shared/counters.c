/*
 * counters.c
 *		Counters by limits: what became of the actions, and what Redis cost.
 *
 * A slot is found by the limits, and once taken it keeps them until all are
 * reset.  When there are more limits than slots, the last one counts for all
 * the others, so that the sums are always right.
 */
#include "postgres.h"

#include "funcapi.h"
#include "storage/spin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "algorithm/limits.h"
#include "shared/counters.h"

#define SLOTS				1024
#define OTHERS				SLOTS	/* the slot of those that have none */
#define COLUMNS				11

typedef struct Slot
{
	slock_t		mutex;			/* protects the counters, and with the lock
								 * held exclusively all */
	bool		used;
	RlLimits	limits;
	int64		outcomes[RL_OUTCOMES];
	int64		from_cache;
	int64		from_local;
	int64		round_trips;
	int64		redis_us;
} Slot;

typedef struct Stat
{
	TimestampTz since;
	uint32		resets;			/* how often all slots were emptied; raised
								 * before a slot is, under the lock held
								 * exclusively, read under it or a slot's mutex */
	Slot		slots[SLOTS + 1];
} Stat;

static Stat *stat = NULL;
static LWLock *lock;			/* who has which slot */

Size
rl_counters_size(void)
{
	return sizeof(Stat);
}

int
rl_counters_locks(void)
{
	return 1;
}

/* Empties a slot, which the caller has locked or alone knows. */
static void
empty(Slot *slot)
{
	slot->used = false;
	slot->limits.hash = 0;
	slot->limits.n = 0;
	memset(slot->outcomes, 0, sizeof(slot->outcomes));
	slot->from_cache = slot->from_local = slot->round_trips = slot->redis_us = 0;
}

void
rl_counters_attach(void *memory, LWLockPadded *locks, bool found)
{
	stat = memory;
	lock = &locks->lock;
	if (found)
		return;
	stat->since = GetCurrentTimestamp();
	stat->resets = 0;
	for (int i = 0; i <= SLOTS; i++)
	{
		SpinLockInit(&stat->slots[i].mutex);
		empty(&stat->slots[i]);
	}
}

/* The slot of the limits, or a free one for them, or NULL. */
static Slot *
probe(const RlLimits *limits)
{
	for (int i = 0; i < SLOTS; i++)
	{
		Slot	   *slot = &stat->slots[(limits->hash + i) % SLOTS];

		if (!slot->used || (slot->limits.hash == limits->hash && rl_limits_same(&slot->limits, limits)))
			return slot;
	}
	return NULL;
}

/*
 * Returns the slot that counts for the limits, and takes a free one if there is
 * none yet.  The slot is theirs until *resets is out of date.
 */
static Slot *
find_slot(const RlLimits *limits, uint32 *resets)
{
	Slot	   *slot;

	LWLockAcquire(lock, LW_SHARED);
	slot = probe(limits);
	*resets = stat->resets;
	LWLockRelease(lock);
	if (slot != NULL && !slot->used)
	{
		LWLockAcquire(lock, LW_EXCLUSIVE);
		slot = probe(limits);
		*resets = stat->resets;
		if (slot != NULL && !slot->used)
		{
			SpinLockAcquire(&slot->mutex);
			slot->limits = *limits;
			slot->used = true;
			SpinLockRelease(&slot->mutex);
		}
		LWLockRelease(lock);
	}
	return slot != NULL ? slot : &stat->slots[OTHERS];
}

/* Counts one action.  Does nothing without shared memory. */
void
rl_counters_add(const RlLimits *limits, RlStatOutcome outcome, bool from_cache, bool from_local,
			  int64 round_trips, int64 redis_us)
{
	static Slot *slot = NULL;	/* of the last call's limits */
	static RlLimits last;
	static uint32 resets;

	if (stat == NULL)
		return;
	for (;;)
	{
		if (slot == NULL || !rl_limits_same(&last, limits))
		{
			slot = find_slot(limits, &resets);
			last = *limits;
		}
		SpinLockAcquire(&slot->mutex);
		/* After a reset the slot is free, or has other limits. */
		if (stat->resets == resets)
			break;
		SpinLockRelease(&slot->mutex);
		slot = NULL;
	}
	slot->outcomes[outcome]++;
	slot->from_cache += from_cache;
	slot->from_local += from_local;
	slot->round_trips += round_trips;
	slot->redis_us += redis_us;
	SpinLockRelease(&slot->mutex);
	/* There may be room again, after a reset. */
	if (slot == &stat->slots[OTHERS])
		slot = NULL;
}

/* When counting began; only with shared memory. */
TimestampTz
rl_counters_since(void)
{
	return stat->since;
}

PG_FUNCTION_INFO_V1(rl_stat);
Datum
rl_stat(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;

	rl_require_shared("rl_stat");
	InitMaterializedSRF(fcinfo, 0);
	LWLockAcquire(lock, LW_SHARED);
	for (int i = 0; i <= SLOTS; i++)
	{
		Slot		slot;
		int64		calls = 0;
		Datum		values[COLUMNS];
		bool		nulls[COLUMNS] = {false};
		int			n = 0;

		SpinLockAcquire(&stat->slots[i].mutex);
		slot = stat->slots[i];
		SpinLockRelease(&stat->slots[i].mutex);
		for (int o = 0; o < RL_OUTCOMES; o++)
			calls += slot.outcomes[o];
		if (calls == 0)
			continue;

		nulls[n] = (i == OTHERS);
		values[n++] = i == OTHERS ? (Datum) 0 : CStringGetTextDatum(rl_limits_text(&slot.limits));
		for (int o = 0; o < RL_OUTCOMES; o++)
			values[n++] = Int64GetDatum(slot.outcomes[o]);
		values[n++] = Int64GetDatum(slot.from_cache);
		values[n++] = Int64GetDatum(slot.from_local);
		values[n++] = Int64GetDatum(slot.round_trips);
		values[n++] = Float8GetDatum((double) slot.redis_us / RL_SECOND);
		tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
	}
	LWLockRelease(lock);
	return (Datum) 0;
}

PG_FUNCTION_INFO_V1(rl_stat_reset);
Datum
rl_stat_reset(PG_FUNCTION_ARGS pg_attribute_unused())
{
	rl_require_shared("rl_stat_reset");
	LWLockAcquire(lock, LW_EXCLUSIVE);
	stat->since = GetCurrentTimestamp();
	stat->resets++;
	for (int i = 0; i <= SLOTS; i++)
	{
		SpinLockAcquire(&stat->slots[i].mutex);
		empty(&stat->slots[i]);
		SpinLockRelease(&stat->slots[i].mutex);
	}
	LWLockRelease(lock);
	PG_RETURN_VOID();
}
