/*
 * local_inspect.c
 *		Reads all bans, and the states of one key, from the local store.
 *
 * A partition is locked, shared, while the cells of a key or a slice are copied.  Times are shown
 * as the wall clock plus what is left of them.
 */
#include "postgres.h"

#include "lib/stringinfo.h"
#include "miscadmin.h"

#include "algorithm/calendar.h"
#include "shared/cells.h"
#include "shared/local_store.h"

#define MAX_INSPECTED		256 /* as in inspect.lua */

/* A copied ban. */
typedef struct Ban
{
	RlCell		cell;
	char		text[RL_MAX_KEY + RL_MAX_WHY];	/* the key, then why */
} Ban;

/* Returns how many bytes of a copied ban are used. */
static int
ban_size(const Ban *ban)
{
	return offsetof(Ban, text) + ban->cell.ban.key_len + ban->cell.ban.why_len;
}

static void
copy_ban(const RlCells *view, const RlCell *cell, Ban *ban)
{
	ban->cell = *cell;
	rl_cell_ban_text(view, cell, ban->text);
}

/* Calls found() for each ban in force under these redis_url and key_prefix.  Needs shared memory. */
void
rl_local_bans(RlKeptFound found, void *arg)
{
	StringInfoData copies;
	Ban			ban;

	initStringInfo(&copies);
	for (int slice = 0; slice < rl_cells_slices(); slice++)
	{
		RlCells		view = {0};
		const uint32 *end = rl_cells_lock_slice(&view, slice);
		RlTimes		times = rl_cells_times(&view);
		int64		ahead = times.wall - times.store;

		resetStringInfo(&copies);
		for (; view.bucket < end; view.bucket++)
			for (uint32 c = *view.bucket; c != RL_NO_CELL; c = rl_cell_at(&view, c)->next)
				if (rl_cell_is_of(rl_cell_at(&view, c), NULL) && rl_cell_at(&view, c)->ban.until > view.now)
				{
					copy_ban(&view, rl_cell_at(&view, c), &ban);
					appendBinaryStringInfo(&copies, (char *) &ban, ban_size(&ban));
				}
		rl_cells_unlock(&view);
		CHECK_FOR_INTERRUPTS();

		while (copies.cursor < copies.len)
		{
			const char *copy = copies.data + copies.cursor;
			RlKey		key;
			RlKept		kept = {.used = RL_UNKNOWN};

			memcpy(&ban, copy, offsetof(Ban, text));
			key.data = kept.name = copy + offsetof(Ban, text);
			key.len = kept.name_len = ban.cell.ban.key_len;
			kept.until = ban.cell.ban.until + ahead;
			kept.began = ban.cell.ban.began + ahead;
			kept.why = kept.name + kept.name_len;
			kept.why_len = ban.cell.ban.why_len;
			copies.cursor += ban_size(&ban);
			if (rl_same_key_hash(rl_key_hash(&key), ban.cell.key_hash))
				found(&kept, arg);
		}
	}
	pfree(copies.data);
}

/* A copied state. */
typedef struct Copy
{
	RlLimit		limit;			/* only the members of the state tag */
	RlTimes		now;
	bool		is_kept;		/* false: as if it had never been used */
	int64		used;
	int64		until;			/* by the wall clock */
	RlState		state;			/* without its logs */
	char		raw[RL_MAX_RAW];	/* of a ban, its level or a record */
	char		name[RL_MAX_KEPT_NAME]; /* of a level or a record; or empty */
} Copy;

static void
describe_state(Copy *copy, const RlPool *pool)
{
	RlState    *state = &copy->state;
	int64		now = copy->limit.calendar != RL_NO_CALENDAR ? copy->now.wall : copy->now.store;

	copy->is_kept =
		rl_state_inspect(&copy->limit, state, pool, rl_time_of(&copy->limit, copy->now), &copy->used,
						 &copy->until);
	if (copy->until != RL_UNKNOWN && !rl_goes_by_wall(&copy->limit))
		copy->until += copy->now.wall - copy->now.store;
	if (state->ban_count > 0 && (rl_period_end(&copy->limit, state->ban_since) <= now ||
								 rl_is_too_late(&copy->limit, state->ban_since, now)))
		state->ban_count = 0;
}

/*
 * Copies a state or, with algorithm RL_BAN_CELL, a ban.  Its partition is locked.  A state of a
 * calendar, which has no logs, is completed later, because its zone must be found.
 */
