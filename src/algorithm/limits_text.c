/*
 * limits_text.c
 *		The canonical text of limits, and the words that it shares with the grammar.
 */
#include "postgres.h"

#include "lib/stringinfo.h"
#include "utils/builtins.h"

#include "algorithm/algorithm.h"
#include "algorithm/calendar.h"
#include "algorithm/limits.h"

/* Largest first.  The canonical text has the largest name that fits; input may also have the words. */
const RlUnit rl_units[RL_UNITS] = {
	{"d", "day", "days", RL_DAY},
	{"h", "hour", "hours", 3600 * RL_SECOND},
	{"min", "minute", "minutes", 60 * RL_SECOND},
	{"s", "second", "seconds", RL_SECOND},
	{"ms", "ms", "ms", RL_SECOND / 1000},
	{"us", "us", "us", 1}
};

const char *const rl_kind_texts[] = {
	[RL_UNLIMITED] = "unlimited",
	[RL_BLOCKED] = "blocked"
};

/* Appends to the text of a limit, which has room for all that the grammar allows. */
static void
append(char *text, int *len, const char *word)
{
	int			n = strlen(word);

	Assert(*len + n < RL_MAX_LIMIT_TEXT);
	memcpy(text + *len, word, n + 1);
	*len += n;
}

static void
append_count(char *text, int *len, const char *word, int64 count)
{
	append(text, len, word);
	*len += pg_lltoa(count, text + *len);
	Assert(*len < RL_MAX_LIMIT_TEXT);
}

static void
append_period(char *text, int *len, const char *word, int64 period)
{
	int			i = 0;

	while (period % rl_units[i].duration != 0)
		i++;
	append_count(text, len, word, period / rl_units[i].duration);
	append(text, len, rl_units[i].name);
}

/* Writes the canonical text of a limit into a buffer of RL_MAX_LIMIT_TEXT bytes.  Returns its length. */
int
rl_limit_write(const RlLimit *limit, char *text)
{
	int64		burst = limit->capacity + limit->held_back;
	int			len = 0;

	append(text, &len, rl_algorithm(limit)->name);
	append_count(text, &len, " ", limit->count);
	if (limit->calendar != RL_NO_CALENDAR)
	{
		append(text, &len, "/");
		append(text, &len, rl_calendar_names[limit->calendar]);
		append(text, &len, " in ");
		append(text, &len, limit->zone);
	}
	else
		append_period(text, &len, "/", limit->period);
	if (burst != limit->count)
		append_count(text, &len, " burst ", burst);
	if (limit->step != 0 && limit->calendar == RL_NO_CALENDAR)
		append_period(text, &len, " step ", limit->step);
	if (limit->from_first)
		append(text, &len, " from_first");
	if (limit->count_denied)
		append(text, &len, " count_denied");
	if (limit->ban != 0)
	{
		append_period(text, &len, " ban ", limit->ban);
		if (limit->ban_to != 0)
			append_period(text, &len, " to ", limit->ban_to);
		append_count(text, &len, " after ", limit->ban_after);
	}
	if (limit->shadow)
		append(text, &len, " shadow");
	if (limit->lease != 0)
		append_period(text, &len, " lease ", limit->lease);
	if (limit->refund_on_abort && !rl_algorithm(limit)->until_end)
		append(text, &len, " refund_on_abort");
	return len;
}

/* Writes why a key is banned that this limit bans, into a buffer of RL_MAX_WHY bytes.  Returns the length. */
int
rl_limit_why(const RlLimit *limit, char *why)
{
	memcpy(why, RL_WHY_LIMIT, strlen(RL_WHY_LIMIT));
	return strlen(RL_WHY_LIMIT) + rl_limit_write(limit, why + strlen(RL_WHY_LIMIT));
}

/* Returns the text of the limit that set a ban, palloc'd; NULL: none, other text, or no memory. */
const char *
rl_ban_rule(const char *why, int len)
{
	int			word = strlen(RL_WHY_LIMIT);
	char	   *rule;

	if (len <= word || len >= RL_MAX_WHY || memcmp(why, RL_WHY_LIMIT, word) != 0)
		return NULL;
	rule = palloc_extended(len - word + 1, MCXT_ALLOC_NO_OOM | MCXT_ALLOC_ZERO);
	return rule ? memcpy(rule, why + word, len - word) : NULL;
}

/* Returns the canonical text of limit i, or of unlimited or blocked; palloc'd. */
char *
rl_limit_text(const RlLimits *limits, int i)
{
	char		text[RL_MAX_LIMIT_TEXT];

	if (limits->kind != RL_LISTED)
		return pstrdup(rl_kind_texts[limits->kind]);
	(void) rl_limit_write(&limits->limit[i], text);
	return pstrdup(text);
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
		char		limit[RL_MAX_LIMIT_TEXT];

		(void) rl_limit_write(&limits->limit[i], limit);
		appendStringInfo(&text, "%s%s", i > 0 ? ", " : "", limit);
	}
	return text.data;
}
