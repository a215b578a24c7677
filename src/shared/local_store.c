/*
 * local_store.c
 *		The store in shared memory, with the same algorithms as in Redis.
 *
 * Each function locks the partition of the key (cells.c), or those of all keys.
 */
#include "postgres.h"

#include "algorithm/calendar.h"
#include "error.h"
#include "shared/cells.h"
#include "shared/local_store.h"

/* A key of an action, while its partition is locked. */
typedef struct Key
{
	RlState		states[RL_MAX_LIMITS];
	RlView		views[RL_MAX_LIMITS];
	uint32		found[RL_MAX_LIMITS];
	uint32		ban_cell;
	uint32		level_cell;
	RlBan		ban;
	RlVerdict	verdict;
} Key;

static const RlStateTag level_tag = {.algorithm = RL_LEVEL_CELL};

/* Returns the time that the limit goes by. */
static int64
time_of(RlCells *view, const RlLimit *limit)
{
	return rl_time_of(limit, rl_cells_times(view));
}

/* Returns true if the cell is as if it did not exist. */
static bool
is_empty(const RlCell *cell)
{
	return cell->tag.algorithm < RL_ALGORITHMS && cell->state.ban_count == 0 &&
		rl_state_is_empty(rl_algorithms[cell->tag.algorithm], &cell->state);
}

/*
 * Removes the cells of a key that has empty ones only, as Redis deletes such a key.  Beside others an
 * empty state is kept, because it goes on in the same life.
 */
static void
remove_empty(RlCells *view)
{
	uint32	   *link = view->bucket;

	for (uint32 c = *link; c != RL_NO_CELL; c = rl_cell_at(view, c)->next)
		if (rl_same_key_hash(rl_cell_at(view, c)->key_hash, view->key_hash) && !is_empty(rl_cell_at(view, c)))
			return;
	while (*link != RL_NO_CELL)
		if (rl_same_key_hash(rl_cell_at(view, *link)->key_hash, view->key_hash))
			rl_cell_remove_at(view, link);
		else
			link = &rl_cell_at(view, *link)->next;
}

/* Stores a state, in cell c or for RL_NO_CELL in a new one.  Returns the cell. */
static uint32
save_state(RlCells *view, uint32 c, const RlLimit *limit, const RlState *state)
{
	if (c == RL_NO_CELL)
		c = rl_cell_make(view, rl_state_tag(limit));
	rl_cell_at(view, c)->state = *state;
	rl_cell_set_end(view, c, rl_state_end(limit, state, &view->pool, rl_cells_times(view)));
	return c;
}

/* Returns true if the store says in which life the action charges a state. */
static bool
tells_life(const RlAction *action)
{
	return action->limits->refunds || action->timed || action->reserve != NULL;
}

/* Returns true if a charge may be refunded to the state in cell c.  An entry of a log is found by its time, in any life. */
static bool
is_of_life(const RlLimit *limit, uint32 c, int64 life)
{
	return life == 0 || rl_algorithm(limit)->has_logs || rl_cell_life(c) == life;
}

/* Returns how many spare cells a ban of the key needs, in place of cell c, or for RL_NO_CELL of none. */
static uint32
spares_for_ban(const RlCells *view, uint32 c, const RlKey *key, int why_len)
{
	uint32		n = rl_ban_cells(key->len, why_len);
	uint32		has = 0;

	if (c != RL_NO_CELL)
		has = rl_ban_cells(rl_cell_at(view, c)->ban.key_len, rl_cell_at(view, c)->ban.why_len);
	return n > has ? n - has : 0;
}

/* There must be as many spare cells as spares_for_ban returns. */
static void
set_ban(RlCells *view, uint32 c, const RlKey *key, int64 until, const char *why, int why_len)
{
	char		text[RL_MAX_KEY + RL_MAX_WHY];
	RlCell	   *cell;

	if (c != RL_NO_CELL)
		rl_cell_remove(view, c);
	memcpy(text, key->data, key->len);
	memcpy(text + key->len, why, why_len);
	c = rl_cell_make_text(view, (RlStateTag) {.algorithm = RL_BAN_CELL}, text, key->len + why_len);
	cell = rl_cell_at(view, c);
	cell->ban.until = until;
	cell->ban.began = view->now;
	cell->ban.key_len = key->len;
	cell->ban.why_len = why_len;
	rl_cell_set_end(view, c, until);
}

/* Stores the level in cell c, or for RL_NO_CELL in a spare one, which must exist. */
static void
set_level(RlCells *view, uint32 c, const RlBan *ban)
{
	if (c == RL_NO_CELL)
		c = rl_cell_make(view, level_tag);
	rl_cell_at(view, c)->state.start = ban->grown;
	rl_cell_set_end(view, c, ban->grows_until);
}

