/*
 * breaker.c
 *		Circuit breakers: what backends know together about servers.
 *
 * When a Redis server fails, each backend would find that out by its own time-out, again and again,
 * and all would connect at the same moment when it is back.  So backends share in shared memory
 * what they have found: one tries, and the others fail at once until it has connected.
 *
 * A breaker knows one fact, that new connections fail, and bounds how many are made at a time.
 * A backend with a connection never asks it.  After a failure no backend connects for FIRST_PAUSE,
 * and after each further failure for twice as long as before, up to ratelimit.retry_interval.  When the
 * pause has ended one backend tries, and the others fail at once until one has connected.
 *
 * At most PLACES backends connect to one address at a time, and one if the last connection was
 * slow.  The reason is that Redis serves handshakes and calls in one line: with many handshakes the
 * calls of other sessions time out, and these sessions have to connect, too.  Backends without a place
 * wait for one, for connect_timeout at most, or fail at once if too many wait.  A place holds the time
 * until which it is taken, so it is free again if the backend stops.
 *
 * Entries have one of four names:
 *
 * - the address of a server, for places and for what the kernel says (refused, unreachable)
 * - the address and the backend's settings, for all other failures: a wrong file of one role must
 *   not stop other roles
 * - the target, which is what redis_url names, and the settings, for a search at Sentinels
 * - the servers of the target, for the time at which the master last moved, and for the server of
 *   a list that all sessions use
 *
 * Locks: one LWLock protects the entries.  Nobody waits while holding it.
 */
#include "postgres.h"

#include "port/atomics.h"
#include "storage/condition_variable.h"

#include "error.h"
#include "shared/breaker.h"

#define ENTRIES				256
#define PLACES				4
#define WAITERS				16	/* may always wait, however slow the server is */
#define FIRST_PAUSE			INT64CONST(100000)	/* microseconds */
#define PLACE_TIME			INT64CONST(1000000) /* the longest time that a place is taken */

/* The lock protects all members but the condition variable.  Times are monotonic; 0: never. */
typedef struct BreakerEntry
{
	RlHash		name;			/* zero: free */
	uint64		used;			/* grows with each use of any entry */
	int64		places[PLACES]; /* until when each is taken */
	ConditionVariable freed;	/* a place, or there was a failure; stays when the entry is evicted */

	/* Connecting */
	int64		connected;		/* when a backend has connected last */
	int64		failed;			/* when an attempt failed last */
	int64		pause;			/* after that; 0: a backend has connected since */
	int64		took;			/* how long the last connection took, or the last attempt that was late */
	int64		queue;			/* when those that wait will have connected, if each takes as long */
	char		message[256];	/* of the last failure */

	/* A target */
	int64		searched;		/* when a backend left a server that cannot run calls */
	int64		moved;			/* when a call succeeded after that */
	int			in_use;			/* number of the server in the list, from 1 on; 0: not known */
} BreakerEntry;

typedef struct Breakers
{
	pg_atomic_uint64 changes;	/* of in_use, of all lists; read without the lock */
	uint64		uses;
	BreakerEntry entries[ENTRIES];	/* protected by the lock */
} Breakers;

/* A place that this backend has taken, or would get if it waits. */
typedef struct Place
{
	RlHash		name;
	int			number;
	int64		until;
} Place;

static Breakers *breakers = NULL;
static LWLock *lock;

/* An attempt has a place by settings while others fail, and one by address, within one of a search. */
static Place taken[4];
static int	ntaken = 0;
static bool watching = false;	/* no failure counts */
static ConditionVariable *waits_for = NULL;

static void
attach(void *memory, LWLockPadded *locks, bool found)
{
	breakers = memory;
	lock = &locks->lock;
	if (found)
		return;
	memset(breakers, 0, sizeof(Breakers));
	pg_atomic_init_u64(&breakers->changes, 1);
	for (int i = 0; i < ENTRIES; i++)
		ConditionVariableInit(&breakers->entries[i].freed);
}

