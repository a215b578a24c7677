/*
 * fuzz_recover.c
 *		Target of the local store's recovery: slots with sound states, and other bytes in them.
 *
 * What is inserted must be sound, and nothing may be left of it when it is removed.  Without other
 * bytes, all states must be inserted.
 */
#include "postgres.h"

#include "shared/cells.h"
#include "fuzz.h"

#define CELLS				32
#define CHUNKS				512
#define KEYS				4

void		__wrap_rl_file_recover(void (*my_insert) (const RlSlots *found, RlRecovered *recovered));

static void (*insert) (const RlSlots *found, RlRecovered *recovered) = NULL;
static RlCell cells[CELLS];
static int64 lives[CELLS];
static RlChunk chunks[CHUNKS];
static uint32 used_cells;
static uint32 used_chunks;

/* Notes the function with which recover.c inserts what a file has. */
void
__wrap_rl_file_recover(void (*my_insert) (const RlSlots *found, RlRecovered *recovered))
{
	insert = my_insert;
}

static RlKeyHash
key_of(uint8 number)
{
	return (RlKeyHash) {number % KEYS, 17 * (number % KEYS)};
}

static RlCell *
make_cell(RlKeyHash key_hash, RlStateTag tag)
{
	RlCell	   *cell = &cells[used_cells++];

	cell->key_hash = key_hash;
	cell->tag = tag;
	cell->end = used_cells;
	cell->used = true;
	return cell;
}

static void
add_entries(RlLog *log, RlKeyHash key_hash, int n, bool own)
{
	RlPool		pool = {.chunks = chunks,.owner = key_hash.low};

	for (int i = 0; i < n && used_chunks + 3 < CHUNKS; i++)
	{
		while ((int) pool.nspare < rl_log_chunks_wanted(&pool, log))
		{
			used_chunks++;
			rl_pool_put(&pool, used_chunks, used_chunks, 1);
		}
		if (own)
			(void) rl_log_add_own(&pool, log, 1000 + i, 1);
		else
			rl_log_append(&pool, log, 1000 + i, 1 + i % 3);
	}
}

static int64
sum_of_chunks(const RlChunk *memory, uint32 c)
{
	int64		units = 0;

	for (; c != RL_NO_CHUNK; c = memory[c - 1].next)
		for (uint32 i = 0; i < memory[c - 1].n; i++)
			units += memory[c - 1].entry[i].units;
	return units;
}

static int64
sum_of_log(const RlChunk *memory, const RlLog *log)
{
	int64		units = sum_of_chunks(memory, log->first);

	for (uint32 index = log->index_first; index != RL_NO_CHUNK; index = memory[index - 1].next)
		for (uint32 i = 0; i < memory[index - 1].n; i++)
			units += sum_of_chunks(memory, memory[index - 1].block[i].first);
	return units;
}

static void
make_text(RlKeyHash key_hash, RlStateTag tag, int key_len, int why_len)
{
	char		text[2 * 256 + RL_CELL_TEXT];
	RlCell	   *first = make_cell(key_hash, tag);
	RlCell	   *cell = first;
	int			len = key_len + why_len;

	memset(text, 'x', sizeof(text));
	first->ban.key_len = key_len;
	first->ban.why_len = why_len;
	first->ban.began = rl_text_sum(text, len);
	for (int at = 0;; at += RL_CELL_TEXT)
	{
		memcpy(cell->ban.text, text, Min(len - at, RL_CELL_TEXT));
		if (at + RL_CELL_TEXT >= len)
			break;
		cell->ban.rest = used_cells + 1;
		cell = make_cell(key_hash, (RlStateTag) {.algorithm = RL_REST_CELL});
	}
}

/* Makes a state of four bytes, if there is room.  Each has another tag. */
static bool
make_state(uint8 kind, uint8 key, uint8 a, uint8 b)
{
	RlKeyHash	key_hash = key_of(key);
	RlStateTag	tag = {.step = used_cells + 1};

	if (used_cells + 11 > CELLS)
		return false;
	if (kind % 4 >= 2)
	{
		tag.algorithm = kind % 4 == 2 ? RL_RECORD_CELL : RL_BAN_CELL;
		make_text(key_hash, tag, 1 + a, b % RL_MAX_WHY);
		return true;
	}
	tag.algorithm = kind / 4 % RL_ALGORITHMS;
	{
		const RlAlgorithm *algorithm = rl_algorithms[tag.algorithm];
		RlState    *state = &make_cell(key_hash, tag)->state;

		if (algorithm->skip == NULL)
			return true;
		add_entries(&state->log[RL_CHARGED], key_hash, a * (1 + kind / 128 * 8), algorithm->until_end);
		if (!algorithm->until_end)
			add_entries(&state->log[RL_REFUSED], key_hash, b, false);
		state->charged = sum_of_log(chunks, &state->log[RL_CHARGED]);
		state->refused = sum_of_log(chunks, &state->log[RL_REFUSED]);
	}
	return true;
}

