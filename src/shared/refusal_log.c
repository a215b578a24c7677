/*
 * refusal_log.c
 *		Which refusals get into the server's log, as ratelimit.log_refusals says.
 *
 * A flood of refused calls must not become a flood of lines.  A refusal that is
 * raised is marked by its error's text domain, which stays with the error through
 * each rethrow; a user's own error with the same SQLSTATE has no mark.
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "port/atomics.h"

#include "shared/refusal_log.h"

/*
 * The most refusals, of all keys together, that are logged in any second.  A refusal
 * usually has at most five lines: the error, its detail, hint and context, and the
 * statement; so these are 100 lines.
 */
#define MAX_LOGGED			20
#define SEEN				1024	/* keys whose last time in the log is known */

/* Shared by all backends if there is shared memory; all members are atomic. */
typedef struct Sample
{
	pg_atomic_uint64 logged;	/* how many refusals were logged */
	pg_atomic_uint64 times[MAX_LOGGED]; /* of the last ones, or 0 */
	pg_atomic_uint64 left_out;	/* refusals since the last one that was logged */
	pg_atomic_uint64 seen[SEEN];	/* milliseconds << 32, and half of a key's hash */
} Sample;

static const char mark[] = "ratelimit-refusal";
static uint64 marked = 0;		/* hash of the key of the last refusal raised */
static Sample *sample = NULL;
static emit_log_hook_type prev_emit_log_hook = NULL;

static void
init_sample(Sample *new)
{
	pg_atomic_init_u64(&new->logged, 0);
	pg_atomic_init_u64(&new->left_out, 0);
	for (int i = 0; i < MAX_LOGGED; i++)
		pg_atomic_init_u64(&new->times[i], 0);
	for (int i = 0; i < SEEN; i++)
		pg_atomic_init_u64(&new->seen[i], 0);
}

static void
attach(void *memory, LWLockPadded *locks pg_attribute_unused(), bool found)
{
	sample = memory;
	if (!found)
		init_sample(sample);
}

const RlSharedPart rl_refusal_log_part = {sizeof(Sample), 0, NULL, attach};

/*
 * Returns true if it has not returned true for the key within a second, and notes the
 * time.  Of several backends at the same moment, one gets true.
 */
static bool
is_new_key(uint64 hash, int64 now)
{
	pg_atomic_uint64 *seen = &sample->seen[hash % SEEN];
	uint64		last = pg_atomic_read_u64(seen);
	uint32		half = hash >> 32;
	uint32		ms = now / 1000;

	if ((uint32) last == half && ms - (uint32) (last >> 32) < 1000)
		return false;
	return pg_atomic_compare_exchange_u64(seen, &last, (uint64) ms << 32 | half);
}

/* Returns true if fewer than MAX_LOGGED refusals were logged within a second, and notes the time. */
static bool
is_within_limit(int64 now)
{
	pg_atomic_uint64 *oldest = &sample->times[pg_atomic_read_u64(&sample->logged) % MAX_LOGGED];
	uint64		last = pg_atomic_read_u64(oldest);

	if ((last != 0 && now - (int64) last < RL_SECOND) || !pg_atomic_compare_exchange_u64(oldest, &last, now))
		return false;
	pg_atomic_fetch_add_u64(&sample->logged, 1);
	return true;
}

/* Leaves a refusal out of the server's log, or tells how many were left out before it. */
static void
emit_log(ErrorData *error)
{
	int64		now = rl_monotonic_now();

	/*
	 * Errors that were caught and rethrown have a copy of the mark.  An error that
	 * ends the session is always logged.
	 */
	if (rl_log_refusals != RL_LOG_ALL && error->output_to_server && error->elevel == ERROR &&
		error->domain != NULL && strcmp(error->domain, mark) == 0)
	{
		if (rl_log_refusals == RL_LOG_NONE)
			error->output_to_server = false;
		else if (!is_new_key(marked, now) || !is_within_limit(now))
		{
			error->output_to_server = false;
			pg_atomic_fetch_add_u64(&sample->left_out, 1);
		}
		else
		{
			uint64		left_out = pg_atomic_exchange_u64(&sample->left_out, 0);

			if (left_out > 0)
				error->detail_log = psprintf("%s %llu other refusals were not logged.",
											 error->detail_log ? error->detail_log : "",
											 (unsigned long long) left_out);
		}
	}
	/* As in core, the hook is called only for messages that are written. */
	if (prev_emit_log_hook && error->output_to_server)
		prev_emit_log_hook(error);
}

/* Installs the hook; called once, when the library is loaded. */
void
rl_refusal_log_init(void)
{
	static Sample own;

	if (sample == NULL)
	{
		init_sample(&own);
		sample = &own;
	}
	prev_emit_log_hook = emit_log_hook;
	emit_log_hook = emit_log;
}

/* Returns the text domain of a refusal of the key that is raised next. */
const char *
rl_refusal_mark(const RlKey *key)
{
	marked = rl_shared_available() ? rl_key_hash(key).low :
		hash_bytes_extended((const unsigned char *) key->data, key->len, 0);
	return mark;
}
