/*
 * cells.c
 *		The local store's memory, which is bounded.
 *
 * A key's cells (cells.h) belong to one partition.  A partition has a hash table and two heaps
 * (heap.c), ordered by the cells' ends: one for cells that have chunks of entries, and one for the
 * others.  Free cells and free chunks serve all partitions, and any of them may have all cells.
 *
 * Locks: each partition's LWLock protects the RlPartition, its buckets, heaps, cells, their lives and the
 * chunks of their logs; only "soonest" is also read without it.  The mutex of Free protects
 * Free, and the links between free cells and between free chunks.  It may be taken while a
 * partition is locked.  Spare cells and chunks belong to the backend that set them aside.  A
 * backend locks one partition at a time; an act on several keys locks all their partitions, in
 * ascending order, and holds none of them while it evicts.
 *
 * Most acts set a cell's end to a later time.  The heap is not changed then: its time is never
 * later than the cell's end, and is corrected when the cell comes to the top.  So an act on an
 * existing cell touches no other cell.
 *
 * When the memory is full, the cell with the earliest end is evicted; for chunks, the earliest
 * that has chunks.  Its partition is found without locks, so the choice is not exact among cells
 * that end at nearly the same time.  An act that needs room unlocks its partition, and then
 * locks one partition for each eviction.  Evicted cells and chunks are its own spares until it
 * has enough.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "port/pg_bitutils.h"
#include "storage/spin.h"

#include "shared/heap.h"

#define CELLS_PER_PARTITION	2048
#define MAX_PARTITIONS		1024
#define LEAST_CHUNKS		65536	/* 8 MB */
#define SLICE				256 /* hash chains that are read at a time */

/* The most that one act does in order to get room, beside an eviction for each cell. */
#define MAX_EVICTIONS		64
#define MAX_CORRECTIONS		1024	/* of times in heaps */
#define CORRECTIONS_AT_ONCE	256 /* while a partition is locked */
#define MAX_DEFERRED		512 /* cells of the act's keys, likewise */

/* Free cells and chunks.  The mutex protects all members. */
typedef struct Free
{
	slock_t		mutex;
	uint32		cells;			/* a list */
	uint32		ncells;			/* its length */
	uint32		used_cells;		/* cells with higher numbers were never used */
	uint32		used_chunks;
	RlPool		pool;			/* its "chunks" is set by lock_free */
	int64		evicted;		/* cells that were evicted before their end */
} Free;

/* Sizes and addresses; set once, at start. */
static int	npartitions;
static uint32 ncells;
static uint32 nchunks;
static uint32 nbuckets;
static LWLockPadded *locks;
static Free *free_memory;
static RlPartition *partitions;
static uint32 *buckets;
static void *heaps;
static RlCell *cells;
static int64 *lives;			/* of the cells; apart, because most acts do without */
static RlChunk *chunks;

/*
 * Size
 */

static void
set_sizes(int max_keys)
{
	npartitions = 1;
	while (npartitions < MAX_PARTITIONS && npartitions * CELLS_PER_PARTITION < max_keys)
		npartitions *= 2;
	/* At least as many as two acts on one key may need. */
	ncells = Max(max_keys, 2 * RL_MAX_WANTED);
	/* Two for three cells at least, if keys with few cells are spread over the partitions. */
	nbuckets = pg_nextpower2_32(ncells / npartitions / 2 * 3);
	nchunks = Max(max_keys, LEAST_CHUNKS);
}

/* Returns the address of an array at *size, or NULL, and adds its bytes to *size. */
static void *
place(char *memory, Size *size, Size n, Size bytes)
{
	void	   *array = memory != NULL ? memory + *size : NULL;

	*size = add_size(*size, CACHELINEALIGN(mul_size(n, bytes)));
	return array;
}

/* Sets the addresses in the memory, which may be NULL.  Returns the bytes. */
static Size
lay_out(char *memory)
{
	Size		size = 0;

	free_memory = place(memory, &size, 1, sizeof(Free));
	partitions = place(memory, &size, npartitions, sizeof(RlPartition));
	buckets = place(memory, &size, npartitions, nbuckets * sizeof(uint32));
	heaps = place(memory, &size, 1, rl_heaps_size(ncells, npartitions));
	if (rl_file_is_wanted())
		return size;
	cells = place(memory, &size, ncells, sizeof(RlCell));
	lives = place(memory, &size, ncells, sizeof(int64));
	chunks = place(memory, &size, nchunks, sizeof(RlChunk));
	return size;
}

