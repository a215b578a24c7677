/*
 * engine.c
 *		The algorithms as a program, linked with no other part: it keeps states in
 *		memory, reads an act from each line and prints the decisions.
 *
 *	act    := op key now argument n { limit } | all key now n 0 { key quota n { limit } }
 *	op     := take | quiet | peek | refund | undo | ban | unban | reset
 *	limit  := algorithm capacity count period interval_ns step from_first
 *			  count_denied ban ban_to ban_after shadow calendar
 *
 * The windows of calendars are those of UTC.
 *
 * The argument is the quota, or the ban's length.  For an undo it is a number n:
 * the undo refunds, for each limit, the charge of the n-th take before its last
 * take, each charge at most once.  A shadow limit that a take did not fit has a charge
 * of 0.  A reset without limits deletes the key.  The
 * answer to the first three ops is a line of decisions, the combined decision and
 * then the decision of each limit, to "all" it is the combined decision of each key;
 * to the other ops it is "done":
 *
 *	decision := allowed capacity remaining retry_after reset_after source
 *
 * It ends with status 2 at a line that is no act, and at two limits with one state, which the
 * extension rejects.
 *
 * As in Redis, only changes are stored: an act that takes nothing does not change
 * a state, even if units of the state have become free.
 */
#include "postgres.h"

#undef printf

#include <inttypes.h>
#include <time.h>

#include "algorithm/algorithm.h"
#include "algorithm/calendar.h"
#include "algorithm/limits.h"
#include "decision.h"

#define BUCKETS				65536
#define CHARGES				1024

typedef struct Kept
{
	struct Kept *next;
	RlLimit		limit;			/* only its tag is used */
	RlState		state;
	RlCharge	charges[CHARGES];	/* of the last takes; amount 0: undone */
	int			ncharges;
} Kept;

typedef struct Key
{
	struct Key *next;
	char		name[64];
	RlBan		ban;
	Kept	   *kept;
} Key;

static Key *keys[BUCKETS];

/* All chunks: pool has those that an act needs, rest has the others. */
#define MAX_CHUNKS			4000000

static RlPool pool;
static RlPool rest;
static uint32 nchunks = 0;

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

/* Never called, because limits come with all their numbers. */
void
rl_error_set(RlError *error pg_attribute_unused(), int sqlstate pg_attribute_unused(),
			 const char *fmt pg_attribute_unused(),...)
{
	abort();
}

bool
rl_limit_is_too_long(RlError *error pg_attribute_unused())
{
	abort();
}

/* Returns the start of the window that contains a time, or of a later or earlier one. */
static int64
window_start(RlCalendar calendar, int64 now, int later)
{
	time_t		seconds = now / RL_SECOND - (now % RL_SECOND < 0);
	struct tm	day;

	gmtime_r(&seconds, &day);
	day.tm_hour = day.tm_min = day.tm_sec = 0;
	if (calendar == RL_CALENDAR_DAY)
		day.tm_mday += later;
	else if (calendar == RL_CALENDAR_WEEK)
		day.tm_mday += 7 * later - (day.tm_wday + 6) % 7;
	else
	{
		day.tm_mday = 1;
		if (calendar == RL_CALENDAR_MONTH)
			day.tm_mon += later;
		else if (calendar == RL_CALENDAR_QUARTER)
			day.tm_mon += 3 * later - day.tm_mon % 3;
		else
		{
			day.tm_mon = 0;
			day.tm_year += later;
		}
	}
	return timegm(&day) * RL_SECOND;
}

/* Here the zone is UTC, by the functions of the C library. */
const RlWindows *
rl_windows_at(const RlLimit *limit, int64 now)
{
	static RlWindows windows;

	for (int i = 0; i < 4; i++)
	{
		time_t		seconds;
		struct tm	day;

		windows.start[i] = window_start(limit->calendar, now, i - RL_CURRENT);
		seconds = windows.start[i] / RL_SECOND;
		gmtime_r(&seconds, &day);
		if (i < 3)
			windows.name[i] = (day.tm_year + 1900) * 10000 + (day.tm_mon + 1) * 100 + day.tm_mday;
	}
	return &windows;
}

int64
rl_window_end(const RlLimit *limit, int64 name)
{
	struct tm	day = {.tm_year = name / 10000 - 1900,.tm_mon = name / 100 % 100 - 1,.tm_mday = name % 100};

	return window_start(limit->calendar, timegm(&day) * RL_SECOND, 1);
}

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

