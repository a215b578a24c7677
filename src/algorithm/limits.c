/*
 * limits.c
 *		The type rl_limits: its grammar, and the rules for a limit's numbers.
 *
 *	limits    := limit { ',' limit } | unlimited | blocked
 *	limit     := [ algorithm ] count '/' period { option }
 *	period    := [ number ] unit | calendar [ in ZONE ]
 *	option    := burst N | step PERIOD | from_first | count_denied
 *			   | ban PERIOD [ to PERIOD ] after N | shadow | lease PERIOD | refund_on_abort
 */
#include "postgres.h"

#include "common/int.h"
#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"

#include "algorithm/algorithm.h"
#include "algorithm/calendar.h"
#include "algorithm/limits.h"
#include "algorithm/siphash.h"
#include "error.h"

/* The most bytes of a word that are read.  Words of the grammar are shorter. */
#define MAX_WORD			100

/* In place of the offset of a flag. */
#define ALL_ALGORITHMS		0

typedef struct Scan
{
	const char *start;
	const char *at;
	const char *end;
	RlError    *error;
} Scan;

/*
 * Numbers
 */

static bool
check_range(int64 value, const RlAlgorithm *algorithm, const char *name, RlError *error)
{
	if (value >= 1 && value <= algorithm->most)
		return true;
	rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE,
				 "%s must be between 1 and %lld", name, (long long) algorithm->most);
	if (value > 1)
		error->hint = algorithm->more;
	return false;
}

/* Sets the error of a limit that takes too long to become free, and returns false. */
bool
rl_limit_is_too_long(RlError *error)
{
	return rl_error_set(error, ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE,
						"the limit must not take more than 100 years to become free");
}

/*
 * Checks a limit that has its algorithm, capacity, count, period, step (0: the default) and
 * options, and derives the rest. count_name is the name of the count in errors.  Returns false
 * with the error set.
 */
bool
rl_limit_complete(RlLimit *limit, const char *count_name, RlError *error)
{
	const RlAlgorithm *algorithm = rl_algorithm(limit);

	if (!check_range(limit->capacity, algorithm, "capacity", error) ||
		!check_range(limit->count, algorithm, count_name, error))
		return false;
	if (limit->period < 1 || limit->period > RL_MAX_PERIOD)
		return rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE,
							"period must be more than 0 and at most 10 years");
	return algorithm->complete == NULL || algorithm->complete(limit, count_name, error);
}

/*
 * Scanning
 */

/* Only ASCII digits and letters count, so that the text means the same in each locale. */
static bool
is_digit(char c)
{
	return c >= '0' && c <= '9';
}