static void
need(int max_keys, Size *size, int *nlocks)
{
	set_sizes(max_keys);
	*size = lay_out(NULL);
	*nlocks = npartitions;
}

static void
attach(void *memory, LWLockPadded *my_locks, bool found)
{
	lay_out(memory);
	locks = my_locks;
	rl_heaps_attach(heaps, found);
	if (found)
		return;
	memset(free_memory, 0, sizeof(Free));
	SpinLockInit(&free_memory->mutex);
	memset(buckets, 0, (Size) npartitions * nbuckets * sizeof(uint32));
	for (int i = 0; i < npartitions; i++)
		partitions[i] = (RlPartition) {.soonest = {PG_INT64_MAX, PG_INT64_MAX},.lives = rl_file_first_life()};
}

const RlSharedPart rl_cells_part = {.need = need,.attach = attach};

static int
partition_of(RlKeyHash key_hash)
{
	return (key_hash.low >> 32) & (npartitions - 1);
}

#ifdef USE_ASSERT_CHECKING
static bool
holds(uint64 low)
{
	return LWLockHeldByMeInMode(&locks[partition_of((RlKeyHash) {.low = low})].lock, LW_EXCLUSIVE);
}

static uint32
used_chunks(void)
{
	return free_memory->used_chunks;
}
#endif

/* Sets the sizes of the memory that a file may keep. */
void
rl_cells_sizes(int max_keys, RlSlots *slots)
{
	set_sizes(max_keys);
	*slots = (RlSlots) {.npartitions = npartitions,.ncells = ncells,.nchunks = nchunks};
#ifdef USE_ASSERT_CHECKING
	slots->holds = holds;
	slots->used_chunks = used_chunks;
#endif
}

/* Sets where the memory is that a file keeps. */
void
rl_cells_place(const RlSlots *slots)
{
	cells = slots->cells;
	lives = slots->lives;
	chunks = slots->chunks;
}

/* Sets the fill level of the memory, which is 0 until it is created.  Needs shared memory. */
void
rl_cells_fill(RlCellsFill *fill)
{
	int64		chunks_in_use;

	if (!rl_find_local_store())
	{
		set_sizes(rl_shared_max_keys());
		*fill = (RlCellsFill) {.max_keys = ncells,.max_entries = (int64) nchunks * RL_CHUNK_ENTRIES};
		return;
	}
	SpinLockAcquire(&free_memory->mutex);
	fill->keys = free_memory->used_cells - free_memory->ncells;
	chunks_in_use = (int64) free_memory->used_chunks - free_memory->pool.nspare;
	fill->evicted = free_memory->evicted;
	SpinLockRelease(&free_memory->mutex);
	fill->max_keys = ncells;
	fill->entries = chunks_in_use * RL_CHUNK_ENTRIES;
	fill->max_entries = (int64) nchunks * RL_CHUNK_ENTRIES;
}

/*
 * Locking
 */

static void
view_partition(RlCells *view, int number)
{
	view->number = number;
	view->partition = &partitions[number];
	view->pages = rl_heap_pages(number);
	view->cells = cells;
	view->pool.chunks = chunks;
	view->pool.keep = rl_keeps ? rl_keep_chunk : NULL;
}

/* Returns the head of the key's hash chain in the view's partition. */
static uint32 *
bucket_of(const RlCells *view, RlKeyHash key_hash)
{
	return &buckets[(Size) view->number * nbuckets + (key_hash.low & (nbuckets - 1))];
}

/* Locks the partition of the view's key, and sets view->now. */
void
rl_cells_lock(RlCells *view, LWLockMode mode)
{
	view_partition(view, partition_of(view->key_hash));
	view->bucket = bucket_of(view, view->key_hash);
	view->pool.owner = view->key_hash.low;
	LWLockAcquire(&locks[view->number].lock, mode);
	if (rl_keeps && mode == LW_EXCLUSIVE)
		rl_keep_begin(view->number);
	/* Under the lock, so that acts on a key come in the order of their times. */
	view->now = rl_local_now();
	view->wall = 0;
}