/* Sets the key's ban from its cells. */
static void
load_ban(const RlCells *view, Key *key)
{
	char		text[RL_MAX_KEY + RL_MAX_WHY];
	RlBan	   *ban = &key->ban;
	const RlCell *cell;

	*ban = (RlBan) {0};
	if (key->level_cell != RL_NO_CELL)
	{
		ban->grown = rl_cell_at(view, key->level_cell)->state.start;
		ban->grows_until = rl_cell_at(view, key->level_cell)->end;
	}
	if (key->ban_cell == RL_NO_CELL)
		return;
	cell = rl_cell_at(view, key->ban_cell);
	ban->until = cell->ban.until;
	if (ban->until <= view->now)
		return;
	rl_cell_ban_text(view, cell, text);
	ban->rule = rl_ban_rule(text + cell->ban.key_len, cell->ban.why_len);
}

/* Stores what an action has changed, and sets the lives in the decisions. */
static void
save_key(RlCells *view, const RlAction *action, const Key *key, uint32 changed, RlDecision *decisions)
{
	char		why[RL_MAX_WHY];

	for (int i = 0; i < action->limits->n; i++)
		if (changed & 1 << i)
		{
			uint32		c = save_state(view, key->found[i], &action->limits->limit[i], &key->states[i]);

			if (tells_life(action))
				decisions[i].life = rl_cell_life(c);
		}
	if (key->ban.by != NULL)
		set_ban(view, key->ban_cell, &action->key, key->ban.until, why, rl_limit_why(key->ban.by, why));
	if (key->ban.by != NULL && key->ban.by->ban_to > 0)
		set_level(view, key->level_cell, &key->ban);
}

static void
finish(RlCells *view)
{
	rl_cells_unlock(view);
	rl_cells_release(view);
}

/*
 * Evicts cells of other keys to make room for an act, whose partitions are unlocked.  Returns
 * false with the error set, and the spares freed, if there is no room.
 */
static bool
evict(RlCells *view, uint32 cells, uint32 chunks, RlError *error)
{
	if (rl_cells_evict(view, cells, chunks))
		return true;
	rl_cells_release(view);
	rl_error_set(error, ERRCODE_STORE_FAILED, "out of shared memory for rate limits");
	return rl_error_detail(error, "ratelimit.local_max_keys sets its size.");
}

/*
 * Makes room for an act on one key, which must start again, because the partition is unlocked
 * meanwhile.  Returns false with the error set, and the partition unlocked, if there is no room.
 */
static bool
make_room(RlCells *view, uint32 cells, uint32 chunks, RlError *error)
{
	rl_cells_unlock(view);
	if (!evict(view, cells, chunks, error))
		return false;
	rl_cells_lock(view, LW_EXCLUSIVE);
	return true;
}

/*
 * Acts on the action's one limit, without the options ban and shadow, of an algorithm that has act_single.
 * Returns false, with nothing done, if the key has a ban or counted refusals, or
 * there is no room.
 */
static bool
take_single(RlCells *view, const RlAction *action, RlDecision *decision)
{
	const RlLimit *limit = &action->limits->limit[0];
	int64		quota = action->quota;
	uint32		c = RL_NO_CELL;
	int64		start = -1;
	int64		end;

	for (uint32 i = *view->bucket; i != RL_NO_CELL; i = rl_cell_at(view, i)->next)
	{
		if (!rl_same_key_hash(rl_cell_at(view, i)->key_hash, view->key_hash))
			continue;
		if (rl_cell_is_of(rl_cell_at(view, i), limit))
			c = i;
		else if (rl_cell_is_of(rl_cell_at(view, i), NULL))
			return false;
	}
	if (c != RL_NO_CELL && rl_cell_at(view, c)->state.ban_count > 0)
		return false;
	if (c != RL_NO_CELL)
		start = rl_cell_at(view, c)->state.start;
	else if (quota > 0 && quota <= limit->capacity && !rl_cells_reserve(view, 1, 0))
		return false;
	decision->life = 0;
	end = rl_algorithm(limit)->act_single(limit, &start, view->now, quota, decision);
	if (!decision->allowed || quota == 0)
		return true;
	if (c == RL_NO_CELL)
		c = rl_cell_make(view, rl_state_tag(limit));
	rl_cell_at(view, c)->state.start = start;
	rl_cell_set_end(view, c, end);
	if (tells_life(action))
		decision->life = rl_cell_life(c);
	return true;
}

