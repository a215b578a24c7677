/*
 * breaker.c
 *		Circuit breakers: after one backend failed to reach a server, no backend
 *		tries it for ratelimit.retry_interval; then one of them tries.
 *
 * Shared memory has an entry for each server whose breaker is not closed: the
 * entry is made by a failure, and removed by an answer.  When there is no room
 * the entry that opened first goes, so that the number of servers that were ever
 * asked does not matter.
 */
#include "postgres.h"

#include "access/xact.h"
#include "port/atomics.h"

#include "error.h"
#include "shared/breaker.h"

#define ENTRIES				256
#define MAX_ADDRESS			300

/* Several times what a backend has of nodes and Sentinels. */
#define HANDLES				256

/* A server that failed; the lock protects all of it. */
typedef struct Entry
{
	char		address[MAX_ADDRESS];
	int64		open_until;		/* monotonic, as the next one */
	int64		trying_until;	/* the backend that tries has until then; 0: none */
	int			sqlstate;		/* of the failure */
	char		message[256];
} Entry;

typedef struct Breakers
{
	pg_atomic_uint32 n;			/* of entries; changed under the lock held
								 * exclusively, read also without */
	Entry		entries[ENTRIES];
} Breakers;

/* This backend's handle of a server's breaker. */
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

Size
rl_breaker_size(void)
{
	return sizeof(Breakers);
}

int
rl_breaker_locks(void)
{
	return 1;
}

void
rl_breaker_attach(void *memory, LWLockPadded *locks, bool found)
{
	breakers = memory;
	lock = &locks->lock;
	if (found)
		return;
	memset(breakers, 0, sizeof(Breakers));
	pg_atomic_init_u32(&breakers->n, 0);
}

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
 * Returns the handle of an address's breaker.  When all are in use it takes the
 * one that was not used for longest, which no node has any more: nodes are
 * replaced in the same order, and there are fewer of them.  Returns NULL if there
 * is no shared memory: then each backend finds out for itself.
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

/* Notes that this backend tries the server until then; 0: does so no more. */
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

/* An aborted call tries no server any more. */
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

static void
register_callbacks(void)
{
	static bool registered = false;

	if (registered)
		return;
	registered = true;
	RegisterXactCallback(transaction_aborts, NULL);
	RegisterSubXactCallback(subtransaction_aborts, NULL);
}

/* Makes this backend the one that tries the server.  Returns false if another was faster. */
static bool
begin_trying(RlBreaker *breaker)
{
	int64		now = rl_monotonic_now();
	Entry	   *entry;
	bool		begun;

	register_callbacks();
	LWLockAcquire(lock, LW_EXCLUSIVE);
	entry = find_entry(breaker);
	begun = entry != NULL && is_half_open(entry, now);
	if (begun)
	{
		entry->trying_until = now + (int64) (rl_connect_timeout + rl_command_timeout) * 1000;
		set_trying(breaker, entry->trying_until);
	}
	LWLockRelease(lock);
	return begun;
}

/*
 * Returns true if the caller may talk to the server, and then has to tell how
 * that went, or to call rl_breakers_release.  Returns false, with the error set,
 * while the breaker is open.
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
		const Entry *entry;
		Entry		copy;

		LWLockAcquire(lock, LW_SHARED);
		entry = find_entry(breaker);
		if (entry != NULL)
			copy = *entry;
		LWLockRelease(lock);
		if (entry == NULL)
			break;
		if (!is_half_open(&copy, now))
		{
			rl_error_set(error, copy.sqlstate, "Redis is left alone after a failure");
			rl_error_detail(error, "The failure was: %s.", copy.message);
			return false;
		}
		(void) begin_trying(breaker);
	}
	return true;
}

/* The server has answered: closes the breaker. */
void
rl_breaker_succeeded(RlBreaker *breaker)
{
	Entry	   *entry;

	if (breaker == NULL || pg_atomic_read_u32(&breakers->n) == 0)
		return;
	set_trying(breaker, 0);
	LWLockAcquire(lock, LW_SHARED);
	entry = find_entry(breaker);
	LWLockRelease(lock);
	if (entry == NULL)
		return;
	LWLockAcquire(lock, LW_EXCLUSIVE);
	entry = find_entry(breaker);
	if (entry != NULL)
		remove_entry(entry);
	LWLockRelease(lock);
}

/* The server could not be reached, or did not answer in time: opens the breaker. */
void
rl_breaker_failed(RlBreaker *breaker, const RlError *error)
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
	entry->sqlstate = error->sqlstate;
	strlcpy(entry->message, error->message, sizeof(entry->message));
	LWLockRelease(lock);
}

/*
 * Lets others try the servers that this backend was to try and has learned
 * nothing of.  To be called at the end of each call; the end of a transaction
 * does so for a call that an ERROR has ended.
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
		/* If this took too long another backend may be trying. */
		if (entry != NULL && entry->trying_until == breaker->trying_until)
			entry->trying_until = 0;
		LWLockRelease(lock);
		set_trying(breaker, 0);
	}
}

/*
 * Returns the breaker's state, for people; *left is how long it stays open, in
 * microseconds.  NULL without a breaker.
 */
const char *
rl_breaker_state(RlBreaker *breaker, int64 *left)
{
	int64		now = rl_monotonic_now();
	const Entry *entry;
	const char *state = "closed";

	*left = 0;
	if (breaker == NULL)
		return NULL;
	LWLockAcquire(lock, LW_SHARED);
	entry = find_entry(breaker);
	if (entry != NULL)
	{
		state = is_half_open(entry, now) ? "half-open" : now < entry->open_until ? "open" : "trying";
		*left = Max(entry->open_until - now, 0);
	}
	LWLockRelease(lock);
	return state;
}