/* Returns the number of slices of all partitions' hash tables. */
int
rl_cells_slices(void)
{
	return npartitions * Max(nbuckets / SLICE, 1);
}

/* Locks the slice's partition, shared.  Its chains are from view->bucket to before the result. */
const uint32 *
rl_cells_lock_slice(RlCells *view, int slice)
{
	uint32		n = Min(nbuckets, SLICE);

	view_partition(view, slice / (nbuckets / n));
	view->bucket = &buckets[(Size) slice * n];
	LWLockAcquire(&locks[view->number].lock, LW_SHARED);
	view->now = rl_local_now();
	view->wall = 0;
	return view->bucket + n;
}

/* Sets the numbers of the partitions of the view's keys, in ascending order.  Returns their count. */
static int
partitions_of_keys(const RlCells *view, int *numbers)
{
	int			n = 0;

	for (int i = 0; i < view->nkeys; i++)
	{
		int			number = partition_of(view->keys[i]);
		int			at = n;

		while (at > 0 && numbers[at - 1] > number)
			at--;
		if (at > 0 && numbers[at - 1] == number)
			continue;
		memmove(&numbers[at + 1], &numbers[at], (n++ - at) * sizeof(int));
		numbers[at] = number;
	}
	return n;
}

/* Locks the partitions of the view's keys, exclusively, and sets view->now. */
void
rl_cells_lock_all(RlCells *view)
{
	int			numbers[RL_MAX_KEYS];
	int			n = partitions_of_keys(view, numbers);

	/* All backends lock in this order, so that there is no deadlock. */
	for (int i = 0; i < n; i++)
		LWLockAcquire(&locks[numbers[i]].lock, LW_EXCLUSIVE);
	if (rl_keeps)
		rl_keep_begin(numbers[0]);
	view->now = rl_local_now();
	view->wall = 0;
}

/* Selects key i of the view for the other functions, and its partition.  Locks nothing. */
void
rl_cells_select(RlCells *view, int i)
{
	view->key_hash = view->keys[i];
	view_partition(view, partition_of(view->key_hash));
	view->bucket = bucket_of(view, view->key_hash);
	view->pool.owner = view->key_hash.low;
}

/* Ends the act on one key, which is not undone then, and begins another one. */
void
rl_cells_end_act(const RlCells *view)
{
	if (!rl_keeps)
		return;
	rl_keep_end(view->now);
	rl_keep_begin(view->number);
}

/* Ends the act, and unlocks what the view has locked.  The spares stay. */
void
rl_cells_unlock(RlCells *view)
{
	int			numbers[RL_MAX_KEYS] = {view->number};
	int			n = view->nkeys > 0 ? partitions_of_keys(view, numbers) : 1;

	if (rl_keeps)
		rl_keep_end(view->now);
	while (n-- > 0)
		LWLockRelease(&locks[numbers[n]].lock);
}

static RlPool *
lock_free(void)
{
	SpinLockAcquire(&free_memory->mutex);
	free_memory->pool.chunks = chunks;
	return &free_memory->pool;
}

static void
add_spare(RlCells *view, uint32 c)
{
	rl_cell_at(view, c)->next = view->spare;
	if (view->nspare++ == 0)
		view->spare_last = c;
	view->spare = c;
}

/* Frees the spares.  Must be called after the last unlock of an act. */
void
rl_cells_release(RlCells *view)
{
	RlPool	   *pool;

	/* What an act has made free is not given away before it has ended. */
	Assert(!rl_keep_in_act());
	if (view->nspare == 0 && view->pool.nspare == 0)
		return;
	pool = lock_free();
	if (view->nspare > 0)
	{
		rl_cell_at(view, view->spare_last)->next = free_memory->cells;
		free_memory->cells = view->spare;
		free_memory->ncells += view->nspare;
	}
	if (view->pool.nspare > 0)
		rl_pool_put(pool, view->pool.spare, view->pool.spare_last, view->pool.nspare);
	SpinLockRelease(&free_memory->mutex);
	view->nspare = 0;
	view->pool.spare = view->pool.spare_last = RL_NO_CHUNK;
	view->pool.nspare = 0;
}

/*
 * Cells
 */

