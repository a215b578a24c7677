/*
 * log.c
 *		Logs: pure functions of logs and of the pool of their chunks.  They do no
 *		I/O, allocate no memory and call no function of the backend.
 *
 * A log of n entries has at most n / 4 chunks and n / 128 blocks, because neighbours that fit
 * into one are merged.  So each function visits at most 64 chunks and the index, which has about
 * 300 chunks for a log of 100,000 entries.
 */
#include "postgres.h"

#include "algorithm/log.h"

static inline RlChunk *
chunk_at(const RlPool *pool, uint32 number)
{
	return &pool->chunks[number - 1];
}

/* Returns a chunk that will be changed. */
static inline RlChunk *
change_chunk(const RlPool *pool, uint32 number)
{
	if (pool->keep != NULL)
		pool->keep(number);
	return chunk_at(pool, number);
}

/* Adds a list of n chunks to the spare chunks. */
void
rl_pool_put(RlPool *pool, uint32 first, uint32 last, uint32 n)
{
	change_chunk(pool, last)->next = pool->spare;
	if (pool->spare == RL_NO_CHUNK)
		pool->spare_last = last;
	pool->spare = first;
	pool->nspare += n;
}

/* Takes a spare chunk and empties it.  The pool must have one. */
uint32
rl_pool_get(RlPool *pool)
{
	uint32		number = pool->spare;
	RlChunk    *chunk;

	Assert(pool->nspare > 0);
	chunk = change_chunk(pool, number);
	pool->spare = chunk->next;
	pool->nspare--;
	if (pool->nspare == 0)
		pool->spare = pool->spare_last = RL_NO_CHUNK;
	chunk->next = RL_NO_CHUNK;
	chunk->n = 0;
	chunk->owner = pool->owner;
	return number;
}

static int64
last_time(const RlPool *pool, uint32 number)
{
	const RlChunk *chunk = chunk_at(pool, number);

	return chunk->entry[chunk->n - 1].time;
}

/*
 * Blocks
 */

static RlBlock *
closed_block(const RlPool *pool, const RlCursor *cursor)
{
	return &chunk_at(pool, cursor->index)->block[cursor->block];
}

static void
enter_block(const RlPool *pool, const RlLog *log, RlCursor *cursor)
{
	cursor->whole = cursor->index != RL_NO_CHUNK;
	cursor->chunk = cursor->whole ? closed_block(pool, cursor)->first : log->first;
	cursor->i = 0;
	cursor->skipped = 0;
}

static void
first_block(const RlPool *pool, const RlLog *log, RlCursor *cursor)
{
	cursor->index = log->index_first;
	cursor->block = 0;
	enter_block(pool, log, cursor);
}

static void
next_block(const RlPool *pool, const RlLog *log, RlCursor *cursor)
{
	if (++cursor->block >= chunk_at(pool, cursor->index)->n)
	{
		cursor->index = chunk_at(pool, cursor->index)->next;
		cursor->block = 0;
	}
	enter_block(pool, log, cursor);
}

static int64
sum_units(const RlChunk *chunk, uint32 n)
{
	int64		units = 0;

	for (uint32 i = 0; i < n; i++)
		units += chunk->entry[i].units;
	return units;
}

static RlChunk *
append_chunk(RlPool *pool, uint32 *first, uint32 *last)
{
	uint32		number = rl_pool_get(pool);

	if (*last == RL_NO_CHUNK)
		*first = number;
	else
		change_chunk(pool, *last)->next = number;
	*last = number;
	return chunk_at(pool, number);
}

static RlChunk *
last_of_index(const RlPool *pool, const RlLog *log)
{
	return log->index_last == RL_NO_CHUNK ? NULL : chunk_at(pool, log->index_last);
}

/* Appends a closed block to the index, which may need a spare chunk. */
static void
append_block(RlPool *pool, RlLog *log, const RlBlock *block)
{
	RlChunk    *index = last_of_index(pool, log);

	if (index == NULL || index->n == RL_CHUNK_BLOCKS)
		index = append_chunk(pool, &log->index_first, &log->index_last);
	else
		index = change_chunk(pool, log->index_last);
	index->block[index->n++] = *block;
}

