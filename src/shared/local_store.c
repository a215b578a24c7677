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
typedef struct KeyStates
{
	RlState		states[RL_MAX_LIMITS];
	RlView		views[RL_MAX_LIMITS];
	uint32		found[RL_MAX_LIMITS];
	uint32		ban_cell;
	uint32		level_cell;
	RlBan		ban;
	RlAct		act;			/* of an action on several keys */
} KeyStates;

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
	rl_cell_change(view, c)->state = *state;
	rl_cell_set_end(view, c, rl_state_end(limit, state, &view->pool, rl_cells_times(view)));
	return c;
}

/* Returns true if the store says in which life the action charges a state. */
static bool
tells_life(const RlAction *action)
{
	return action->limits->refunds || action->timed || action->reserve != NULL;
}

/*
 * Returns true if a charge may be refunded to the state in cell c.  An entry of a log is found by its
 * time, in any life.
 */
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
	rl_cell_change(view, c)->state.start = ban->grown;
	rl_cell_set_end(view, c, ban->grows_until);
}

/* Sets the key's ban from its cells. */
static void
load_ban(const RlCells *view, KeyStates *key)
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
save_key(RlCells *view, const RlAction *action, const KeyStates *key, uint32 changed, RlDecision *decisions)
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
 * Does the same for an act on several keys, which locks their partitions again.  Each key's numbers
 * include those of the keys before it.
 */
static bool
make_room_for_all(RlCells *view, const uint32 *cells, const uint32 *chunks, RlError *error)
{
	rl_cells_unlock(view);
	for (int i = 0; i < view->nkeys; i++)
	{
		rl_cells_select(view, i);
		if (!evict(view, cells[i], chunks[i], error))
			return false;
	}
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
	else if (quota > 0 && quota <= limit->capacity && !rl_cells_set_aside(view, 1, 0))
		return false;
	decision->life = 0;
	end = rl_algorithm(limit)->act_single(limit, &start, view->now, quota, decision);
	if (!decision->allowed || quota == 0)
		return true;
	if (c == RL_NO_CELL)
		c = rl_cell_make(view, rl_state_tag(limit));
	rl_cell_change(view, c)->state.start = start;
	rl_cell_set_end(view, c, end);
	if (tells_life(action))
		decision->life = rl_cell_life(c);
	return true;
}

/* Finds cells and states of an act on the view's key, and adds the cells and chunks that it may need. */
static void
find_cells(const RlCells *view, const RlAction *action, KeyStates *key, uint32 *cells, uint32 *chunks)
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
		*chunks += rl_chunks_wanted(limit, state, &view->pool, view->now,
									rl_quota_of(limit, action->reserve != NULL, action->quota));
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
begin_act(RlCells *view, const RlAction *action, KeyStates *key, RlError *error)
{
	for (;;)
	{
		uint32		cells = 0;
		uint32		chunks = 0;

		find_cells(view, action, key, &cells, &chunks);
		if (rl_cells_set_aside(view, cells, chunks))
			return true;
		if (!make_room(view, cells, chunks, error))
			return false;
	}
}

/*
 * Reservations
 *
 * A record is in a cell of its last key with further cells, as a ban: until is its end, and its text is the
 * id, and then the Record.
 */

/* A charge of a reservation, as in RlCharge, and the limit. */
typedef struct Reserved
{
	int			key;			/* its number */
	RlLimit		limit;
	int64		units;
	int64		place;
	int64		life;
} Reserved;

/*
 * The same as a record keeps it, and behind it zone_len bytes: of the limit the members that a
 * settlement needs
 */
typedef struct Kept
{
	RlStateTag	tag;
	int64		capacity;
	int64		count;
	int64		interval_ns;
	int64		units;
	int64		place;
	int64		life;
	uint8		key;
	uint8		calendar;
	uint8		zone_len;
} Kept;

#define MAX_CHARGES			(RL_MAX_KEYS * RL_MAX_LIMITS)

/* The record keeps the members of its first "nkeys" keys, and its first "n" charges, each as a Kept. */
typedef struct Record
{
	uint8		keys[RL_DIGEST];	/* as in RlReserve */
	uint8		action[RL_DIGEST];
	int64		hold;
	int64		settled;		/* the quota of the last key that it is settled at, or RL_UNKNOWN */
	RlTimes		at;				/* of the charges */
	int32		nkeys;
	int32		n;
	struct
	{
		int64		quota;		/* 0: nothing was charged */
		uint64		limits;		/* hash of their text */
	}			of[RL_MAX_KEYS];
	Reserved	charges[MAX_CHARGES];
} Record;

