/*
 * breaker.c
 *		Circuit breakers: what backends know together about servers that fail.
 *
 * Two facts are apart, because a backend's connection says nothing about those of other
 * backends.  If connecting fails, no backend makes a new connection until
 * ratelimit.retry_interval has passed, and backends with a connection go on.  If the server is
 * silent (a call on a connection that had worked got no answer in time, and then neither did a
 * new connection), no backend asks it.  If a new connection got no answer, one backend tries after
 * FIRST_PAUSE, and then after twice the time, up to ratelimit.retry_interval; while others get
 * answers, after FIRST_PAUSE each time.  A backend that waits longer than those that got no answer
 * asks in any case.
 *
 * A call that fails on a connection that has worked makes the server suspect: the backend that
 * connects next checks it, and others that need a connection wait for the result.
 *
 * Shared memory has an entry for each server that is suspect or fails, until it answers.  When
 * there is no room, the entry that lets a backend try first is evicted, so the number of
 * servers that were ever asked does not matter.
 *
 * Locks: one LWLock protects the entries.  Their number is an atomic, changed under it, and also
 * read without it: while it is 0, a call takes no lock.  Nobody waits while holding the lock.
 */
#include "postgres.h"

#include "port/atomics.h"
#include "storage/condition_variable.h"

#include "error.h"
#include "shared/breaker.h"

#define ENTRIES				256
#define MAX_ADDRESS			300
#define FIRST_PAUSE			INT64CONST(100000)	/* microseconds */

/* Several times the nodes and Sentinels that a backend has. */
#define HANDLES				256

/* A server that is suspect (neither of the first two times is set) or fails.  The lock protects all members. */
typedef struct BreakerEntry
{
	char		address[MAX_ADDRESS];
	int64		connect_at;		/* connecting failed: no new connection before; 0: it did
								 * not fail.  Monotonic, as the other times */
	int64		ask_at;			/* the server is silent: no call before; 0: it is not */
	int64		pause;			/* the last one after a silent connection; 0 if silence is 0 */
	int			unanswered;		/* how long a call got no answer on a connection that had
								 * worked, in milliseconds; 0: each got one */
	int			silence;		/* how long new connections got no answer, in milliseconds; 0:
								 * connecting has not failed in this way */
	int64		trying_until;	/* when the time of the backend that tries ends;
								 * 0: none tries */
	char		message[256];
} BreakerEntry;

typedef struct Breakers
{
	pg_atomic_uint32 n;			/* of entries */
	ConditionVariable changed;	/* an entry may let a waiting backend go on */
	BreakerEntry entries[ENTRIES];	/* protected by the lock */
} Breakers;

/* This backend's handle of a breaker: no cache of the entry, but a record of what this backend tries. */
struct RlBreaker
{
	char		address[MAX_ADDRESS];	/* empty: free */
	uint64		used;			/* grows with each use */
	int64		trying_until;	/* not 0: this backend tries the server */
};

static Breakers *breakers = NULL;
static LWLock *lock;
static RlBreaker handles[HANDLES];
static int	ntrying = 0;		/* handles with a trying_until */

static void
attach(void *memory, LWLockPadded *locks, bool found)
{
	breakers = memory;
	lock = &locks->lock;
	if (found)
		return;
	memset(breakers, 0, sizeof(Breakers));
	pg_atomic_init_u32(&breakers->n, 0);
	ConditionVariableInit(&breakers->changed);
}

const RlSharedPart rl_breaker_part = {sizeof(Breakers), 1, NULL, attach};

static void
touch(RlBreaker *breaker)
{
	static uint64 uses = 0;

	breaker->used = ++uses;
}

/*
 * Returns the handle of the breaker of an address.  When all are in use it takes the least
 * recently used one, which belongs to no node: nodes are replaced in the same order, and are
 * fewer.  Returns NULL without shared memory; the functions below then let every call try the
 * server.
 */
RlBreaker *
rl_breaker_find(const char *address)
{
	RlBreaker  *oldest = &handles[0];

	if (breakers == NULL || strlen(address) >= MAX_ADDRESS)
		return NULL;
	for (RlBreaker *breaker = handles; breaker < handles + HANDLES; breaker++)
	{
		if (strcmp(breaker->address, address) == 0)
		{
			touch(breaker);
			return breaker;
		}
		if (breaker->used < oldest->used)
			oldest = breaker;
	}
	if (oldest->trying_until != 0)
		rl_breakers_release();
	strlcpy(oldest->address, address, MAX_ADDRESS);
	touch(oldest);
	return oldest;
}

/* Notes that this backend tries the server until then; 0: it has ended that. */
static void
set_trying(RlBreaker *breaker, int64 until)
{
	ntrying += (until != 0) - (breaker->trying_until != 0);
	breaker->trying_until = until;
}

/* Returns when a backend may try the server; for a suspect one 0. */
static int64
try_at(const BreakerEntry *entry)
{
	return Max(entry->connect_at, entry->ask_at);
}