/* Finds cells and states of an act on the view's key, and adds the cells and chunks that it may need. */
static void
find_cells(const RlCells *view, const RlAction *action, Key *key, uint32 *cells, uint32 *chunks)
{
	const RlLimits *limits = action->limits;
	uint32		ban = key->ban_cell = rl_cell_find(view, NULL);
	bool		may_change = action->how != RL_PEEK && action->quota > 0 &&
		(ban == RL_NO_CELL || rl_cell_at(view, ban)->ban.until <= view->now || rl_all_shadow(limits));
	int			why_len = 0;
	bool		grows = false;

	key->level_cell = RL_NO_CELL;
	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];

		uint32		found = key->found[i] = rl_cell_find(view, limit);
		RlState    *state = &key->states[i];

		*state = found != RL_NO_CELL ? rl_cell_at(view, found)->state : (RlState) RL_NO_STATE;
		if (limit->ban_to > 0 && key->level_cell == RL_NO_CELL)
			key->level_cell = rl_cell_find_tag(view, level_tag);
		if (!may_change)
			continue;
		*cells += found == RL_NO_CELL;
		*chunks += rl_chunks_wanted(limit, state, &view->pool, view->now, rl_quota_of(limits, i, action->quota));
		if (action->how == RL_TAKE && limit->ban > 0 && state->ban_count + 1 >= limit->ban_after)
		{
			char		why[RL_MAX_WHY];

			why_len = Max(why_len, rl_limit_why(limit, why));
			grows |= limit->ban_to > 0;
		}
	}
	if (why_len > 0)
		*cells += spares_for_ban(view, ban, &action->key, why_len) + (grows && key->level_cell == RL_NO_CELL);
}

/* Does the same, and reserves them.  Returns false with the error set, and unlocked, if there is no room. */
static bool
begin_act(RlCells *view, const RlAction *action, Key *key, RlError *error)
{
	for (;;)
	{
		uint32		cells = 0;
		uint32		chunks = 0;

		find_cells(view, action, key, &cells, &chunks);
		if (rl_cells_reserve(view, cells, chunks))
			return true;
		if (!make_room(view, cells, chunks, error))
			return false;
	}
}

/*
 * Reservations
 *
 * A record is in a cell with further cells, as a ban: until is its end, and its text is the
 * id, and then the Record.
 */

/* A charge of a reservation, as in RlCharge, and the limit. */
typedef struct Reserved
{
	RlLimit		limit;
	int64		units;
	int64		at;
	int64		mark;
	int64		life;
} Reserved;

/* The same as a record keeps it: of the limit the members that a settlement needs */
typedef struct Kept
{
	RlStateTag	tag;
	int64		capacity;
	int64		count;
	int64		interval_ns;
	int64		units;
	int64		at;
	int64		mark;
	int64		life;
	uint8		calendar;
	char		zone[RL_MAX_ZONE];
} Kept;

/* The record keeps its first "n" charges, each as a Kept. */
typedef struct Record
{
	uint64		limits;			/* hash of their text */
	int64		quota;
	int64		hold;
	int64		settled;		/* the quota that it is settled at, or RL_UNKNOWN */
	int64		n;
	Reserved	charges[RL_MAX_LIMITS];
} Record;

StaticAssertDecl(RL_MAX_ID + offsetof(Record, charges) + RL_MAX_LIMITS * sizeof(Kept) == RL_MAX_RECORD,
				 "RL_MAX_RECORD must be changed");

/* Ended records that an act deletes, at most. */
#define SWEPT				64

/* Returns the bytes of a record with n charges. */
static int
record_size(int n)
{
	return offsetof(Record, charges) + n * sizeof(Kept);
}

static RlStateTag
record_tag(const RlKey *id)
{
	return (RlStateTag) {.algorithm = RL_RECORD_CELL,.step = rl_key_hash(id).low};
}

/* Copies the record in a cell. */
static void
load_record(const RlCells *view, uint32 c, Record *record)
{
	const RlCell *cell = rl_cell_at(view, c);
	char		text[RL_MAX_RECORD];

	rl_cell_ban_text(view, cell, text);
	memcpy(record, text + cell->ban.key_len, offsetof(Record, charges));
	for (int i = 0; i < record->n; i++)
	{
		Kept		kept;

		memcpy(&kept, text + cell->ban.key_len + record_size(i), sizeof(kept));
		record->charges[i] = (Reserved) {
			.limit = {.algorithm = kept.tag.algorithm,.from_first = kept.tag.from_first,.shadow = kept.tag.shadow,
				.capacity = kept.capacity,.count = kept.count,.period = kept.tag.period,
				.interval_ns = kept.interval_ns,.step = kept.tag.step,.calendar = kept.calendar},
			.units = kept.units,.at = kept.at,.mark = kept.mark,.life = kept.life
		};
		memcpy(record->charges[i].limit.zone, kept.zone, RL_MAX_ZONE);
	}
}

