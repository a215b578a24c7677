/*
 * borders.c
 *		Runs throttle and token_bucket at small numbers and at the borders of the large ones, as
 *		src/algorithm has them, and checks the promises of each action: this refutes a mutant by an
 *		action that breaks one.
 *
 * "cases" prints actions for borders.lua, and "replies" compares its replies with C.  With the
 * name of an algorithm, both leave out the other one.
 */
#include "postgres.h"

#include <stdio.h>
#include <stdlib.h>

#include "algorithm/algorithm.h"
#include "algorithm/limits.h"
#include "error.h"

#define N(list)		(sizeof(list) / sizeof((list)[0]))
#define TEST_NOW	INT64CONST(4000000000000000)	/* the latest that ratelimit.debug_now can be */
#define promise(kept) do { if (!(kept)) broken(#kept); } while (0)

static RlLimits limits = {.n = 1};
static RlLimit *const limit = &limits.limit[0];
static RlState before;
static int64 now, quota, ncases, nreplies;
static const char *mode;

bool rl_error_set(RlError *error, int sqlstate, const char *fmt,...) { return false; }
bool rl_limit_is_too_long(RlError *error) { return false; }

static void
broken(const char *what)
{
	fprintf(stderr, "%s %lld/%lldus burst %lld, quota %lld at %lld, state %lld %lld: not %s\n", rl_algorithm(limit)->name,
			(long long) limit->count, (long long) limit->period, (long long) limit->capacity, (long long) quota,
			(long long) now, (long long) before.start, (long long) before.charged, what);
	exit(1);
}

static RlView
view_at(const RlState *state, int64 at)
{
	RlView		view;

	rl_algorithm(limit)->load(limit, state, NULL, at, &view);
	return view;
}

/* Returns what is in use: ns of backlog, or units. */
static int64
used_at(const RlState *state, int64 at)
{
	RlView		view = view_at(state, at);

	return limit->algorithm == RL_THROTTLE ? view.start : view.charged;
}

static bool
fits_at(const RlState *state, int64 at)
{
	RlView		view = view_at(state, at);

	return rl_algorithm(limit)->fits(limit, &view, quota);
}

/* Prints a state as its field in Redis. */
static void
print_field(const RlState *state)
{
	if (state->start < 0)
		printf(" -");
	else if (limit->algorithm == RL_THROTTLE)
		printf(" %012lld", (long long) state->start);
	else
		printf(" %lld_%lld", (long long) state->start, (long long) state->charged);
}

/* Reads the field that a script has written, and compares it. */
static void
read_field(const RlState *state, bool changed)
{
	char		text[64];
	long long	start, charged = 0;

	if (scanf("%63s", text) != 1)
		abort();
	if (!changed)
		promise(strcmp(text, "-") == 0);
	else if (limit->algorithm == RL_THROTTLE && state->start < 0)
		promise(strcmp(text, "gone") == 0);
	else
	{
		promise(sscanf(text, limit->algorithm == RL_THROTTLE ? "%lld" : "%lld_%lld", &start, &charged) > 0);
		promise(charged == state->charged && (start == state->start || state->start < 0));
	}
}

/* Compares the reply about the action. */
static void
read_reply(const RlDecision *c)
{
	int64		values[4], reported[RL_REPORTED], verdict;
	RlDecision	lua;
	int			n;

	if (scanf("%d", &n) != 1 || n < 1 || n > 4)
		abort();
	for (int i = 0; i < n; i++)
		if (scanf("%ld", &values[i]) != 1)
			abort();
	promise(rl_algorithm(limit)->read_single(limit, quota, values, n, &verdict, reported));
	promise((verdict == 0) == c->allowed);
	promise(rl_algorithm(limit)->decide(limit, quota, verdict == 0 ? RL_VERDICT_ALLOWED : RL_VERDICT_REFUSED, reported, &lua));
	promise(lua.remaining == c->remaining && lua.retry_after == Min(c->retry_after, RL_MAX_WAIT) &&
			lua.reset_after == Min(c->reset_after, RL_MAX_WAIT));
	nreplies++;
}

