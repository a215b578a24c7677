/*
 * breaker.c
 *		Circuit breakers: after one backend failed to reach a server, no backend
 *		tries it until ratelimit.retry_interval has passed.  Then one of them
 *		tries.
 *
 * Shared memory has an entry for each server whose breaker is not closed.  A
 * failure makes the entry, and an answer removes it.  When there is no room, the
 * entry that opened first is evicted, so the number of servers that were ever
 * asked does not matter.
 *
 * Locks: one LWLock protects the entries.  Their number is an atomic, which is
 * changed under the lock held exclusively, and also read without it: while it is
 * 0, a call takes no lock.  The handles are local to the backend.
 */
#include "postgres.h"

#include "access/xact.h"
#include "port/atomics.h"

#include "error.h"
#include "shared/breaker.h"

#define ENTRIES				256
#define MAX_ADDRESS			300

/* Several times the nodes and Sentinels that a backend has. */
#define HANDLES				256

/* A server that failed.  The lock protects all members. */
typedef struct Entry
{
	char		address[MAX_ADDRESS];
	int64		open_until;		/* monotonic, as the next one */
	int64		trying_until;	/* when the time of the backend that tries ends;
								 * 0: none tries */
	char		message[256];
} Entry;

typedef struct Breakers
{
	pg_atomic_uint32 n;			/* of entries */
	Entry		entries[ENTRIES];	/* protected by the lock */
} Breakers;

/*
 * This backend's handle of a server's breaker: no cache of the entry, but a
 * record of the servers that this backend tries.
 */
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
}

const RlSharedPart rl_breaker_part = {sizeof(Breakers), 1, NULL, attach};

/*
 * Handles
 */

static void
touch(RlBreaker *breaker)
{
	static uint64 uses = 0;

	breaker->used = ++uses;
}

/*
 * Returns the handle of the breaker of an address.  When all are in use it takes
 * the least recently used one, which belongs to no node: nodes are replaced in the
 * same order, and there are fewer of them.  Returns NULL without shared memory;
 * the functions below then let every call try the server.
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

/*
 * Entries
 */

/* Returns the entry of the breaker, or NULL if it is closed. */
static Entry *
find_entry(const RlBreaker *breaker)
{
	int			n = pg_atomic_read_u32(&breakers->n);

	for (int i = 0; i < n; i++)
		if (strcmp(breakers->entries[i].address, breaker->address) == 0)
			return &breakers->entries[i];
	return NULL;
}

/* Copies the entry of the breaker.  Returns false if it is closed. */
static bool
copy_entry(const RlBreaker *breaker, Entry *copy)
{
	const Entry *entry;

	LWLockAcquire(lock, LW_SHARED);
	entry = find_entry(breaker);
	if (entry != NULL)
		*copy = *entry;
	LWLockRelease(lock);
	return entry != NULL;
}

/* Makes an entry for the breaker. */
static Entry *
add_entry(const RlBreaker *breaker)
{
	int			n = pg_atomic_read_u32(&breakers->n);
	Entry	   *entry = &breakers->entries[0];

	if (n < ENTRIES)
	{
		entry = &breakers->entries[n];
		pg_atomic_write_u32(&breakers->n, n + 1);
	}
	else
		for (int i = 1; i < n; i++)
			if (breakers->entries[i].open_until < entry->open_until)
				entry = &breakers->entries[i];
	strlcpy(entry->address, breaker->address, MAX_ADDRESS);
	return entry;
}

/* Removes an entry; the last one moves to its place. */
static void
remove_entry(Entry *entry)
{
	int			n = pg_atomic_read_u32(&breakers->n) - 1;

	if (entry != &breakers->entries[n])
		*entry = breakers->entries[n];
	pg_atomic_write_u32(&breakers->n, n);
}

/* Returns true if the next call may try the server. */
static bool
is_half_open(const Entry *entry, int64 now)
{
	return now >= entry->open_until && now >= entry->trying_until;
}

/*
 * Trying
 */

/* Ends the attempts of an aborted call. */
static void
transaction_aborts(XactEvent event, void *arg pg_attribute_unused())
{
	if (event == XACT_EVENT_ABORT || event == XACT_EVENT_PARALLEL_ABORT)
		rl_breakers_release();
}

static void
subtransaction_aborts(SubXactEvent event, SubTransactionId mine pg_attribute_unused(),
					  SubTransactionId parent pg_attribute_unused(),
					  void *arg pg_attribute_unused())
{
	if (event == SUBXACT_EVENT_ABORT_SUB)
		rl_breakers_release();
}