/* Returns NULL if the breaker is closed. */
static BreakerEntry *
find_entry(const RlBreaker *breaker)
{
	int			n = pg_atomic_read_u32(&breakers->n);

	for (int i = 0; i < n; i++)
		if (strcmp(breakers->entries[i].address, breaker->address) == 0)
			return &breakers->entries[i];
	return NULL;
}

static bool
copy_entry(const RlBreaker *breaker, BreakerEntry *copy)
{
	const BreakerEntry *entry;

	LWLockAcquire(lock, LW_SHARED);
	entry = find_entry(breaker);
	if (entry != NULL)
		*copy = *entry;
	LWLockRelease(lock);
	return entry != NULL;
}

static BreakerEntry *
add_entry(const RlBreaker *breaker)
{
	int			n = pg_atomic_read_u32(&breakers->n);
	BreakerEntry *entry = &breakers->entries[0];

	if (n < ENTRIES)
	{
		entry = &breakers->entries[n];
		pg_atomic_write_u32(&breakers->n, n + 1);
	}
	else
		for (int i = 1; i < n; i++)
			if (try_at(&breakers->entries[i]) < try_at(entry))
				entry = &breakers->entries[i];
	memset(entry, 0, sizeof(*entry));
	strlcpy(entry->address, breaker->address, MAX_ADDRESS);
	return entry;
}

/* Removes an entry; the last one moves to its place. */
static void
remove_entry(BreakerEntry *entry)
{
	int			n = pg_atomic_read_u32(&breakers->n) - 1;

	if (entry != &breakers->entries[n])
		*entry = breakers->entries[n];
	pg_atomic_write_u32(&breakers->n, n);
}

static bool
is_half_open(const BreakerEntry *entry, int64 now)
{
	return now >= try_at(entry) && now >= entry->trying_until;
}

/* Makes this backend try the server, unless another backend was faster. */
static void
begin_trying(RlBreaker *breaker)
{
	int64		now = rl_monotonic_now();
	BreakerEntry *entry;

	LWLockAcquire(lock, LW_EXCLUSIVE);
	entry = find_entry(breaker);
	if (entry != NULL && is_half_open(entry, now))
	{
		entry->trying_until = now + (int64) (rl_connect_timeout + rl_command_timeout) * 1000;
		set_trying(breaker, entry->trying_until);
	}
	LWLockRelease(lock);
}

/* Sets the error of a call that does not ask the server, because of an earlier failure. */
void
rl_not_retrying(RlError *error, const char *address, const char *failure, int64 left)
{
	rl_error_set(error, ERRCODE_STORE_FAILED, "not retrying Redis yet, because it has failed");
	rl_error_detail(error, "The server is %s. The failure was: %s.", address, failure);
	error->retry_after = Max(left, 1);
}

/*
 * Returns whether the caller may call the server, with its connection or without one.  With
 * RL_ADMITTED and RL_CHECK the caller must then call rl_breaker_connected, _answered, _failed
 * or rl_breakers_release.  With RL_WAIT and RL_OPEN the error is set.
 */
RlAdmission
rl_breaker_admits(RlBreaker *breaker, bool connected, RlError *error)
{
	if (breaker == NULL || rl_retry_interval == 0)
		return RL_ADMITTED;
	touch(breaker);
	while (pg_atomic_read_u32(&breakers->n) > 0 && breaker->trying_until == 0)
	{
		int64		now = rl_monotonic_now();
		BreakerEntry entry;

		if (!copy_entry(breaker, &entry) ||
			(connected && (entry.ask_at == 0 || rl_command_timeout > Min(entry.silence, entry.unanswered))))
			return RL_ADMITTED;
		if (!is_half_open(&entry, now))
		{
			if (!connected && entry.silence > 0 && rl_command_timeout > entry.silence)
				return RL_CHECK;
			rl_not_retrying(error, breaker->address, entry.message,
							Max(try_at(&entry), entry.trying_until) - now);
			return try_at(&entry) == 0 ? RL_WAIT : RL_OPEN;
		}
		begin_trying(breaker);
	}
	return breaker->trying_until != 0 ? RL_CHECK : RL_ADMITTED;
}

/* Waits while another backend tries.  Returns false once the time has passed.  May raise at an interrupt. */
bool
rl_breaker_wait(RlBreaker *breaker, int64 until)
{
	int64		now;
	BreakerEntry entry;

	ConditionVariablePrepareToSleep(&breakers->changed);
	now = rl_monotonic_now();
	if (copy_entry(breaker, &entry) && now < Min(entry.trying_until, until))
		(void) ConditionVariableTimedSleep(&breakers->changed,
										   (Min(entry.trying_until, until) - now + 999) / 1000,
										   rl_wait_event());
	ConditionVariableCancelSleep();
	return rl_monotonic_now() < until;
}

