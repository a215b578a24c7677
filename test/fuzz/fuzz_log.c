/*
 * fuzz_log.c
 *		Target of the logs' chunks: after operations, two logs have the entries of arrays.
 */
#include "postgres.h"

#include "algorithm/log.h"
#include "fuzz.h"

#define MAX_ENTRIES			4096	/* of a log */
#define MAX_CHUNKS			4096

typedef struct Model
{
	int			n;
	RlEntry		entry[MAX_ENTRIES];
} Model;

static RlPool pool;
static uint32 nchunks;			/* that were ever used */
static uint32 unused[MAX_CHUNKS];	/* that were used, and are not now */
static uint32 nunused;
static RlLog logs[2];
static Model models[2];

/* Gives the pool exactly this number of spare chunks. */
static void
give_chunks(int n)
{
	while (n-- > 0)
	{
		uint32		number = nunused > 0 ? unused[--nunused] : ++nchunks;

		REQUIRE(nchunks <= MAX_CHUNKS);
		rl_pool_put(&pool, number, number, 1);
	}
}

static void
take_chunks(void)
{
	while (pool.nspare > 0)
		unused[nunused++] = rl_pool_get(&pool);
	REQUIRE(pool.spare == RL_NO_CHUNK);
}

static int64
newest(const Model *model)
{
	return model->n > 0 ? model->entry[model->n - 1].time : -1;
}

static void
delete_entries(Model *model, int at, int n)
{
	model->n -= n;
	memmove(&model->entry[at], &model->entry[at + n], (model->n - at) * sizeof(RlEntry));
}

/* Requires the chunks of a block to have the entries from *at on.  Returns their units. */
static int64
check_block(const RlBlock *block, const Model *model, int *at)
{
	uint32		last = RL_NO_CHUNK;
	uint32		n = 0;
	int64		units = 0;

	for (uint32 number = block->first; number != RL_NO_CHUNK; number = pool.chunks[number - 1].next)
	{
		const RlChunk *chunk = &pool.chunks[number - 1];

		REQUIRE(chunk->n >= 1 && chunk->n <= RL_CHUNK_ENTRIES);
		for (uint32 i = 0; i < chunk->n; i++, (*at)++)
		{
			REQUIRE(*at < model->n && chunk->entry[i].time == model->entry[*at].time);
			REQUIRE(chunk->entry[i].units == model->entry[*at].units && chunk->entry[i].own == model->entry[*at].own);
			units += chunk->entry[i].units;
		}
		last = number;
		n++;
	}
	REQUIRE(block->last == last && block->nchunks == n && n <= RL_BLOCK_CHUNKS);
	return units;
}

/* Requires a log to have the entries of a model.  Returns the number of its chunks. */
static uint32
check_log(const RlLog *log, const Model *model)
{
	const RlBlock open = {0, 0, log->first, log->last, log->nchunks};
	uint32		n = log->nchunks;
	uint32		last = RL_NO_CHUNK;
	int			at = 0;

	for (uint32 number = log->index_first; number != RL_NO_CHUNK; number = pool.chunks[number - 1].next)
	{
		const RlChunk *index = &pool.chunks[number - 1];

		REQUIRE(index->n >= 1 && index->n <= RL_CHUNK_BLOCKS);
		for (uint32 i = 0; i < index->n; i++)
		{
			REQUIRE(check_block(&index->block[i], model, &at) == index->block[i].units);
			REQUIRE(at > 0 && model->entry[at - 1].time == index->block[i].newest);
			n += index->block[i].nchunks;
		}
		last = number;
		n++;
	}
	REQUIRE(log->index_last == last);
	(void) check_block(&open, model, &at);
	REQUIRE(at == model->n);
	REQUIRE(rl_log_newest(&pool, log) == newest(model));
	return n;
}

static void
append(RlLog *log, Model *model, int64 time, int64 units)
{
	/* An entry in a closed block stays as it is, so there can be two of one time. */
	RlEntry    *last = log->last != RL_NO_CHUNK ? &model->entry[model->n - 1] : NULL;

	if (model->n == MAX_ENTRIES)
		return;
	give_chunks(rl_log_chunks_wanted(&pool, log));
	rl_log_append(&pool, log, time, units);
	take_chunks();
	if (last != NULL && last->time == time && !last->own)
		last->units += units;
	else
		model->entry[model->n++] = (RlEntry) {time, units, false};
}

static bool
has_own(const Model *model, int64 time)
{
	for (int i = 0; i < model->n; i++)
		if (model->entry[i].time == time && model->entry[i].own)
			return true;
	return false;
}

static void
add_own(RlLog *log, Model *model, int64 time, int64 units)
{
	int			at = 0;
	int64		added;

	if (model->n == MAX_ENTRIES || (time < newest(model) && model->n > RL_MAX_INSERT))
		return;
	give_chunks(rl_log_chunks_wanted(&pool, log));
	added = rl_log_add_own(&pool, log, time, units);
	while (has_own(model, time))
		time++;
	REQUIRE(added == time);
	while (at < model->n && model->entry[at].time <= time)
		at++;
	memmove(&model->entry[at + 1], &model->entry[at], (model->n - at) * sizeof(RlEntry));
	model->entry[at] = (RlEntry) {time, units, true};
	model->n++;
}