/* Closes the open block.  The index may need a spare chunk for it. */
static void
close_block(RlPool *pool, RlLog *log)
{
	RlBlock		block = {rl_log_newest(pool, log), 0, log->first, log->last, log->nchunks};

	for (uint32 c = log->first; c != RL_NO_CHUNK; c = chunk_at(pool, c)->next)
		block.units += sum_units(chunk_at(pool, c), chunk_at(pool, c)->n);
	append_block(pool, log, &block);
	log->first = log->last = RL_NO_CHUNK;
	log->nchunks = 0;
}

/* Removes the first closed block from the index.  The caller has freed its chunks. */
static void
remove_first_block(RlPool *pool, RlLog *log)
{
	uint32		number = log->index_first;
	RlChunk    *index = change_chunk(pool, number);

	index->n--;
	memmove(index->block, index->block + 1, index->n * sizeof(RlBlock));
	if (index->n > 0)
		return;
	log->index_first = index->next;
	if (log->index_first == RL_NO_CHUNK)
		log->index_last = RL_NO_CHUNK;
	rl_pool_put(pool, number, number, 1);
}

/*
 * Reading
 */

/* Returns how many spare chunks rl_log_append may need. */
int
rl_log_chunks_wanted(const RlPool *pool, const RlLog *log)
{
	const RlChunk *index = last_of_index(pool, log);

	if (log->last != RL_NO_CHUNK && chunk_at(pool, log->last)->n < RL_CHUNK_ENTRIES)
		return 0;
	if (log->nchunks == RL_BLOCK_CHUNKS && (index == NULL || index->n == RL_CHUNK_BLOCKS))
		return 2;
	return 1;
}

/* Returns the time of the newest entry, or -1 if there is none. */
int64
rl_log_newest(const RlPool *pool, const RlLog *log)
{
	const RlChunk *index = last_of_index(pool, log);

	if (log->last != RL_NO_CHUNK)
		return last_time(pool, log->last);
	return index == NULL ? -1 : index->block[index->n - 1].newest;
}

/* Returns true if a reservation has the newest entry, which must exist, for itself. */
bool
rl_log_ends_with_own(const RlPool *pool, const RlLog *log)
{
	const RlChunk *index = last_of_index(pool, log);
	const RlChunk *last =
		chunk_at(pool, log->last != RL_NO_CHUNK ? log->last : index->block[index->n - 1].last);

	return last->entry[last->n - 1].own;
}

/* Sets the cursor before the first entry that is later than gone.  Returns the units before it. */
int64
rl_log_seek(const RlPool *pool, const RlLog *log, int64 gone, RlCursor *cursor)
{
	int64		units = 0;

	first_block(pool, log, cursor);
	while (cursor->whole && closed_block(pool, cursor)->newest <= gone)
	{
		units += closed_block(pool, cursor)->units;
		next_block(pool, log, cursor);
	}
	while (cursor->chunk != RL_NO_CHUNK)
	{
		const RlChunk *chunk = chunk_at(pool, cursor->chunk);

		if (last_time(pool, cursor->chunk) > gone)
			break;
		cursor->whole = false;
		units += sum_units(chunk, chunk->n);
		cursor->chunk = chunk->next;
	}
	if (cursor->chunk != RL_NO_CHUNK)
		for (const RlEntry *entry = chunk_at(pool, cursor->chunk)->entry; entry->time <= gone; entry++)
		{
			cursor->whole = false;
			units += entry->units;
			cursor->i++;
		}
	return units;
}

/* Returns the time and the units of the block or entry after the cursor, or PG_INT64_MAX and 0. */
static RlEntry
piece_at(const RlPool *pool, const RlCursor *cursor)
{
	RlEntry		piece = {PG_INT64_MAX, 0, false};

	if (cursor->chunk == RL_NO_CHUNK)
		return piece;
	if (cursor->whole)
		return (RlEntry) {closed_block(pool, cursor)->newest, closed_block(pool, cursor)->units, false};
	piece = chunk_at(pool, cursor->chunk)->entry[cursor->i];
	piece.units -= cursor->skipped;
	return piece;
}

/* Moves the cursor past the block or entry after it.  It must not be at the end. */
static void
advance(const RlPool *pool, const RlLog *log, RlCursor *cursor)
{
	const RlChunk *chunk = chunk_at(pool, cursor->chunk);

	cursor->skipped = 0;
	if (!cursor->whole && ++cursor->i < chunk->n)
		return;
	if (!cursor->whole && chunk->next != RL_NO_CHUNK)
	{
		cursor->chunk = chunk->next;
		cursor->i = 0;
	}
	else if (cursor->index != RL_NO_CHUNK)
		next_block(pool, log, cursor);
	else
		cursor->chunk = RL_NO_CHUNK;
}

