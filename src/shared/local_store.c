/*
 * local_store.c
 *		The store in shared memory, with the same algorithms as in Redis.
 *
 * Each function locks the partition of the key (cells.c), or those of all keys.
 */
#include "postgres.h"

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
	RlBan		ban;
	RlVerdict	verdict;
} Key;

/* Stores a state, in cell c or for RL_NO_CELL in a new one. */
static void
save_state(RlCells *view, uint32 c, const RlLimit *limit, const RlState *state)
{
	if (c == RL_NO_CELL)
		c = rl_cell_make(view, limit);
	rl_cell_at(view, c)->state = *state;
	/* As in Redis, an empty state is deleted. */
	if (rl_state_is_empty(limit, state) && state->ban_count == 0)
		rl_cell_remove(view, c);
	else
		rl_cell_set_end(view, c, rl_state_end(limit, state, &view->pool));
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
	int			len = key->len + why_len;
	RlCell	   *cell;

	if (c != RL_NO_CELL)
		rl_cell_remove(view, c);
	memcpy(text, key->data, key->len);
	memcpy(text + key->len, why, why_len);
	c = rl_cell_make(view, NULL);
	cell = rl_cell_at(view, c);
	cell->ban.until = until;
	cell->ban.began = view->now;
	cell->ban.key_len = key->len;
	cell->ban.why_len = why_len;
	for (int at = 0;;)
	{
		int			n = Min(len - at, RL_CELL_TEXT);

		memcpy(cell->ban.text, text + at, n);
		at += n;
		if (at == len)
			break;
		cell->ban.rest = rl_cell_take(view);
		cell = rl_cell_at(view, cell->ban.rest);
	}
	rl_cell_set_end(view, c, until);
}

/* Sets the ban to that in cell c, or for RL_NO_CELL to none. */
static void
load_ban(const RlCells *view, uint32 c, RlBan *ban)
{
	char		text[RL_MAX_KEY + RL_MAX_WHY];
	const RlCell *cell;

	*ban = (RlBan) {0};
	if (c == RL_NO_CELL)
		return;
	cell = rl_cell_at(view, c);
	ban->until = cell->ban.until;
	if (ban->until <= view->now)
		return;
	rl_cell_ban_text(view, cell, text);
	ban->rule = rl_ban_rule(text + cell->ban.key_len, cell->ban.why_len);
}

static void
save_key(RlCells *view, const RlKey *name, const RlLimits *limits, const Key *key, uint32 changed)
{
	char		why[RL_MAX_WHY];

	for (int i = 0; i < limits->n; i++)
		if (changed & 1 << i)
			save_state(view, key->found[i], &limits->limit[i], &key->states[i]);
	if (key->ban.by != NULL)
		set_ban(view, key->ban_cell, name, key->ban.until, why, rl_limit_why(key->ban.by, why));
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
	rl_error_detail(error, "ratelimit.local_max_keys sets its size.");
	return false;
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
 * Takes the fast path for one limit without the options ban and shadow, of an algorithm that
 * has act_alone.  Returns false, with nothing done, if the key has a ban or counted refusals, or
 * there is no room.
 */
static bool
take_alone(RlCells *view, const RlLimit *limit, int64 quota, RlDecision *decision)
{
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
	end = rl_algorithm(limit)->act_alone(limit, &start, view->now, quota, decision);
	if (!decision->allowed || quota == 0)
		return true;
	if (c == RL_NO_CELL)
		c = rl_cell_make(view, limit);
	rl_cell_at(view, c)->state.start = start;
	rl_cell_set_end(view, c, end);
	return true;
}

/* Finds cells and states of an act on the view's key, and adds the cells and chunks that it may need. */
static void
find_cells(const RlCells *view, const RlAction *action, const RlLimits *limits, Key *key, uint32 *cells,
		   uint32 *chunks)
{
	uint32		ban = key->ban_cell = rl_cell_find(view, NULL);
	bool		may_change = action->how != RL_PEEK && action->quota > 0 &&
		(ban == RL_NO_CELL || rl_cell_at(view, ban)->ban.until <= view->now || rl_all_shadow(limits));
	int			why_len = 0;

	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];

		uint32		found = key->found[i] = rl_cell_find(view, limit);
		RlState    *state = &key->states[i];

		*state = found != RL_NO_CELL ? rl_cell_at(view, found)->state : (RlState) RL_NO_STATE;
		if (!may_change)
			continue;
		*cells += found == RL_NO_CELL;
		*chunks += rl_chunks_wanted(limit, state, &view->pool, view->now, action->quota);
		if (limit->ban > 0 && state->ban_count + 1 >= limit->ban_after)
		{
			char		why[RL_MAX_WHY];

			why_len = Max(why_len, rl_limit_why(limit, why));
		}
	}
	if (why_len > 0)
		*cells += spares_for_ban(view, ban, &action->key, why_len);
}