StaticAssertDecl(RL_MAX_ID + offsetof(Record, charges) + MAX_CHARGES * (sizeof(Kept) + RL_MAX_ZONE) ==
				 RL_MAX_RECORD,
				 "RL_MAX_RECORD must be changed");

/* Records that an act on a full key deletes, at most: that have ended, or otherwise that are settled */
#define SWEPT				64
#define FORGOTTEN			16

static RlStateTag
record_tag(const RlKey *id)
{
	return (RlStateTag) {.algorithm = RL_RECORD_CELL,.step = rl_key_hash(id).low};
}

/* Returns the most bytes that a record for these actions may have. */
static int
most_of_record(const RlAction *const *actions, int n)
{
	int			size = offsetof(Record, of) + n * sizeof(((Record *) NULL)->of[0]);

	for (int i = 0; i < n; i++)
		for (int l = 0; l < actions[i]->limits->n; l++)
			size += sizeof(Kept) + strlen(actions[i]->limits->limit[l].zone);
	return size;
}

/* Copies the record in a cell. */
static void
load_record(const RlCells *view, uint32 c, Record *record)
{
	const RlCell *cell = rl_cell_at(view, c);
	char		text[RL_MAX_RECORD];
	const char *at = text + cell->ban.key_len;

	rl_cell_ban_text(view, cell, text);
	memcpy(record, at, offsetof(Record, of));
	at += offsetof(Record, of);
	memcpy(record->of, at, record->nkeys * sizeof(record->of[0]));
	at += record->nkeys * sizeof(record->of[0]);
	for (int i = 0; i < record->n; i++)
	{
		Kept		kept;

		memcpy(&kept, at, sizeof(kept));
		at += sizeof(kept);
		record->charges[i] = (Reserved) {
			.key = kept.key,
			.limit = {.algorithm = kept.tag.algorithm,.from_first = kept.tag.from_first,
				.shadow = kept.tag.shadow,.capacity = kept.capacity,.count = kept.count,
				.period = kept.tag.period,.interval_ns = kept.interval_ns,.step = kept.tag.step,
				.calendar = kept.calendar},
			.units = kept.units,.place = kept.place,.life = kept.life
		};
		memcpy(record->charges[i].limit.zone, at, kept.zone_len);
		at += kept.zone_len;
	}
}

/* Stores a record in place of cell c, or for RL_NO_CELL in new cells.  There must be spares for it. */
static void
save_record(RlCells *view, uint32 c, const RlKey *id, const Record *record, int64 until)
{
	char		text[RL_MAX_RECORD];
	char	   *at = text + id->len;
	RlCell	   *cell;

	if (c != RL_NO_CELL)
		rl_cell_remove(view, c);
	memcpy(text, id->data, id->len);
	memcpy(at, record, offsetof(Record, of));
	at += offsetof(Record, of);
	memcpy(at, record->of, record->nkeys * sizeof(record->of[0]));
	at += record->nkeys * sizeof(record->of[0]);
	for (int i = 0; i < record->n; i++)
	{
		const Reserved *charge = &record->charges[i];
		const RlLimit *limit = &charge->limit;
		Kept		kept;

		/* The padding too, because the text is copied. */
		memset(&kept, 0, sizeof(kept));
		kept.tag = rl_state_tag(limit);
		kept.capacity = limit->capacity;
		kept.count = limit->count;
		kept.interval_ns = limit->interval_ns;
		kept.units = charge->units;
		kept.place = charge->place;
		kept.life = charge->life;
		kept.key = charge->key;
		kept.calendar = limit->calendar;
		kept.zone_len = strlen(limit->zone);
		memcpy(at, &kept, sizeof(kept));
		at += sizeof(kept);
		memcpy(at, limit->zone, kept.zone_len);
		at += kept.zone_len;
	}
	c = rl_cell_make_text(view, record_tag(id), text, at - text);
	cell = rl_cell_at(view, c);
	cell->ban.until = until;
	cell->ban.began = rl_keeps ? rl_text_sum(text, at - text) : 0;
	cell->ban.key_len = id->len;
	cell->ban.settled = record->settled != RL_UNKNOWN;
	cell->ban.why_len = at - text - id->len;
	rl_cell_set_end(view, c, until);
}

