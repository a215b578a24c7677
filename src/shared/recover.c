/*
 * recover.c
 *		Inserts what a file of an earlier run has into the local store's memory.
 *
 * It trusts no number in the file.  A state is inserted if all its cells and chunks belong to its key,
 * the lists end, and the sums are right.  Otherwise it is dropped: this happens only after a crash of
 * the system.  What is inserted is a copy, so no two states share a chunk.
 *
 * Units that transactions held are dropped too, because these transactions have ended.
 */
#include "postgres.h"

#include <sys/mman.h>

#include "shared/cells.h"
#include "shared/recover.h"
#include "shared/store_file.h"

/* What was found in the file. */
typedef struct Found
{
	const RlSlots *slots;
	RlPool		pool;			/* of the file */
	RlRecovered *result;
} Found;

/* A cell of the file that is not the rest of another. */
typedef struct Start
{
	int64		end;
	uint32		cell;
} Start;

/* Returns a chunk, or NULL if it cannot be in one of the key's lists. */
static const RlChunk *
find_chunk(const Found *found, RlKeyHash key_hash, uint32 number, uint32 most)
{
	const RlChunk *chunk;

	if (number == RL_NO_CHUNK || number > found->slots->nchunks)
		return NULL;
	chunk = &found->slots->chunks[number - 1];
	return chunk->owner == key_hash.low && chunk->n >= 1 && chunk->n <= most ? chunk : NULL;
}

/*
 * Checks a block, whose entries must not be before *time; sets that to the last entry's, and adds its
 * units.
 */
static bool
check_block(const Found *found, RlKeyHash key_hash, const RlBlock *block, int64 *time, int64 *units)
{
	uint32		last = RL_NO_CHUNK;
	uint32		n = 0;

	for (uint32 c = block->first; c != RL_NO_CHUNK; n++)
	{
		const RlChunk *chunk = find_chunk(found, key_hash, c, RL_CHUNK_ENTRIES);

		if (chunk == NULL || n == RL_BLOCK_CHUNKS)
			return false;
		for (uint32 i = 0; i < chunk->n; i++)
		{
			const RlEntry *entry = &chunk->entry[i];

			if (entry->time < *time || entry->units < 0 || entry->units > 2 * RL_MAX_COUNT)
				return false;
			*time = entry->time;
			*units += entry->units;
		}
		last = c;
		c = chunk->next;
	}
	return n == block->nchunks && last == block->last;
}

/* Checks a log with so many units, and adds its chunks. */
static bool
check_log(const Found *found, RlKeyHash key_hash, const RlLog *log, int64 units, uint32 *chunks)
{
	RlBlock		open = {.first = log->first,.last = log->last,.nchunks = log->nchunks};
	int64		time = PG_INT64_MIN;
	int64		sum = 0;
	uint32		last = RL_NO_CHUNK;

	for (uint32 c = log->index_first; c != RL_NO_CHUNK;)
	{
		const RlChunk *index = find_chunk(found, key_hash, c, RL_CHUNK_BLOCKS);

		/* The list may be a circle. */
		if (index == NULL || *chunks > found->slots->nchunks)
			return false;
		for (uint32 i = 0; i < index->n; i++)
		{
			const RlBlock *block = &index->block[i];
			int64		before = sum;

			if (block->nchunks == 0 || !check_block(found, key_hash, block, &time, &sum) ||
				time != block->newest || sum - before != block->units)
				return false;
			*chunks += block->nchunks;
		}
		(*chunks)++;
		last = c;
		c = index->next;
	}
	if (last != log->index_last || !check_block(found, key_hash, &open, &time, &sum))
		return false;
	*chunks += log->nchunks;
	return sum == units;
}

/* Copies the text of a ban or a record.  Returns its length, or -1 if it is damaged. */
static int
check_text(const Found *found, const RlCell *cell, char *text)
{
	bool		is_ban = cell->tag.algorithm == RL_BAN_CELL;
	const RlCell *part = cell;
	int			len = cell->ban.key_len + cell->ban.why_len;

	if (is_ban ? cell->ban.key_len > RL_MAX_KEY || cell->ban.why_len > RL_MAX_WHY : len > RL_MAX_RECORD)
		return -1;
	for (int at = 0;;)
	{
		int			n = Min(len - at, RL_CELL_TEXT);
		uint32		rest = part->ban.rest;

		memcpy(text + at, part->ban.text, n);
		at += n;
		if (at == len)
		{
			if (rest != RL_NO_CELL)
				return -1;
			break;
		}
		if (rest == RL_NO_CELL || rest > found->slots->ncells)
			return -1;
		part = &found->slots->cells[rest - 1];
		if (!part->used || part->tag.algorithm != RL_REST_CELL ||
			!rl_same_key_hash(part->key_hash, cell->key_hash))
			return -1;
	}
	return is_ban || cell->ban.began == rl_text_sum(text, len) ? len : -1;
}

/* Gets room for a state.  Returns false if there is none. */
static bool
has_room(Found *found, RlCells *view, uint32 cells, uint32 chunks)
{
	if (rl_cells_set_aside(view, cells, chunks))
		return true;
	found->result->no_room++;
	return false;
}