static void
forget_failure(RlBreaker *breaker, bool connected, bool answered)
{
	BreakerEntry *entry;
	BreakerEntry copy;

	if (breaker == NULL || pg_atomic_read_u32(&breakers->n) == 0)
		return;
	/* An answer on a connection that is there does not say that another one can be made. */
	if (!copy_entry(breaker, &copy) ||
		(!connected && copy.connect_at != 0 && copy.pause <= FIRST_PAUSE && copy.unanswered == 0))
		return;
	set_trying(breaker, 0);
	LWLockAcquire(lock, LW_EXCLUSIVE);
	entry = find_entry(breaker);
	if (entry != NULL)
	{
		/* An answer ends a silence.  If only new connections were silent, it must be on a new one. */
		if (entry->silence > 0 ? answered && (connected || entry->unanswered > 0) : connected)
			entry->connect_at = 0;
		else if (answered && entry->pause > FIRST_PAUSE)
		{
			/* A new connection may get an answer now too: the next try is soon. */
			entry->connect_at -= entry->pause - FIRST_PAUSE;
			entry->pause = FIRST_PAUSE;
		}
		if (answered)
			entry->ask_at = entry->unanswered = 0;
		if (try_at(entry) == 0)
			remove_entry(entry);
	}
	LWLockRelease(lock);
	ConditionVariableBroadcast(&breakers->changed);
}

/* Notes that a connection was made, and whether the server has sent an answer.  Does not throw. */
void
rl_breaker_connected(RlBreaker *breaker, bool answered)
{
	forget_failure(breaker, true, answered);
}

/* Notes that the server has answered on a connection that was there.  Does not throw. */
void
rl_breaker_answered(RlBreaker *breaker)
{
	forget_failure(breaker, false, true);
}

/*
 * Notes a failure; pause is the time until the next attempt if connecting failed.  Sets in the
 * error, whose message is kept, when the server is tried again.  Does not throw.
 */
void
rl_breaker_failed(RlBreaker *breaker, RlFailure failure, int64 pause, RlError *error)
{
	int64		interval = (int64) rl_retry_interval * 1000;
	bool		tried;
	int64		now;
	BreakerEntry *entry;

	if (breaker == NULL || interval == 0)
		return;
	tried = breaker->trying_until != 0;
	set_trying(breaker, 0);
	LWLockAcquire(lock, LW_EXCLUSIVE);
	now = rl_monotonic_now();
	entry = find_entry(breaker);
	if (entry == NULL)
		entry = add_entry(breaker);
	if (failure == RL_CONNECT_FAILED)
	{
		/* Without a new connection it is not known that the server is silent. */
		entry->ask_at = 0;
		entry->connect_at = now + pause;
		entry->pause = entry->silence = 0;
	}
	else if (failure == RL_SILENT)
	{
		if (tried || entry->pause == 0)
			entry->pause = Min(Max(entry->pause * 2, FIRST_PAUSE), interval);
		entry->silence = Max(entry->silence, rl_command_timeout);
		/* Without an unanswered call, only new connections are known to fail. */
		entry->connect_at = entry->unanswered > 0 ? 0 : now + entry->pause;
		entry->ask_at = entry->unanswered > 0 ? now + entry->pause : 0;
	}
	else if (failure == RL_CALL_UNANSWERED)
		entry->unanswered = Max(entry->unanswered, rl_command_timeout);
	if (failure < RL_CALL_FAILED)
		entry->trying_until = 0;
	if (failure < RL_CALL_FAILED || entry->message[0] == '\0')
		strlcpy(entry->message, error->message, sizeof(entry->message));
	error->retry_after = Max(try_at(entry) - now, 0);
	LWLockRelease(lock);
	if (failure < RL_CALL_FAILED)
		ConditionVariableBroadcast(&breakers->changed);
}

/*
 * Lets other backends try the servers that this one was trying, if it learned nothing about
 * them.  To be called at the end of each call; the abort of the (sub)transaction does it for a
 * call that an ERROR has ended.  Does not throw.
 */
void
rl_breakers_release(void)
{
	for (RlBreaker *breaker = handles; ntrying > 0 && breaker < handles + HANDLES; breaker++)
	{
		BreakerEntry *entry;

		if (breaker->trying_until == 0)
			continue;
		LWLockAcquire(lock, LW_EXCLUSIVE);
		entry = find_entry(breaker);
		/* After trying_until another backend may be trying. */
		if (entry != NULL && entry->trying_until == breaker->trying_until)
			entry->trying_until = 0;
		LWLockRelease(lock);
		set_trying(breaker, 0);
		ConditionVariableBroadcast(&breakers->changed);
	}
}

/* Returns the state for rl_status, or NULL, and for how many microseconds nobody tries the server. */
const char *
rl_breaker_state(RlBreaker *breaker, int64 *left)
{
	int64		now = rl_monotonic_now();
	BreakerEntry entry;

	*left = 0;
	if (breaker == NULL)
		return NULL;
	if (!copy_entry(breaker, &entry))
		return "closed";
	if (now < entry.trying_until)
		return "trying";
	if (try_at(&entry) == 0)
		return "suspect";
	*left = Max(try_at(&entry) - now, 0);
	return *left == 0 ? "half-open" : entry.ask_at != 0 ? "open" : "connect-failed";
}