/* Moves the cursor past this number of units, or to the end. */
void
rl_log_skip(const RlPool *pool, const RlLog *log, RlCursor *cursor, int64 units)
{
	while (units > 0 && cursor->chunk != RL_NO_CHUNK)
	{
		int64		here = piece_at(pool, cursor).units;

		if (here <= units)
		{
			units -= here;
			advance(pool, log, cursor);
		}
		else if (cursor->whole)
			cursor->whole = false;
		else
		{
			cursor->skipped += units;
			units = 0;
		}
	}
}

/* Returns the time of the n-th oldest unit, which must exist, after the cursors, and moves them. */
int64
rl_log_unit(const RlPool *pool, const RlLog *const logs[2], RlCursor cursors[2], int64 n)
{
	for (;;)
	{
		RlEntry		pieces[2] = {piece_at(pool, &cursors[0]), piece_at(pool, &cursors[1])};
		int			older = pieces[0].time <= pieces[1].time ? 0 : 1;

		/*
		 * All units up to the older time are in these pieces, and if the other is an entry, in the older
		 * one.  If they are fewer than n, all of the older is passed.  So few blocks are opened, whatever
		 * one entry holds.
		 */
		if (pieces[older].units >= n || (cursors[1 - older].whole && pieces[0].units + pieces[1].units >= n))
		{
			if (cursors[0].whole || cursors[1].whole)
			{
				cursors[cursors[0].whole ? 0 : 1].whole = false;
				continue;
			}
			return pieces[older].time;
		}
		n -= pieces[older].units;
		advance(pool, logs[older], &cursors[older]);
	}
}

/*
 * Changing
 */

/* Removes everything before the cursor, and puts the chunks into the pool. */
void
rl_log_cut(RlPool *pool, RlLog *log, const RlCursor *cursor)
{
	RlBlock    *block = NULL;
	uint32	   *first = &log->first;
	uint32	   *nchunks = &log->nchunks;
	int64		units = 0;
	uint32		before = RL_NO_CHUNK;
	uint32		n = 0;
	uint32		place = cursor->block;

	while (log->index_first != cursor->index || place > 0)
	{
		RlBlock    *gone = &chunk_at(pool, log->index_first)->block[0];

		place -= (log->index_first == cursor->index);
		rl_pool_put(pool, gone->first, gone->last, gone->nchunks);
		remove_first_block(pool, log);
	}
	if (cursor->whole)
		return;
	if (cursor->index != RL_NO_CHUNK)
	{
		block = &change_chunk(pool, cursor->index)->block[0];
		first = &block->first;
		nchunks = &block->nchunks;
	}
	for (uint32 c = *first; c != cursor->chunk; c = chunk_at(pool, c)->next)
	{
		units += sum_units(chunk_at(pool, c), chunk_at(pool, c)->n);
		before = c;
		n++;
	}
	if (n > 0)
		rl_pool_put(pool, *first, before, n);
	*first = cursor->chunk;
	*nchunks -= n;
	if (cursor->chunk != RL_NO_CHUNK && (cursor->i > 0 || cursor->skipped > 0))
	{
		RlChunk    *chunk = change_chunk(pool, cursor->chunk);

		units += sum_units(chunk, cursor->i) + cursor->skipped;
		chunk->n -= cursor->i;
		memmove(chunk->entry, chunk->entry + cursor->i, chunk->n * sizeof(RlEntry));
		chunk->entry[0].units -= cursor->skipped;
	}
	if (block != NULL)
		block->units -= units;
	else if (log->first == RL_NO_CHUNK)
		log->last = RL_NO_CHUNK;
}

/* Removes all entries. */
void
rl_log_clear(RlPool *pool, RlLog *log)
{
	RlCursor	end = {0};

	rl_log_cut(pool, log, &end);
}

static void
append_entry(RlPool *pool, RlLog *log, RlEntry entry)
{
	RlChunk    *last = log->last == RL_NO_CHUNK ? NULL : change_chunk(pool, log->last);

	if (last == NULL || last->n == RL_CHUNK_ENTRIES)
	{
		if (log->nchunks == RL_BLOCK_CHUNKS)
			close_block(pool, log);
		last = append_chunk(pool, &log->first, &log->last);
		log->nchunks++;
	}
	last->entry[last->n++] = entry;
}

