/*
 * local_store.c
 *		The store in this server's shared memory: states by the same algorithms
 *		as in Redis.
 */
#include "postgres.h"

#include "cells.h"
#include "charges.h"

static void
lock_key(RlCells *view, const RlKey *key, LWLockMode mode)
{
	rl_cells_lock(view, rl_name(key), mode);
}

/*
 * States
 */

/* What a cell keeps, as a state; of no cell, that of a limit never used. */
static void
load_state(const RlCells *view, uint32 c, RlState *state)
{
	const RlCell *cell;

	memset(state, 0, sizeof(*state));
	state->start = -1;
	if (c == RL_NO_CELL)
		return;
	cell = rl_cell_at(view, c);
	state->start = cell->start;
	state->used = cell->used;
	state->refused_since = cell->refused_since;
	state->refused = cell->refused;
	if (DsaPointerIsValid(cell->entries))
	{
		state->entries = dsa_get_address(rl_ring_area(), cell->entries);
		state->size = cell->size;
		state->first = cell->first;
		state->n = cell->n;
	}
}

/* True if a state that was changed is one that Redis would have no field for. */
static bool
is_empty(const RlLimit *limit, const RlCell *cell)
{
	if (cell->refused > 0)
		return false;
	return (limit->algorithm == RL_THROTTLE && cell->start < 0) ||
		(limit->algorithm == RL_SLIDING_WINDOW && cell->used == 0);
}

/*
 * Keeps what an act has changed of the state in cell c, if it has one, and the
 * ring if that is a new one.
 */
static void
save_state(RlCells *view, uint32 c, const RlLimit *limit, const RlState *state, dsa_pointer ring)
{
	RlCell	   *cell = c == RL_NO_CELL ? NULL : rl_cell_at(view, c);
	RlState		kept;

	if (!state->changed)
	{
		if (DsaPointerIsValid(ring))
			dsa_free(rl_ring_area(), ring);
		if (state->refused == (cell ? cell->refused : 0) &&
			state->refused_since == (cell ? cell->refused_since : 0))
			return;
	}
	if (cell == NULL)
	{
		c = rl_cell_make(view, limit);
		cell = rl_cell_at(view, c);
	}
	cell->refused_since = state->refused_since;
	cell->refused = state->refused;
	if (state->changed)
	{
		cell->start = state->start;
		cell->used = state->used;
		if (DsaPointerIsValid(ring))
		{
			if (DsaPointerIsValid(cell->entries))
				dsa_free(rl_ring_area(), cell->entries);
			cell->entries = ring;
		}
		cell->size = state->size;
		cell->first = state->first;
		cell->n = state->n;
		if (is_empty(limit, cell))
		{
			rl_cell_remove(view, c);
			return;
		}
	}
	else
	{
		load_state(view, c, &kept);
		state = &kept;
	}
	rl_cell_set_end(view, c, rl_state_end(limit, state));
}

static void
set_ban(RlCells *view, uint32 c, int64 until)
{
	if (c == RL_NO_CELL)
		c = rl_cell_make(view, NULL);
	rl_cell_at(view, c)->start = until;
	rl_cell_set_end(view, c, until);
}

/* The key's cells of the limits, and their states. */
static void
load_states(const RlCells *view, const RlLimits *limits, uint32 *found, RlState *states)
{
	for (int i = 0; i < limits->n; i++)
	{
		found[i] = rl_cell_find(view, &limits->limit[i]);
		load_state(view, found[i], &states[i]);
	}
}

/*
 * Makes room for whatever an act may write: for cells, one of a ban among
 * them, and for entries.  Returns false with the error set.
 */