const RlSharedPart rl_breaker_part = {.size = sizeof(Breakers),.nlocks = 1,.attach = attach};

/* Returns the name of a server's entry, or with settings that of the entry by address and settings. */
static RlHash
name_of(const char *server, bool settings)
{
	int			times[] = {rl_connect_timeout, rl_command_timeout};
	RlHash		name = rl_shared_hash(server, strlen(server));

	if (!settings)
		return name;
	for (int i = 0; i < RL_TARGET_SETTINGS; i++)
		name = rl_siphash(name, *rl_target_settings[i].value, strlen(*rl_target_settings[i].value));
	return rl_siphash(name, times, sizeof(times));
}

/* Returns NULL if there is none. */
static BreakerEntry *
find_entry(RlHash name)
{
	for (BreakerEntry *entry = breakers->entries; entry < breakers->entries + ENTRIES; entry++)
		if (entry->used != 0 && rl_same_key_hash(entry->name, name))
			return entry;
	return NULL;
}

/* Returns the number of places that are taken. */
static int
count_taken(const BreakerEntry *entry, int64 now)
{
	int			n = 0;

	for (int i = 0; i < PLACES; i++)
		n += entry->places[i] > now;
	return n;
}

/* Returns the entry, made in place of the least recently used one of which no place is taken. */
static BreakerEntry *
make_entry(RlHash name, int64 now)
{
	BreakerEntry *entry = find_entry(name);

	if (entry == NULL)
	{
		for (BreakerEntry *e = breakers->entries; e < breakers->entries + ENTRIES; e++)
			if ((entry == NULL || e->used < entry->used) && count_taken(e, now) == 0)
				entry = e;
		/* All have a place taken: that is no reason to fail. */
		if (entry == NULL)
			entry = breakers->entries;
		memset(entry->places, 0, sizeof(entry->places));
		memset((char *) entry + offsetof(BreakerEntry, connected), 0,
			   sizeof(*entry) - offsetof(BreakerEntry, connected));
		entry->name = name;
	}
	entry->used = ++breakers->uses;
	return entry;
}

/* How many backends may connect at a time. */
static int
places_of(const BreakerEntry *entry)
{
	return entry->pause > 0 || entry->took > (int64) rl_command_timeout * 250 ? 1 : PLACES;
}

static bool
is_mine(RlHash name)
{
	for (int i = 0; i < ntaken; i++)
		if (rl_same_key_hash(taken[i].name, name))
			return true;
	return false;
}

/* Takes a place that is free. */
static void
take_place(BreakerEntry *entry, int64 now)
{
	int			number = 0;

	for (int i = 1; i < PLACES; i++)
		if (entry->places[i] < entry->places[number])
			number = i;
	entry->places[number] = now + Min(PLACE_TIME, ((int64) rl_connect_timeout + rl_command_timeout) * 1000);
	Assert(ntaken < (int) lengthof(taken));
	if (ntaken < (int) lengthof(taken))
		taken[ntaken++] = (Place) {entry->name, number, entry->places[number]};
}

/* Gives back this backend's place, if it has one, and wakes as many backends as can go on. */
static void
give_place(BreakerEntry *entry, RlHash name, int64 now)
{
	for (int i = 0; i < ntaken; i++)
		if (rl_same_key_hash(taken[i].name, name))
		{
			/* After its time another backend may have it. */
			if (entry != NULL && entry->places[taken[i].number] == taken[i].until)
				entry->places[taken[i].number] = 0;
			taken[i] = taken[--ntaken];
			break;
		}
	if (entry != NULL)
		for (int i = count_taken(entry, now); i < places_of(entry); i++)
			ConditionVariableSignal(&entry->freed);
}

/* Sets the error of a call that does not connect, because of an earlier failure. */
static void
not_retrying(RlError *error, const char *server, const BreakerEntry *entry, int64 until, int64 now)
{
	rl_error_set(error, ERRCODE_STORE_FAILED, "not retrying Redis yet, because it has failed");
	rl_error_detail(error, "The server is %s. The failure was: %s.", server, entry->message);
	error->unreachable = true;
	error->retry_after = Max(until - now, 1);
}

