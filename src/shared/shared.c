/*
 * shared.c
 *		Memory that all backends share, divided among the modules that use it.
 *
 * It has a header, and three areas, each with locks and parts: one for the local store, which is
 * by far the largest, one for refunds that are overdue, and one for the other modules.  If the library is
 * preloaded, the postmaster creates all of it.  Otherwise, from PostgreSQL 17 on, the first backend that
 * needs an area creates it, as a segment of dynamic shared memory.  Another one is for the header, which
 * other backends find by its name.  They exist until the server stops.
 *
 * Locks: while the memory is created or attached, AddinShmemInitLock, or a lock of its own, because
 * a large segment takes seconds.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/dsm.h"
#if PG_VERSION_NUM >= 170000
#include "storage/dsm_registry.h"
#endif
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "utils/resowner.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "error.h"
#include "shared/breaker.h"
#include "shared/cells.h"
#include "shared/counters.h"
#include "shared/known.h"
#include "shared/overdue.h"
#include "shared/recover.h"
#include "shared/refusal_log.h"
#include "shared/store_file.h"

#if PG_VERSION_NUM < 190000
#define GetNamedDSMSegment(name, size, init, found, arg) GetNamedDSMSegment(name, size, init, found)
#define LWLockNewTrancheId(name) LWLockNewTrancheId()
#else
#define LWLockRegisterTranche(id, name) ((void) 0)
#endif

/*
 * The layout of everything in shared memory.  Increase it when a struct there, the meaning of a
 * member, or the size of an area changes: while a package is upgraded, old and new libraries
 * run in one server, and each must find only memory of its own layout.
 */
#define LAYOUT				23
#define NAME				"ratelimit " CppAsString2(LAYOUT)
#define TRANCHE				"ratelimit"

/* Between two attempts to create the memory. */
#define RETRY_INTERVAL		(60 * RL_SECOND)

typedef enum Area
{
	BASE,
	LOCAL_STORE,
	OVERDUE,
	AREAS
} Area;

/* Written once, when the memory is created, but for areas; then read without a lock. */
typedef struct Header
{
	int64		ahead;			/* the local store's time less rl_boottime_now */
	RlHash		secret;			/* random */
	int			tranche;		/* of the locks */
	int			max_keys;		/* ratelimit.local_max_keys at this time */
	dsm_handle	areas[AREAS];	/* unless the library is preloaded; locked by the lock of Attempts */
} Header;

/* Whether an area was created. */
typedef struct Attempt
{
	int64		failed_at;		/* monotonic; 0: not failed */
	bool		succeeded;
} Attempt;

/* In main memory, which is not full then. */
typedef struct Attempts
{
	LWLock		lock;
	Attempt		area[AREAS];	/* locked by it */
} Attempts;

static const RlSharedPart *const parts[AREAS][6] = {
	[BASE] = {&rl_known_part, &rl_counters_part, &rl_breaker_part, &rl_refusal_log_part, &rl_targets_part,
		NULL},
	[LOCAL_STORE] = {&rl_cells_part, &rl_recover_part, NULL},
	[OVERDUE] = {&rl_overdue_part, NULL}
};

static Header *header = NULL;	/* not NULL: this process has the base */
static bool has_area[AREAS];
static bool local_store_is_ready = false;
static shmem_request_hook_type prev_shmem_request_hook = NULL;
static shmem_startup_hook_type prev_shmem_startup_hook = NULL;

static Size
part_size(const RlSharedPart *part, int max_keys, int *nlocks)
{
	Size		size = part->size;

	*nlocks = part->nlocks;
	if (part->need != NULL)
		part->need(max_keys, &size, nlocks);
	return CACHELINEALIGN(size);
}

static Size
area_size(Area area, int max_keys, int *nlocks)
{
	Size		total = 0;

	*nlocks = 0;
	for (const RlSharedPart *const *part = parts[area]; *part != NULL; part++)
	{
		int			n;

		total = add_size(total, part_size(*part, max_keys, &n));
		*nlocks += n;
	}
	return add_size(total, mul_size(*nlocks, sizeof(LWLockPadded)));
}

static void
init_header(Header *new, bool preloaded)
{
	int64		now = GetCurrentTimestamp() + RL_UNIX_EPOCH;

	if (!pg_strong_random(&new->secret, sizeof(new->secret)))
		elog(ERROR, "could not generate a random key");
	if (preloaded)
		rl_file_find(&new->secret, &now);
	new->ahead = now - rl_boottime_now();
	new->tranche = LWLockNewTrancheId(TRANCHE);
	new->max_keys = rl_local_max_keys;
}