static Kept *
find_kept(Key *key, const RlLimit *limit)
{
	Kept	   *kept;

	for (kept = key->kept; kept; kept = kept->next)
		if (rl_same_state(&kept->limit, limit))
			return kept;
	kept = allocate(sizeof(Kept));
	kept->limit = *limit;
	kept->state = (RlState) RL_NO_STATE;
	kept->next = key->kept;
	key->kept = kept;
	return kept;
}

/* Gives the pool exactly this number of spare chunks. */
static void
give_chunks(int wanted)
{
	if (pool.chunks == NULL)
		pool.chunks = rest.chunks = allocate(MAX_CHUNKS * sizeof(RlChunk));
	if (pool.nspare > 0)
		rl_pool_put(&rest, pool.spare, pool.spare_last, pool.nspare);
	pool.spare = pool.spare_last = pool.nspare = 0;
	while (wanted-- > 0)
	{
		uint32		number = rest.nspare > 0 ? rl_pool_get(&rest) : ++nchunks;

		if (nchunks > MAX_CHUNKS)
			abort();
		rl_pool_put(&pool, number, number, 1);
	}
}

static void
forget(Kept *kept)
{
	for (int i = 0; i < 2; i++)
		rl_log_clear(&pool, &kept->state.log[i]);
	kept->state = (RlState) RL_NO_STATE;
	memset(kept->charges, 0, sizeof(kept->charges));
}

static void
print_decision(const RlDecision *d)
{
	printf("%d %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %s ", d->allowed, d->capacity,
		   d->remaining, d->retry_after, d->reset_after,
		   d->source == RL_FROM_BAN ? "ban" : d->source == RL_FROM_LOCAL ? "local" :
		   d->source == RL_SHADOW ? "shadow" : "wrong");
}

/* A key of an action. */
typedef struct Part
{
	Key		   *key;
	RlLimits	limits;
	int64		quota;
	Kept	   *kept[RL_MAX_LIMITS];
	RlState		states[RL_MAX_LIMITS];
	RlView		views[RL_MAX_LIMITS];
	RlDecision	decisions[RL_MAX_LIMITS];
	RlAct		act;
} Part;

static void
take(Part *parts, int n, int64 now, RlTake how)
{
	bool		commit = how != RL_PEEK;
	bool		allowed = true;
	int			wanted = 0;

	for (int p = 0; p < n; p++)
	{
		Part	   *part = &parts[p];

		for (int i = 0; i < part->limits.n; i++)
		{
			const RlLimit *limit = &part->limits.limit[i];

			part->kept[i] = find_kept(part->key, limit);
			part->states[i] = part->kept[i]->state;
			wanted += rl_chunks_wanted(limit, &part->states[i], &pool, now, part->quota);
		}
	}
	give_chunks(commit ? wanted : 0);
	for (int p = 0; p < n; p++)
	{
		Part	   *part = &parts[p];

		part->act = (RlAct) {.times = {now, now},.quota = part->quota,.how = how};
		part->act.verdict = rl_act_decide(&part->limits, part->states, &pool, part->key->ban.until, &part->act, part->views,
										  part->decisions);
		allowed &= part->act.verdict == RL_VERDICT_ALLOWED;
	}
	for (int p = 0; p < n; p++)
	{
		Part	   *part = &parts[p];

		if (!allowed && part->act.verdict == RL_VERDICT_ALLOWED)
			part->act.verdict = RL_VERDICT_REFUSED;
		rl_act_complete(&part->limits, part->states, &pool, &part->key->ban, &part->act, part->views,
						part->decisions);
		for (int i = 0; i < part->limits.n; i++)
		{
			Kept	   *kept = part->kept[i];
			const RlLimit *limit = &part->limits.limit[i];

			kept->state = part->states[i];
			if (commit && allowed && part->quota > 0)
				kept->charges[kept->ncharges++ % CHARGES] =
					part->decisions[i].source == RL_SHADOW ? (RlCharge) {0} :
					rl_algorithm(limit)->charge(limit, part->quota, now, part->decisions[i].reset_after);
		}
	}
}

static void
print_combined(const Part *part)
{
	int			binding;
	RlDecision	combined = rl_combine(&part->limits, part->decisions, &binding);

	print_decision(&combined);
}

