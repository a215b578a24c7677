/*
 * breaker.c
 *		Servers that are left alone: one backend's failure to reach a server
 *		spares all others the wait for ratelimit.retry_interval; then one of
 *		them tries.
 */
#include "postgres.h"

#include "port/atomics.h"
#include "storage/spin.h"

#include "shared.h"

#define BREAKERS			256
#define MAX_ADDRESS			300

struct RlBreaker
{
	slock_t		mutex;			/* protects all but address and open_until */
	char		address[MAX_ADDRESS];	/* empty: free; protected by the lock */
	pg_atomic_uint64 open_until;	/* monotonic; 0: closed */
	int64		trying_until;	/* the one that tries has until then */
	int			sqlstate;		/* of the failure */
	char		message[256];
};

static RlBreaker *breakers = NULL;
static LWLock *lock;

/* The one that this backend tries, while others wait for the outcome. */
static RlBreaker *trying = NULL;

Size
rl_breaker_size(void)
{
	return BREAKERS * sizeof(RlBreaker);
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
	for (int i = 0; i < BREAKERS; i++)
	{
		memset(&breakers[i], 0, sizeof(RlBreaker));
		SpinLockInit(&breakers[i].mutex);
		pg_atomic_init_u64(&breakers[i].open_until, 0);
	}
}

/*
 * The breaker of an address, which lives as long as the server.  NULL if there
 * is no shared memory, or no room: then each backend finds out for itself.
 */
RlBreaker *
rl_breaker_find(const char *address)
{
	RlBreaker  *breaker = NULL;

	if (breakers == NULL || strlen(address) >= MAX_ADDRESS)
		return NULL;
	LWLockAcquire(lock, LW_EXCLUSIVE);
	for (int i = 0; i < BREAKERS && breaker == NULL; i++)
	{
		if (breakers[i].address[0] == '\0')
			strlcpy(breakers[i].address, address, MAX_ADDRESS);
		if (strcmp(breakers[i].address, address) == 0)
			breaker = &breakers[i];
	}
	LWLockRelease(lock);
	return breaker;
}

/*
 * True if the caller may talk to the server; it then tells how that went.
 * False, with the error set, while the server is left alone.
 */
bool
rl_breaker_admits(RlBreaker *breaker, RlError *error)
{
	int64		now;
	bool		admits;
	char		message[sizeof(breaker->message)];

	if (breaker == NULL || rl_retry_interval == 0 || pg_atomic_read_u64(&breaker->open_until) == 0)
		return true;
	now = rl_monotonic_now();
	SpinLockAcquire(&breaker->mutex);
	admits = now >= (int64) pg_atomic_read_u64(&breaker->open_until) && now >= breaker->trying_until;
	if (admits)
		breaker->trying_until = now + (int64) (rl_connect_timeout + rl_command_timeout) * 1000;
	error->sqlstate = breaker->sqlstate;
	memcpy(message, breaker->message, sizeof(message));
	SpinLockRelease(&breaker->mutex);
	if (admits)
	{
		trying = breaker;
		return true;
	}
	rl_error_set(error, error->sqlstate, "Redis is left alone after a failure");
	rl_error_detail(error, "The failure was: %s.", message);
	return false;
}

/* The server has answered. */
void
rl_breaker_succeeded(RlBreaker *breaker)
{
	if (breaker == NULL || pg_atomic_read_u64(&breaker->open_until) == 0)
		return;
	SpinLockAcquire(&breaker->mutex);
	pg_atomic_write_u64(&breaker->open_until, 0);
	breaker->trying_until = 0;
	SpinLockRelease(&breaker->mutex);
	trying = NULL;
}

/* A call was interrupted: if it was to try a server, the next one may. */
void
rl_breaker_interrupted(void)
{
	if (trying == NULL)
		return;
	SpinLockAcquire(&trying->mutex);
	trying->trying_until = 0;
	SpinLockRelease(&trying->mutex);
	trying = NULL;
}

/* The server could not be reached, or did not answer in time. */
void
rl_breaker_failed(RlBreaker *breaker, const RlError *error)
{
	int64		until = rl_monotonic_now() + (int64) rl_retry_interval * 1000;

	if (breaker == NULL || rl_retry_interval == 0)
		return;
	SpinLockAcquire(&breaker->mutex);
	pg_atomic_write_u64(&breaker->open_until, until);
	breaker->trying_until = 0;
	breaker->sqlstate = error->sqlstate;
	memcpy(breaker->message, error->message, sizeof(breaker->message));
	SpinLockRelease(&breaker->mutex);
	trying = NULL;
}

/*
 * Says how the breaker stands, for people; *left is how long it stays open, in
 * microseconds.  NULL without a breaker.
 */
const char *
rl_breaker_state(RlBreaker *breaker, int64 *left)
{
	int64		now = rl_monotonic_now();
	int64		open_until;
	int64		trying_until;

	*left = 0;
	if (breaker == NULL)
		return NULL;
	SpinLockAcquire(&breaker->mutex);
	open_until = pg_atomic_read_u64(&breaker->open_until);
	trying_until = breaker->trying_until;
	SpinLockRelease(&breaker->mutex);
	if (open_until == 0)
		return "closed";
	if (now < open_until)
	{
		*left = open_until - now;
		return "open";
	}
	return now < trying_until ? "trying" : "half-open";
}