/* Requires the chunks of the cell to be sound, and returns their number. */
static int64
check_cell(const RlCells *view, const RlCell *cell)
{
	const RlChunk *memory = view->pool.chunks;
	int64		n = 0;

	if (rl_cell_has_text(cell))
		return 0;
	for (int i = 0; i < 2; i++)
	{
		const RlLog *log = &cell->state.log[i];

		for (uint32 c = log->first; c != RL_NO_CHUNK; c = memory[c - 1].next)
			REQUIRE(++n <= CHUNKS && memory[c - 1].n >= 1 && memory[c - 1].n <= RL_CHUNK_ENTRIES);
		for (uint32 index = log->index_first; index != RL_NO_CHUNK; index = memory[index - 1].next)
		{
			REQUIRE(++n <= CHUNKS && memory[index - 1].n >= 1 && memory[index - 1].n <= RL_CHUNK_BLOCKS);
			for (uint32 b = 0; b < memory[index - 1].n; b++)
				for (uint32 c = memory[index - 1].block[b].first; c != RL_NO_CHUNK; c = memory[c - 1].next)
					REQUIRE(++n <= CHUNKS && memory[c - 1].n >= 1 && memory[c - 1].n <= RL_CHUNK_ENTRIES);
		}
		if (log->first != RL_NO_CHUNK || log->index_first != RL_NO_CHUNK)
			REQUIRE(sum_of_log(memory, log) == (i == RL_CHARGED ? cell->state.charged : cell->state.refused));
	}
	return n;
}

/* Checks and removes all states of the store.  Returns their number. */
static int64
remove_all(void)
{
	RlCellsFill fill;
	int64		n = 0;
	int64		entries = 0;

	rl_cells_fill(&fill);
	for (int slice = 0; slice < rl_cells_slices(); slice++)
	{
		RlCells		view = {0};
		const uint32 *end = rl_cells_lock_slice(&view, slice);

		for (; view.bucket < end; view.bucket++)
			while (*view.bucket != RL_NO_CELL)
			{
				entries += check_cell(&view, rl_cell_at(&view, *view.bucket)) * RL_CHUNK_ENTRIES;
				rl_cell_remove_at(&view, view.bucket);
				n++;
			}
		rl_cells_unlock(&view);
		rl_cells_release(&view);
	}
	REQUIRE(entries == fill.entries);
	rl_cells_fill(&fill);
	REQUIRE(fill.keys == 0 && fill.entries == 0);
	return n;
}

/*
 * The first byte is the number of states, of four bytes each.  Then there are changes: which slot, the byte in it, and the
 * new value.
 */
void
fuzz_recover(const char *data, int len)
{
	RlSlots		slots = {.npartitions = 1,.ncells = CELLS,.nchunks = CHUNKS,.cells = cells,.lives = lives,.chunks = chunks};
	RlRecovered recovered = {0};
	int			made = 0;
	int			at = 1;

	if (insert == NULL)
		rl_require_local_store("fuzz");
	REQUIRE(insert != NULL);
	memset(cells, 0, sizeof(cells));
	memset(chunks, 0, sizeof(chunks));
	used_cells = used_chunks = 0;
	for (int n = len > 0 ? (uint8) data[0] % 16 : 0; n > 0 && at + 4 <= len; n--, at += 4)
		made += make_state(data[at], data[at + 1], data[at + 2], data[at + 3]);
	if (at + 3 > len)
	{
		insert(&slots, &recovered);
		REQUIRE(recovered.states == made && recovered.damaged == 0 && recovered.no_room == 0);
		REQUIRE(remove_all() == made);
		return;
	}
	for (; at + 3 <= len; at += 3)
	{
		uint8		slot = data[at];
		uint8		byte = data[at + 1];
		uint32		n = slot % 2 ? used_cells : used_chunks;

		if (n > 0)
			((char *) (slot % 2 ? (void *) &cells[slot / 2 % n] : (void *) &chunks[slot / 2 % n]))[byte % 128] = data[at + 2];
	}
	insert(&slots, &recovered);
	REQUIRE(remove_all() == recovered.states);
}