static void
check(void)
{
	bool		is_throttle = limit->algorithm == RL_THROTTLE;
	int64		unit = is_throttle ? limit->interval_ns : 1;
	int64		used = used_at(&before, now);
	int64		start = before.start;
	int64		number[RL_NUMBERS];
	RlState		after = before, refunded = before, owing = before;
	RlBan		ban = {0};
	RlDecision	d, single;
	bool		changed = rl_act(&limits, &after, NULL, &ban, (RlTimes) {now, now}, quota, RL_TAKE, &d);
	bool		changed_back = rl_refund_quota(limit, &refunded, NULL, now, quota);
	__int128	charge = (__int128) quota * unit;

	ncases++;
	promise(!changed || used_at(&after, now) == used + charge);
	promise(used_at(&after, now) >= used && (after.start >= before.start || used == 0));
	promise(!d.allowed || quota == 0 || used_at(&after, now) <= limit->capacity * unit);
	promise(d.allowed || memcmp(&after, &before, sizeof(after)) == 0);
	promise(d.allowed == (quota <= limit->capacity && used <= (limit->capacity - quota) * unit));
	promise(d.remaining >= 0 && d.remaining <= limit->capacity);
	promise(d.retry_after >= 0 || (d.retry_after == RL_NEVER && quota > limit->capacity));
	if (!d.allowed && quota <= limit->capacity && used <= limit->capacity * unit)
		promise(fits_at(&before, now + d.retry_after) && !fits_at(&before, now + d.retry_after - 1));
	promise(used_at(&before, now + d.reset_after) == 0 || d.allowed || used > limit->capacity * unit);
	promise(used_at(&refunded, now) == Max(used - (int64) Min(charge, RL_MAX_BACKLOG), 0));
	rl_owe(limit, &owing, NULL, now, quota);
	promise(used_at(&owing, now) >= used && used_at(&owing, now) <= used + charge);
	if (is_throttle)
	{
		rl_algorithm(limit)->act_single(limit, &start, now, quota, &single);
		promise(single.allowed == d.allowed && single.retry_after == d.retry_after && single.remaining == d.remaining);
		promise(start >= before.start && (!changed || start == after.start));
	}
	else if (rl_algorithm(limit)->skip != NULL || rl_algorithm(limit)->most != RL_MAX_COUNT ||
			 rl_algorithm(limit)->has_logs || !rl_algorithm(limit)->refills || rl_algorithm(limit)->end != rl_units_end)
		broken("the table that script/prove supposes");

	/* A longer backlog is never reported.  Scripts get no later time, and those for one limit no quota 0. */
	if (mode == NULL || quota == 0 || now > TEST_NOW || (is_throttle && used > RL_MAX_BACKLOG))
		return;
	if (strcmp(mode, "replies") == 0)
	{
		read_reply(&d);
		read_field(&after, changed);
		read_field(&refunded, changed_back);
		return;
	}
	rl_algorithm(limit)->numbers(limit, quota, number);
	printf("%s %lld %lld %lld", rl_algorithm(limit)->name, (long long) now, (long long) quota, (long long) limit->period);
	for (int i = 0; i < RL_NUMBERS; i++)
		printf(" %lld", (long long) (is_throttle || i < 2 ? number[i] : 0));
	print_field(&before);
	printf("\n");
}

/* Checks each action on a state that the limit, or one with other numbers, can have. */
static void
check_states(void)
{
	int64		quotas[] = {0, 1, 2, limit->capacity - 1, limit->capacity, limit->capacity + 1, RL_MAX_COUNT};
	int64		units[] = {0, 1, 2, limit->capacity - 1, limit->capacity, limit->capacity + 2,
		limit->algorithm == RL_TOKEN_BUCKET ? RL_MAX_COUNT : 0};
	int64		anchors[] = {now, now - 1, now - limit->period + 1, now - limit->period, now - 2 * limit->period - 1, now + 1, TEST_NOW};

	for (size_t q = 0; q < N(quotas); q++)
	{
		quota = Min(quotas[q], RL_MAX_COUNT);
		if (q > 2 && quota <= 2)
			continue;
		before = (RlState) RL_NO_STATE;
		check();
		for (size_t u = 0; u < N(units); u++)
			for (size_t a = 0; a < (limit->algorithm == RL_THROTTLE ? 3 : N(anchors)); a++)
			{
				before = (RlState) RL_NO_STATE;
				if (limit->algorithm == RL_THROTTLE)
					before.start = now * 1000 + units[u] * limit->interval_ns + (int64) a - 1;
				else
				{
					before.start = anchors[a];
					before.charged = Min(units[u], RL_MAX_COUNT);
				}
				if (before.start >= 0 && (limit->algorithm == RL_THROTTLE || before.charged > 0))
					check();
			}
		if (limit->algorithm == RL_THROTTLE)
		{
			/* The clock was set back by any time. */
			before.start = TEST_NOW * 1000 + RL_MAX_SPAN * 1000;
			check();
		}
	}
}

int
main(int argc, char **argv)
{
	static const int64 counts[] = {1, 2, 3, 4, 5, 999, 1000001, RL_MAX_COUNT};
	static const int64 periods[] = {1, 2, 3, 4, 999, RL_SECOND, RL_DAY + 1, RL_MAX_PERIOD};
	static const int64 times[] = {0, 7, 1700000000123457, TEST_NOW, 6000000000000000};
	RlError		error;

	mode = argc > 1 ? argv[1] : NULL;
	for (int a = RL_THROTTLE; a <= RL_TOKEN_BUCKET; a++)
		for (size_t c = 0; c < N(counts) && (argc < 3 || strcmp(argv[2], rl_algorithms[a]->name) == 0); c++)
			for (size_t n = 0; n < N(counts); n++)
				for (size_t p = 0; p < N(periods); p++)
				{
					*limit = (RlLimit) {.algorithm = a,.capacity = counts[c],.count = counts[n],.period = periods[p]};
					if (rl_algorithm(limit)->complete(limit, "", &error))
						for (size_t t = 0; t < N(times); t++)
						{
							now = times[t];
							check_states();
						}
				}
	if (mode == NULL || strcmp(mode, "replies") == 0)
		fprintf(stderr, "%lld actions, %lld replies\n", (long long) ncases, (long long) nreplies);
	return 0;
}