static bool
prepare(RlCells *view, const RlLimits *limits, int64 quota, const uint32 *found, uint32 ban,
		RlState *states, dsa_pointer *rings, RlError *error)
{
	uint32		stay[RL_MAX_WANTED];
	int			n = 0;
	int			missing = 0;

	for (int i = 0; i < limits->n; i++)
	{
		if (found[i] != RL_NO_CELL)
			stay[n++] = found[i];
		else
			missing++;
	}
	for (int i = 0; i < limits->n && ban == RL_NO_CELL; i++)
		if (limits->limit[i].ban > 0)
		{
			missing++;
			break;
		}
	if (ban != RL_NO_CELL)
		stay[n++] = ban;
	rl_cells_reserve(view, missing, stay, n);

	for (int i = 0; i < limits->n; i++)
	{
		if (rl_entries_wanted(&limits->limit[i], &states[i], view->now, quota) <= states[i].size)
			continue;
		rings[i] = rl_ring_make(view, &states[i]);
		if (DsaPointerIsValid(rings[i]))
			continue;
		while (i-- > 0)
			if (DsaPointerIsValid(rings[i]))
				dsa_free(rl_ring_area(), rings[i]);
		rl_error_set(error, ERRCODE_OUT_OF_MEMORY, "out of shared memory for rate limits");
		rl_error_detail(error, "ratelimit.local_max_keys says how much there is.");
		return false;
	}
	return true;
}

/*
 * The store
 */

/*
 * The fast way of the commonest case, one throttle without a ban of its own.
 * Returns false, with nothing done, if it is not that simple.
 */
static bool
take_throttle(RlCells *view, const RlLimit *limit, int64 quota, RlDecision *decision)
{
	uint32		c = RL_NO_CELL;
	int64		now = view->now * 1000;
	int64		backlog = 0;

	for (uint32 i = *view->bucket; i != RL_NO_CELL; i = rl_cell_at(view, i)->next)
	{
		if (!rl_same_name(rl_cell_at(view, i)->name, view->name))
			continue;
		if (rl_cell_is_of(rl_cell_at(view, i), limit))
			c = i;
		else if (rl_cell_is_of(rl_cell_at(view, i), NULL))
			return false;
	}
	if (c != RL_NO_CELL && rl_cell_at(view, c)->refused > 0)
		return false;
	if (c != RL_NO_CELL)
		backlog = Max(rl_cell_at(view, c)->start - now, 0);
	else if (rl_cells_free(view) == 0)
		return false;
	backlog = rl_throttle_act(limit, backlog, quota, decision);
	if (!decision->allowed || quota == 0)
		return true;
	if (c == RL_NO_CELL)
		c = rl_cell_make(view, limit);
	rl_cell_at(view, c)->start = now + backlog;
	rl_cell_set_end(view, c, view->now + backlog / 1000 + 1);
	return true;
}

static bool
local_take(const RlKey *key, const RlLimits *limits, int64 quota, RlTake how,
		   RlDecision *decisions, int64 *at, RlError *error)
{
	RlLimits	quiet;
	RlState		states[RL_MAX_LIMITS];
	uint32		found[RL_MAX_LIMITS];
	dsa_pointer rings[RL_MAX_LIMITS];
	uint32		ban;
	int64		old_ban;
	int64		banned_until;
	RlCells		view;

	if (how == RL_TAKE_QUIETLY)
	{
		quiet = *limits;
		for (int i = 0; i < quiet.n; i++)
		{
			quiet.limit[i].count_denied = false;
			quiet.limit[i].ban = 0;
		}
		limits = &quiet;
	}

	lock_key(&view, key, how == RL_PEEK ? LW_SHARED : LW_EXCLUSIVE);
	*at = view.now;
	if (how != RL_PEEK && limits->n == 1 && limits->limit[0].algorithm == RL_THROTTLE &&
		limits->limit[0].ban == 0 && take_throttle(&view, &limits->limit[0], quota, decisions))
	{
		rl_cells_unlock(&view);
		return true;
	}
	load_states(&view, limits, found, states);
	for (int i = 0; i < limits->n; i++)
		rings[i] = InvalidDsaPointer;
	ban = rl_cell_find(&view, NULL);
	banned_until = old_ban = ban == RL_NO_CELL ? 0 : rl_cell_at(&view, ban)->start;
	if (how != RL_PEEK && quota > 0 && banned_until <= view.now &&
		!prepare(&view, limits, quota, found, ban, states, rings, error))
	{
		rl_cells_unlock(&view);
		return false;
	}
	rl_act(limits, states, &banned_until, view.now, quota, how != RL_PEEK, decisions);
	for (int i = 0; how != RL_PEEK && i < limits->n; i++)
		save_state(&view, found[i], &limits->limit[i], &states[i], rings[i]);
	if (banned_until != old_ban)
		set_ban(&view, ban, banned_until);
	rl_cells_unlock(&view);
	return true;
}