/* Makes this backend try the server, unless another backend was faster. */
static void
begin_trying(RlBreaker *breaker)
{
	static bool registered = false;
	int64		now = rl_monotonic_now();
	Entry	   *entry;

	if (!registered)
	{
		registered = true;
		RegisterXactCallback(transaction_aborts, NULL);
		RegisterSubXactCallback(subtransaction_aborts, NULL);
	}
	LWLockAcquire(lock, LW_EXCLUSIVE);
	entry = find_entry(breaker);
	if (entry != NULL && is_half_open(entry, now))
	{
		entry->trying_until = now + (int64) (rl_connect_timeout + rl_command_timeout) * 1000;
		set_trying(breaker, entry->trying_until);
	}
	LWLockRelease(lock);
}

/*
 * Returns true if the caller may call the server.  It then must call
 * rl_breaker_succeeded, rl_breaker_failed or rl_breakers_release.  Returns false,
 * with the error set, if the breaker is open.
 */
bool
rl_breaker_admits(RlBreaker *breaker, RlError *error)
{
	if (breaker == NULL || rl_retry_interval == 0)
		return true;
	touch(breaker);
	while (pg_atomic_read_u32(&breakers->n) > 0 && breaker->trying_until == 0)
	{
		int64		now = rl_monotonic_now();
		Entry		entry;

		if (!copy_entry(breaker, &entry))
			break;
		if (!is_half_open(&entry, now))
		{
			rl_error_set(error, ERRCODE_STORE_FAILED, "not retrying Redis until ratelimit.retry_interval has passed");
			rl_error_detail(error, "The server is %s. The failure was: %s.", breaker->address, entry.message);
			error->retry_after = Max(Max(entry.open_until, entry.trying_until) - now, 1);
			return false;
		}
		begin_trying(breaker);
	}
	return true;
}

/* Closes the breaker.  To be called when the server has answered.  Does not throw. */
void
rl_breaker_succeeded(RlBreaker *breaker)
{
	Entry	   *entry;
	Entry		copy;

	if (breaker == NULL || pg_atomic_read_u32(&breakers->n) == 0)
		return;
	set_trying(breaker, 0);
	if (!copy_entry(breaker, &copy))
		return;
	LWLockAcquire(lock, LW_EXCLUSIVE);
	entry = find_entry(breaker);
	if (entry != NULL)
		remove_entry(entry);
	LWLockRelease(lock);
}

/*
 * Opens the breaker.  To be called when the server could not be reached, or did
 * not answer in time.  Does not throw.
 */
void
rl_breaker_failed(RlBreaker *breaker, RlError *error)
{
	Entry	   *entry;

	if (breaker == NULL || rl_retry_interval == 0)
		return;
	set_trying(breaker, 0);
	LWLockAcquire(lock, LW_EXCLUSIVE);
	entry = find_entry(breaker);
	if (entry == NULL)
		entry = add_entry(breaker);
	entry->open_until = rl_monotonic_now() + (int64) rl_retry_interval * 1000;
	entry->trying_until = 0;
	strlcpy(entry->message, error->message, sizeof(entry->message));
	error->retry_after = (int64) rl_retry_interval * 1000;
	LWLockRelease(lock);
}

/*
 * Lets other backends try the servers that this backend was trying, if it learned
 * nothing about them.  To be called at the end of each call; the abort of the
 * (sub)transaction does it for a call that an ERROR has ended.  Does not throw.
 */
void
rl_breakers_release(void)
{
	for (RlBreaker *breaker = handles; ntrying > 0 && breaker < handles + HANDLES; breaker++)
	{
		Entry	   *entry;

		if (breaker->trying_until == 0)
			continue;
		LWLockAcquire(lock, LW_EXCLUSIVE);
		entry = find_entry(breaker);
		/* After trying_until another backend may be trying. */
		if (entry != NULL && entry->trying_until == breaker->trying_until)
			entry->trying_until = 0;
		LWLockRelease(lock);
		set_trying(breaker, 0);
	}
}

/*
 * Returns the breaker's state for rl_status, or NULL without a breaker, and sets
 * for how many microseconds it stays open.
 */
const char *
rl_breaker_state(RlBreaker *breaker, int64 *left)
{
	int64		now = rl_monotonic_now();
	Entry		entry;

	*left = 0;
	if (breaker == NULL)
		return NULL;
	if (!copy_entry(breaker, &entry))
		return "closed";
	*left = Max(entry.open_until - now, 0);
	if (is_half_open(&entry, now))
		return "half-open";
	return now < entry.open_until ? "open" : "trying";
}