/* Appends units, not before the newest entry.  The pool must have rl_log_chunks_wanted() spare chunks. */
void
rl_log_append(RlPool *pool, RlLog *log, int64 time, int64 units)
{
	RlChunk    *last = log->last == RL_NO_CHUNK ? NULL : chunk_at(pool, log->last);

	if (last != NULL && last->entry[last->n - 1].time == time && !last->entry[last->n - 1].own)
		change_chunk(pool, log->last)->entry[last->n - 1].units += units;
	else
		append_entry(pool, log, (RlEntry) {time, units, false});
}

/* Returns true if a reservation has an entry of its own with this time. */
bool
rl_log_has_own(const RlPool *pool, const RlLog *log, int64 time)
{
	RlCursor	at;

	for (rl_log_seek(pool, log, time - 1, &at); at.chunk != RL_NO_CHUNK; advance(pool, log, &at))
	{
		const RlEntry *entry = &chunk_at(pool, at.chunk)->entry[at.i];

		at.whole = false;
		if (entry->time != time)
			break;
		if (entry->own)
			return true;
	}
	return false;
}

/*
 * Adds units as an entry of their own.  The time may be earlier than the newest entry's, if the
 * log has at most RL_MAX_INSERT entries.  If another reservation has an entry of this time, it
 * gets the next microsecond.  Returns its time.  For spare chunks see rl_log_append.
 */
int64
rl_log_add_own(RlPool *pool, RlLog *log, int64 time, int64 units)
{
	RlEntry		later[RL_MAX_INSERT];
	int			n = 0;
	RlCursor	at;

	if (rl_log_newest(pool, log) == time && rl_log_has_own(pool, log, time))
		time++;
	if (rl_log_newest(pool, log) <= time)
	{
		append_entry(pool, log, (RlEntry) {time, units, true});
		return time;
	}
	for (first_block(pool, log, &at); at.chunk != RL_NO_CHUNK && n < RL_MAX_INSERT; advance(pool, log, &at))
	{
		at.whole = false;
		later[n++] = chunk_at(pool, at.chunk)->entry[at.i];
	}
	rl_log_clear(pool, log);
	for (int i = 0; i < n; i++)
	{
		if (units > 0 && later[i].time > time)
		{
			append_entry(pool, log, (RlEntry) {time, units, true});
			units = 0;
		}
		else if (later[i].time == time && later[i].own)
			time++;
		append_entry(pool, log, later[i]);
	}
	if (units > 0)
		append_entry(pool, log, (RlEntry) {time, units, true});
	return time;
}

/*
 * Appends the entries of a log in another pool to an empty log; with own_only, those that reservations
 * have for themselves.  The pool must have as many spare chunks as the log.  Returns the units.
 */
int64
rl_log_copy(const RlPool *from, const RlLog *log, bool own_only, RlPool *pool, RlLog *copy)
{
	int64		units = 0;
	RlCursor	at;

	for (first_block(from, log, &at); at.chunk != RL_NO_CHUNK; advance(from, log, &at))
	{
		RlEntry		entry = chunk_at(from, at.chunk)->entry[at.i];

		at.whole = false;
		if (own_only && !entry.own)
			continue;
		append_entry(pool, copy, entry);
		units += entry.units;
	}
	return units;
}

/* Returns false if the next chunk's entries do not fit. */
static bool
merge_chunks(RlPool *pool, RlBlock *block, uint32 number)
{
	const RlChunk *old = chunk_at(pool, number);
	uint32		next_number = old->next;
	RlChunk    *chunk;
	RlChunk    *next;

	if (next_number == RL_NO_CHUNK)
		return false;
	next = chunk_at(pool, next_number);
	if (old->n + next->n > RL_CHUNK_ENTRIES)
		return false;
	chunk = change_chunk(pool, number);
	memcpy(chunk->entry + chunk->n, next->entry, next->n * sizeof(RlEntry));
	chunk->n += next->n;
	chunk->next = next->next;
	if (block->last == next_number)
		block->last = number;
	block->nchunks--;
	rl_pool_put(pool, next_number, next_number, 1);
	return true;
}