static bool
is_record(const RlCells *view, uint32 c)
{
	return rl_same_key_hash(rl_cell_at(view, c)->key_hash, view->key_hash) &&
		rl_cell_at(view, c)->tag.algorithm == RL_RECORD_CELL;
}

/*
 * Returns true if the key has room for one more record.  If it is full, deletes some records that have
 * ended, or if there are none, those settled ones that end first.
 */
static bool
has_room_for_record(RlCells *view)
{
	int64		ends[FORGOTTEN];	/* of the settled records that end first, in order */
	int			settled = 0;
	int			ended = 0;
	int			n = 0;
	int			left;
	int64		last;

	for (uint32 c = *view->bucket; c != RL_NO_CELL; c = rl_cell_at(view, c)->next)
		n += is_record(view, c);
	if (n < RL_MAX_RESERVATIONS)
		return true;
	for (uint32 c = *view->bucket; c != RL_NO_CELL; c = rl_cell_at(view, c)->next)
	{
		int64		until = rl_cell_at(view, c)->ban.until;
		int			i = settled;

		if (!is_record(view, c))
			continue;
		if (until <= view->now)
			ended++;
		else if (rl_cell_at(view, c)->ban.settled && (i < FORGOTTEN || until < ends[--i]))
		{
			for (; i > 0 && ends[i - 1] > until; i--)
				ends[i] = ends[i - 1];
			ends[i] = until;
			settled += settled < FORGOTTEN;
		}
	}
	left = ended > 0 ? Min(ended, SWEPT) : settled;
	last = ended > 0 ? view->now : settled > 0 ? ends[settled - 1] : 0;
	n -= left;
	for (uint32 *link = view->bucket; left > 0;)
	{
		const RlCell *cell = rl_cell_at(view, *link);

		if (!is_record(view, *link) || cell->ban.until > last || (ended == 0 && !cell->ban.settled))
		{
			link = &rl_cell_at(view, *link)->next;
			continue;
		}
		rl_cell_remove_at(view, link);
		left--;
	}
	return n < RL_MAX_RESERVATIONS;
}

/*
 * Answers with the present figures if the selected key, the last one, has a record in cell c, or sets
 * the error and *failed if that is of another action.  Returns false if there is none.
 */
static bool
answer_reserved(RlCells *view, const RlAction *const *actions, int n, uint32 c,
				RlDecision (*each)[RL_MAX_LIMITS], bool *failed, RlError *error)
{
	Record		record;

	*failed = false;
	if (c == RL_NO_CELL || rl_cell_at(view, c)->ban.until <= view->now)
		return false;
	load_record(view, c, &record);
	if (memcmp(record.action, actions[0]->reserve->action, RL_DIGEST) != 0)
	{
		*failed = true;
		return !rl_reserved_otherwise(record.nkeys, error);
	}
	for (int i = 0; i < n; i++)
	{
		const RlLimits *limits = actions[i]->limits;
		RlState		states[RL_MAX_LIMITS];
		RlBan		ban = {0};

		rl_cells_select(view, i);
		for (int l = 0; l < limits->n; l++)
		{
			uint32		state = rl_cell_find(view, &limits->limit[l]);

			states[l] = state != RL_NO_CELL ? rl_cell_at(view, state)->state : (RlState) RL_NO_STATE;
		}
		if (limits->n > 0)
			(void) rl_act(limits, states, &view->pool, &ban, rl_cells_times(view), 0, RL_PEEK, each[i]);
		for (int l = 0; l < limits->n; l++)
			rl_set_reserved(&each[i][l], record.settled != RL_UNKNOWN);
	}
	return true;
}

/* Adds what was charged to key i to a record. */
static void
add_to_record(Record *record, int i, const RlAction *action, RlTimes at, const RlView *views,
			  const RlDecision *decisions)
{
	const RlLimits *limits = action->limits;
	RlCharge	charges[RL_MAX_LIMITS];

	record->of[i].quota = limits->n > 0 ? action->quota : 0;
	record->of[i].limits = limits->hash;
	if (record->of[i].quota == 0)
		return;
	rl_charges_set(action, at, decisions, charges);
	for (int l = 0; l < limits->n; l++)
		if (decisions[l].fits)
			record->charges[record->n++] = (Reserved) {
				i, limits->limit[l], rl_quota_of(&limits->limit[l], true, action->quota),
				rl_algorithm(&limits->limit[l])->has_logs ? views[l].place : charges[l].place, charges[l].life
			};
}