static bool
is_letter(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static bool
is_space(char c)
{
	return c != '\0' && strchr(" \t\n\r\f\v", c) != NULL;
}

static void
skip_space(Scan *scan)
{
	while (scan->at < scan->end && is_space(*scan->at))
		scan->at++;
}

/* Returns the flag of the algorithm at that offset of RlAlgorithm; true for ALL_ALGORITHMS. */
static bool
has_flag(const RlAlgorithm *algorithm, size_t flag)
{
	return flag == ALL_ALGORITHMS || *(const bool *) ((const char *) algorithm + flag);
}

/* Returns the length of the word that starts here, at most MAX_WORD.  Any other character is a word. */
static int
word_length(const Scan *scan)
{
	const char *p = scan->at;
	const char *end = scan->at + Min(scan->end - scan->at, MAX_WORD);

	while (p < end && (is_letter(*p) || is_digit(*p) || *p == '_' || *p == '.' || IS_HIGHBIT_SET(*p)))
		p++;
	if (p == scan->at && p < scan->end)
		p++;
	return p - scan->at;
}

/* Adds the text that starts here to the error, and returns false. */
static bool
show_text(Scan *scan, int len, const char *complaint)
{
	if (len == 0)
		return rl_error_detail(scan->error, "%s at the end.", complaint);
	return rl_error_detail(scan->error, "%s at character %d, \"%.*s\".", complaint,
						   pg_mbstrlen_with_len(scan->start, scan->at - scan->start) + 1,
						   pg_mbcliplen(scan->at, len, 64), scan->at);
}

/* Sets the error that shows the text that starts here, and returns false. */
static bool
wrong_text(Scan *scan, int len, const char *complaint)
{
	rl_error_set(scan->error, ERRCODE_INVALID_TEXT_REPRESENTATION,
				 "invalid input syntax for type rl_limits: \"%.*s\"",
				 pg_mbcliplen(scan->start, scan->end - scan->start, 150), scan->start);
	scan->error->hint = "Write, for example, \"5/10s\", \"throttle 30/min burst 15\" or \"sliding_log 5/10s, fixed_window 1000/day\".";
	return show_text(scan, len, complaint);
}

static bool
wrong_word(Scan *scan, const char *complaint)
{
	return wrong_text(scan, word_length(scan), complaint);
}

/* Does the same with this hint. */
static bool
wrong_word_hint(Scan *scan, const char *complaint, const char *hint)
{
	wrong_word(scan, complaint);
	scan->error->hint = hint;
	return false;
}

/*
 * Returns a hint: the text, with the names of the algorithms of which the flag of RlAlgorithm at that
 * offset is true in place of %s, or of all with ALL_ALGORITHMS.
 */
static const char *
hint_of_algorithms(const char *text, size_t flag)
{
	StringInfoData names;
	int			last = RL_ALGORITHMS - 1;

	initStringInfo(&names);
	while (!has_flag(rl_algorithms[last], flag))
		last--;
	for (int a = 0; a <= last; a++)
		if (has_flag(rl_algorithms[a], flag))
			appendStringInfo(&names, "%s%s", names.len == 0 ? "" : a == last ? " and " : ", ",
							 rl_algorithms[a]->name);
	return psprintf(text, names.data);
}

/* Does the same as wrong_word with a hint about periods. */
static bool
wrong_period(Scan *scan, const char *complaint)
{
	return wrong_word_hint(scan, complaint, "The units are us, ms, s, min, h and d, and second, minute, hour and day with or without s: \"5/10s\", \"100/hour\". "
		"A fixed_window also has week, month, quarter and year: \"fixed_window 1000/month\".");
}

/* Moves past the word if it comes next.  Returns false if it does not. */
static bool
take_word(Scan *scan, const char *word)
{
	int			len = strlen(word);

	skip_space(scan);
	if (word_length(scan) != len || pg_strncasecmp(scan->at, word, len) != 0)
		return false;
	scan->at += len;
	return true;
}

static bool
scan_count(Scan *scan, int64 *count)
{
	const char *p;

	skip_space(scan);
	*count = 0;
	for (p = scan->at; p < scan->end && is_digit(*p); p++)
	{
		/* Stop above every range: rl_limit_complete rejects the number. */
		if (*count <= RL_MAX_COUNT)
			*count = *count * 10 + (*p - '0');
	}
	if (p == scan->at && p < scan->end && *p == '=')
		return wrong_word_hint(scan, "A whole number is expected",
							   "Write the number of an option behind a space: \"burst 10\".");
	if (p == scan->at || (p < scan->end && (is_letter(*p) || *p == '_' || *p == '.')))
		return wrong_word(scan, "A whole number is expected");
	scan->at = p;
	return true;
}

/* Takes the name or a word of a unit if one comes next, and sets its duration. */
static bool
take_unit(Scan *scan, int64 *duration)
{
	for (size_t i = 0; i < RL_UNITS; i++)
		if (take_word(scan, rl_units[i].name) || take_word(scan, rl_units[i].word) ||
			take_word(scan, rl_units[i].words))
		{
			*duration = rl_units[i].duration;
			return true;
		}
	skip_space(scan);
	return false;
}

/* Takes a period: a unit, with a number or without.  It must be a whole number of microseconds. */
static bool
scan_period(Scan *scan, int64 *period)
{
	Scan		unit = *scan;
	int64		number = 0;
	int64		divisor = 1;
	int64		duration;
	bool		digits = false;
	bool		fraction = false;

	skip_space(scan);
	for (unit.at = scan->at; unit.at < unit.end; unit.at++)
	{
		char		c = *unit.at;

		if (c == '.' && !fraction)
			fraction = true;
		else if (is_digit(c))
		{
			digits = true;
			if (pg_mul_s64_overflow(number, 10, &number) ||
				pg_add_s64_overflow(number, c - '0', &number) ||
				(fraction && pg_mul_s64_overflow(divisor, 10, &divisor)))
				return wrong_word(scan, "A period has too many digits");
		}
		else
			break;
	}
	if (fraction && !digits)
		return wrong_period(scan, "A period is expected");
	if (!take_unit(&unit, &duration))
		return digits ? wrong_period(&unit, "A unit is expected (us, ms, s, min, h, d)") :
			wrong_period(scan, "A period is expected");
	if (!digits)
		number = 1;
	while (divisor > 1 && number % 10 == 0)
	{
		number /= 10;
		divisor /= 10;
	}
	if (duration % divisor != 0)
	{
		/* The product with the unit may be whole where the number is not. */
		if (pg_mul_s64_overflow(number, duration, &number) || number % divisor != 0)
			return wrong_word(scan, "A period is not a whole number of microseconds");
		*period = number / divisor;
	}
	else if (pg_mul_s64_overflow(number, duration / divisor, period))
		return wrong_word(scan, "A period is too long");
	scan->at = unit.at;
	return true;
}

static bool
scan_zone(Scan *scan, RlLimit *limit)
{
	const char *p;

	skip_space(scan);
	for (p = scan->at; p < scan->end && (is_letter(*p) || is_digit(*p) || strchr("_/+-", *p) != NULL) &&
		 *p != '\0'; p++)
		;
	if (p == scan->at || (p < scan->end && *p != ',' && !is_space(*p)))
		return wrong_word(scan, "The name of a time zone is expected");
	if (!rl_calendar_set_zone(limit, scan->at, p - scan->at))
	{
		wrong_text(scan, p - scan->at, "An unknown time zone begins");
		scan->error->hint = "The view pg_timezone_names lists time zones.";
		return false;
	}
	scan->at = p;
	return true;
}

/* Takes a calendar with its zone if it comes next, and sets *found: "day" is one only if a zone follows. */
static bool
scan_calendar(Scan *scan, RlLimit *limit, bool *found)
{
	Scan		word;
	int			c = RL_CALENDAR_DAY;
	bool		has_zone;

	skip_space(scan);
	word = *scan;
	while (rl_calendar_names[c] != NULL && !take_word(scan, rl_calendar_names[c]))
		c++;
	*found = rl_calendar_names[c] != NULL;
	if (!*found)
		return true;
	has_zone = take_word(scan, "in");
	if (c == RL_CALENDAR_DAY && !has_zone)
	{
		*found = false;
		*scan = word;
		return true;
	}
	if (!rl_algorithm(limit)->has_calendar)
		return wrong_word_hint(&word, "The algorithm has no such period",
							   "Only fixed_window has such periods: \"fixed_window 1000/month\".");
	rl_calendar_set(limit, c);
	return has_zone ? scan_zone(scan, limit) : rl_calendar_set_zone(limit, "UTC", 3);
}

/* Scans a ban behind its word. */
static bool
scan_ban(Scan *scan, Scan *word, RlLimit *limit)
{
	bool		grows;

	if (!scan_period(scan, &limit->ban))
		return false;
	grows = take_word(scan, "to");
	if (grows && !scan_period(scan, &limit->ban_to))
		return false;
	if (!take_word(scan, "after"))
		return wrong_word_hint(scan, "\"after\" is expected",
							   "Write, for example, \"sliding_log 5/1min ban 1h after 10\".");
	if (!scan_count(scan, &limit->ban_after))
		return false;
	if (limit->ban < 1 || limit->ban > RL_MAX_PERIOD || limit->ban_to > RL_MAX_PERIOD ||
		limit->ban_after < 1 ||
		limit->ban_after > RL_MAX_COUNT)
		return wrong_word(word, "A ban is out of range");
	if (grows && limit->ban_to < limit->ban)
		return wrong_word(word, "The longest ban is shorter than the first");
	return true;
}

/* Scans one option, or sets *found to false.  It must be one of the algorithm's, and not given twice. */
static bool
scan_option(Scan *scan, RlLimit *limit, bool *found)
{
	const RlAlgorithm *algorithm = rl_algorithm(limit);
	Scan		word;
	size_t		flag = ALL_ALGORITHMS;
	bool		again;

	skip_space(scan);
	word = *scan;
	*found = scan->at < scan->end && *scan->at != ',';
	if (!*found)
		return true;

	if (take_word(scan, "burst"))
	{
		flag = offsetof(RlAlgorithm, has_burst);
		again = limit->capacity != -1;
		if (!scan_count(scan, &limit->capacity))
			return false;
	}
	else if (take_word(scan, "step"))
	{
		flag = offsetof(RlAlgorithm, has_step);
		again = limit->step != 0;
		if (!scan_period(scan, &limit->step))
			return false;
		if (limit->step == 0)
			return wrong_word(&word, "A step must be more than 0");
	}
	else if (take_word(scan, "from_first"))
	{
		flag = offsetof(RlAlgorithm, has_from_first);
		again = limit->from_first;
		limit->from_first = true;
	}
	else if (take_word(scan, "count_denied"))
	{
		flag = offsetof(RlAlgorithm, has_count_denied);
		again = limit->count_denied;
		limit->count_denied = true;
	}
	else if (take_word(scan, "shadow"))
	{
		again = limit->shadow;
		limit->shadow = true;
	}
	else if (take_word(scan, "lease"))
	{
		int64		lease;

		flag = offsetof(RlAlgorithm, has_lease);
		again = limit->lease != 0;
		if (!scan_period(scan, &lease))
			return false;
		if (lease < 1 || lease > RL_MAX_LEASE)
			return wrong_word(&word, "A lease must be more than 0 and at most 1s");
		limit->lease = lease;
	}
	else if (take_word(scan, "refund_on_abort"))
	{
		if (algorithm->until_end)
			return wrong_word_hint(&word, "The algorithm has no such option",
								   "The end of the transaction frees its units in any case.");
		again = limit->refund_on_abort;
		limit->refund_on_abort = true;
	}
	else if (take_word(scan, "ban"))
	{
		again = limit->ban != 0;
		if (!scan_ban(scan, &word, limit))
			return false;
	}
	else
		return wrong_word(scan, "An option or a comma is expected");

	if (!has_flag(algorithm, flag))
		return wrong_word_hint(&word, "The algorithm has no such option",
							   hint_of_algorithms("The option is for %s.", flag));
	if (limit->from_first && limit->calendar != RL_NO_CALENDAR)
		return wrong_word_hint(&word, "The windows of a calendar have no such option",
							   "They begin with the calendar's.");
	if (again)
		return wrong_word(&word, "The option is given twice");
	if (limit->shadow && limit->ban != 0)
		return wrong_word(&word, "The options ban and shadow exclude each other");
	/* A lease does not know of the refusals, and of a ban only when it has ended. */
	if (limit->lease != 0 && (limit->count_denied || limit->ban != 0 || limit->shadow))
		return wrong_word(&word, "The option lease excludes ban, count_denied and shadow");
	return true;
}

/* Moves past a text in place of a list, and returns the kind of limits. */
static RlLimitsKind
take_kind(Scan *scan)
{
	for (RlLimitsKind kind = RL_UNLIMITED; kind <= RL_BLOCKED; kind++)
		if (take_word(scan, rl_kind_texts[kind]))
			return kind;
	return RL_LISTED;
}

static bool
scan_limit(Scan *scan, RlLimit *limit)
{
	Scan		start = *scan;
	bool		more = true;
	bool		found;

	memset(limit, 0, sizeof(*limit));
	limit->algorithm = RL_THROTTLE;
	limit->capacity = -1;

	skip_space(scan);
	if (scan->at < scan->end && !is_digit(*scan->at))
	{
		Scan		word = *scan;
		int			a;

		if (take_kind(scan) != RL_LISTED)
			return wrong_word_hint(&word, "A word that has to be the whole text begins",
								   "unlimited and blocked stand alone.");
		for (a = 0; a < RL_ALGORITHMS; a++)
			if (take_word(scan, rl_algorithms[a]->name))
				break;
		if (a == RL_ALGORITHMS)
			return wrong_word_hint(scan, "An algorithm or a count is expected",
								   hint_of_algorithms("The algorithms are %s. For no limit write unlimited, to forbid the action blocked.", ALL_ALGORITHMS));
		limit->algorithm = a;
	}

	if (!scan_count(scan, &limit->count))
		return false;
	if (!take_word(scan, "/"))
		return scan->at + 1 < scan->end && *scan->at == ',' && is_digit(scan->at[1]) ?
			wrong_word_hint(scan, "\"/\" is expected", "Write numbers without separators: 1000.") :
			wrong_word(scan, "\"/\" is expected");
	if (!scan_calendar(scan, limit, &found) || (!found && !scan_period(scan, &limit->period)))
		return false;
	while (more)
		if (!scan_option(scan, limit, &more))
			return false;

	if (limit->capacity == -1)
		limit->capacity = limit->count;
	if (rl_limit_complete(limit, "count", scan->error))
		return true;
	if (limit->count == 0 || limit->capacity == 0)
		scan->error->hint = "To forbid the action, write \"blocked\".";
	return show_text(&start, scan->at - start.at, "The limit is");
}

/*
 * Reduces the capacities for the lease: an action under it was charged at most this long before
 * it happens, and meanwhile a throttle replenishes what is held back.  Limits with windows or lumps
 * keep their capacity, because their leases end with these.  "starts" has the place of each limit.
 * Returns false with the error set.
 */
static bool
hold_back_for_lease(RlLimits *limits, Scan *starts)
{
	int64		lease = limits->limit[0].lease;

	for (int i = 1; i < limits->n; i++)
	{
		if ((limits->limit[i].lease > 0) != (lease > 0))
			return wrong_word(&starts[i],
							  lease > 0 ? "A limit without a lease, after one with a lease, begins" :
							  "A limit with a lease, after one without a lease, begins");
		lease = Min(lease, limits->limit[i].lease);
	}
	for (int i = 0; i < limits->n && lease > 0; i++)
	{
		RlLimit    *limit = &limits->limit[i];

		if (limit->interval_ns == 0)
			continue;
		limit->held_back = rl_divide_up(lease * 1000, limit->interval_ns);
		if (limit->held_back > limit->capacity / 2)
			return wrong_word(&starts[i], "A limit whose lease needs more than half of its capacity begins");
		limit->capacity -= limit->held_back;
	}
	return true;
}

/* Parses the text, which need not be terminated.  Returns false with the error set. */
bool
rl_limits_parse(const char *text, int len, RlLimits *limits, RlError *error)
{
	Scan		scan = {text, text, text + len, error};
	Scan		whole = scan;
	Scan		starts[RL_MAX_LIMITS];

	limits->n = 0;
	limits->kind = take_kind(&whole);
	skip_space(&whole);
	if (limits->kind != RL_LISTED && whole.at == whole.end)
	{
		rl_limits_complete(limits);
		return true;
	}
	limits->kind = RL_LISTED;
	do
	{
		skip_space(&scan);
		if (limits->n == RL_MAX_LIMITS)
			return wrong_word(&scan, "More than eight limits begin");
		starts[limits->n] = scan;
		if (!scan_limit(&scan, &limits->limit[limits->n]))
			return false;
		for (int i = 0; i < limits->n; i++)
			if (rl_same_state(&limits->limit[i], &limits->limit[limits->n]))
				return wrong_word_hint(&starts[limits->n],
									   "A limit with the algorithm and the period of an earlier one begins",
									   "The limits of a list must differ in one of them.");
		limits->n++;
	} while (take_word(&scan, ","));
	if (!hold_back_for_lease(limits, starts))
		return false;
	Assert(scan.at == scan.end);
	rl_limits_complete(limits);
	return true;
}

/*
 * Lists
 */

/* Returns true if the two have the same canonical text.  Both must be complete. */
bool
rl_limits_same(const RlLimits *a, const RlLimits *b)
{
	return a->kind == b->kind && a->n == b->n && memcmp(a->limit, b->limit, a->n * sizeof(RlLimit)) == 0;
}

/* Returns true if one of these limits has one state with one of those. */
bool
rl_limits_share_state(const RlLimits *a, const RlLimits *b)
{
	for (int i = 0; i < a->n; i++)
		for (int j = 0; j < b->n; j++)
			if (rl_same_state(&a->limit[i], &b->limit[j]))
				return true;
	return false;
}

/* Returns the longest time for which a lot under the limits is worth asking. */
int64
rl_lease_length(const RlLimits *limits)
{
	int64		length = limits->lease;

	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];

		/* Lots end with the window, sub-window or lump.  Those of a calendar are long. */
		if (limit->interval_ns == 0 && limit->calendar == RL_NO_CALENDAR)
			length = Min(length, limit->step > 0 ? limit->step : limit->period);
	}
	return length;
}

/* Sets refunds, concurrent, lease and hash from the limits, which are complete. */
void
rl_limits_complete(RlLimits *limits)
{
	char		text[RL_MAX_LIMITS * (RL_MAX_LIMIT_TEXT + 2)];
	int			len = 0;

	limits->refunds = limits->concurrent = false;
	limits->lease = limits->n > 0 ? limits->limit[0].lease : 0;
	for (int i = 0; i < limits->n; i++)
	{
		limits->refunds |= limits->limit[i].refund_on_abort;
		limits->concurrent |= rl_algorithm(&limits->limit[i])->until_end;
		limits->lease = Min(limits->lease, limits->limit[i].lease);
	}
	for (int i = 0; i < limits->n; i++)
	{
		if (i > 0)
		{
			memcpy(text + len, ", ", 2);
			len += 2;
		}
		len += rl_limit_write(&limits->limit[i], text + len);
	}
	limits->hash = rl_siphash((RlHash) {limits->kind, 0}, text, len).low;
}