/* Inserts a ban or a record.  Returns false if it is damaged. */
static bool
insert_text(Found *found, RlCells *view, const RlCell *cell, uint32 *c)
{
	char		text[Max(RL_MAX_RECORD, RL_MAX_KEY + RL_MAX_WHY)];
	int			len = check_text(found, cell, text);
	RlCell	   *to;

	if (len < 0)
		return false;
	if (!has_room(found, view, Max(rl_ban_cells(len, 0), 1), 0))
		return true;
	*c = rl_cell_make_text(view, cell->tag, text, len);
	to = rl_cell_at(view, *c);
	to->ban.until = cell->ban.until;
	to->ban.began = cell->ban.began;
	to->ban.key_len = cell->ban.key_len;
	to->ban.settled = cell->ban.settled;
	to->ban.why_len = cell->ban.why_len;
	return true;
}

/* Inserts a state, or a level of bans.  Returns false if it is damaged. */
static bool
insert_state(Found *found, RlCells *view, const RlCell *cell, uint32 *c)
{
	const RlState *state = &cell->state;
	uint32		id = cell->tag.algorithm;
	const RlAlgorithm *algorithm = id < RL_ALGORITHMS ? rl_algorithms[id] : NULL;
	bool		has_logs = algorithm != NULL && algorithm->skip != NULL;
	int64		units[2] = {state->charged, state->refused};
	uint32		chunks = 0;
	RlState    *to;

	if (state->charged < 0 || state->refused < 0 || state->ban_count < 0)
		return false;
	for (int i = 0; i < 2; i++)
		if (!check_log(found, cell->key_hash, &state->log[i], has_logs ? units[i] : 0, &chunks))
			return false;
	if (!has_room(found, view, 1, chunks))
		return true;
	*c = rl_cell_make(view, cell->tag);
	to = &rl_cell_at(view, *c)->state;
	*to = *state;
	memset(to->log, 0, sizeof(to->log));
	if (!has_logs)
		return true;
	view->pool.owner = cell->key_hash.low;
	to->charged = rl_log_copy(&found->pool, &state->log[RL_CHARGED], algorithm->until_end, &view->pool,
							  &to->log[RL_CHARGED]);
	(void) rl_log_copy(&found->pool, &state->log[RL_REFUSED], false, &view->pool,
					   &to->log[RL_REFUSED]);
	return true;
}

static void
insert_cell(Found *found, uint32 start)
{
	const RlCell *cell = &found->slots->cells[start - 1];
	RlKeyHash	key_hash = cell->key_hash;
	RlCells		view = {.keys = &key_hash,.nkeys = 1};
	uint32		c = RL_NO_CELL;
	bool		sound;

	rl_cells_select(&view, 0);
	sound = rl_cell_find_tag(&view, cell->tag) == RL_NO_CELL;
	if (sound && rl_cell_has_text(cell))
		sound = insert_text(found, &view, cell, &c);
	else if (sound)
		sound = (cell->tag.algorithm < RL_ALGORITHMS || cell->tag.algorithm == RL_LEVEL_CELL) &&
			insert_state(found, &view, cell, &c);
	found->result->damaged += !sound;
	if (c != RL_NO_CELL)
	{
		rl_cell_set_life(c, found->slots->lives[start - 1]);
		rl_cell_set_end(&view, c, cell->end);
		found->result->states++;
	}
	rl_cells_release(&view);
}

static int
compare_ends(const void *a, const void *b)
{
	int64		x = ((const Start *) a)->end;
	int64		y = ((const Start *) b)->end;

	return x > y ? -1 : x < y;
}

/* Inserts all that the slots have; if there may be no room for all, what ends last. */
static void
insert(const RlSlots *slots, RlRecovered *recovered)
{
	Found		found = {.slots = slots,.pool = {.chunks = slots->chunks},.result = recovered};
	Size		size = slots->ncells * sizeof(Start);
	Start	   *starts = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint32		n = 0;
	RlSlots		mine;

	if (starts == MAP_FAILED)
		return;
	for (uint32 c = 1; c <= slots->ncells; c++)
		if (slots->cells[c - 1].used && slots->cells[c - 1].tag.algorithm != RL_REST_CELL)
			starts[n++] = (Start) {slots->cells[c - 1].end, c};
	rl_cells_sizes(rl_shared_max_keys(), &mine);
	if (mine.ncells < slots->ncells || mine.nchunks < slots->nchunks)
		qsort(starts, n, sizeof(Start), compare_ends);
	for (uint32 i = 0; i < n; i++)
		insert_cell(&found, starts[i].cell);
	munmap(starts, size);
}

static void
need(int max_keys, Size *size, int *nlocks)
{
	RlSlots		slots;

	rl_cells_sizes(max_keys, &slots);
	*size = rl_file_is_wanted() ? rl_file_state_size(&slots) : 0;
	*nlocks = rl_file_is_wanted() ? 2 : 0;
}

static void
attach(void *memory, LWLockPadded *locks, bool found pg_attribute_unused())
{
	RlSlots		slots;

	if (!rl_file_is_wanted())
		return;
	rl_cells_sizes(rl_local_max_keys, &slots);
	rl_file_make(&slots, memory, locks);
	rl_cells_place(&slots);
}

static void
ready(void)
{
	rl_file_recover(insert);
}

const RlSharedPart rl_recover_part = {.need = need,.attach = attach,.ready = ready};