static void
refund(Key *key, const RlLimits *limits, int64 now, int64 quota)
{
	for (int i = 0; i < limits->n; i++)
		rl_refund_quota(&limits->limit[i], &find_kept(key, &limits->limit[i])->state, &pool, now, quota);
}

static void
undo(Key *key, const RlLimits *limits, int64 now, int64 back)
{
	for (int i = 0; i < limits->n; i++)
	{
		Kept	   *kept = find_kept(key, &limits->limit[i]);
		RlCharge   *charge;

		if (back < 0 || back >= CHARGES || back >= kept->ncharges)
			continue;
		charge = &kept->charges[(kept->ncharges - 1 - back) % CHARGES];
		if (charge->amount == 0)
			continue;
		rl_refund_charge(&limits->limit[i], &kept->state, &pool, now, charge);
		charge->amount = 0;
	}
}

static bool
read_limits(RlLimits *limits)
{
	if (limits->n < 0 || limits->n > RL_MAX_LIMITS)
		return false;
	for (int i = 0; i < limits->n; i++)
	{
		RlLimit    *limit = &limits->limit[i];
		int			algorithm;
		int			from_first;
		int			count_denied;
		int			shadow;
		int			calendar;

		memset(limit, 0, sizeof(*limit));
		if (scanf("%d %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64
				  " %d %d %" SCNd64 " %" SCNd64 " %" SCNd64 " %d %d",
				  &algorithm, &limit->capacity, &limit->count, &limit->period,
				  &limit->interval_ns, &limit->step, &from_first, &count_denied,
				  &limit->ban, &limit->ban_to, &limit->ban_after, &shadow, &calendar) != 13)
			return false;
		limit->algorithm = algorithm;
		limit->from_first = from_first;
		limit->count_denied = count_denied;
		limit->shadow = shadow;
		limit->calendar = calendar;
		/* The tag has a hash of the zone. */
		if (calendar != RL_NO_CALENDAR)
			limit->step = 1;
		for (int other = 0; other < i; other++)
			if (rl_same_state(limit, &limits->limit[other]))
				return false;
	}
	return true;
}

static void
take_one(Key *key, const RlLimits *limits, int64 now, int64 quota, RlTake how)
{
	Part		part = {.key = key,.limits = *limits,.quota = quota};

	take(&part, 1, now, how);
	print_combined(&part);
	for (int i = 0; i < limits->n; i++)
		print_decision(&part.decisions[i]);
	printf("\n");
}

/* Reads n keys with their quotas and limits, and takes all of them or none. */
static bool
take_all(int64 now, int n)
{
	static Part parts[RL_MAX_KEYS];
	char		name[64];

	if (n < 1 || n > RL_MAX_KEYS)
		return false;
	for (int p = 0; p < n; p++)
	{
		if (scanf("%63s %" SCNd64 " %d", name, &parts[p].quota, &parts[p].limits.n) != 3 ||
			!read_limits(&parts[p].limits))
			return false;
		parts[p].key = find_key(name);
	}
	take(parts, n, now, RL_TAKE);
	for (int p = 0; p < n; p++)
		print_combined(&parts[p]);
	printf("\n");
	return true;
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

		if (!read_limits(&limits))
			return 2;
		if (strcmp(op, "all") == 0)
		{
			if (!take_all(now, argument))
				return 2;
		}
		else if (strcmp(op, "take") == 0 || strcmp(op, "quiet") == 0 || strcmp(op, "peek") == 0)
			take_one(key, &limits, now, argument, op[0] == 't' ? RL_TAKE : op[0] == 'q' ? RL_TRY : RL_PEEK);
		else
		{
			if (strcmp(op, "refund") == 0)
				refund(key, &limits, now, argument);
			else if (strcmp(op, "undo") == 0)
				undo(key, &limits, now, argument);
			else if (strcmp(op, "ban") == 0)
				key->ban.until = now + argument;
			else if (strcmp(op, "unban") == 0)
				key->ban = (RlBan) {0};
			else if (strcmp(op, "reset") == 0)
			{
				for (int i = 0; i < limits.n; i++)
					forget(find_kept(key, &limits.limit[i]));
				if (limits.n == 0)
				{
					key->ban = (RlBan) {0};
					for (Kept *kept = key->kept; kept; kept = kept->next)
						forget(kept);
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