/* Attaches the parts of an area to its memory.  "found" says that it is initialized. */
static void
attach_area(Header *new, Area area, char *memory, bool found)
{
	LWLockPadded *locks = (LWLockPadded *) memory;
	int			nlocks;

	(void) area_size(area, new->max_keys, &nlocks);
	memory += nlocks * sizeof(LWLockPadded);
	LWLockRegisterTranche(new->tranche, TRANCHE);
	for (int i = 0; i < nlocks && !found; i++)
		LWLockInitialize(&locks[i].lock, new->tranche);
	for (const RlSharedPart *const *part = parts[area]; *part != NULL; part++)
	{
		Size		size = part_size(*part, new->max_keys, &nlocks);

		(*part)->attach(memory, locks, found);
		memory += size;
		locks += nlocks;
	}
	header = new;
	has_area[area] = true;
}

/*
 * With shared_preload_libraries
 */

static Size
main_size(void)
{
	Size		size = CACHELINEALIGN(sizeof(Header));
	int			nlocks;

	for (Area area = 0; area < AREAS; area++)
		size = add_size(size, area_size(area, rl_local_max_keys, &nlocks));
	return size;
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
	Header	   *new;
	char	   *memory;
	int			nlocks;

	if (prev_shmem_startup_hook)
		prev_shmem_startup_hook();
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	new = ShmemInitStruct(NAME, main_size(), &found);
	if (!found)
		init_header(new, true);
	memory = (char *) new + CACHELINEALIGN(sizeof(Header));
	for (Area area = 0; area < AREAS; area++)
	{
		Size		size = area_size(area, new->max_keys, &nlocks);

		attach_area(new, area, memory, found);
		memory += size;
	}
	LWLockRelease(AddinShmemInitLock);
}

/* Requests the memory.  Must be called while the library is preloaded. */
void
rl_shared_request(void)
{
	rl_file_request();
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
 * Creates the area if no backend has, and attaches it.  The lock of Attempts must be held.  Raises
 * an error if that fails; the resource owner then has the segments.
 */
static void
find_area(Area area, Attempt *attempt)
{
	Header	   *new = header;
	dsm_segment *segment = NULL;
	int			nlocks;
	bool		found;

	/* The large segment comes first: a name whose segment fails may be unusable until the server restarts. */
	if (!attempt->succeeded)
		segment = dsm_create(area_size(area, area == BASE ? rl_local_max_keys : new->max_keys, &nlocks), 0);
	if (area == BASE)
		new = GetNamedDSMSegment(NAME, sizeof(Header), NULL, &found, NULL);
	if (segment != NULL)
	{
		if (area == BASE)
			init_header(new, false);
		new->areas[area] = dsm_segment_handle(segment);
	}
	else if ((segment = dsm_find_mapping(new->areas[area])) == NULL &&
			 (segment = dsm_attach(new->areas[area])) == NULL)
		elog(ERROR, "could not map dynamic shared memory segment");
	attach_area(new, area, dsm_segment_address(segment), attempt->succeeded);
	dsm_pin_mapping(segment);
	if (!attempt->succeeded)
		dsm_pin_segment(segment);
	attempt->succeeded = true;
}

/* Returns the records of the areas' attempts.  Raises an error if memory is full. */
static Attempts *
find_attempts(void)
{
	Attempts   *attempts;
	bool		found;

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	attempts = ShmemInitStruct(NAME " attempts", sizeof(Attempts), &found);
	if (!found)
	{
		memset(attempts, 0, sizeof(Attempts));
		LWLockInitialize(&attempts->lock, LWLockNewTrancheId(TRANCHE));
	}
	LWLockRelease(AddinShmemInitLock);
	LWLockRegisterTranche(attempts->lock.tranche, TRANCHE);
	return attempts;
}

static void
end_owner(ResourceOwner owner)
{
	ResourceOwnerRelease(owner, RESOURCE_RELEASE_BEFORE_LOCKS, false, false);
	ResourceOwnerRelease(owner, RESOURCE_RELEASE_LOCKS, false, false);
	ResourceOwnerRelease(owner, RESOURCE_RELEASE_AFTER_LOCKS, false, false);
	ResourceOwnerDelete(owner);
}

/* Notes a failure.  Returns true if none was noted within RETRY_INTERVAL, or if attempts is NULL. */
static bool
is_first_failure(Attempts *attempts, Area area, int64 now)
{
	Attempt    *attempt;
	bool		first;

	if (attempts == NULL)
		return true;
	attempt = &attempts->area[area];
	LWLockAcquire(&attempts->lock, LW_EXCLUSIVE);
	first = attempt->failed_at == 0 || now - attempt->failed_at >= RETRY_INTERVAL;
	if (first)
		attempt->failed_at = now;
	LWLockRelease(&attempts->lock);
	return first;
}

/*
 * Attaches the area if this process has not, and with "create" creates it if no process has.
 * Does not throw: if that fails, the server's log says so, and no process tries again within
 * RETRY_INTERVAL.  The caller must not hold LWLocks, and must have the base unless that is the
 * area.
 */
static void
start_area(Area area, bool create)
{
	static int64 next_attempts[AREAS] = {0};
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner caller_owner = CurrentResourceOwner;
	ResourceOwner owner;
	Attempts   *volatile attempts = NULL;
	ErrorData  *volatile error = NULL;
	int64		now;

	if ((now = rl_monotonic_now()) < next_attempts[area] && create)
		return;
	owner = ResourceOwnerCreate(caller_owner, "ratelimit");
	CurrentResourceOwner = owner;
	PG_TRY();
	{
		Attempt    *attempt;

		attempts = find_attempts();
		attempt = &attempts->area[area];
		LWLockAcquire(&attempts->lock, LW_EXCLUSIVE);
		if (create)
			next_attempts[area] = now + RETRY_INTERVAL;
		if (attempt->succeeded ||
			(create && (attempt->failed_at == 0 || now - attempt->failed_at >= RETRY_INTERVAL)))
			find_area(area, attempt);
		else if (create)
			next_attempts[area] = attempt->failed_at + RETRY_INTERVAL;
		LWLockRelease(&attempts->lock);
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
	if (is_first_failure(attempts, area, now))
		rl_log_no_throw((errcode(error->sqlerrcode),
						 area == BASE ? errmsg("could not create the shared memory of ratelimit") :
						 area == LOCAL_STORE ?
							errmsg("could not create the shared memory of ratelimit's local store") :
						 errmsg("could not create the shared memory of ratelimit's overdue refunds"),
						 errdetail_internal("%s", error->message),
						 errhint("Make more room for dynamic shared memory (usually /dev/shm), or add ratelimit to shared_preload_libraries.")));
	FreeErrorData(error);
}

#else

static void
start_area(Area area pg_attribute_unused(), bool create pg_attribute_unused())
{
}

#endif

/*
 * Attaches or creates the shared memory but the local store's.  Does not throw.  To be called without
 * LWLocks.
 */
void
rl_shared_start(void)
{
	if (header == NULL)
		start_area(BASE, true);
}

/* Returns true if there is shared memory; the local store's may still be missing. */
bool
rl_shared_available(void)
{
	return header != NULL;
}

pg_noreturn static void
raise_unshared(const char *what)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("%s needs shared memory", what),
#if PG_VERSION_NUM >= 170000
			 errhint("The server's log shows why it could not be created.")));
