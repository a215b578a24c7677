/*
 * shared.c
 *		Memory that all backends share, divided among the modules that use it.
 *
 * It has a header of fixed size, and areas: the locks, and a part for each module.
 * If the library is preloaded, the postmaster creates it.  Otherwise, from
 * PostgreSQL 17 on, the first backend that needs it creates two segments of dynamic
 * shared memory: one for the header, which other backends find by its name, and one
 * for the areas.  They exist until the server stops.
 *
 * Locks: AddinShmemInitLock, while the memory is created or attached.
 */
#include "postgres.h"

#include <time.h>

#include "miscadmin.h"
#include "port/atomics.h"
#include "storage/dsm.h"
#if PG_VERSION_NUM >= 170000
#include "storage/dsm_registry.h"
#endif
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/shmem.h"
#include "utils/resowner.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "shared/breaker.h"
#include "shared/cells.h"
#include "shared/counters.h"
#include "shared/denial_cache.h"
#include "shared/lease.h"
#include "shared/refusal_log.h"

#if PG_VERSION_NUM < 190000
#define GetNamedDSMSegment(name, size, init, found, arg) GetNamedDSMSegment(name, size, init, found)
#define LWLockNewTrancheId(name) LWLockNewTrancheId()
#else
#define LWLockRegisterTranche(id, name) ((void) 0)
#endif

/*
 * The layout of everything in shared memory.  Increase it when a struct there, the
 * meaning of a member, or the size of an area changes: while a package is upgraded, old
 * and new libraries run in one server.  Each must find only memory of its own layout.
 */
#define LAYOUT				6
#define NAME				"ratelimit " CppAsString2(LAYOUT)
#define TRANCHE				"ratelimit"

/* Between two attempts to create the memory. */
#define RETRY_INTERVAL		(60 * RL_SECOND)

/* Between two looks of a backend at the wall clock. */
#define CLOCK_CHECK			(RL_SECOND / 100)

/* Written once, when the memory is created, but for wall_ahead; then read without a lock. */
typedef struct Header
{
	pg_atomic_uint64 wall_ahead;	/* the local store's time less rl_boottime_now; grows only */
	RlHash		secret;			/* random */
	int			tranche;		/* of the locks */
	int			max_keys;		/* ratelimit.local_max_keys at this time */
	dsm_handle	areas;			/* unless the library is preloaded */
} Header;

/*
 * Whether the memory was created.  It is in the server's main memory, because
 * dynamic shared memory may be full.  AddinShmemInitLock protects all members.
 */
typedef struct Attempt
{
	int64		failed_at;		/* monotonic; 0: not failed */
	bool		succeeded;
} Attempt;

static const RlSharedPart *const parts[] = {
	&rl_cells_part, &rl_denial_part, &rl_counters_part, &rl_breaker_part,
	&rl_refusal_log_part, &rl_lease_part
};

static Header *header = NULL;
static shmem_request_hook_type prev_shmem_request_hook = NULL;
static shmem_startup_hook_type prev_shmem_startup_hook = NULL;

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

/*
 * Returns the wall clock less rl_boottime_now.  The wall clock is read first, so that a
 * pause between the two makes the result smaller and never larger.
 */