/* Returns the state of a limit that was charged, or an empty one, and its cell. */
static RlState
charged_state(const RlCells *view, const Reserved *charge, uint32 *c)
{
	*c = rl_cell_find(view, &charge->limit);
	return *c != RL_NO_CELL ? rl_cell_at(view, *c)->state : (RlState) RL_NO_STATE;
}

/*
 * Refunds some of the units of a charge, less those that have been replenished since.  Returns true if
 * the state has changed.
 */
static bool
refund_units(RlCells *view, const Record *record, const Reserved *charge, RlState *state, int64 units)
{
	const RlLimit *limit = &charge->limit;
	RlCharge	part = rl_charge_of(limit, units, rl_time_of(limit, record->at), charge->place, 0);

	part.own = true;
	return rl_refund_charge(limit, state, &view->pool, time_of(view, limit), &part);
}

/* Refunds or charges the difference of a charge to what its key, which is selected, is settled at. */
static void
settle_charge(RlCells *view, const Record *record, const Reserved *charge, int64 quota)
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
	else if (!refund_units(view, record, charge, &state, rest))
		return;
	(void) save_state(view, c, limit, &state);
}

/* Returns true if the unit of a concurrent limit is still held. */
static bool
is_held(const RlCells *view, const Reserved *charge, const RlState *state)
{
	return charge->place + charge->limit.period > view->now &&
		rl_log_has_own(&view->pool, &state->log[RL_CHARGED], charge->place);
}

/*
 * Starts the period of the units that are held again.  Returns false, with nothing changed, if one is
 * lost.
 */
static bool
extend_charges(RlCells *view, Record *record)
{
	/* No unit is lost while the partitions are locked, so two rounds suffice. */
	for (int round = 0; round < 2; round++)
		for (int i = 0; i < record->n; i++)
		{
			Reserved   *charge = &record->charges[i];
			const RlLimit *limit = &charge->limit;
			uint32		c;
			RlState		state;

			if (!rl_algorithm(limit)->until_end)
				continue;
			rl_cells_select(view, charge->key);
			state = charged_state(view, charge, &c);
			if (round == 0 && !is_held(view, charge, &state))
				return false;
			if (round == 0)
				continue;
			(void) refund_units(view, record, charge, &state, 1);
			charge->place = rl_hold_unit(limit, &state, &view->pool, view->now, record->hold);
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

		if (limit->calendar != RL_NO_CALENDAR &&
			!rl_calendar_set_zone(limit, limit->zone, strlen(limit->zone)))
			return rl_error_set(error, ERRCODE_INVALID_TEXT_REPRESENTATION,
								"time zone \"%s\" is not known", limit->zone);
	}
	return true;
}

/*
 * Adds the cells and chunks that key i needs for a settlement, or an extension.  The record needs no
 * more than it has.
 */
static void
find_room(const RlCells *view, const Record *record, int i, const int64 *quotas, uint32 *cells,
		  uint32 *chunks)
{
	for (int l = 0; l < record->n; l++)
	{
		const Reserved *charge = &record->charges[l];
		uint32		c;
		RlState		state;

		if (charge->key != i)
			continue;
		state = charged_state(view, charge, &c);
		*cells += c == RL_NO_CELL && quotas != NULL && quotas[i] > charge->units;
		if (rl_algorithm(&charge->limit)->skip != NULL)
			*chunks += rl_log_chunks_wanted(&view->pool, &state.log[RL_CHARGED]);
	}
}

/* Settles or extends an open record in cell c of the last key, for whose states there are spares. */
static void
settle_record(RlCells *view, uint32 c, const RlReserve *of, Record *record, const int64 *quotas,
			  RlSettled *settled)
{
	int			last = of->nkeys - 1;
	int64		until;

	if (quotas != NULL)
	{
		for (int i = 0; i < record->n; i++)
		{
			rl_cells_select(view, record->charges[i].key);
			settle_charge(view, record, &record->charges[i], quotas[record->charges[i].key]);
		}
		for (int i = 0; i < last; i++)
		{
			rl_cells_select(view, i);
			remove_empty(view);
		}
		for (int i = 0; i < of->nkeys; i++)
		{
			settled->quotas[i] = record->of[i].quota;
			settled->limits[i] = record->of[i].limits;
		}
		record->settled = quotas[last];
		record->n = 0;
		until = view->now + Min(record->hold, RL_KEEP_SETTLED);
	}
	else
	{
		for (int i = 0; i < record->n; i++)
			if (rl_algorithm(&record->charges[i].limit)->until_end &&
				of->hold > record->charges[i].limit.period)
			{
				settled->how = RL_SETTLED_LONG_HOLD;
				return;
			}
		record->hold = of->hold > 0 ? of->hold : record->hold;
		if (!extend_charges(view, record))
			return;
		until = view->now + record->hold;
	}
	settled->how = RL_SETTLED_DONE;
	rl_cells_select(view, last);
	save_record(view, c, &of->id, record, until);
}

