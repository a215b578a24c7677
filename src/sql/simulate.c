/*
 * simulate.c
 *		rl_simulate: decides the rows of a window's partition as if the limits
 *		had been in force.
 *
 * The states and their chunks are allocated in the partition's memory context.
 */
#include "postgres.h"

#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "windowapi.h"

#include "algorithm/algorithm.h"
#include "algorithm/limits.h"
#include "decision.h"
#include "sql/arguments.h"

/* The latest time that leaves room for the longest limit, in 2096. */
#define LATEST				INT64CONST(4000000000000000)

typedef struct Partition
{
	RlLimits	limits;			/* none before the first row */
	RlState		states[RL_MAX_LIMITS];
	RlPool		pool;			/* of the states' entries */
	uint32		nchunks;		/* that are allocated */
	RlBan		ban;
	int64		at;
} Partition;

/* Returns an argument of the current row.  Raises an error if it is NULL. */
static Datum
argument(WindowObject window, int n, const char *name)
{
	bool		isnull;
	Datum		value = WinGetFuncArgCurrent(window, n, &isnull);

	if (isnull)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not be null", name)));
	return value;
}

/*
 * Sets the partition's limits at its first row.  Raises an error if a limit is
 * concurrent, or if a later row has other limits.
 */
static void
set_limits(Partition *partition, const RlLimits *limits)
{
	if (limits->concurrent)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("rl_simulate does not support limits that are concurrent"),
				 errdetail("They depend on the end of each transaction, which a row does not show.")));
	if (!rl_limits_given(&partition->limits))
	{
		rl_limits_copy(&partition->limits, limits);
		for (int i = 0; i < limits->n; i++)
			partition->states[i] = (RlState) RL_NO_STATE;
	}
	else if (!rl_limits_same(&partition->limits, limits))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("limits must be the same in all rows of a partition")));
}

/*
 * Returns the row's time in microseconds since 1970.  Raises an error if it is out
 * of range, or earlier than the last row's.
 */
static int64
row_time(Partition *partition, TimestampTz at)
{
	if (at < -RL_UNIX_EPOCH || at > LATEST - RL_UNIX_EPOCH)
		ereport(ERROR,
				(errcode(ERRCODE_DATETIME_VALUE_OUT_OF_RANGE),
				 errmsg("time of an action must be finite, and from 1970 to 2096")));
	at += RL_UNIX_EPOCH;
	if (at < partition->at)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("times must not decrease within a partition"),
				 errhint("Write OVER (PARTITION BY ... ORDER BY ...) with the time that is the function's argument.")));
	partition->at = at;
	return at;
}

/* Makes sure that the pool has so many spare chunks; it grows to twice its size. */
static void
reserve_chunks(Partition *partition, uint32 wanted)
{
	RlPool	   *pool = &partition->pool;
	Size		n = Max(16, 2 * (Size) partition->nchunks);

	if (pool->nspare >= wanted)
		return;
	pool->chunks = pool->chunks == NULL ?
		MemoryContextAllocHuge(GetMemoryChunkContext(partition), n * sizeof(RlChunk)) :
		repalloc_huge(pool->chunks, n * sizeof(RlChunk));
	while (partition->nchunks < n)
	{
		partition->nchunks++;
		rl_pool_put(pool, partition->nchunks, partition->nchunks, 1);
	}
}

PG_FUNCTION_INFO_V1(rl_simulate);
Datum
rl_simulate(PG_FUNCTION_ARGS)
{
	WindowObject window = PG_WINDOW_OBJECT();
	Partition  *partition = WinGetPartitionLocalMemory(window, sizeof(Partition));
	int64		now;
	int64		quota;
	int			wanted = 0;
	RlDecision	decisions[RL_MAX_LIMITS];
	RlAnswer	answer = {0};

#if PG_VERSION_NUM >= 190000
	WinCheckAndInitializeNullTreatment(window, false, fcinfo);
#endif
	/* Otherwise all rows of the partition would be kept. */
	WinSetMarkPosition(window, WinGetCurrentPosition(window));

	set_limits(partition, rl_text_limits(DatumGetTextPP(argument(window, 0, "limits"))));
	now = row_time(partition, DatumGetTimestampTz(argument(window, 1, "time of an action")));
	quota = rl_quota_checked(DatumGetInt64(argument(window, 2, "quota")));
	for (int i = 0; i < partition->limits.n; i++)
		wanted += rl_chunks_wanted(&partition->limits.limit[i], &partition->states[i],
								   &partition->pool, now, quota);
	reserve_chunks(partition, wanted);
	if (partition->limits.kind != RL_LISTED)
		answer.decision = rl_unasked_decision(&partition->limits);
	else
	{
		/* A ban in force was set by a limit of the partition. */
		if (partition->ban.by != NULL && partition->ban.until > now)
			partition->ban.rule =
				rl_limit_text(&partition->limits, partition->ban.by - partition->limits.limit);
		rl_act(&partition->limits, partition->states, &partition->pool, &partition->ban,
			   (RlTimes) {now, now}, quota, RL_TAKE, decisions);
		answer.decision = rl_combine(&partition->limits, decisions, &answer.binding);
	}
	return rl_decision_row(fcinfo, &partition->limits, &answer);
}