/* Stores a record in place of cell c, or for RL_NO_CELL in new cells.  There must be spares for it. */
static void
save_record(RlCells *view, uint32 c, const RlKey *id, const Record *record, int64 until)
{
	char		text[RL_MAX_RECORD];
	int			size = record_size(record->n);
	RlCell	   *cell;

	if (c != RL_NO_CELL)
		rl_cell_remove(view, c);
	memcpy(text, id->data, id->len);
	memcpy(text + id->len, record, offsetof(Record, charges));
	for (int i = 0; i < record->n; i++)
	{
		const Reserved *charge = &record->charges[i];
		Kept		kept = {
			.tag = rl_state_tag(&charge->limit),.capacity = charge->limit.capacity,.count = charge->limit.count,
			.interval_ns = charge->limit.interval_ns,.units = charge->units,.at = charge->at,.mark = charge->mark,
			.life = charge->life,.calendar = charge->limit.calendar
		};

		memcpy(kept.zone, charge->limit.zone, RL_MAX_ZONE);
		memcpy(text + id->len + record_size(i), &kept, sizeof(kept));
	}
	c = rl_cell_make_text(view, record_tag(id), text, id->len + size);
	cell = rl_cell_at(view, c);
	cell->ban.until = until;
	cell->ban.key_len = id->len;
	cell->ban.why_len = size;
	rl_cell_set_end(view, c, until);
}

/* Returns true if the key has room for one more record.  If it is full, deletes some that have ended, SWEPT at most. */
static bool
has_room_for_record(RlCells *view)
{
	uint32	   *link = view->bucket;
	int			n = 0;

	for (uint32 c = *view->bucket; c != RL_NO_CELL; c = rl_cell_at(view, c)->next)
		n += rl_same_key_hash(rl_cell_at(view, c)->key_hash, view->key_hash) &&
			rl_cell_at(view, c)->tag.algorithm == RL_RECORD_CELL;
	if (n < RL_MAX_RESERVATIONS)
		return true;
	while (*link != RL_NO_CELL && n > RL_MAX_RESERVATIONS - SWEPT)
	{
		RlCell	   *cell = rl_cell_at(view, *link);

		if (!rl_same_key_hash(cell->key_hash, view->key_hash) || cell->tag.algorithm != RL_RECORD_CELL ||
			cell->ban.until > view->now)
		{
			link = &cell->next;
			continue;
		}
		rl_cell_remove_at(view, link);
		n--;
	}
	return n < RL_MAX_RESERVATIONS;
}

/*
 * Answers with the present figures if there is a record with the action's id, or sets *other if that
 * has other limits or another quota.  Returns false if there is none.
 */
static bool
answer_reserved(RlCells *view, const RlAction *action, uint32 c, RlDecision *decisions, bool *other)
{
	const RlLimits *limits = action->limits;
	RlState		states[RL_MAX_LIMITS];
	RlBan		ban = {0};
	Record		record;

	if (c == RL_NO_CELL || rl_cell_at(view, c)->ban.until <= view->now)
		return false;
	load_record(view, c, &record);
	*other = record.limits != limits->hash || record.quota != action->quota;
	if (*other)
		return true;
	for (int i = 0; i < limits->n; i++)
	{
		uint32		state = rl_cell_find(view, &limits->limit[i]);

		states[i] = state != RL_NO_CELL ? rl_cell_at(view, state)->state : (RlState) RL_NO_STATE;
	}
	(void) rl_act(limits, states, &view->pool, &ban, rl_cells_times(view), 0, RL_PEEK, decisions);
	for (int i = 0; i < limits->n; i++)
		rl_set_reserved(&decisions[i], record.settled != RL_UNKNOWN);
	return true;
}

/* Stores the record of an action that was allowed. */
static void
keep_reservation(RlCells *view, const RlAction *action, uint32 c, const RlView *views, const RlDecision *decisions)
{
	const RlLimits *limits = action->limits;
	RlCharge	charges[RL_MAX_LIMITS];
	Record		record = {.limits = limits->hash,.quota = action->quota,.hold = action->reserve->hold,.settled = RL_UNKNOWN};

	rl_charges_set(action, rl_cells_times(view), decisions, charges);
	for (int i = 0; i < limits->n; i++)
		if (decisions[i].charged)
			record.charges[record.n++] = (Reserved) {
				limits->limit[i], rl_quota_of(limits, i, action->quota), charges[i].at,
				rl_algorithm(&limits->limit[i])->has_logs ? views[i].mark : charges[i].mark, charges[i].life
			};
	save_record(view, c, &action->reserve->id, &record, view->now + record.hold);
}

