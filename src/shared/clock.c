/*
 * clock.c
 *		Clocks, and sleeping and waiting by them.
 */
#include "postgres.h"

#include <time.h>

#include "miscadmin.h"
#include "storage/latch.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "ratelimit.h"
#include "shared/clock.h"

static int64
read_clock(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return (int64) t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* Returns microseconds on a clock that is never set. */
int64
rl_monotonic_now(void)
{
	return read_clock(CLOCK_MONOTONIC);
}

/* Does the same on one that runs while the system is suspended, if there is such a clock. */
int64
rl_boottime_now(void)
{
#ifdef CLOCK_BOOTTIME
	return read_clock(CLOCK_BOOTTIME);
#else
	return read_clock(CLOCK_MONOTONIC);
#endif
}

/* Returns the wait event that pg_stat_activity shows for all waits for Redis. */
uint32
rl_wait_event(void)
{
#if PG_VERSION_NUM >= 170000
	static uint32 event = 0;

	if (event == 0)
		event = WaitEventExtensionNew("RatelimitRedis");
	return event;
#else
	return PG_WAIT_EXTENSION;
#endif
}

/* Sleeps until a time on that clock.  May raise an error at an interrupt, but not in the last millisecond. */
void
rl_sleep_until(int64 until, uint32 wait_event)
{
	for (;;)
	{
		int64		left = until - rl_monotonic_now();

		CHECK_FOR_INTERRUPTS();
		if (left <= 0)
			return;
		if (left < 1000)
		{
			pg_usleep(left);
			continue;
		}
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT |
						 (IsUnderPostmaster ? WL_EXIT_ON_PM_DEATH : 0),
						 Min(left / 1000, 60000), wait_event);
		ResetLatch(MyLatch);
	}
}

/* Returns the wall clock, in microseconds since 1970, or ratelimit.debug_now if it is set. */
int64
rl_wall_now(void)
{
	if (rl_debug_now[0] != '\0')
		return strtoll(rl_debug_now, NULL, 10);
	return GetCurrentTimestamp() + RL_UNIX_EPOCH;
}
