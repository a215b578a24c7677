/*
 * engine.c
 *		src/algorithm.c as a program, linked with nothing else: it keeps states
 *		in memory, reads an act a line and prints what was decided.
 *
 *	act    := op key now argument n { limit }
 *	op     := take | quiet | peek | refund | ban | unban | reset
 *	limit  := algorithm capacity count period interval_ns step from_first
 *			  count_denied ban ban_after
 *
 * The argument is the quota, or the ban's length.  A reset without limits
 * forgets the key.  The answer to the first three is a line of decisions, the
 * combined one and then each limit's, else it is "done":
 *
 *	decision := allowed capacity remaining retry_after reset_after source
 *
 * As in Redis, only what an act changes is kept: an act that takes nothing
 * leaves a state as it was, even one of which much has become free by now.
 */
#include "postgres.h"

#undef printf

#include <inttypes.h>

#include "../src/algorithm.h"

#define BUCKETS				65536

typedef struct Kept
{
	struct Kept *next;
	RlLimit		limit;			/* its tag is what counts */
	RlState		state;
} Kept;

typedef struct Key
{
	struct Key *next;
	char		name[64];
	int64		banned_until;
	Kept	   *kept;
} Key;

static Key *keys[BUCKETS];

#ifdef USE_ASSERT_CHECKING
#if PG_VERSION_NUM >= 160000
void
ExceptionalCondition(const char *condition, const char *file, int line)
#else
void
ExceptionalCondition(const char *condition, const char *type, const char *file, int line)
#endif
{
	printf("failed assertion %s, %s:%d\n", condition, file, line);
	fflush(stdout);
	abort();
}
#endif

static void *
allocate(size_t size)
{
	void	   *p = calloc(1, size);

	if (p == NULL)
		abort();
	return p;
}

static Key *
find_key(const char *name)
{
	uint32		hash = 5381;
	Key		   *key;

	for (const char *p = name; *p; p++)
		hash = hash * 33 + (unsigned char) *p;
	for (key = keys[hash % BUCKETS]; key; key = key->next)
		if (strcmp(key->name, name) == 0)
			return key;
	key = allocate(sizeof(Key));
	strcpy(key->name, name);
	key->next = keys[hash % BUCKETS];
	return keys[hash % BUCKETS] = key;
}

static RlState *
find_state(Key *key, const RlLimit *limit)
{
	Kept	   *kept;

	for (kept = key->kept; kept; kept = kept->next)
		if (kept->limit.algorithm == limit->algorithm && kept->limit.period == limit->period &&
			kept->limit.step == limit->step && kept->limit.from_first == limit->from_first)
			return &kept->state;
	kept = allocate(sizeof(Kept));
	kept->limit = *limit;
	kept->state = (RlState) RL_NO_STATE;
	kept->next = key->kept;
	key->kept = kept;
	return &kept->state;
}

/* A state of its own, with room for the act and not for more. */
static RlState
copy_state(const RlState *state, const RlLimit *limit, int64 now, int64 quota)
{
	RlState		copy = *state;
	int			size = rl_entries_wanted(limit, &copy, now, quota);

	copy.changed = false;
	rl_move_entries(&copy, size > 0 ? allocate(size * sizeof(RlEntry)) : NULL, size);
	return copy;
}

/* Puts a state in another's place, or only what counts refusals. */
static void
put_state(RlState *state, RlState copy)
{
	RlState		old = *state;

	free(copy.changed ? old.entries : copy.entries);
	*state = copy.changed ? copy : old;
	state->refused = copy.refused;
	state->refused_since = copy.refused_since;
}

static void
forget(RlState *state)
{
	free(state->entries);
	*state = (RlState) RL_NO_STATE;
}

static void
print_decision(const RlDecision *d)
{
	printf("%d %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %s ", d->allowed, d->capacity,
		   d->remaining, d->retry_after, d->reset_after,
		   d->source == RL_FROM_BAN ? "ban" : d->source == RL_FROM_LOCAL ? "local" : "wrong");
}

static void
take(Key *key, RlLimits *limits, int64 now, int64 quota, bool quietly, bool commit)
{
	RlState    *kept[RL_MAX_LIMITS];
	RlState		states[RL_MAX_LIMITS];
	RlDecision	decisions[RL_MAX_LIMITS];
	RlDecision	combined;
	int			binding;

	for (int i = 0; i < limits->n; i++)
	{
		if (quietly)
		{
			limits->limit[i].count_denied = false;
			limits->limit[i].ban = 0;
		}
		kept[i] = find_state(key, &limits->limit[i]);
		states[i] = copy_state(kept[i], &limits->limit[i], now, quota);
	}
	rl_act(limits, states, &key->banned_until, now, quota, commit, decisions);
	for (int i = 0; i < limits->n; i++)
		put_state(kept[i], states[i]);
	combined = rl_combine(decisions, limits->n, &binding);
	print_decision(&combined);
	for (int i = 0; i < limits->n; i++)
		print_decision(&decisions[i]);
	printf("\n");
}

static void
refund(Key *key, const RlLimits *limits, int64 now, int64 quota)
{
	RlState    *kept[RL_MAX_LIMITS];
	RlState		states[RL_MAX_LIMITS];

	for (int i = 0; i < limits->n; i++)
	{
		kept[i] = find_state(key, &limits->limit[i]);
		states[i] = copy_state(kept[i], &limits->limit[i], now, 0);
	}
	rl_give_back(limits, states, now, quota);
	for (int i = 0; i < limits->n; i++)
		put_state(kept[i], states[i]);
}

int
main(void)
{
	char		op[16];
	char		name[64];
	int64		now;
	int64		argument;
	RlLimits	limits;

	while (scanf("%15s %63s %" SCNd64 " %" SCNd64 " %d", op, name, &now, &argument, &limits.n) == 5)
	{
		Key		   *key = find_key(name);

		if (limits.n < 0 || limits.n > RL_MAX_LIMITS)
			return 2;
		for (int i = 0; i < limits.n; i++)
		{
			RlLimit    *limit = &limits.limit[i];
			int			algorithm;
			int			from_first;
			int			count_denied;

			if (scanf("%d %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64
					  " %d %d %" SCNd64 " %" SCNd64,
					  &algorithm, &limit->capacity, &limit->count, &limit->period,
					  &limit->interval_ns, &limit->step, &from_first, &count_denied,
					  &limit->ban, &limit->ban_after) != 10)
				return 2;
			limit->algorithm = algorithm;
			limit->from_first = from_first;
			limit->count_denied = count_denied;
			limit->refund_on_abort = false;
		}

		if (strcmp(op, "take") == 0 || strcmp(op, "quiet") == 0 || strcmp(op, "peek") == 0)
			take(key, &limits, now, argument, op[0] == 'q', op[0] != 'p');
		else
		{
			if (strcmp(op, "refund") == 0)
				refund(key, &limits, now, argument);
			else if (strcmp(op, "ban") == 0)
				key->banned_until = now + argument;
			else if (strcmp(op, "unban") == 0)
				key->banned_until = 0;
			else if (strcmp(op, "reset") == 0)
			{
				for (int i = 0; i < limits.n; i++)
					forget(find_state(key, &limits.limit[i]));
				if (limits.n == 0)
				{
					key->banned_until = 0;
					for (Kept *kept = key->kept; kept; kept = kept->next)
						forget(&kept->state);
				}
			}
			else
				return 2;
			printf("done\n");
		}
		fflush(stdout);
	}
	return feof(stdin) ? 0 : 2;
}