/* For RlStore.take, with a reservation. */
static bool
local_reserve(const RlAction *action, RlDecision *decisions, RlAnswer *answer, RlError *error)
{
	const RlLimits *limits = action->limits;
	Key			key;
	RlAct		act = {.quota = action->quota,.how = RL_TAKE,.hold = action->reserve->hold};
	uint32		changed;
	uint32		record;
	bool		other;
	RlCells		view = {.key_hash = rl_key_hash(&action->key)};

	rl_cells_lock(&view, LW_EXCLUSIVE);
	for (;;)
	{
		uint32		cells = rl_ban_cells(action->reserve->id.len, record_size(limits->n));
		uint32		chunks = 0;

		record = rl_cell_find_tag(&view, record_tag(&action->reserve->id));
		answer->at = act.times = rl_cells_times(&view);
		if (answer_reserved(&view, action, record, decisions, &other))
		{
			finish(&view);
			return !other || rl_not_reserved(true, error);
		}
		find_cells(&view, action, &key, &cells, &chunks);
		if (rl_cells_reserve(&view, cells, chunks))
			break;
		if (!make_room(&view, cells, chunks, error))
			return false;
	}
	load_ban(&view, &key);
	act.verdict = rl_act_decide(limits, key.states, &view.pool, key.ban.until, act.times, action->quota, key.views,
								decisions);
	if (act.verdict == RL_VERDICT_ALLOWED && record == RL_NO_CELL && !has_room_for_record(&view))
	{
		finish(&view);
		return rl_not_reserved(false, error);
	}
	changed = rl_act_complete(limits, key.states, &view.pool, &key.ban, &act, key.views, decisions);
	save_key(&view, action, &key, changed, decisions);
	if (act.verdict == RL_VERDICT_ALLOWED)
		keep_reservation(&view, action, record, key.views, decisions);
	finish(&view);
	return true;
}

/* Returns the state of a limit that was charged, or an empty one, and its cell. */
static RlState
charged_state(const RlCells *view, const Reserved *charge, uint32 *c)
{
	*c = rl_cell_find(view, &charge->limit);
	return *c != RL_NO_CELL ? rl_cell_at(view, *c)->state : (RlState) RL_NO_STATE;
}

/* Refunds some of the units of a charge, less those that have been replenished since.  Returns true if the state has changed. */
static bool
refund_units(RlCells *view, const Reserved *charge, RlState *state, int64 units)
{
	RlCharge	part = rl_algorithm(&charge->limit)->charge(&charge->limit, units, charge->at, 0);

	part.mark = charge->mark;
	part.own = true;
	return rl_refund_charge(&charge->limit, state, &view->pool, time_of(view, &charge->limit), &part);
}

/* Refunds or charges the difference of a charge to what it is settled at. */
static void
settle_charge(RlCells *view, const Reserved *charge, int64 quota)
{
	const RlLimit *limit = &charge->limit;
	bool		held = rl_algorithm(limit)->until_end;
	int64		rest = held ? charge->units : charge->units - quota;
	uint32		c;
	RlState		state = charged_state(view, charge, &c);

	if (rest == 0 || (rest > 0 && (c == RL_NO_CELL || !is_of_life(limit, c, charge->life))))
		return;
	if (rest < 0)
		rl_owe(limit, &state, &view->pool, time_of(view, limit), -rest);
	else if (!refund_units(view, charge, &state, rest))
		return;
	(void) save_state(view, c, limit, &state);
}

/* Returns true if the unit of a concurrent limit is still held. */
static bool
is_held(const RlCells *view, const Reserved *charge, const RlState *state)
{
	return charge->mark + charge->limit.period > view->now &&
		rl_log_has_own(&view->pool, &state->log[RL_CHARGED], charge->mark);
}

/* Starts the period of the units that are held again.  Returns false, with nothing changed, if one is lost. */
static bool
extend_charges(RlCells *view, Record *record, int64 hold)
{
	/* No unit is lost while the partition is locked, so two rounds suffice. */
	for (int round = 0; round < 2; round++)
		for (int i = 0; i < record->n; i++)
		{
			Reserved   *charge = &record->charges[i];
			const RlLimit *limit = &charge->limit;
			uint32		c;
			RlState		state = charged_state(view, charge, &c);

			if (!rl_algorithm(limit)->until_end)
				continue;
			if (round == 0 && !is_held(view, charge, &state))
				return false;
			if (round == 0)
				continue;
			(void) refund_units(view, charge, &state, 1);
			charge->mark = rl_hold_unit(limit, &state, &view->pool, view->now, hold);
			(void) save_state(view, c, limit, &state);
		}
	return true;
}