/* Sets the error of a call that has waited for a place in vain, or cannot wait. */
static void
crowded(RlError *error, const char *server)
{
	rl_error_set(error, ERRCODE_STORE_FAILED,
				 "could not connect to Redis: too many sessions are connecting");
	rl_error_detail(error, "The server is %s.", server);
}

/* Returns until when no other backend connects, because connecting has failed; 0: one may. */
static int64
closed_until(const BreakerEntry *entry, int64 now)
{
	int64		until = entry->failed + entry->pause;

	if (entry->pause == 0 || rl_retry_interval == 0)
		return 0;
	for (int i = 0; i < PLACES && !is_mine(entry->name); i++)
		until = Max(until, entry->places[i]);
	return until > now ? until : 0;
}

/*
 * Returns false with the error set if more backends wait than connect_timeout suffices for, and
 * more than WAITERS.  Those that wait are not counted: each puts the end of the queue off.
 */
static bool
may_wait(BreakerEntry *entry, const char *server, int64 now, RlError *error)
{
	int64		each = entry->took / places_of(entry);
	int64		begins = Max(entry->queue, now);

	if (begins - now > Max((int64) rl_connect_timeout * 1000, each * WAITERS))
	{
		crowded(error, server);
		return false;
	}
	entry->queue = begins + each;
	return true;
}

typedef enum Admission
{
	CONNECT,
	WAIT,
	REFUSED
} Admission;

/*
 * Takes the places that the attempt needs and returns CONNECT.  Otherwise returns WAIT, with the
 * entry to wait at and until when, or REFUSED with the error set.  The lock is held.
 */
static Admission
admit(RlAttempt *attempt, const char *server, bool waited, BreakerEntry **at, int64 *until, RlError *error)
{
	int64		now = rl_monotonic_now();
	BreakerEntry *mine = make_entry(attempt->settings, now);
	BreakerEntry *entry = attempt->search ? mine : make_entry(attempt->address, now);
	BreakerEntry *closed = closed_until(mine, now) != 0 ? mine : closed_until(entry, now) != 0 ? entry : NULL;

	if (closed != NULL)
	{
		not_retrying(error, server, closed, closed_until(closed, now), now);
		return REFUSED;
	}
	/* Of those whose settings have failed one tries. */
	if (mine->pause > 0 && rl_retry_interval > 0 && !is_mine(attempt->settings))
		take_place(mine, now);
	attempt->began = now;
	if (attempt->search)
		return CONNECT;
	attempt->alone = places_of(entry) == 1 || mine->pause > 0;
	if (count_taken(entry, now) < places_of(entry))
	{
		take_place(entry, now);
		return CONNECT;
	}
	if (!waited && !may_wait(entry, server, now, error))
		return REFUSED;
	*at = entry;
	for (int i = 0; i < PLACES; i++)
		if (entry->places[i] > now)
			*until = Min(*until, entry->places[i]);
	return WAIT;
}

/* Lets another backend go on in place of this one, which may have been woken. */
static void
stop_waiting(void)
{
	ConditionVariable *freed = waits_for;

	if (freed == NULL)
		return;
	waits_for = NULL;
	ConditionVariableCancelSleep();
	ConditionVariableSignal(freed);
}

/*
 * Begins an attempt to connect the server, or, with search, to find the service's master; waits
 * for a place until then at the latest, for *patience microseconds at most, and subtracts what it
 * took.  Returns false with the error set if this backend may not connect.  After true the
 * caller calls rl_attempt_succeeded, rl_attempt_failed or rl_breakers_release.  Without shared
 * memory each call connects.  Raises an error at an interrupt.
 */