/* Does the same, and reserves them.  Returns false with the error set, and unlocked, if there is no room. */
static bool
begin_act(RlCells *view, const RlAction *action, const RlLimits *limits, Key *key, RlError *error)
{
	for (;;)
	{
		uint32		cells = 0;
		uint32		chunks = 0;

		find_cells(view, action, limits, key, &cells, &chunks);
		if (rl_cells_reserve(view, cells, chunks))
			return true;
		if (!make_room(view, cells, chunks, error))
			return false;
	}
}

static bool
local_take(const RlAction *action, RlDecision *decisions, RlAnswer *answer, RlError *error)
{
	const RlLimits *limits = action->limits;
	int64		quota = action->quota;
	RlTake		how = action->how;
	RlLimits	uncounted;
	Key			key;
	uint32		changed;
	RlCells		view = {.key_hash = rl_key_hash(&action->key)};

	if (how == RL_TRY)
	{
		rl_limits_copy(&uncounted, limits);
		for (int i = 0; i < uncounted.n; i++)
		{
			uncounted.limit[i].count_denied = false;
			uncounted.limit[i].ban = 0;
		}
		limits = &uncounted;
	}

	rl_cells_lock(&view, how == RL_PEEK ? LW_SHARED : LW_EXCLUSIVE);
	if (how != RL_PEEK && limits->n == 1 && limits->limit[0].ban == 0 && !limits->limit[0].shadow &&
		rl_algorithm(&limits->limit[0])->act_alone != NULL &&
		take_alone(&view, &limits->limit[0], quota, decisions))
	{
		answer->at = view.now;
		finish(&view);
		return true;
	}
	if (!begin_act(&view, action, limits, &key, error))
		return false;
	answer->at = view.now;
	load_ban(&view, key.ban_cell, &key.ban);
	changed = rl_act(limits, key.states, &view.pool, &key.ban, view.now, quota, how != RL_PEEK, decisions);
	save_key(&view, &action->key, limits, &key, changed);
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
			find_cells(view, actions[i], actions[i]->limits, &keys[i], &cells[i], &chunks[i]);
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

		load_ban(&view, key->ban_cell, &key->ban);
		key->verdict = rl_act_decide(actions[i]->limits, key->states, &view.pool, key->ban.until,
									 view.now, actions[i]->quota, key->views, taken[i].each);
		allowed &= key->verdict == RL_VERDICT_ALLOWED;
	}
	for (int i = 0; i < n; i++)
	{
		Key		   *key = &keys[i];
		RlAct		act = {view.now, actions[i]->quota, key->verdict, true};
		uint32		changed;

		if (!allowed && act.verdict == RL_VERDICT_ALLOWED)
			act.verdict = RL_VERDICT_REFUSED;
		rl_cells_select(&view, i);
		changed = rl_act_complete(actions[i]->limits, key->states, &view.pool, &key->ban, &act,
								  key->views, taken[i].each);
		save_key(&view, &actions[i]->key, actions[i]->limits, key, changed);
		taken[i].at = view.now;
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

	if (c == RL_NO_CELL)
		return;
	state = rl_cell_at(view, c)->state;
	if (charge != NULL ? rl_refund_charge(limit, &state, &view->pool, view->now, charge) :
		rl_refund_quota(limit, &state, &view->pool, view->now, quota))
		save_state(view, c, limit, &state);
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

/* Returns false if there is none or it has ended, but under debug_now no cell ends: Redis keeps keys then. */
static bool
delete_cell(RlCells *view, uint32 c)
{
	bool		found = c != RL_NO_CELL &&
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

	rl_cells_lock(&view, LW_EXCLUSIVE);
	*found = delete_cell(&view, rl_cell_find(&view, NULL));
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
	.unban = local_unban
};