static bool
has_calendar(const Record *record)
{
	for (int i = 0; i < record->n; i++)
		if (record->charges[i].limit.calendar != RL_NO_CALENDAR)
			return true;
	return false;
}

/*
 * Loads the time zones of a record, which perhaps only other backends have loaded.  This reads
 * files, so nothing may be locked.  Returns false with the error set if a zone is not known.
 */
static bool
load_zones(Record *record, RlError *error)
{
	for (int i = 0; i < record->n; i++)
	{
		RlLimit    *limit = &record->charges[i].limit;

		if (limit->calendar != RL_NO_CALENDAR && !rl_calendar_set_zone(limit, limit->zone, strlen(limit->zone)))
			return rl_error_set(error, ERRCODE_INVALID_TEXT_REPRESENTATION,
								"time zone \"%s\" is not known", limit->zone);
	}
	return true;
}

/* Adds the cells and chunks that a settlement, or an extension, may need.  The record needs no more than it has. */
static void
find_room(const RlCells *view, const Record *record, int64 quota, uint32 *cells, uint32 *chunks)
{
	for (int i = 0; i < record->n; i++)
	{
		uint32		c;
		RlState		state = charged_state(view, &record->charges[i], &c);

		*cells += c == RL_NO_CELL && quota > record->charges[i].units;
		if (rl_algorithm(&record->charges[i].limit)->skip != NULL)
			*chunks += rl_log_chunks_wanted(&view->pool, &state.log[RL_CHARGED]);
	}
}

/* Settles or extends an open record, for whose states there are spares. */
static void
settle_record(RlCells *view, uint32 c, const RlKey *id, Record *record, int64 quota, int64 hold, RlSettled *settled)
{
	if (quota != RL_UNKNOWN)
	{
		for (int i = 0; i < record->n; i++)
			settle_charge(view, &record->charges[i], quota);
		record->settled = quota;
		record->n = 0;
		save_record(view, c, id, record, view->now + Min(record->hold, RL_KEEP_SETTLED));
		*settled = (RlSettled) {RL_SETTLED_DONE, record->quota, record->limits};
		return;
	}
	for (int i = 0; i < record->n; i++)
		if (rl_algorithm(&record->charges[i].limit)->until_end && hold > record->charges[i].limit.period)
		{
			settled->how = RL_SETTLED_LONG_HOLD;
			return;
		}
	record->hold = hold > 0 ? hold : record->hold;
	if (!extend_charges(view, record, record->hold))
		return;
	save_record(view, c, id, record, view->now + record->hold);
	settled->how = RL_SETTLED_DONE;
}

static bool
local_settle(const RlKey *key, const RlKey *id, int64 quota, int64 hold, RlSettled *settled, RlError *error)
{
	RlCells		view = {.key_hash = rl_key_hash(key)};
	uint64		loaded = 0;		/* hash of the limits whose zones are loaded; 0: none */

	*settled = (RlSettled) {.how = RL_SETTLED_NONE};
	rl_cells_lock(&view, LW_EXCLUSIVE);
	for (;;)
	{
		uint32		c = rl_cell_find_tag(&view, record_tag(id));
		uint32		cells = 0;
		uint32		chunks = 0;
		Record		record;

		if (c != RL_NO_CELL && rl_cell_at(&view, c)->ban.until <= view.now)
		{
			rl_cell_remove(&view, c);
			c = RL_NO_CELL;
		}
		if (c == RL_NO_CELL)
			break;
		load_record(&view, c, &record);
		if (record.settled != RL_UNKNOWN)
		{
			settled->how = quota != RL_UNKNOWN ? RL_SETTLED_DONE : RL_SETTLED_NONE;
			break;
		}
		if (loaded != record.limits && has_calendar(&record))
		{
			finish(&view);
			if (!load_zones(&record, error))
				return false;
			loaded = record.limits;
			rl_cells_lock(&view, LW_EXCLUSIVE);
			continue;
		}
		find_room(&view, &record, quota, &cells, &chunks);
		if (rl_cells_reserve(&view, cells, chunks))
		{
			settle_record(&view, c, id, &record, quota, hold, settled);
			break;
		}
		if (!make_room(&view, cells, chunks, error))
			return false;
	}
	finish(&view);
	return true;
}