/* Returns the key's cell with this tag, or RL_NO_CELL. */
uint32
rl_cell_find_tag(const RlCells *view, RlStateTag tag)
{
	for (uint32 c = *view->bucket; c != RL_NO_CELL; c = rl_cell_at(view, c)->next)
		if (rl_same_key_hash(rl_cell_at(view, c)->key_hash, view->key_hash) &&
			rl_same_tag(rl_cell_at(view, c)->tag, tag))
			return c;
	return RL_NO_CELL;
}

/* Returns the key's cell of the limit, or of the ban if limit is NULL; or RL_NO_CELL. */
uint32
rl_cell_find(const RlCells *view, const RlLimit *limit)
{
	RlStateTag	ban = {.algorithm = RL_BAN_CELL};

	return rl_cell_find_tag(view, limit != NULL ? rl_state_tag(limit) : ban);
}

static int
heap_of(const RlCell *cell)
{
	for (int i = 0; i < 2 && !rl_cell_has_text(cell); i++)
		if (cell->state.log[i].last != RL_NO_CHUNK || cell->state.log[i].index_last != RL_NO_CHUNK)
			return RL_WITH_CHUNKS;
	return RL_WITHOUT_CHUNKS;
}

/*
 * Sets a cell's end, after its logs.  The act has changed the cell before, or made it.  The heap changes
 * only if the end is earlier, or the heap is another.
 */
void
rl_cell_set_end(RlCells *view, uint32 c, int64 end)
{
	RlCell	   *cell = rl_cell_at(view, c);
	int			heap = heap_of(cell);
	bool		earlier = end < cell->end;

	cell->end = end;
	if (heap != cell->heap)
	{
		rl_heap_remove(view, c);
		rl_heap_add(view, heap, c);
	}
	/* The end in the heap is not later than the cell's was.  To read it takes 3 % of a call. */
	else if (earlier && end < rl_heap_item(view, heap, cell->heap_at)->end)
		rl_heap_sift(view, heap, cell->heap_at, (RlHeapItem) {end, c});
}

/* Empties a cell, so that a recovery finds no state in it, and makes it a spare. */
static void
free_cell(RlCells *view, uint32 c)
{
	memset(rl_cell_change(view, c), 0, sizeof(RlCell));
	add_spare(view, c);
}

/* Removes the cell at a link of a hash chain.  It, its chunks and its further cells become spares. */
void
rl_cell_remove_at(RlCells *view, uint32 *link)
{
	uint32		c = *link;
	RlCell	   *cell = rl_cell_change(view, c);
	uint32		rest = rl_cell_has_text(cell) ? cell->ban.rest : RL_NO_CELL;

	*link = cell->next;
	rl_heap_remove(view, c);
	if (!rl_cell_has_text(cell))
		for (int i = 0; i < 2; i++)
			rl_log_clear(&view->pool, &cell->state.log[i]);
	while (rest != RL_NO_CELL)
	{
		uint32		next = rl_cell_at(view, rest)->ban.rest;

		free_cell(view, rest);
		rest = next;
	}
	free_cell(view, c);
}

/* Does the same for any cell.  It takes a walk over the cells before it in its chain. */
void
rl_cell_remove(RlCells *view, uint32 c)
{
	uint32	   *link = bucket_of(view, rl_cell_at(view, c)->key_hash);

	while (*link != c)
		link = &rl_cell_at(view, *link)->next;
	rl_cell_remove_at(view, link);
}

/* Takes a spare cell, which must exist, and gives it to the key, with this tag.  All else in it is zero. */
static uint32
take_spare(RlCells *view, RlStateTag tag)
{
	uint32		c = view->spare;
	RlCell	   *cell;

	Assert(view->nspare > 0);
	cell = rl_cell_change(view, c);
	view->spare = cell->next;
	view->nspare--;
	memset(cell, 0, sizeof(RlCell));
	cell->key_hash = view->key_hash;
	cell->tag = tag;
	cell->used = true;
	return c;
}

/* Makes a spare cell, which must exist, the key's cell with this tag.  All else in it is zero. */
uint32
rl_cell_make(RlCells *view, RlStateTag tag)
{
	uint32		c = take_spare(view, tag);
	RlCell	   *cell = rl_cell_at(view, c);

	cell->end = PG_INT64_MAX;
	cell->next = *view->bucket;
	*view->bucket = c;
	rl_heap_add(view, RL_WITHOUT_CHUNKS, c);
	lives[c - 1] = ++view->partition->lives;
	return c;
}