bool
rl_attempt_begin(RlAttempt *attempt, const char *server, bool search, int64 *patience, int64 until,
				 RlError *error)
{
	int64		start = rl_monotonic_now();
	bool		waited = false;
	Admission	admission;

	*attempt = (RlAttempt) {.noted = breakers != NULL,.search = search,.began = start};
	if (!attempt->noted)
		return true;
	attempt->address = name_of(server, false);
	attempt->settings = name_of(server, true);
	until = Min(until, start + *patience);
	for (;;)
	{
		BreakerEntry *entry = NULL;
		int64		wake = until;
		int64		now;

		LWLockAcquire(lock, LW_EXCLUSIVE);
		admission = admit(attempt, server, waited, &entry, &wake, error);
		if (entry != NULL && !waited)
		{
			/* Before the lock is released, so that no signal is missed. */
			waits_for = &entry->freed;
			ConditionVariablePrepareToSleep(waits_for);
		}
		LWLockRelease(lock);
		now = rl_monotonic_now();
		if (admission == WAIT && now >= until)
		{
			crowded(error, server);
			admission = REFUSED;
		}
		if (admission != WAIT)
			break;
		waited = true;
		(void) ConditionVariableTimedSleep(waits_for, Max(wake - now + 999, 1000) / 1000, rl_wait_event());
	}
	stop_waiting();
	*patience -= Min(*patience, rl_monotonic_now() - start);
	if (admission == REFUSED && is_mine(attempt->settings))
		rl_attempt_failed(attempt, false, error);
	return admission == CONNECT;
}

/*
 * Notes that the server has answered on a new connection, or that the search has found a master.  Does not
 * throw.
 */
void
rl_attempt_succeeded(const RlAttempt *attempt)
{
	int64		now = rl_monotonic_now();

	if (!attempt->noted)
		return;
	LWLockAcquire(lock, LW_EXCLUSIVE);
	for (int i = 0; i < (attempt->search ? 1 : 2); i++)
	{
		RlHash		name = i == 0 ? attempt->settings : attempt->address;
		BreakerEntry *entry = make_entry(name, now);

		entry->connected = now;
		entry->pause = 0;
		entry->took = now - attempt->began;
		give_place(entry, name, now);
	}
	LWLockRelease(lock);
}

/*
 * Whether the failure makes the pause longer: not if the attempt began before the last one, or if it was only
 * late.
 */
static bool
is_news(const RlAttempt *attempt, const BreakerEntry *entry, const RlError *error)
{
	return attempt->began >= entry->failed &&
		(!error->timed_out || attempt->alone || entry->connected < attempt->began);
}

/*
 * Ends an attempt that has failed.  It counts unless this backend was short of something or had
 * less than its time; the error then says when a backend tries again.  Does not throw.
 */
void
rl_attempt_failed(const RlAttempt *attempt, bool counts, RlError *error)
{
	int64		interval = (int64) rl_retry_interval * 1000;
	int64		now = rl_monotonic_now();
	BreakerEntry *mine;
	BreakerEntry *entry;
	BreakerEntry *failed;

	if (!attempt->noted)
		return;
	counts &= !watching;
	LWLockAcquire(lock, LW_EXCLUSIVE);
	mine = make_entry(attempt->settings, now);
	entry = attempt->search ? mine : make_entry(attempt->address, now);
	failed = error->by_kernel ? entry : mine;
	/* After the first one it may be that the settings are wrong. */
	if (counts && error->timed_out && mine->pause == 0)
		entry->took = now - attempt->began;
	if (counts && interval > 0 && is_news(attempt, failed, error))
	{
		failed->pause = Min(Max(failed->pause * 2, FIRST_PAUSE), interval);
		failed->failed = now;
		/* The master that a search has found is tried then. */
		if (attempt->search && error->retry_after > 0)
			failed->pause = error->retry_after;
		strlcpy(failed->message, error->message, sizeof(failed->message));
		ConditionVariableBroadcast(&entry->freed);
	}
	if (counts && interval > 0)
		error->retry_after = Max(failed->failed + failed->pause - now, 0);
	give_place(mine, attempt->settings, now);
	if (!attempt->search)
		give_place(entry, attempt->address, now);
	LWLockRelease(lock);
}