static bool
local_refund(const RlKey *key, const RlLimits *limits, int64 quota, RlError *error pg_attribute_unused())
{
	RlState		states[RL_MAX_LIMITS];
	uint32		found[RL_MAX_LIMITS];
	RlCells		view;

	lock_key(&view, key, LW_EXCLUSIVE);
	load_states(&view, limits, found, states);
	rl_give_back(limits, states, view.now, quota);
	for (int i = 0; i < limits->n; i++)
		save_state(&view, found[i], &limits->limit[i], &states[i], InvalidDsaPointer);
	rl_cells_unlock(&view);
	return true;
}

/* A cell that has ended counts as gone, but not for a test's clock. */
static bool
is_there(const RlCells *view, uint32 c)
{
	return rl_debug_now[0] != '\0' || rl_cell_at(view, c)->end > view->now;
}

/* Forgets the key's cell of the limit, or its ban; tells whether it was there. */
static bool
forget(RlCells *view, const RlLimit *limit)
{
	uint32		c = rl_cell_find(view, limit);
	bool		found = c != RL_NO_CELL && is_there(view, c);

	if (c != RL_NO_CELL)
		rl_cell_remove(view, c);
	return found;
}

static bool
local_reset(const RlKey *key, const RlLimits *limits, bool *found, RlError *error pg_attribute_unused())
{
	RlCells		view;
	uint32		next;

	*found = false;
	lock_key(&view, key, LW_EXCLUSIVE);
	for (int i = 0; limits && i < limits->n; i++)
		*found |= forget(&view, &limits->limit[i]);
	for (uint32 c = limits ? RL_NO_CELL : *view.bucket; c != RL_NO_CELL; c = next)
	{
		next = rl_cell_at(&view, c)->next;
		if (!rl_same_name(rl_cell_at(&view, c)->name, view.name))
			continue;
		*found |= is_there(&view, c);
		rl_cell_remove(&view, c);
	}
	rl_cells_unlock(&view);
	return true;
}

static bool
local_ban(const RlKey *key, int64 duration, RlError *error pg_attribute_unused())
{
	RlCells		view;
	uint32		ban;

	lock_key(&view, key, LW_EXCLUSIVE);
	ban = rl_cell_find(&view, NULL);
	if (ban == RL_NO_CELL)
		rl_cells_reserve(&view, 1, NULL, 0);
	set_ban(&view, ban, view.now + duration);
	rl_cells_unlock(&view);
	return true;
}

static bool
local_unban(const RlKey *key, bool *found, RlError *error pg_attribute_unused())
{
	RlCells		view;

	lock_key(&view, key, LW_EXCLUSIVE);
	*found = forget(&view, NULL);
	rl_cells_unlock(&view);
	return true;
}

/* Takes a charge back, as far as it has not leaked; does not throw. */
void
rl_local_undo(RlName name, const RlLimit *limit, const RlCharge *charge)
{
	RlState		state;
	uint32		found;
	RlCells		view;

	rl_cells_lock(&view, name, LW_EXCLUSIVE);
	found = rl_cell_find(&view, limit);
	if (found != RL_NO_CELL)
	{
		load_state(&view, found, &state);
		rl_undo(limit, &state, view.now, charge);
		save_state(&view, found, limit, &state, InvalidDsaPointer);
	}
	rl_cells_unlock(&view);
}

const RlStore rl_local_store = {
	.take = local_take,
	.refund = local_refund,
	.reset = local_reset,
	.ban = local_ban,
	.unban = local_unban
};
