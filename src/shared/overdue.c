/*
 * overdue.c
 *		The list of refunds that the end of a transaction could not send.
 *
 * A target is a Redis with the settings by which it is reached.  Its refunds are sent by whoever
 * calls it next, and by a worker (worker.c), which the first refund starts.  A process takes
 * refunds off the list before it sends them, and adds those that it could not send again, so
 * each is in the hands of one process at a time.  If a process dies without its callbacks, the
 * server restarts, and all of this memory is new.
 *
 * The list has slots of fixed size, and copies into them, so adding to it cannot fail for want of
 * memory, and does not throw.  If it is full, or one target has half of it, sessions keep their
 * refunds; when a session ends, a refund that ends soon makes place, and is lost.  Charges are
 * never refused for want of it.
 *
 * Lock: one, for all of it; "waiting" is also read without it, as a hint.  The list itself is an
 * area of its own, which the first charge that may have to be refunded creates.
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "utils/guc.h"

#include "error.h"
#include "shared/overdue.h"

#define TARGETS				8
#define WORKERS				4
#define SLOTS				40960
#define BUCKETS				16384
#define NONE				(-1)
#define NAME_HERE			112 /* bytes of a name in the slot of its entry */
#define MAX_SETTINGS		8192	/* bytes of a target's settings */
#define LOOKED_AT			64	/* entries among which the one that ends first makes place */
#define LONGEST				INT64CONST(3600000000)	/* microseconds that an entry waits */
#define PAUSE				INT64CONST(500000)	/* after an answer that a later call may not get */
#define START_PAUSE			(60 * RL_SECOND)	/* between two starts of a worker that does not come */
#define LOG_PAUSE			(60 * RL_SECOND)	/* between two lines in the log */

/* An entry, or free, or with a part of the name of an entry before it from "refund" on */
typedef struct Slot
{
	int32		next;			/* of the target's entries, or of the free slots */
	int32		previous;
	int32		next_of_key;	/* of the bucket */
	int32		previous_of_key;
	int32		more;			/* the slot with the next part of the name; NONE */
	int32		target;			/* number */
	RlOverdue	refund;
	char		name[NAME_HERE];
} Slot;

#define PART				(sizeof(Slot) - offsetof(Slot, refund))

typedef struct OverdueList
{
	int32		free;			/* the first free slot; NONE */
	int32		buckets[BUCKETS];	/* the last entry of a key; by key_hash, which nobody can aim at a
									 * bucket */
	Slot		slots[SLOTS];
} OverdueList;

typedef struct Target
{
	uint64		id;				/* 0: free */
	int64		used;			/* monotonic */
	int32		first;			/* entries, the oldest first */
	int32		last;
	int32		n;
	int32		nslots;			/* that they use */
	int32		taken;			/* entries that processes are sending */
	int64		paused_until;	/* monotonic */
	int64		start_after;	/* monotonic; no worker is started earlier */
	int64		log_after;		/* monotonic; of its workers */
	int			worker;			/* its process ID; 0: none */
	Latch	   *latch;			/* its */
	char		settings[MAX_SETTINGS]; /* the texts, each with its terminator */
} Target;

typedef struct Targets
{
	volatile int32 waiting;		/* entries of all targets */
	int64		sent;
	int64		lost;
	int64		log_after;		/* monotonic */
	Target		targets[TARGETS];
} Targets;

static Targets *base = NULL;
static LWLock *lock;
static OverdueList *list = NULL;
static Target *served = NULL;	/* by this process, the worker */

static void
attach_base(void *memory, LWLockPadded *locks, bool found)
{
	base = memory;
	lock = &locks->lock;
	if (!found)
		memset(base, 0, sizeof(Targets));
}

static void
attach_list(void *memory, LWLockPadded *locks pg_attribute_unused(), bool found)
{
	list = memory;
	if (found)
		return;
	list->free = 0;
	memset(list->buckets, 0xff, sizeof(list->buckets));
	for (int i = 0; i < SLOTS; i++)
		list->slots[i].next = i + 1 < SLOTS ? i + 1 : NONE;
}

const RlSharedPart rl_targets_part = {.size = sizeof(Targets),.nlocks = 1,.attach = attach_base};
const RlSharedPart rl_overdue_part = {.size = sizeof(OverdueList),.attach = attach_list};

/*
 * Targets
 */