/* Lets no failure of this backend's next call count, for rl_status.  Does not throw. */
void
rl_breakers_watch(void)
{
	watching = true;
}

/*
 * Ends the attempts of this backend about which it has learned nothing, at the end of a call
 * or at the abort of the (sub)transaction after an ERROR.  Does not throw.
 */
void
rl_breakers_release(void)
{
	stop_waiting();
	watching = false;
	if (ntaken == 0)
		return;
	LWLockAcquire(lock, LW_EXCLUSIVE);
	while (ntaken > 0)
		give_place(find_entry(taken[0].name), taken[0].name, rl_monotonic_now());
	LWLockRelease(lock);
}

/* Returns the state for rl_status, or NULL, and for how many microseconds nobody tries the server. */
const char *
rl_breaker_state(const char *server, bool search, int64 *left)
{
	const char *state = "closed";

	*left = 0;
	if (breakers == NULL)
		return NULL;
	LWLockAcquire(lock, LW_SHARED);
	for (int i = 0; i < (search ? 1 : 2); i++)
	{
		int64		now = rl_monotonic_now();
		const BreakerEntry *entry = find_entry(name_of(server, i == 0));

		if (entry == NULL || entry->pause == 0)
			continue;
		*left = Max(entry->failed + entry->pause - now, 0);
		state = count_taken(entry, now) > 0 ? "trying" : *left > 0 ? "connect-failed" : "half-open";
		if (*left > 0)
			break;
	}
	LWLockRelease(lock);
	return state;
}

/*
 * The server that a target's servers or Sentinels name
 */

/*
 * Returns whether a backend may leave a server that cannot run calls, and look for the one in
 * use now; its connection was made at that time.  One backend may once in
 * ratelimit.retry_interval, and all whose connection is older than the last move.  Without
 * shared memory each may.
 */
bool
rl_may_search(const char *target, int64 connected)
{
	int64		now = rl_monotonic_now();
	BreakerEntry *entry;
	bool		may;

	if (breakers == NULL)
		return true;
	LWLockAcquire(lock, LW_EXCLUSIVE);
	entry = make_entry(name_of(target, false), now);
	may = entry->moved > connected;
	if (!may && (entry->searched == 0 || now - entry->searched >= (int64) rl_retry_interval * 1000))
	{
		entry->searched = now;
		may = true;
	}
	LWLockRelease(lock);
	return may;
}

/* Notes that a call has succeeded after such a search.  Does not throw. */
void
rl_note_moved(const char *target)
{
	int64		now = rl_monotonic_now();

	if (breakers == NULL)
		return;
	LWLockAcquire(lock, LW_EXCLUSIVE);
	make_entry(name_of(target, false), now)->moved = now;
	LWLockRelease(lock);
}

static uint64 changes_seen = 0;

/* Returns true if a server of a list has been taken since this backend's last rl_list_in_use. */
bool
rl_list_has_changed(void)
{
	return breakers != NULL && pg_atomic_read_u64(&breakers->changes) != changes_seen;
}

/*
 * Returns the number of the list's server that all sessions use.  It becomes "found", a master,
 * if that is not 0 and "before" was in use, or none was known.  Keeps the entry from eviction.
 */
int
rl_list_in_use(const char *target, int before, int found)
{
	BreakerEntry *entry;

	if (breakers == NULL)
		return found;
	LWLockAcquire(lock, LW_EXCLUSIVE);
	entry = make_entry(name_of(target, false), rl_monotonic_now());
	if (found != 0 && (entry->in_use == 0 || entry->in_use == before) && entry->in_use != found)
	{
		entry->in_use = found;
		pg_atomic_fetch_add_u64(&breakers->changes, 1);
	}
	changes_seen = pg_atomic_read_u64(&breakers->changes);
	found = entry->in_use;
	LWLockRelease(lock);
	return found;
}