static void
copy_state(RlCells *view, uint32 c, Copy *copy)
{
	const RlCell *cell = rl_cell_at(view, c);
	RlTimes		now = rl_cells_times(view);
	int64		ahead = now.wall - now.store;
	Ban			ban;

	memset(copy, 0, sizeof(*copy));
	copy->limit.algorithm = cell->tag.algorithm;
	copy->limit.period = cell->tag.period;
	copy->limit.step = cell->tag.step;
	copy->limit.from_first = cell->tag.from_first;
	copy->limit.shadow = cell->tag.shadow;
	copy->now = now;
	if (rl_cell_is_of(cell, NULL))
	{
		copy->used = RL_UNKNOWN;
		copy_ban(view, cell, &ban);
		copy->until = cell->ban.until + ahead;
		snprintf(copy->raw, sizeof(copy->raw), "%lld %lld%s%.*s", (long long) cell->ban.until,
				 (long long) cell->ban.began, cell->ban.why_len > 0 ? " " : "", cell->ban.why_len,
				 ban.text + cell->ban.key_len);
		copy->is_kept = copy->until > now.wall;
		return;
	}
	if (cell->tag.algorithm == RL_LEVEL_CELL)
	{
		strcpy(copy->name, RL_LEVEL_NAME);
		copy->used = RL_UNKNOWN;
		copy->until = cell->end + ahead;
		snprintf(copy->raw, sizeof(copy->raw), "%lld %lld", (long long) cell->end,
				 (long long) cell->state.start);
		copy->is_kept = copy->until > now.wall;
		return;
	}
	if (cell->tag.algorithm == RL_RECORD_CELL)
	{
		strcpy(copy->name, RL_RECORD_NAME);
		copy->used = rl_local_describe_record(view, c, copy->name + strlen(copy->name), copy->raw);
		copy->until = cell->ban.until + ahead;
		copy->is_kept = copy->until > now.wall;
		return;
	}
	copy->state = cell->state;
	if (copy->limit.algorithm != RL_FIXED_WINDOW || copy->limit.zone_hash == 0)
		describe_state(copy, &view->pool);
}

/* Writes a state's value as Redis keeps it, but without the entries of its logs. */
static void
write_raw(const Copy *copy, char *raw)
{
	const RlState *state = &copy->state;
	const RlAlgorithm *algorithm = rl_algorithm(&copy->limit);
	int			n = 0;

	if (algorithm->skip == NULL)
		n = snprintf(raw, RL_MAX_RAW, "%lld", (long long) state->start);
	if (copy->limit.calendar != RL_NO_CALENDAR)
		n += snprintf(raw + n, RL_MAX_RAW - n, " %lld", (long long) copy->until);
	if (algorithm->skip == NULL && algorithm->next_free != NULL)
		raw[n++] = ' ';
	if (algorithm->next_free != NULL)
		n += snprintf(raw + n, RL_MAX_RAW - n, "%lld", (long long) state->charged);
	if (state->refused > 0)
		snprintf(raw + n, RL_MAX_RAW - n, "%c%lld", algorithm->skip == NULL ? ' ' : ':',
				 (long long) state->refused);
}

static void
report(Copy *copy, RlKeptFound found, void *arg)
{
	char		name[RL_MAX_STATE_NAME] = "ban";
	char		raw[RL_MAX_RAW];
	char		end[24] = "";
	RlKept		kept = {.name = name,.raw = raw};
	bool		is_ban = copy->limit.algorithm == (RlAlgorithmId) RL_BAN_CELL;

	if (copy->name[0] != '\0')
		kept.name = copy->name;
	else if (!is_ban)
	{
		if (!rl_calendar_find_zone(&copy->limit))
			return;
		if (copy->limit.calendar != RL_NO_CALENDAR)
			describe_state(copy, NULL);
		rl_state_name(&copy->limit, name);
	}
	if (copy->is_kept)
	{
		if (is_ban || copy->name[0] != '\0')
			strlcpy(raw, copy->raw, sizeof(raw));
		else
			write_raw(copy, raw);
		kept.name_len = strlen(kept.name);
		kept.raw_len = strlen(raw);
		kept.used = copy->used;
		kept.until = copy->until;
		found(&kept, arg);
	}
	if (copy->state.ban_count > 0)
	{
		strlcat(name, ":refused", sizeof(name));
		kept.name_len = strlen(name);
		kept.until = rl_period_end(&copy->limit, copy->state.ban_since);
		if (copy->limit.calendar == RL_NO_CALENDAR)
			kept.until += copy->now.wall - copy->now.store;
		else
			snprintf(end, sizeof(end), " %lld", (long long) kept.until);
		kept.raw_len = snprintf(raw, sizeof(raw), "%lld%s %lld", (long long) copy->state.ban_since, end,
								(long long) copy->state.ban_count);
		kept.used = copy->state.ban_count;
		found(&kept, arg);
	}
}

/*
 * Calls found() for each state of the key, and for its ban.  Needs shared memory.  Raises an error if
 * there are more than MAX_INSPECTED states, because they are copied while others wait.
 */
void
rl_local_inspect(const RlKey *key, RlKeptFound found, void *arg)
{
	RlCells		view = {.key_hash = rl_key_hash(key)};
	StringInfoData copies;
	int			nstates = 0;

	initStringInfo(&copies);
	rl_cells_lock(&view, LW_SHARED);
	for (uint32 c = *view.bucket; c != RL_NO_CELL; c = rl_cell_at(&view, c)->next)
	{
		Copy		copy;

		if (!rl_same_key_hash(rl_cell_at(&view, c)->key_hash, view.key_hash))
			continue;
		nstates += rl_cell_at(&view, c)->tag.algorithm != RL_RECORD_CELL;
		if (nstates > MAX_INSPECTED)
			break;
		copy_state(&view, c, &copy);
		appendBinaryStringInfo(&copies, (char *) &copy, sizeof(copy));
	}
	rl_cells_unlock(&view);
	if (nstates > MAX_INSPECTED)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("key has more than %d states, which is too many for rl_inspect", MAX_INSPECTED)));
	for (int at = 0; at < copies.len; at += sizeof(Copy))
	{
		/* To find a zone takes long. */
		CHECK_FOR_INTERRUPTS();
		report((Copy *) (copies.data + at), found, arg);
	}
	pfree(copies.data);
}