/* Returns the hash of the settings by which Redis is reached; not 0. */
uint64
rl_target_id(void)
{
	static uint64 version = 0;
	static uint64 id;

	if (version == rl_settings_version && id != 0)
		return id;
	id = 0;
	for (int i = 0; i < RL_TARGET_SETTINGS; i++)
	{
		const char *value = *rl_target_settings[i].value;

		id = hash_bytes_extended((const unsigned char *) value, strlen(value), id);
	}
	version = rl_settings_version;
	return id = Max(id, 1);
}

/* Returns NULL if there is none. */
static Target *
find_target(uint64 id)
{
	for (Target *target = base->targets; target < base->targets + TARGETS; target++)
		if (target->id == id)
			return target;
	return NULL;
}

/*
 * Makes an entry for the settings as they are, in place of one without refunds.  Returns NULL if
 * there is no room.
 */
static Target *
make_target(uint64 id, int64 now)
{
	Target	   *oldest = NULL;
	char	   *next;
	Size		size = 0;

	for (int i = 0; i < RL_TARGET_SETTINGS; i++)
		size += strlen(*rl_target_settings[i].value) + 1;
	for (Target *target = base->targets; target < base->targets + TARGETS; target++)
		if (target->n + target->taken == 0 && target->worker == 0 &&
			(oldest == NULL || target->used < oldest->used))
			oldest = target;
	if (oldest == NULL || size > MAX_SETTINGS)
		return NULL;
	memset(oldest, 0, sizeof(*oldest));
	oldest->id = id;
	oldest->used = now;
	oldest->first = oldest->last = NONE;
	next = oldest->settings;
	for (int i = 0; i < RL_TARGET_SETTINGS; i++)
	{
		strcpy(next, *rl_target_settings[i].value);
		next += strlen(next) + 1;
	}
	return oldest;
}

/*
 * Prepares this process to add refunds of the present settings later, in a callback.  Does not
 * throw; without the memory it cannot add them.  Must be called without LWLocks.
 */
void
rl_overdue_prepare(void)
{
	static uint64 version = 0;
	int64		now;

	if (!rl_shared_available() || !rl_start_overdue(true) || version == rl_settings_version)
		return;
	now = rl_monotonic_now();
	LWLockAcquire(lock, LW_EXCLUSIVE);
	if (find_target(rl_target_id()) == NULL)
		(void) make_target(rl_target_id(), now);
	LWLockRelease(lock);
	version = rl_settings_version;
}

/*
 * The list.  The lock is held.
 */

static int32 *
bucket_of(const RlOverdue *refund)
{
	return &list->buckets[refund->key_hash.low % BUCKETS];
}

static int
slots_of(int name_len)
{
	return 1 + (Max(name_len - NAME_HERE, 0) + PART - 1) / PART;
}

/* Copies a name into the entry's slots, of which there are enough, or out of them. */
static void
copy_name(Slot *slot, char *name, int len, bool in)
{
	char	   *here = slot->name;
	int			part = Min(len, NAME_HERE);

	for (;;)
	{
		memcpy(in ? here : name, in ? name : here, part);
		name += part;
		len -= part;
		if (len == 0)
			return;
		slot = &list->slots[slot->more];
		here = (char *) &slot->refund;
		part = Min(len, (int) PART);
	}
}

static void
remove_entry(Target *target, int32 at)
{
	Slot	   *slot = &list->slots[at];

	if (slot->previous == NONE)
		target->first = slot->next;
	else
		list->slots[slot->previous].next = slot->next;
	if (slot->next == NONE)
		target->last = slot->previous;
	else
		list->slots[slot->next].previous = slot->previous;
	if (slot->previous_of_key == NONE)
		*bucket_of(&slot->refund) = slot->next_of_key;
	else
		list->slots[slot->previous_of_key].next_of_key = slot->next_of_key;
	if (slot->next_of_key != NONE)
		list->slots[slot->next_of_key].previous_of_key = slot->previous_of_key;
	target->n--;
	target->nslots -= slots_of(slot->refund.name_len);
	base->waiting--;
	while (at != NONE)
	{
		int32		more = list->slots[at].more;

		list->slots[at].next = list->free;
		list->free = at;
		at = more;
	}
}

/* Returns when nothing is left to refund, on the monotonic clock; or later. */
static int64
end_of(const RlOverdue *refund)
{
	int64		end = refund->since + LONGEST;

	return rl_algorithm(&refund->limit)->until_end ? Min(end, refund->asked + refund->limit.period) : end;
}

/* Loses a refund of the target: of its oldest ones, the one that ends first. */
static void
make_place(Target *target)
{
	int32		soonest = target->first;
	int32		at = target->first;

	for (int i = 0; i < LOOKED_AT && at != NONE; i++)
	{
		if (end_of(&list->slots[at].refund) < end_of(&list->slots[soonest].refund))
			soonest = at;
		at = list->slots[at].next;
	}
	remove_entry(target, soonest);
}