static void
remove_units(RlLog *log, Model *model, int64 time, int64 units, bool own)
{
	int64		removed = rl_log_remove(&pool, log, time, units, own);

	for (int i = 0; i < model->n && removed > 0;)
	{
		RlEntry    *entry = &model->entry[i];
		int64		part = entry->time == time && entry->own == own ? Min(entry->units, Min(units, removed)) : 0;

		removed -= part;
		units -= part;
		entry->units -= part;
		if (entry->units == 0)
			delete_entries(model, i, 1);
		else
			i++;
	}
	REQUIRE(removed == 0);
	for (int i = 0; i < model->n && units > 0; i++)
		REQUIRE(model->entry[i].time != time || model->entry[i].own != own);
}

/* Removes the entries up to a time, and this many units more. */
static void
cut(RlLog *log, Model *model, int64 gone, int64 units)
{
	RlCursor	cursor;
	int64		found = rl_log_seek(&pool, log, gone, &cursor);
	int			n = 0;

	for (; n < model->n && model->entry[n].time <= gone; n++)
		found -= model->entry[n].units;
	REQUIRE(found == 0);
	rl_log_skip(&pool, log, &cursor, units);
	rl_log_cut(&pool, log, &cursor);
	for (; n < model->n && model->entry[n].units <= units; n++)
		units -= model->entry[n].units;
	delete_entries(model, 0, n);
	if (model->n > 0)
		model->entry[0].units -= units;
}

/* Compares the time of the n-th oldest unit of both logs that is later than gone. */
static void
check_unit(int64 gone, int64 n)
{
	const RlLog *const both[2] = {&logs[0], &logs[1]};
	RlCursor	cursors[2];
	int			at[2] = {0, 0};
	int64		left = n;

	for (int i = 0; i < 2; i++)
	{
		(void) rl_log_seek(&pool, both[i], gone, &cursors[i]);
		while (at[i] < models[i].n && models[i].entry[at[i]].time <= gone)
			at[i]++;
	}
	while (at[0] < models[0].n || at[1] < models[1].n)
	{
		int			older = at[1] == models[1].n ||
			(at[0] < models[0].n && models[0].entry[at[0]].time <= models[1].entry[at[1]].time) ? 0 : 1;
		const RlEntry *entry = &models[older].entry[at[older]++];

		if (entry->units >= left)
		{
			REQUIRE(rl_log_unit(&pool, both, cursors, n) == entry->time);
			return;
		}
		left -= entry->units;
	}
}

static void
operate(uint8 operation, uint8 a, uint8 b)
{
	RlLog	   *log = &logs[operation & 1];
	Model	   *model = &models[operation & 1];
	int64		last = newest(model);
	int64		some = model->n > 0 ? model->entry[(a * 256 + b) % model->n].time : a;
	int64		before = Max(last - a, 0);

	switch ((operation >> 1) % 8)
	{
		case 0:
			append(log, model, last + a + (last < 0), b + 1);
			break;
		case 1:
			for (int i = 0; i < b * 4; i++)
				append(log, model, last + 1 + i, 1 + i % (a + 1));
			break;
		case 2:
			add_own(log, model, before, b + 1);
			break;
		case 3:
			add_own(log, model, Max(last, 0) + a, b + 1);
			break;
		case 4:
			for (int i = 0; i < ((operation & 64) ? a * 4 : 1) && model->n > 0; i++)
				remove_units(log, model, model->entry[(a * 256 + b) % model->n].time,
							 (operation & 32) ? 1 + a % 4 : 1000000, operation & 16);
			break;
		case 5:
			cut(log, model, (operation & 16) ? before : some, b);
			break;
		case 6:
			check_unit((operation & 16) ? before : some, 1 + b * a);
			break;
		case 7:
			REQUIRE(rl_log_has_own(&pool, log, some) == has_own(model, some));
			if (operation & 32)
			{
				rl_log_clear(&pool, log);
				model->n = 0;
			}
	}
}

/* Each operation has three bytes. */
void
fuzz_log(const char *data, int len)
{
	if (pool.chunks == NULL)
		pool.chunks = malloc(MAX_CHUNKS * sizeof(RlChunk));
	nchunks = nunused = 0;
	memset(logs, 0, sizeof(logs));
	models[0].n = models[1].n = 0;
	for (int i = 0; i + 2 < len; i += 3)
	{
		operate(data[i], data[i + 1], data[i + 2]);
		take_chunks();
		/* Long logs are slow to compare. */
		if (models[0].n + models[1].n < 200 || i % 8 == 0 || i + 5 >= len)
			REQUIRE(check_log(&logs[0], &models[0]) + check_log(&logs[1], &models[1]) + nunused == nchunks);
	}
}