#else
			 errhint("Add ratelimit to shared_preload_libraries, and restart the server.")));
#endif
}

/* Starts shared memory.  Raises an error if there is none; "what" is the feature that needs it. */
void
rl_require_shared(const char *what)
{
	rl_shared_start();
	if (header == NULL)
		raise_unshared(what);
}

static void
start_local_store(bool create)
{
	if (!has_area[LOCAL_STORE])
		start_area(LOCAL_STORE, create);
	if (!has_area[LOCAL_STORE])
		return;
	for (const RlSharedPart *const *part = parts[LOCAL_STORE]; *part != NULL; part++)
		if ((*part)->ready != NULL)
			(*part)->ready();
	local_store_is_ready = true;
}

/* Does the same for the local store; a backend needs it before callbacks can refund there. */
void
rl_require_local_store(const char *what)
{
	if (local_store_is_ready)
		return;
	rl_require_shared(what);
	start_local_store(true);
	if (!local_store_is_ready)
		raise_unshared(what);
}

/*
 * Attaches the memory of the local store if a process has created it.  Returns false if none has.  Needs
 * shared memory.
 */
bool
rl_find_local_store(void)
{
	if (!local_store_is_ready)
		start_local_store(false);
	return local_store_is_ready;
}

/*
 * Attaches the memory of overdue refunds, and with "create" creates it if no process has.  Returns false
 * if there is none.  Does not throw.  Needs shared memory.
 */
bool
rl_start_overdue(bool create)
{
	if (!has_area[OVERDUE])
		start_area(OVERDUE, create);
	return has_area[OVERDUE];
}

/* Returns for how many states the local store has room.  Needs shared memory. */
int
rl_shared_max_keys(void)
{
	return header->max_keys;
}

/*
 * Returns the time of the local store, in microseconds since 1970, or ratelimit.debug_now if it
 * is set.  It is the wall clock when the memory was created, and goes on by a clock that is never
 * set.  Needs shared memory.
 */
int64
rl_local_now(void)
{
	if (rl_debug_now[0] != '\0')
		return strtoll(rl_debug_now, NULL, 10);
	return header->ahead + rl_boottime_now();
}

/* Returns the hash of a name in shared memory, with the server's secret.  Needs shared memory. */
RlHash
rl_shared_hash(const void *data, size_t len)
{
	return rl_siphash(header->secret, data, len);
}

/*
 * Returns the key's hash, for the settings as they are.  Needs shared memory.
 *
 * Caches (src/README.md): the hash of the settings, without which a call of the local store
 * takes 11 % longer; the last key's hash, for which a call asks twice, 4 %.
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