static int64
wall_ahead(void)
{
	int64		wall = GetCurrentTimestamp() + RL_UNIX_EPOCH;

	return wall - rl_boottime_now();
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
part_size(const RlSharedPart *part, int max_keys, int *nlocks)
{
	Size		size = part->size;

	*nlocks = part->nlocks;
	if (part->need != NULL)
		part->need(max_keys, &size, nlocks);
	return CACHELINEALIGN(size);
}

/* Returns the bytes of the areas, and sets the number of locks. */
static Size
areas_size(int max_keys, int *nlocks)
{
	Size		total = 0;

	*nlocks = 0;
	for (size_t i = 0; i < lengthof(parts); i++)
	{
		int			n;

		total = add_size(total, part_size(parts[i], max_keys, &n));
		*nlocks += n;
	}
	return add_size(total, mul_size(*nlocks, sizeof(LWLockPadded)));
}

/* Sets all members of a new header but the areas. */
static void
init_header(Header *new)
{
	pg_atomic_init_u64(&new->wall_ahead, wall_ahead());
	if (!pg_strong_random(&new->secret, sizeof(new->secret)))
		elog(ERROR, "could not generate a random key");
	new->tranche = LWLockNewTrancheId(TRANCHE);
	new->max_keys = rl_local_max_keys;
}

/* Attaches all parts to the areas.  "found" says that the areas are initialized. */
static void
attach_areas(Header *new, char *areas, bool found)
{
	LWLockPadded *locks = (LWLockPadded *) areas;
	int			nlocks;

	(void) areas_size(new->max_keys, &nlocks);
	areas += nlocks * sizeof(LWLockPadded);
	LWLockRegisterTranche(new->tranche, TRANCHE);
	for (int i = 0; i < nlocks && !found; i++)
		LWLockInitialize(&locks[i].lock, new->tranche);
	for (size_t i = 0; i < lengthof(parts); i++)
	{
		Size		size = part_size(parts[i], new->max_keys, &nlocks);

		parts[i]->attach(areas, locks, found);
		areas += size;
		locks += nlocks;
	}
	header = new;
}

/*
 * With shared_preload_libraries
 */

static Size
main_size(void)
{
	int			nlocks;

	return add_size(CACHELINEALIGN(sizeof(Header)), areas_size(rl_local_max_keys, &nlocks));
}

static void
request(void)
{
	if (prev_shmem_request_hook)
		prev_shmem_request_hook();
	RequestAddinShmemSpace(main_size());
}

static void
startup(void)
{
	bool		found;
	char	   *memory;

	if (prev_shmem_startup_hook)
		prev_shmem_startup_hook();
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	memory = ShmemInitStruct(NAME, main_size(), &found);
	if (!found)
		init_header((Header *) memory);
	attach_areas((Header *) memory, memory + CACHELINEALIGN(sizeof(Header)), found);
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

/*
 * Without shared_preload_libraries
 */

#if PG_VERSION_NUM >= 170000

/*
 * Creates the memory if no backend has, and attaches it.  AddinShmemInitLock must be
 * held.  Raises an error if that fails; the resource owner then has the segments.
 */
static void
find_memory(Attempt *attempt)
{
	Header	   *new;
	dsm_segment *areas = NULL;
	int			nlocks;
	bool		found;

	/*
	 * The large segment comes first: if there is no room for the segment of a name,
	 * the name may be unusable until the server is restarted.
	 */
	if (!attempt->succeeded)
		areas = dsm_create(areas_size(rl_local_max_keys, &nlocks), 0);
	new = GetNamedDSMSegment(NAME, sizeof(Header), NULL, &found, NULL);
	if (areas != NULL)
	{
		init_header(new);
		new->areas = dsm_segment_handle(areas);
	}
	else if ((areas = dsm_find_mapping(new->areas)) == NULL && (areas = dsm_attach(new->areas)) == NULL)
		elog(ERROR, "could not map dynamic shared memory segment");
	attach_areas(new, dsm_segment_address(areas), attempt->succeeded);
	dsm_pin_mapping(areas);
	if (!attempt->succeeded)
		dsm_pin_segment(areas);
	attempt->succeeded = true;
}

/* Returns the record of the attempts.  AddinShmemInitLock must be held.  Raises an error if memory is full. */
static Attempt *
find_attempt(void)
{
	bool		found;
	Attempt    *attempt = ShmemInitStruct(NAME " attempt", sizeof(Attempt), &found);

	if (!found)
		memset(attempt, 0, sizeof(Attempt));
	return attempt;
}

/* Releases all resources of the owner, and deletes it. */
static void
end_owner(ResourceOwner owner)
{
	ResourceOwnerRelease(owner, RESOURCE_RELEASE_BEFORE_LOCKS, false, false);
	ResourceOwnerRelease(owner, RESOURCE_RELEASE_LOCKS, false, false);
	ResourceOwnerRelease(owner, RESOURCE_RELEASE_AFTER_LOCKS, false, false);
	ResourceOwnerDelete(owner);
}

/* Notes a failure.  Returns true if none was noted within RETRY_INTERVAL, or if attempt is NULL. */
static bool
is_first_failure(Attempt *attempt, int64 now)
{
	bool		first;

	if (attempt == NULL)
		return true;
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	first = attempt->failed_at == 0 || now - attempt->failed_at >= RETRY_INTERVAL;
	if (first)
		attempt->failed_at = now;
	LWLockRelease(AddinShmemInitLock);
	return first;
}

/*
 * Attaches the memory if this process has not, and creates it if no process has.
 * Does not throw: if the memory cannot be created, the server's log says so, and
 * no process tries again within RETRY_INTERVAL.  The caller must not hold LWLocks.
 */
void
rl_shared_start(void)
{
	static int64 next_attempt = 0;
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner caller_owner = CurrentResourceOwner;
	ResourceOwner owner;
	Attempt    *volatile attempt = NULL;
	ErrorData  *volatile error = NULL;
	int64		now;

	if (header != NULL || (now = rl_monotonic_now()) < next_attempt)
		return;
	next_attempt = now + RETRY_INTERVAL;
	owner = ResourceOwnerCreate(caller_owner, "ratelimit");
	CurrentResourceOwner = owner;
	PG_TRY();
	{
		LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
		attempt = find_attempt();
		if (attempt->succeeded || attempt->failed_at == 0 || now - attempt->failed_at >= RETRY_INTERVAL)
			find_memory(attempt);
		else
			next_attempt = attempt->failed_at + RETRY_INTERVAL;
		LWLockRelease(AddinShmemInitLock);
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		FlushErrorState();
		LWLockReleaseAll();
	}
	PG_END_TRY();
	CurrentResourceOwner = caller_owner;
	end_owner(owner);
	if (error == NULL)
		return;
	if (is_first_failure(attempt, now))
		ereport(LOG_SERVER_ONLY,
				(errcode(error->sqlerrcode),
				 errmsg("could not create the shared memory of ratelimit"),
				 errdetail_internal("%s", error->message),
				 errhint("Make more room for dynamic shared memory (usually /dev/shm), or add ratelimit to shared_preload_libraries.")));
	FreeErrorData(error);
}

#else

void
rl_shared_start(void)
{
}

#endif

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
	rl_shared_start();
	if (header == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("%s needs shared memory", what),
#if PG_VERSION_NUM >= 170000
				 errhint("The server's log shows why it could not be created.")));
#else
				 errhint("Add ratelimit to shared_preload_libraries, and restart the server.")));
#endif
}

/*
 * Returns the time of the local store, in microseconds since 1970, or
 * ratelimit.debug_now if it is set.  Needs shared memory.
 *
 * This time never goes back.  It is that of a clock that is never set, and follows the
 * wall clock within CLOCK_CHECK when that is set forward: all backends are as far ahead.
 */
int64
rl_local_now(void)
{
	static int64 next_check = 0;
	int64		now;
	int64		ahead;
	uint64		known;

	if (rl_debug_now[0] != '\0')
		return strtoll(rl_debug_now, NULL, 10);
	now = rl_boottime_now();
	if (now >= next_check)
	{
		next_check = now + CLOCK_CHECK;
		ahead = wall_ahead();
		known = pg_atomic_read_u64(&header->wall_ahead);
		while (ahead > (int64) known &&
			   !pg_atomic_compare_exchange_u64(&header->wall_ahead, &known, ahead))
			;
	}
	return now + (int64) pg_atomic_read_u64(&header->wall_ahead);
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