/*
 * Returns the number of the cell's life, which began when it was made: no other cell that its key has, or
 * had, has this number.
 */
int64
rl_cell_life(uint32 c)
{
	return lives[c - 1];
}

/* Sets it, for a cell that was found after a crash. */
void
rl_cell_set_life(uint32 c, int64 life)
{
	lives[c - 1] = life;
}

/*
 * Makes spare cells, which must exist, the key's ban or a record, with a text of this length.
 * The caller sets the other members, and the end.
 */
uint32
rl_cell_make_text(RlCells *view, RlStateTag tag, const char *text, int len)
{
	uint32		first = rl_cell_make(view, tag);
	uint32		c = first;

	for (int at = 0;;)
	{
		RlCell	   *cell = rl_cell_at(view, c);
		int			n = Min(len - at, RL_CELL_TEXT);

		memcpy(cell->ban.text, text + at, n);
		at += n;
		if (at == len)
			return first;
		c = cell->ban.rest = take_spare(view, (RlStateTag) {.algorithm = RL_REST_CELL});
	}
}

/*
 * Room
 */

static bool
has_spares(const RlCells *view, uint32 cells_wanted, uint32 chunks_wanted)
{
	return view->nspare >= cells_wanted && view->pool.nspare >= chunks_wanted;
}

static void
take_free(RlCells *view, uint32 cells_wanted, uint32 chunks_wanted)
{
	RlPool	   *pool = lock_free();

	while (view->nspare < cells_wanted)
	{
		uint32		c = free_memory->cells;

		if (c != RL_NO_CELL)
		{
			free_memory->cells = rl_cell_at(view, c)->next;
			free_memory->ncells--;
		}
		else if (free_memory->used_cells < ncells)
			c = ++free_memory->used_cells;
		else
			break;
		add_spare(view, c);
	}
	while (view->pool.nspare < chunks_wanted)
	{
		uint32		c;

		if (pool->nspare > 0)
			c = rl_pool_get(pool);
		else if (free_memory->used_chunks < nchunks)
			c = ++free_memory->used_chunks;
		else
			break;
		rl_pool_put(&view->pool, c, c, 1);
	}
	SpinLockRelease(&free_memory->mutex);
}

/*
 * Makes sure that the view has so many spare cells and chunks.  Returns false if there are too
 * few.  The caller then unlocks the partition, calls rl_cells_evict, and starts again.
 */
bool
rl_cells_set_aside(RlCells *view, uint32 cells_wanted, uint32 chunks_wanted)
{
	if (!has_spares(view, cells_wanted, chunks_wanted))
		take_free(view, cells_wanted, chunks_wanted);
	return has_spares(view, cells_wanted, chunks_wanted);
}

static bool
is_own(const RlCells *view, const RlCell *cell)
{
	for (int i = 0; i < view->nkeys; i++)
		if (rl_same_key_hash(cell->key_hash, view->keys[i]))
			return true;
	return false;
}

static void
count_eviction(void)
{
	SpinLockAcquire(&free_memory->mutex);
	free_memory->evicted++;
	SpinLockRelease(&free_memory->mutex);
}

/*
 * Evicts the cell with the earliest end from a heap of the locked partition, but of the act's
 * keys only one that has ended.  Returns false if that end turns out to be later than "latest", or after
 * CORRECTIONS_AT_ONCE, or behind MAX_DEFERRED cells of these keys; another call may succeed if *progress
 * is true.  Reduces *corrections, the number that the act may still make; at 0 the times in the heap
 * decide.
 */