/* Writes the id and the status of the record in a cell, for rl_inspect.  Returns its quota. */
int64
rl_local_describe_record(const RlCells *view, uint32 c, char *id, char *status)
{
	char		text[RL_MAX_RECORD];
	Record		record;
	int			len = rl_cell_at(view, c)->ban.key_len;

	rl_cell_ban_text(view, rl_cell_at(view, c), text);
	memcpy(id, text, len);
	id[len] = '\0';
	load_record(view, c, &record);
	if (record.settled == RL_UNKNOWN)
		strcpy(status, "open");
	else
		snprintf(status, RL_MAX_RAW, "settled:%lld", (long long) record.settled);
	return record.quota;
}

/*
 * The store
 */

static bool
local_take(const RlAction *action, RlDecision *decisions, RlAnswer *answer, RlError *error)
{
	const RlLimits *limits = action->limits;
	int64		quota = action->quota;
	RlTake		how = action->how;
	Key			key;
	uint32		changed;
	RlCells		view = {.key_hash = rl_key_hash(&action->key)};

	if (action->reserve != NULL)
		return local_reserve(action, decisions, answer, error);
	rl_cells_lock(&view, how == RL_PEEK ? LW_SHARED : LW_EXCLUSIVE);
	if (how != RL_PEEK && limits->n == 1 && limits->limit[0].ban == 0 && !limits->limit[0].shadow &&
		rl_algorithm(&limits->limit[0])->act_single != NULL &&
		take_single(&view, action, decisions))
	{
		/* Such a limit does not go by the wall clock. */
		answer->at = (RlTimes) {view.now, view.now};
		finish(&view);
		return true;
	}
	if (!begin_act(&view, action, &key, error))
		return false;
	answer->at = rl_cells_times(&view);
	load_ban(&view, &key);
	changed = rl_act(limits, key.states, &view.pool, &key.ban, answer->at, quota, how, decisions);
	save_key(&view, action, &key, changed, decisions);
	finish(&view);
	return true;
}

/* Does the same for several keys, whose partitions it locks. */
static bool
begin_all(RlCells *view, const RlAction *const *actions, int n, Key *keys, RlError *error)
{
	for (;;)
	{
		uint32		cells[RL_MAX_KEYS];
		uint32		chunks[RL_MAX_KEYS];
		bool		reserved = true;

		rl_cells_lock_all(view);
		for (int i = 0; i < n; i++)
		{
			cells[i] = i > 0 ? cells[i - 1] : 0;
			chunks[i] = i > 0 ? chunks[i - 1] : 0;
			rl_cells_select(view, i);
			find_cells(view, actions[i], &keys[i], &cells[i], &chunks[i]);
			/* The keys share the spares, so a key's numbers include those of the keys before it. */
			reserved &= rl_cells_reserve(view, cells[i], chunks[i]);
		}
		if (reserved)
			return true;
		rl_cells_unlock(view);
		for (int i = 0; i < n; i++)
		{
			rl_cells_select(view, i);
			if (!evict(view, cells[i], chunks[i], error))
				return false;
		}
	}
}

static bool
local_take_all(const RlAction *const *actions, int n, RlTaken *taken, bool *apart,
			   RlUsage *usage pg_attribute_unused(), RlError *error)
{
	RlKeyHash	hashes[RL_MAX_KEYS];
	Key			keys[RL_MAX_KEYS];
	RlCells		view = {.keys = hashes,.nkeys = n};
	bool		allowed = true;

	*apart = false;
	for (int i = 0; i < n; i++)
		hashes[i] = rl_key_hash(&actions[i]->key);
	if (!begin_all(&view, actions, n, keys, error))
		return false;
	for (int i = 0; i < n; i++)
	{
		Key		   *key = &keys[i];

		load_ban(&view, key);
		key->verdict = rl_act_decide(actions[i]->limits, key->states, &view.pool, key->ban.until,
									 rl_cells_times(&view), actions[i]->quota, key->views, taken[i].each);
		allowed &= key->verdict == RL_VERDICT_ALLOWED;
	}
	for (int i = 0; i < n; i++)
	{
		Key		   *key = &keys[i];
		RlAct		act = {.times = rl_cells_times(&view),.quota = actions[i]->quota,.verdict = key->verdict,.how = RL_TAKE};
		uint32		changed;

		if (!allowed && act.verdict == RL_VERDICT_ALLOWED)
			act.verdict = RL_VERDICT_REFUSED;
		rl_cells_select(&view, i);
		changed = rl_act_complete(actions[i]->limits, key->states, &view.pool, &key->ban, &act,
								  key->views, taken[i].each);
		save_key(&view, actions[i], key, changed, taken[i].each);
		taken[i].at = act.times;
		taken[i].charged = allowed;
	}
	finish(&view);
	return true;
}

