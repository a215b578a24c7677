/*
 * refusal_log.c
 *		Which refusals get into the server's log, as ratelimit.log_refusals says, and
 *		which actions that were allowed in shadow.
 *
 * A flood of refused calls must not become a flood of lines.  A refusal is known by its error's
 * text domain, which stays with the error through each rethrow; a user's own error with the
 * same SQLSTATE has another one.
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "port/atomics.h"

#include "shared/refusal_log.h"

/* The most refusals that are logged in any second: about 100 lines. */
#define MAX_LOGGED			20
#define SEEN				1024	/* keys whose last time in the log is known */

/* Which refusals were logged; all members are atomic. */
typedef struct Sample
{
	pg_atomic_uint64 logged;	/* how many refusals were logged */
	pg_atomic_uint64 times[MAX_LOGGED]; /* of the last ones, or 0 */
	pg_atomic_uint64 left_out;	/* refusals since the last one that was logged */
	pg_atomic_uint64 seen[SEEN];	/* milliseconds << 32, and half of a key's hash */
} Sample;

/* The samples; shared by all backends if there is shared memory. */
#define REFUSED				0	/* errors */
#define SHADOW				1	/* actions that were allowed */
#define SAMPLES				2

/*
 * The text domain of a refusal ends with the hash of its key.  Those of the last refusals raised are kept,
 * because PostgreSQL keeps the pointer: another can be raised before the first is logged.
 */
#define DOMAIN_PREFIX		"ratelimit-refusal "
#define DOMAINS				64
static char domains[DOMAINS][sizeof(DOMAIN_PREFIX) + 16];
static uint32 next_domain = 0;
static Sample *samples = NULL;
static emit_log_hook_type prev_emit_log_hook = NULL;

static void
init_samples(Sample *new)
{
	for (Sample *sample = new; sample < new + SAMPLES; sample++)
	{
		pg_atomic_init_u64(&sample->logged, 0);
		pg_atomic_init_u64(&sample->left_out, 0);
		for (int i = 0; i < MAX_LOGGED; i++)
			pg_atomic_init_u64(&sample->times[i], 0);
		for (int i = 0; i < SEEN; i++)
			pg_atomic_init_u64(&sample->seen[i], 0);
	}
}

static void
attach(void *memory, LWLockPadded *locks pg_attribute_unused(), bool found)
{
	samples = memory;
	if (!found)
		init_samples(samples);
}

const RlSharedPart rl_refusal_log_part = {.size = SAMPLES * sizeof(Sample),.nlocks = 0,.attach = attach};

/* Returns true once a second for a key, and to one of several backends at the same moment. */
static bool
is_new_key(Sample *sample, uint64 hash, int64 now)
{
	pg_atomic_uint64 *seen = &sample->seen[hash % SEEN];
	uint64		last = pg_atomic_read_u64(seen);
	uint32		half = hash >> 32;
	uint32		ms = now / 1000;

	if ((uint32) last == half && ms - (uint32) (last >> 32) < 1000)
		return false;
	return pg_atomic_compare_exchange_u64(seen, &last, (uint64) ms << 32 | half);
}

static bool
is_within_limit(Sample *sample, int64 now)
{
	pg_atomic_uint64 *oldest = &sample->times[pg_atomic_read_u64(&sample->logged) % MAX_LOGGED];
	uint64		last = pg_atomic_read_u64(oldest);

	if ((last != 0 && now - (int64) last < RL_SECOND) || !pg_atomic_compare_exchange_u64(oldest, &last, now))
		return false;
	pg_atomic_fetch_add_u64(&sample->logged, 1);
	return true;
}

/* Returns true if a refusal of the key may be logged, and how many were left out before it. */
static bool
may_log(Sample *sample, uint64 hash, uint64 *left_out)
{
	int64		now = rl_monotonic_now();

	if (!is_new_key(sample, hash, now) || !is_within_limit(sample, now))
	{
		pg_atomic_fetch_add_u64(&sample->left_out, 1);
		return false;
	}
	*left_out = pg_atomic_exchange_u64(&sample->left_out, 0);
	return true;
}

/* Returns a sentence, after a blank, about refusals that were left out, or an empty text. */
const char *
rl_left_out_text(uint64 left_out)
{
	return left_out == 0 ? "" :
		psprintf(" %llu other refusals were not logged.", (unsigned long long) left_out);
}

/* Leaves a refusal out of the server's log, or tells how many were left out before it. */
static void
emit_log(ErrorData *error)
{
	uint64		left_out;

	/* A rethrown error has its text domain.  An error that ends the session is always logged. */
	if (rl_log_refusals != RL_LOG_ALL && error->output_to_server && error->elevel == ERROR &&
		error->domain != NULL && strncmp(error->domain, DOMAIN_PREFIX, strlen(DOMAIN_PREFIX)) == 0)
	{
		if (rl_log_refusals == RL_LOG_NONE)
			error->output_to_server = false;
		else if (!may_log(&samples[REFUSED], strtoull(error->domain + strlen(DOMAIN_PREFIX), NULL, 16),
						  &left_out))
			error->output_to_server = false;
		else if (left_out > 0)
			error->detail_log = psprintf("%s%s", error->detail_log ? error->detail_log : "",
										 rl_left_out_text(left_out));
	}
	/* As in core, the hook is called only for messages that are written. */
	if (prev_emit_log_hook && error->output_to_server)
		prev_emit_log_hook(error);
}

/* Installs the hook; called once, when the library is loaded. */
void
rl_refusal_log_init(void)
{
	static Sample own[SAMPLES];

	if (samples == NULL)
	{
		init_samples(own);
		samples = own;
	}
	prev_emit_log_hook = emit_log_hook;
	emit_log_hook = emit_log;
}

static uint64
hash_of(const RlKey *key)
{
	return rl_shared_available() ? rl_key_hash(key).low :
		hash_bytes_extended((const unsigned char *) key->data, key->len, 0);
}

/* Returns the text domain of a refusal of the key that is raised next. */
const char *
rl_refusal_domain(const RlKey *key)
{
	char	   *domain = domains[next_domain++ % DOMAINS];

	snprintf(domain, sizeof(domains[0]), DOMAIN_PREFIX "%016llx", (unsigned long long) hash_of(key));
	return domain;
}

/* Returns true if an action allowed only in shadow may be logged, and how many were left out before. */
bool
rl_shadow_may_log(const RlKey *key, uint64 *left_out)
{
	return may_log(&samples[SHADOW], hash_of(key), left_out);
}