static bool
evict_first(RlCells *view, int heap, int64 latest, int *corrections, bool *progress)
{
	uint32		victim = RL_NO_CELL;
	uint32		deferred[MAX_DEFERRED];
	int			ndeferred = 0;
	int			n = 0;

	while (n < CORRECTIONS_AT_ONCE && view->partition->n[heap] > 0)
	{
		RlHeapItem	top = *rl_heap_item(view, heap, 0);
		RlCell	   *cell = rl_cell_at(view, top.cell);

		/* All cells are the act's own, or the earliest is in another heap. */
		if (top.end == PG_INT64_MAX || (n > 0 && top.end > latest))
			break;
		if (is_own(view, cell) && cell->end > view->now)
		{
			if (ndeferred == MAX_DEFERRED)
				break;
			top.end = PG_INT64_MAX;
			deferred[ndeferred++] = top.cell;
		}
		else if (cell->end > top.end && *corrections > 0)
		{
			top.end = cell->end;
			(*corrections)--;
			n++;
		}
		else
		{
			victim = top.cell;
			break;
		}
		rl_heap_sift(view, heap, 0, top);
	}
	if (victim != RL_NO_CELL)
	{
		if (rl_cell_at(view, victim)->end > rl_local_now())
			count_eviction();
		rl_cell_remove(view, victim);
	}
	for (int i = 0; i < ndeferred; i++)
	{
		RlCell	   *cell = rl_cell_at(view, deferred[i]);

		rl_heap_sift(view, heap, cell->heap_at, (RlHeapItem) {cell->end, deferred[i]});
	}
	*progress = victim != RL_NO_CELL || n > 0;
	return victim != RL_NO_CELL;
}

static bool
has_own_key(const RlCells *view, int number)
{
	for (int i = 0; i < view->nkeys; i++)
		if (partition_of(view->keys[i]) == number)
			return true;
	return false;
}

/* The heaps in which all cells are of the act's own keys, or so many that others are not searched. */
typedef struct OwnHeaps
{
	int			n;
	int			heaps[2 * RL_MAX_KEYS]; /* 2 * the partition + the heap */
} OwnHeaps;

static bool
has_own_only(const OwnHeaps *own, int number, int heap)
{
	for (int i = 0; i < own->n; i++)
		if (own->heaps[i] == 2 * number + heap)
			return true;
	return false;
}

/*
 * Returns which partition has the cell with the earliest end (with_chunks: of cells with
 * chunks), or -1.  Sets the heap that it is in, and the earliest end in all other heaps.  Leaves
 * out those that have cells of the act's own keys only.
 */
static int
choose_partition(bool with_chunks, const OwnHeaps *own, int *heap, int64 *others)
{
	int			best = -1;
	int64		soonest = PG_INT64_MAX;

	*others = PG_INT64_MAX;
	for (int i = 0; i < npartitions; i++)
		for (int h = with_chunks ? RL_WITH_CHUNKS : RL_WITHOUT_CHUNKS; h <= RL_WITH_CHUNKS; h++)
		{
			int64		end = partitions[i].soonest[h];

			if (end >= *others || has_own_only(own, i, h))
				continue;
			if (end >= soonest)
			{
				*others = end;
				continue;
			}
			*others = soonest;
			soonest = end;
			best = i;
			*heap = h;
		}
	return best;
}

/*
 * Evicts cells of other keys, and cells that have ended, until the view, whose partitions must be
 * unlocked, has so many spare cells and chunks.  Returns false after too many evictions, or if there
 * are no such cells.  Raises an error if the call is cancelled.
 */
bool
rl_cells_evict(RlCells *view, uint32 cells_wanted, uint32 chunks_wanted)
{
	OwnHeaps	own = {.n = 0};
	int			evictions = 0;
	int			corrections = MAX_CORRECTIONS;

	/* The act has this key only. */
	if (view->nkeys == 0)
	{
		view->keys = &view->key_hash;
		view->nkeys = 1;
	}
	while (evictions < MAX_EVICTIONS + (int) cells_wanted)
	{
		bool		progress;
		int			heap = RL_WITHOUT_CHUNKS;
		int			number;
		int64		latest;

		if (has_spares(view, cells_wanted, chunks_wanted))
			return true;
		if (InterruptPending)
		{
			rl_cells_release(view);
			CHECK_FOR_INTERRUPTS();
		}
		number = choose_partition(view->pool.nspare < chunks_wanted, &own, &heap, &latest);
		if (number < 0)
			return false;
		view_partition(view, number);
		LWLockAcquire(&locks[number].lock, LW_EXCLUSIVE);
		if (rl_keeps)
			rl_keep_begin(number);
		evictions += evict_first(view, heap, latest, &corrections, &progress);
		if (rl_keeps)
			rl_keep_end(rl_local_now());
		LWLockRelease(&locks[number].lock);
		if (!progress && has_own_key(view, number))
			own.heaps[own.n++] = 2 * number + heap;
	}
	return false;
}
