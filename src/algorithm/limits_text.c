/*
 * limits_text.c
 *		The canonical text of limits, and the words that it shares with the grammar.
 */
#include "postgres.h"

#include "lib/stringinfo.h"

#include "algorithm/algorithm.h"
#include "algorithm/calendar.h"
#include "algorithm/limits.h"

/*
 * Largest first, so that the canonical text takes the largest that fits.  The
 * canonical text has the name; input may also have the word, with or without s.
 */
const RlUnit rl_units[RL_UNITS] = {
	{"d", "day", "days", RL_DAY},
	{"h", "hour", "hours", 3600 * RL_SECOND},
	{"min", "minute", "minutes", 60 * RL_SECOND},
	{"s", "second", "seconds", RL_SECOND},
	{"ms", "ms", "ms", RL_SECOND / 1000},
	{"us", "us", "us", 1}
};

/* The texts in place of a list of limits. */
const char *const rl_kind_texts[] = {
	[RL_UNLIMITED] = "unlimited",
	[RL_BLOCKED] = "blocked"
};

static void
append_period(StringInfo text, int64 period)
{
	int			i = 0;

	while (period % rl_units[i].duration != 0)
		i++;
	appendStringInfo(text, "%lld%s", (long long) (period / rl_units[i].duration), rl_units[i].name);
}

static void
append_limit(StringInfo text, const RlLimit *limit)
{
	int64		burst = limit->capacity + limit->reserve;

	appendStringInfo(text, "%s %lld/", rl_algorithm(limit)->name, (long long) limit->count);
	if (limit->calendar != RL_NO_CALENDAR)
		appendStringInfo(text, "%s in %s", rl_calendar_names[limit->calendar], limit->zone);
	else
		append_period(text, limit->period);
	if (burst != limit->count)
		appendStringInfo(text, " burst %lld", (long long) burst);
	if (limit->step != 0 && limit->calendar == RL_NO_CALENDAR)
	{
		appendStringInfoString(text, " step ");
		append_period(text, limit->step);
	}
	if (limit->from_first)
		appendStringInfoString(text, " from_first");
	if (limit->count_denied)
		appendStringInfoString(text, " count_denied");
	if (limit->ban != 0)
	{
		appendStringInfoString(text, " ban ");
		append_period(text, limit->ban);
		appendStringInfo(text, " after %lld", (long long) limit->ban_after);
	}
	if (limit->shadow)
		appendStringInfoString(text, " shadow");
	if (limit->lease != 0)
	{
		appendStringInfoString(text, " lease ");
		append_period(text, limit->lease);
	}
	if (limit->refund_on_abort && !rl_algorithm(limit)->until_end)
		appendStringInfoString(text, " refund_on_abort");
}

/* Returns the canonical text of limit i, or of unlimited or blocked; palloc'd. */
char *
rl_limit_text(const RlLimits *limits, int i)
{
	StringInfoData text;

	initStringInfo(&text);
	if (limits->kind == RL_LISTED)
		append_limit(&text, &limits->limit[i]);
	else
		appendStringInfoString(&text, rl_kind_texts[limits->kind]);
	return text.data;
}

/* Returns the canonical text of limits, palloc'd. */
char *
rl_limits_text(const RlLimits *limits)
{
	StringInfoData text;

	if (limits->kind != RL_LISTED)
		return pstrdup(rl_kind_texts[limits->kind]);
	initStringInfo(&text);
	for (int i = 0; i < limits->n; i++)
	{
		if (i > 0)
			appendStringInfoString(&text, ", ");
		append_limit(&text, &limits->limit[i]);
	}
	return text.data;
}