static void
put_entry(Target *target, const RlOverdue *refund, const char *name, int64 now)
{
	int32		at = list->free;
	Slot	   *slot = &list->slots[at];
	int32	   *bucket = bucket_of(refund);
	Slot	   *part = slot;

	for (int i = slots_of(refund->name_len); i > 1; i--)
	{
		part->more = part->next;
		part = &list->slots[part->more];
	}
	list->free = part->next;
	part->more = NONE;
	slot->target = target - base->targets;
	slot->refund = *refund;
	if (refund->since == 0)
		slot->refund.since = now;
	else
		target->taken--;
	copy_name(slot, (char *) name, refund->name_len, true);
	slot->next = NONE;
	slot->previous = target->last;
	if (target->last == NONE)
		target->first = at;
	else
		list->slots[target->last].next = at;
	target->last = at;
	slot->previous_of_key = NONE;
	slot->next_of_key = *bucket;
	if (*bucket != NONE)
		list->slots[*bucket].previous_of_key = at;
	*bucket = at;
	target->n++;
	target->nslots += slots_of(refund->name_len);
	base->waiting++;
}

/* Returns the target that must lose a refund before this one can have another of so many slots, or NULL. */
static Target *
find_loser(Target *target, int nslots)
{
	Target	   *largest = target;
	int			used = 0;

	if (target->nslots + nslots > SLOTS / 2)
		return target;
	for (Target *t = base->targets; t < base->targets + TARGETS; t++)
	{
		used += t->nslots;
		if (t->nslots > largest->nslots)
			largest = t;
	}
	return used + nslots > SLOTS ? largest : NULL;
}

/*
 * The worker's start
 */

static int
count_workers(void)
{
	int			n = 0;

	for (int i = 0; i < TARGETS; i++)
		n += base->targets[i].worker != 0;
	return n;
}

/* Returns a target whose refunds wait for a worker, or NULL. */
static Target *
find_unserved(int64 now)
{
	for (Target *target = base->targets; target < base->targets + TARGETS; target++)
		if (target->n > 0 && target->worker == 0 && now >= target->start_after)
			return target;
	return NULL;
}

/* Returns true if there are as many workers as there may be.  Then wakes all, so that an idle one ends. */
static bool
no_seat(void)
{
	bool		full = count_workers() >= WORKERS;

	for (int i = 0; full && i < TARGETS; i++)
		if (base->targets[i].latch != NULL)
			SetLatch(base->targets[i].latch);
	return full;
}

/*
 * Returns true if the caller is to start a worker for the target.  Of a new refund, wakes the one
 * that there is.
 */
static bool
needs_worker(Target *target, bool new, int64 now)
{
	if (target->latch != NULL && new)
		SetLatch(target->latch);
	if (target->worker != 0 || now < target->start_after || no_seat())
		return false;
	target->start_after = now + START_PAUSE;
	return true;
}

/*
 * Starts a worker, without waiting for it.  Nothing depends on it: if there is no slot for it,
 * or no library, those who call the target send its refunds.  Does not throw.
 */
static void
start_worker(int number)
{
	BackgroundWorker worker = {
		.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION,
		.bgw_start_time = BgWorkerStart_ConsistentState,
		.bgw_restart_time = BGW_NEVER_RESTART,
		.bgw_main_arg = Int32GetDatum(number)
	};

	strlcpy(worker.bgw_name, "ratelimit refunds", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "ratelimit refunds", BGW_MAXLEN);
	strcpy(worker.bgw_library_name, "ratelimit");
	strlcpy(worker.bgw_function_name, "rl_refunds_main", BGW_MAXLEN);
	if (!RegisterDynamicBackgroundWorker(&worker, NULL))
	{
		/* The slots are in use; another refund tries again. */
		LWLockAcquire(lock, LW_EXCLUSIVE);
		base->targets[number].start_after = rl_monotonic_now() + RL_SECOND;
		LWLockRelease(lock);
	}
}

/*
 * Adding and taking
 */

/*
 * Adds a refund for a target, also one that this process has taken.  Returns false if there is no
 * list or no room: the caller keeps it then.  With "displaces" a full list loses another refund,
 * one that ends soon.  Does not throw.  Needs rl_overdue_prepare.
 */