/*
 * Locks the keys of a reservation and finds its record.  Returns its cell, or RL_NO_CELL if there is none
 * in force; deletes one that has ended.  The last key is selected.
 */
static uint32
lock_record(RlCells *view, const RlReserve *of)
{
	uint32		c;

	rl_cells_lock_all(view);
	rl_cells_select(view, view->nkeys - 1);
	c = rl_cell_find_tag(view, record_tag(&of->id));
	if (c == RL_NO_CELL || rl_cell_at(view, c)->ban.until > view->now)
		return c;
	rl_cell_remove(view, c);
	remove_empty(view);
	return RL_NO_CELL;
}

static bool
local_settle(const RlKey *keys, const RlReserve *of, const int64 *quotas, RlSettled *settled, RlError *error)
{
	RlKeyHash	hashes[RL_MAX_KEYS];
	RlCells		view = {.keys = hashes,.nkeys = of->nkeys};
	uint8		loaded[RL_DIGEST] = {0};	/* the action whose zones are loaded */
	bool		done = true;

	*settled = (RlSettled) {.how = RL_SETTLED_NONE};
	for (int i = 0; i < of->nkeys; i++)
		hashes[i] = rl_key_hash(&keys[i]);
	for (;;)
	{
		uint32		c = lock_record(&view, of);
		uint32		cells[RL_MAX_KEYS];
		uint32		chunks[RL_MAX_KEYS];
		bool		reserved = true;
		Record		record;

		if (c == RL_NO_CELL)
			break;
		load_record(&view, c, &record);
		if (record.nkeys != of->nkeys || memcmp(record.keys, of->keys, RL_DIGEST) != 0)
		{
			done = rl_reserved_otherwise(record.nkeys, error);
			break;
		}
		if (record.settled != RL_UNKNOWN)
		{
			settled->how = quotas != NULL ? RL_SETTLED_DONE : RL_SETTLED_NONE;
			break;
		}
		if (has_calendar(&record) && memcmp(loaded, record.action, RL_DIGEST) != 0)
		{
			finish(&view);
			if (!load_zones(&record, error))
				return false;
			memcpy(loaded, record.action, RL_DIGEST);
			continue;
		}
		for (int i = 0; i < of->nkeys; i++)
		{
			cells[i] = i > 0 ? cells[i - 1] : 0;
			chunks[i] = i > 0 ? chunks[i - 1] : 0;
			rl_cells_select(&view, i);
			find_room(&view, &record, i, quotas, &cells[i], &chunks[i]);
			reserved &= rl_cells_set_aside(&view, cells[i], chunks[i]);
		}
		if (reserved)
		{
			settle_record(&view, c, of, &record, quotas, settled);
			break;
		}
		if (!make_room_for_all(&view, cells, chunks, error))
			return false;
	}
	finish(&view);
	return done;
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
		len = snprintf(status, RL_MAX_RAW, "open");
	else
		len = snprintf(status, RL_MAX_RAW, "settled:%lld", (long long) record.settled);
	if (record.nkeys > 1)
		snprintf(status + len, RL_MAX_RAW - len, " keys:%d", record.nkeys);
	return record.of[record.nkeys - 1].quota;
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
	KeyStates	key;
	uint32		changed;
	RlCells		view = {.key_hash = rl_key_hash(&action->key)};

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

/*
 * Locks the partitions of several keys, and does the same for each.  With a reservation also finds its
 * record, and room for it; but if *record is in force, finds nothing else.
 */
static bool
begin_all(RlCells *view, const RlAction *const *actions, int n, KeyStates *keys, uint32 *record,
		  RlError *error)
{
	const RlReserve *reserve = actions[0]->reserve;

	for (;;)
	{
		uint32		cells[RL_MAX_KEYS];
		uint32		chunks[RL_MAX_KEYS];
		bool		reserved = true;

		*record = RL_NO_CELL;
		rl_cells_lock_all(view);
		if (reserve != NULL)
		{
			rl_cells_select(view, n - 1);
			*record = rl_cell_find_tag(view, record_tag(&reserve->id));
			if (*record != RL_NO_CELL && rl_cell_at(view, *record)->ban.until > view->now)
				return true;
		}
		for (int i = 0; i < n; i++)
		{
			cells[i] = i > 0 ? cells[i - 1] : 0;
			chunks[i] = i > 0 ? chunks[i - 1] : 0;
			rl_cells_select(view, i);
			find_cells(view, actions[i], &keys[i], &cells[i], &chunks[i]);
			if (reserve != NULL && i == n - 1)
				cells[i] += rl_ban_cells(reserve->id.len, most_of_record(actions, n));
			/* The keys share the spares, so a key's numbers include those of the keys before it. */
			reserved &= rl_cells_set_aside(view, cells[i], chunks[i]);
		}
		if (reserved)
			return true;
		if (!make_room_for_all(view, cells, chunks, error))
			return false;
	}
}

static bool
local_take_all(const RlAction *const *actions, int n, RlTook took, void *arg, bool *apart,
			   RlUsage *usage pg_attribute_unused(), RlError *error)
{
	const RlReserve *reserve = actions[0]->reserve;
	RlKeyHash	hashes[RL_MAX_KEYS];
	KeyStates	keys[RL_MAX_KEYS];
	RlCells		view = {.keys = hashes,.nkeys = n};
	RlDecision	each[RL_MAX_KEYS][RL_MAX_LIMITS];
	RlTimes		times;
	uint32		c;
	Record		record;
	bool		allowed = true;
	bool		failed;

	*apart = false;
	for (int i = 0; i < n; i++)
		hashes[i] = rl_key_hash(&actions[i]->key);
	if (!begin_all(&view, actions, n, keys, &c, error))
		return false;
	if (answer_reserved(&view, actions, n, c, each, &failed, error))
	{
		times = rl_cells_times(&view);
		finish(&view);
		for (int i = 0; i < n && !failed; i++)
			took(i, each[i], times, true, arg);
		return !failed;
	}
	for (int i = 0; i < n; i++)
	{
		KeyStates  *key = &keys[i];

		key->act = (RlAct) {
			.times = rl_cells_times(&view),.quota = actions[i]->quota,.verdict = RL_VERDICT_ALLOWED,
			.how = RL_TAKE,.hold = reserve != NULL ? reserve->hold : 0
		};
		load_ban(&view, key);
		if (actions[i]->limits->n > 0)
			key->act.verdict = rl_act_decide(actions[i]->limits, key->states, &view.pool, key->ban.until,
											 &key->act, key->views, each[i]);
		allowed &= key->act.verdict == RL_VERDICT_ALLOWED;
	}
	if (reserve != NULL && allowed && c == RL_NO_CELL)
	{
		rl_cells_select(&view, n - 1);
		if (!has_room_for_record(&view))
		{
			finish(&view);
			return rl_too_many_reservations(error);
		}
	}
	if (reserve != NULL)
	{
		record = (Record) {
			.hold = reserve->hold,.settled = RL_UNKNOWN,.at = rl_cells_times(&view),.nkeys = n
		};
		memcpy(record.keys, reserve->keys, RL_DIGEST);
		memcpy(record.action, reserve->action, RL_DIGEST);
	}
	for (int i = 0; i < n; i++)
	{
		KeyStates  *key = &keys[i];
		uint32		changed;

		if (!allowed && key->act.verdict == RL_VERDICT_ALLOWED)
			key->act.verdict = RL_VERDICT_REFUSED;
		rl_cells_select(&view, i);
		changed = rl_act_complete(actions[i]->limits, key->states, &view.pool, &key->ban, &key->act,
								  key->views, each[i]);
		save_key(&view, actions[i], key, changed, each[i]);
		if (reserve != NULL && allowed)
			add_to_record(&record, i, actions[i], key->act.times, key->views, each[i]);
	}
	if (reserve != NULL && allowed)
		save_record(&view, c, &reserve->id, &record, view.now + reserve->hold);
	times = rl_cells_times(&view);
	finish(&view);
	for (int i = 0; i < n; i++)
		took(i, each[i], times, allowed, arg);
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
		if (!rl_same_key_hash(rl_cell_at(&view, c)->key_hash, view.key_hash))
			continue;
		*found |= delete_cell(&view, c);
		/* A key can have more cells than an act can keep, so each is an act. */
		rl_cells_end_act(&view);
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
		if (rl_cells_set_aside(&view, cells, 0))
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