static void
refund(RlCells *view, const RlLimit *limit, int64 quota, const RlCharge *charge)
{
	uint32		c = rl_cell_find(view, limit);
	RlState		state;

	if (c == RL_NO_CELL || (charge != NULL && !is_of_life(limit, c, charge->life)))
		return;
	state = rl_cell_at(view, c)->state;
	if (charge != NULL ? !rl_refund_charge(limit, &state, &view->pool, time_of(view, limit), charge) :
		!rl_refund_quota(limit, &state, &view->pool, time_of(view, limit), quota))
		return;
	(void) save_state(view, c, limit, &state);
	if (is_empty(rl_cell_at(view, c)))
		remove_empty(view);
}

static bool
local_refund(const RlKey *key, const RlLimits *limits, int64 quota, RlError *error pg_attribute_unused())
{
	RlCells		view = {.key_hash = rl_key_hash(key)};

	rl_cells_lock(&view, LW_EXCLUSIVE);
	for (int i = 0; i < limits->n; i++)
		refund(&view, &limits->limit[i], quota, NULL);
	finish(&view);
	return true;
}

/* Refunds a charge, less the quota that has been replenished since.  Does not throw. */
void
rl_local_refund_charge(RlKeyHash key_hash, const RlLimit *limit, const RlCharge *charge)
{
	RlCells		view = {.key_hash = key_hash};

	rl_cells_lock(&view, LW_EXCLUSIVE);
	refund(&view, limit, 0, charge);
	finish(&view);
}

/*
 * Returns false if there is none, or it is empty or has ended; but under debug_now no cell ends:
 * Redis keeps keys then.
 */
static bool
delete_cell(RlCells *view, uint32 c)
{
	bool		found = c != RL_NO_CELL && !is_empty(rl_cell_at(view, c)) &&
		(rl_debug_now[0] != '\0' || rl_cell_at(view, c)->end > view->now);

	if (c != RL_NO_CELL)
		rl_cell_remove(view, c);
	return found;
}

static bool
local_reset(const RlKey *key, const RlLimits *limits, bool *found, RlError *error pg_attribute_unused())
{
	RlCells		view = {.key_hash = rl_key_hash(key)};
	uint32		next;

	*found = false;
	rl_cells_lock(&view, LW_EXCLUSIVE);
	for (int i = 0; limits && i < limits->n; i++)
		*found |= delete_cell(&view, rl_cell_find(&view, &limits->limit[i]));
	if (limits)
		remove_empty(&view);
	for (uint32 c = limits ? RL_NO_CELL : *view.bucket; c != RL_NO_CELL; c = next)
	{
		next = rl_cell_at(&view, c)->next;
		if (rl_same_key_hash(rl_cell_at(&view, c)->key_hash, view.key_hash))
			*found |= delete_cell(&view, c);
	}
	finish(&view);
	return true;
}

static bool
local_ban(const RlKey *key, int64 duration, const char *why, RlError *error)
{
	RlCells		view = {.key_hash = rl_key_hash(key)};
	int			why_len = strlen(why);
	uint32		ban;
	uint32		cells;

	rl_cells_lock(&view, LW_EXCLUSIVE);
	for (;;)
	{
		ban = rl_cell_find(&view, NULL);
		cells = spares_for_ban(&view, ban, key, why_len);
		if (rl_cells_reserve(&view, cells, 0))
			break;
		if (!make_room(&view, cells, 0, error))
			return false;
	}
	set_ban(&view, ban, key, view.now + duration, why, why_len);
	finish(&view);
	return true;
}

static bool
local_unban(const RlKey *key, bool *found, RlError *error pg_attribute_unused())
{
	RlCells		view = {.key_hash = rl_key_hash(key)};
	RlStateTag	tags[] = {{.algorithm = RL_BAN_CELL}, level_tag};

	*found = false;
	rl_cells_lock(&view, LW_EXCLUSIVE);
	for (int i = 0; i < (int) lengthof(tags); i++)
	{
		uint32		c = rl_cell_find_tag(&view, tags[i]);

		if (c == RL_NO_CELL)
			continue;
		*found |= rl_cell_at(&view, c)->end > view.now;
		rl_cell_remove(&view, c);
	}
	remove_empty(&view);
	finish(&view);
	return true;
}

const RlStore rl_local_store = {
	.name = "local",
	.is_local = true,
	.take = local_take,
	.take_all = local_take_all,
	.refund = local_refund,
	.reset = local_reset,
	.ban = local_ban,
	.unban = local_unban,
	.settle = local_settle
};