static int64
remove_from_chunk(const RlPool *pool, uint32 number, int64 time, int64 units, bool own)
{
	RlChunk    *chunk = chunk_at(pool, number);
	int64		left = units;
	uint32		i = 0;

	while (i < chunk->n && left > 0)
	{
		RlEntry    *entry = &chunk->entry[i];
		int64		part = Min(left, entry->units);

		if (entry->time != time || entry->own != own)
		{
			i++;
			continue;
		}
		(void) change_chunk(pool, number);
		left -= part;
		entry->units -= part;
		if (entry->units == 0)
		{
			chunk->n--;
			memmove(entry, entry + 1, (chunk->n - i) * sizeof(RlEntry));
		}
	}
	return units - left;
}

/* Removes up to this number of units of the time from a block, and merges small chunks. */
static int64
remove_from_block(RlPool *pool, RlBlock *block, int64 time, int64 units, bool own)
{
	uint32		before = RL_NO_CHUNK;
	uint32		number = block->first;
	int64		left = units;

	while (number != RL_NO_CHUNK && left > 0 && chunk_at(pool, number)->entry[0].time <= time)
	{
		RlChunk    *chunk = chunk_at(pool, number);
		int64		removed = remove_from_chunk(pool, number, time, left, own);

		left -= removed;
		if (chunk->n == 0 && before == RL_NO_CHUNK)
		{
			/* The empty chunk gets the next chunk's entries, if there is a next chunk. */
			if (merge_chunks(pool, block, number))
				continue;
			rl_pool_put(pool, number, number, 1);
			block->first = block->last = RL_NO_CHUNK;
			block->nchunks = 0;
			break;
		}
		if (removed == 0 || before == RL_NO_CHUNK || !merge_chunks(pool, block, before))
			before = number;
		number = chunk_at(pool, before)->next;
	}
	if (left < units && before != RL_NO_CHUNK)
		merge_chunks(pool, block, before);
	if (block->last != RL_NO_CHUNK)
		block->newest = last_time(pool, block->last);
	return units - left;
}

/* Removes empty blocks from the index, and merges neighbours that fit into one. */
static void
compact_index(RlPool *pool, RlLog *log)
{
	uint32		next = log->index_first;

	log->index_first = log->index_last = RL_NO_CHUNK;
	while (next != RL_NO_CHUNK)
	{
		RlChunk		old = *chunk_at(pool, next);

		/* The new index needs no more chunks than are freed here. */
		rl_pool_put(pool, next, next, 1);
		next = old.next;
		for (uint32 i = 0; i < old.n; i++)
		{
			const RlBlock *block = &old.block[i];
			RlChunk    *index = last_of_index(pool, log);
			RlBlock    *last = index == NULL ? NULL : &index->block[index->n - 1];

			if (block->nchunks == 0)
				continue;
			if (last == NULL || last->nchunks + block->nchunks > RL_BLOCK_CHUNKS)
			{
				append_block(pool, log, block);
				continue;
			}
			/* The image of the new index's chunk was kept when the pool gave it. */
			change_chunk(pool, last->last)->next = block->first;
			last->last = block->last;
			last->newest = block->newest;
			last->units += block->units;
			last->nchunks += block->nchunks;
		}
	}
}

/*
 * Removes up to this number of units of the entries with the time: of those that reservations
 * have for themselves, or of the others.  Returns how many.
 */
int64
rl_log_remove(RlPool *pool, RlLog *log, int64 time, int64 units, bool own)
{
	RlCursor	at;
	RlBlock		open;
	int64		left = units;
	bool		sparse = false;

	for (first_block(pool, log, &at); at.whole && left > 0; next_block(pool, log, &at))
	{
		RlBlock    *block = closed_block(pool, &at);
		int64		removed;

		if (block->newest < time)
			continue;
		(void) change_chunk(pool, at.index);
		removed = remove_from_block(pool, block, time, left, own);
		if (removed == 0 && block->newest > time)
			break;
		left -= removed;
		block->units -= removed;
		sparse |= block->nchunks <= RL_BLOCK_CHUNKS / 2;
	}
	if (sparse)
		compact_index(pool, log);
	if (left > 0 && log->first != RL_NO_CHUNK)
	{
		open = (RlBlock) {0, 0, log->first, log->last, log->nchunks};
		left -= remove_from_block(pool, &open, time, left, own);
		log->first = open.first;
		log->last = open.last;
		log->nchunks = open.nchunks;
	}
	return units - left;
}
