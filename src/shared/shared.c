/*
 * shared.c
 *		Memory that all backends share: requested when the library is
 *		preloaded, and divided among the modules that use it.
 */
#include "postgres.h"

#include <time.h>

#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/shmem.h"
#include "utils/timestamp.h"

#include "shared/breaker.h"
#include "shared/cells.h"
#include "shared/counters.h"
#include "shared/denial_cache.h"
#include "shared/refusal_log.h"

#define TRANCHE				"ratelimit"

/* Written once, when the memory is created; then read without a lock. */
typedef struct Header
{
	int64		wall_at_start;	/* microseconds since 1970 */
	int64		monotonic_at_start;
	RlHash		secret;			/* random */
} Header;

static const RlSharedPart *const parts[] = {
	&rl_cells_part, &rl_denial_part, &rl_counters_part, &rl_breaker_part,
	&rl_refusal_log_part
};

static Header *header = NULL;
static shmem_request_hook_type prev_shmem_request_hook = NULL;
static shmem_startup_hook_type prev_shmem_startup_hook = NULL;

/* Returns microseconds on a clock that is never set. */
int64
rl_monotonic_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64) t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/*
 * Sleeps until a time on that clock.  May raise an error at an interrupt, but
 * not in the last millisecond.
 */
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

/* Returns the bytes that the part needs, and sets the number of locks. */
static Size
part_size(const RlSharedPart *part, int *nlocks)
{
	Size		size = part->size;

	*nlocks = part->nlocks;
	if (part->need != NULL)
		part->need(&size, nlocks);
	return CACHELINEALIGN(size);
}

/* Returns the bytes of the header and all parts, and sets the number of locks. */
static Size
total_size(int *nlocks)
{
	Size		total = CACHELINEALIGN(sizeof(Header));

	*nlocks = 0;
	for (size_t i = 0; i < lengthof(parts); i++)
	{
		int			n;

		total = add_size(total, part_size(parts[i], &n));
		*nlocks += n;
	}
	return total;
}

static void
request(void)
{
	int			nlocks;

	if (prev_shmem_request_hook)
		prev_shmem_request_hook();
	RequestAddinShmemSpace(total_size(&nlocks));
	RequestNamedLWLockTranche(TRANCHE, nlocks);
}

static void
startup(void)
{
	bool		found;
	char	   *memory;
	LWLockPadded *locks;
	Size		size;
	int			nlocks;

	if (prev_shmem_startup_hook)
		prev_shmem_startup_hook();
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	memory = ShmemInitStruct("ratelimit", total_size(&nlocks), &found);
	locks = GetNamedLWLockTranche(TRANCHE);
	header = (Header *) memory;
	if (!found)
	{
		header->wall_at_start = GetCurrentTimestamp() + RL_UNIX_EPOCH;
		header->monotonic_at_start = rl_monotonic_now();
		if (!pg_strong_random(&header->secret, sizeof(header->secret)))
			elog(ERROR, "could not generate a random key");
	}
	memory += CACHELINEALIGN(sizeof(Header));
	for (size_t i = 0; i < lengthof(parts); i++)
	{
		size = part_size(parts[i], &nlocks);
		parts[i]->attach(memory, locks, found);
		memory += size;
		locks += nlocks;
	}
	LWLockRelease(AddinShmemInitLock);
}

/* Requests the memory.  Must be called while the library is preloaded. */
void
rl_shared_request(void)
{
	prev_shmem_request_hook = shmem_request_hook;
	shmem_request_hook = request;
	prev_shmem_startup_hook = shmem_startup_hook;
	shmem_startup_hook = startup;
}

/* Returns true if there is shared memory. */
bool
rl_shared_available(void)
{
	return header != NULL;
}

/* Raises an error if there is no shared memory; "what" is the feature that needs it. */
void
rl_require_shared(const char *what)
{
	if (header == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("%s needs shared memory", what),
				 errhint("Add ratelimit to shared_preload_libraries, and restart the server.")));
}

/*
 * Returns the time of the local store, in microseconds since 1970: the wall
 * clock at server start, advanced by the monotonic clock, or
 * ratelimit.debug_now if it is set.  Needs shared memory.
 */
int64
rl_local_now(void)
{
	if (rl_debug_now[0] != '\0')
		return strtoll(rl_debug_now, NULL, 10);
	return header->wall_at_start + (rl_monotonic_now() - header->monotonic_at_start);
}

/*
 * Returns the key's hash, for the settings as they are.  Needs shared memory.
 *
 * Caches (src/README.md): the hash of the settings, without which a call of the
 * local store takes 11 % longer; the last key's hash, for which a call asks
 * twice, 4 %.
 */
RlKeyHash
rl_key_hash(const RlKey *key)
{
	static uint64 version = 0;
	static RlHash settings;
	static RlKeyHash last_hash;
	static int	last_len = 0;
	static char last[RL_MAX_KEY];

	if (version != rl_settings_version)
	{
		/* Each hash is the secret of the next, so that the parts cannot run together. */
		settings = rl_siphash(header->secret, rl_redis_url, strlen(rl_redis_url));
		settings = rl_siphash(settings, rl_key_prefix, strlen(rl_key_prefix));
		version = rl_settings_version;
		last_len = 0;
	}
	if (key->len != last_len || memcmp(key->data, last, last_len) != 0)
	{
		last_hash = rl_siphash(settings, key->data, key->len);
		last_len = key->len;
		memcpy(last, key->data, last_len);
	}
	return last_hash;
}