bool
rl_overdue_add(uint64 id, const RlOverdue *refund, const char *name, bool displaces)
{
	int64		now = rl_monotonic_now();
	int			nslots = slots_of(refund->name_len);
	int			lost = 0;
	Target	   *target;
	Target	   *loser;
	bool		start;
	bool		logs;

	/* The worker would refund by another clock. */
	if (list == NULL || rl_debug_now[0] != '\0')
		return false;
	LWLockAcquire(lock, LW_EXCLUSIVE);
	target = find_target(id);
	if (target == NULL && id == rl_target_id())
		target = make_target(id, now);
	if (target == NULL || (!displaces && find_loser(target, nslots) != NULL))
	{
		LWLockRelease(lock);
		return false;
	}
	while ((loser = find_loser(target, nslots)) != NULL)
	{
		make_place(loser);
		lost++;
	}
	put_entry(target, refund, name, now);
	target->used = now;
	start = needs_worker(target, refund->since == 0, now);
	base->lost += lost;
	logs = lost > 0 && now >= base->log_after;
	if (logs)
		base->log_after = now + LOG_PAUSE;
	LWLockRelease(lock);
	if (start)
		start_worker(target - base->targets);
	if (logs)
		rl_log_no_throw((errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
						 errmsg("too many rate-limit refunds wait for Redis to keep all of them"),
						 errdetail("There is room for about %d of one Redis.", SLOTS / 2),
						 errhint("rl_status() shows how many are lost.")));
	return true;
}

/* Returns true if refunds of the present settings wait, and may be sent. */
bool
rl_overdue_waits(void)
{
	const Target *target;

	if (base == NULL || base->waiting == 0)
		return false;
	target = find_target(rl_target_id());
	return target != NULL && target->n > 0 && rl_monotonic_now() >= target->paused_until &&
		rl_debug_now[0] == '\0' && rl_start_overdue(false);
}

/* Passes an entry to take() and removes it.  Returns false if that cannot take it. */
static bool
take_entry(Target *target, int32 at, RlOverdueTake take, void *arg)
{
	Slot	   *slot = &list->slots[at];
	char		name[RL_MAX_OVERDUE_NAME];

	if (end_of(&slot->refund) > rl_monotonic_now())
	{
		copy_name(slot, name, slot->refund.name_len, false);
		if (!take(&slot->refund, name, arg))
			return false;
		target->taken++;
	}
	remove_entry(target, at);
	return true;
}

/*
 * Takes refunds of the present settings off the list, those of a key first unless it is NULL, then
 * the oldest, "most" at most.  Returns how many have left the list.  Needs rl_overdue_waits().
 */
int
rl_overdue_take(const RlKeyHash *first, int most, RlOverdueTake take, void *arg)
{
	Target	   *target;
	int			n = 0;

	LWLockAcquire(lock, LW_EXCLUSIVE);
	target = find_target(rl_target_id());
	if (target != NULL && first != NULL)
		for (int32 at = list->buckets[first->low % BUCKETS]; at != NONE && n < most;)
		{
			const Slot *slot = &list->slots[at];
			int32		next = slot->next_of_key;

			/* Another target may have the key, too: with another password, for example. */
			if (rl_same_key_hash(slot->refund.key_hash, *first) && target == &base->targets[slot->target])
			{
				if (!take_entry(target, at, take, arg))
					break;
				n++;
			}
			at = next;
		}
	while (target != NULL && n < most && target->first != NONE &&
		   take_entry(target, target->first, take, arg))
		n++;
	LWLockRelease(lock);
	return n;
}

/* Counts a refund that was taken and has ended: it is "sent", or lost or useless.  Does not throw. */
void
rl_overdue_ended(uint64 id, bool sent)
{
	Target	   *target;

	LWLockAcquire(lock, LW_EXCLUSIVE);
	target = find_target(id);
	if (target != NULL)
		target->taken--;
	base->sent += sent;
	LWLockRelease(lock);
}

/* Counts refunds that are lost.  Does not throw. */
void
rl_overdue_lost(int64 n)
{
	if (base == NULL)
		return;
	LWLockAcquire(lock, LW_EXCLUSIVE);
	base->lost += n;
	LWLockRelease(lock);
}

/* Lets nobody take refunds of a target for a moment, because its server runs none now.  Does not throw. */
void
rl_overdue_pause(uint64 id)
{
	Target	   *target;

	if (base == NULL)
		return;
	LWLockAcquire(lock, LW_EXCLUSIVE);
	target = find_target(id);
	if (target != NULL)
		target->paused_until = rl_monotonic_now() + PAUSE;
	LWLockRelease(lock);
}

/* Sets how many refunds wait in this server.  Needs shared memory. */
void
rl_overdue_fill(RlOverdueFill *fill)
{
	int64		now = rl_monotonic_now();
	bool		has_list = base->waiting > 0 && rl_start_overdue(false);

	*fill = (RlOverdueFill) {0};
	LWLockAcquire(lock, LW_SHARED);
	for (const Target *target = base->targets; target < base->targets + TARGETS; target++)
	{
		fill->waiting += target->n + target->taken;
		if (target->n > 0 && has_list)
			fill->oldest = Max(fill->oldest, now - list->slots[target->first].refund.since);
	}
	fill->sent = base->sent;
	fill->lost = base->lost;
	LWLockRelease(lock);
}

/*
 * The worker
 */

static void
stop_serving(int code pg_attribute_unused(), Datum arg pg_attribute_unused())
{
	if (served != NULL)
		(void) rl_overdue_leave(true);
}

/*
 * Makes this process the worker of a target, and sets the target's settings.  Returns false if the target
 * has another worker or is gone, or if there are as many workers as there may be, because several were
 * started at a time.  A session that exits does not mind how many there are.  Raises an error if a setting
 * is not accepted.
 */
bool
rl_overdue_serve(int number, bool at_exit)
{
	Target	   *target = &base->targets[number];
	char		values[MAX_SETTINGS];
	const char *value = values;
	bool		mine;

	if (!rl_start_overdue(false))
		return false;
	LWLockAcquire(lock, LW_EXCLUSIVE);
	mine = target->id != 0 && target->worker == 0;
	if (mine && !at_exit && no_seat())
	{
		/* The next worker that ends starts one for this target. */
		target->start_after = 0;
		mine = false;
	}
	if (mine)
	{
		target->worker = MyProcPid;
		target->latch = MyLatch;
		memcpy(values, target->settings, MAX_SETTINGS);
		served = target;
	}
	LWLockRelease(lock);
	if (!mine)
		return false;
	before_shmem_exit(stop_serving, (Datum) 0);
	for (int i = 0; i < RL_TARGET_SETTINGS; i++)
	{
		SetConfigOption(rl_target_settings[i].name, value, PGC_SUSET, PGC_S_OVERRIDE);
		value += strlen(value) + 1;
	}
	return true;
}

/*
 * Ends that, unless refunds wait and it is not to be at once.  Returns false then.  Starts the worker of
 * another target that waits for one.  Does not throw.
 */
bool
rl_overdue_leave(bool at_once)
{
	int64		now = rl_monotonic_now();
	Target	   *next = NULL;
	bool		left;

	LWLockAcquire(lock, LW_EXCLUSIVE);
	left = at_once || served->n == 0;
	if (left)
	{
		served->worker = 0;
		served->latch = NULL;
		if (!at_once)
			served->start_after = 0;
		next = find_unserved(now);
		if (next != NULL)
			next->start_after = now + START_PAUSE;
	}
	LWLockRelease(lock);
	if (next != NULL)
		start_worker(next - base->targets);
	if (left)
		served = NULL;
	return left;
}

/* Returns true if another target waits for a worker, and there are too many. */
bool
rl_overdue_seat_wanted(void)
{
	bool		wanted;

	LWLockAcquire(lock, LW_SHARED);
	wanted = count_workers() >= WORKERS && find_unserved(rl_monotonic_now()) != NULL;
	LWLockRelease(lock);
	return wanted;
}

/* Returns for how long the worker's target is paused: microseconds, or 0. */
int64
rl_overdue_pause_left(void)
{
	int64		until;

	LWLockAcquire(lock, LW_SHARED);
	until = served->paused_until;
	LWLockRelease(lock);
	return Max(until - rl_monotonic_now(), 0);
}

/* Returns true, once in a minute, if the target's workers may log that they have failed. */
bool
rl_overdue_may_log(void)
{
	int64		now = rl_monotonic_now();
	bool		may;

	LWLockAcquire(lock, LW_EXCLUSIVE);
	may = now >= served->log_after;
	if (may)
		served->log_after = now + LOG_PAUSE;
	LWLockRelease(lock);
	return may;
}

/* Returns the number of a target whose refunds have no worker; -1: there is none. */
int
rl_overdue_unserved(void)
{
	int			number = -1;

	if (base == NULL || base->waiting == 0)
		return -1;
	LWLockAcquire(lock, LW_SHARED);
	for (int i = 0; i < TARGETS; i++)
		if (base->targets[i].n > 0 && base->targets[i].worker == 0)
			number = i;
	LWLockRelease(lock);
	return number;
}
