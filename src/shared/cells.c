/*
 * cells.c
 *		The local store's memory, which is bounded.
 *
 * A cell is one state of one key: of a limit, or the key's ban.  A key belongs
 * to one of the partitions, each of which has a lock, a hash table, and two heaps
 * by the time from which a cell is of no use: one of cells with chunks of entries
 * and one of the others.  Free cells and free chunks are for all partitions; a
 * spinlock protects these two lists.
 *
 * Most acts move a cell's end away.  The heap does not follow them: its times
 * are never later than the cells' own, and are put right when such a cell comes
 * to the top.  So an act on a key that is there touches no other cell.
 *
 * When the memory is full, the cell nearest to its end is evicted, an ended one
 * before all; for chunks, the nearest of those that have some.  Which partition
 * has it is read without locks, so among cells that end at nearly the same time
 * the choice is not exact.  An act that needs room lets go of its partition's
 * lock first, and locks one partition at a time for one eviction; what is evicted
 * is in its hand until it has what it needs.
 */
#include "postgres.h"

#include <math.h>

#include "miscadmin.h"
#include "port/pg_bitutils.h"
#include "storage/spin.h"

#include "shared/cells.h"

#define CELLS_PER_PARTITION	2048
#define MAX_PARTITIONS		1024
#define LEAST_CHUNKS		65536	/* 8 MB */
#define CHILDREN			8	/* in a heap: each move touches another cell */

/* What one act may do to get room. */
#define MAX_EVICTIONS		64
#define MAX_CORRECTIONS		1024	/* of heaps */
#define CORRECTIONS_AT_ONCE	256 /* under a lock */

/* The two heaps of a partition. */
#define WITHOUT_CHUNKS		0
#define WITH_CHUNKS			1

typedef struct HeapItem
{
	int64		end;			/* never later than the cell's */
	uint32		cell;
} HeapItem;

/* Protected by the partition's lock; but soonest is also read without. */
typedef struct Partition
{
	uint32		n[2];			/* cells in the heaps */
	volatile int64 soonest[2];	/* the first item's end, or PG_INT64_MAX */
} Partition;

/* What is free; protected by the mutex. */
typedef struct Free
{
	slock_t		mutex;
	uint32		cells;			/* a list */
	uint32		untouched_cells;	/* from here on they were never used */
	uint32		untouched_chunks;
	RlPool		pool;			/* without its chunks' address */
} Free;

/* Where the memory is, and each partition's share of it. */
static int	npartitions;
static uint32 ncells;
static uint32 nchunks;
static uint32 heap_size;		/* of both heaps together */
static uint32 nbuckets;
static LWLockPadded *locks;
static Free *free_memory;
static Partition *partitions;
static uint32 *buckets;
static HeapItem *heaps;
static RlCell *cells;
static RlChunk *chunks;

/*
 * Size
 */

/*
 * Keys are spread over the partitions by chance, each with all its states.  So
 * that each partition has room for its share when all cells are in use, it has
 * six standard deviations more than the mean, for keys with RL_MAX_WANTED states.
 */
static void
set_sizes(void)
{
	double		mean;

	npartitions = 1;
	while (npartitions < MAX_PARTITIONS && npartitions * CELLS_PER_PARTITION < rl_local_max_keys)
		npartitions *= 2;
	/* More than one act may need. */
	ncells = Max(rl_local_max_keys, 2 * RL_MAX_WANTED);
	mean = (double) ncells / npartitions;
	heap_size = npartitions == 1 ? ncells : (uint32) ceil(mean + 6 * sqrt(mean * RL_MAX_WANTED));
	nbuckets = pg_nextpower2_32(heap_size);
	nchunks = Max(rl_local_max_keys, LEAST_CHUNKS);
}

static Size
all_partitions(Size bytes)
{
	return CACHELINEALIGN(mul_size(npartitions, bytes));
}

Size
rl_cells_size(void)
{
	Size		size = CACHELINEALIGN(sizeof(Free));

	set_sizes();
	size = add_size(size, all_partitions(sizeof(Partition)));
	size = add_size(size, all_partitions(nbuckets * sizeof(uint32)));
	size = add_size(size, all_partitions(heap_size * sizeof(HeapItem)));
	size = add_size(size, CACHELINEALIGN(mul_size(ncells, sizeof(RlCell))));
	return add_size(size, mul_size(nchunks, sizeof(RlChunk)));
}

int
rl_cells_locks(void)
{
	set_sizes();
	return npartitions;
}

void
rl_cells_attach(void *memory, LWLockPadded *my_locks, bool found)
{
	char	   *p = memory;

	set_sizes();
	locks = my_locks;
	free_memory = (Free *) p;
	p += CACHELINEALIGN(sizeof(Free));
	partitions = (Partition *) p;
	p += all_partitions(sizeof(Partition));
	buckets = (uint32 *) p;
	p += all_partitions(nbuckets * sizeof(uint32));
	heaps = (HeapItem *) p;
	p += all_partitions(heap_size * sizeof(HeapItem));
	cells = (RlCell *) p;
	p += CACHELINEALIGN(mul_size(ncells, sizeof(RlCell)));
	chunks = (RlChunk *) p;
	if (found)
		return;
	memset(free_memory, 0, sizeof(Free));
	SpinLockInit(&free_memory->mutex);
	memset(buckets, 0, all_partitions(nbuckets * sizeof(uint32)));
	for (int i = 0; i < npartitions; i++)
		partitions[i] = (Partition) {{0, 0}, {PG_INT64_MAX, PG_INT64_MAX}};
}

/* How many states are kept, and room for how many entries is in use and there. */
void
rl_cells_fill(int64 *keys, int64 *entries, int64 *max_entries)
{
	int64		used;

	*keys = 0;
	for (int i = 0; i < npartitions; i++)
	{
		LWLockAcquire(&locks[i].lock, LW_SHARED);
		*keys += partitions[i].n[WITHOUT_CHUNKS] + partitions[i].n[WITH_CHUNKS];
		LWLockRelease(&locks[i].lock);
	}
	SpinLockAcquire(&free_memory->mutex);
	used = (int64) free_memory->untouched_chunks - free_memory->pool.nspare;
	SpinLockRelease(&free_memory->mutex);
	*entries = used * RL_CHUNK_ENTRIES;
	*max_entries = (int64) nchunks * RL_CHUNK_ENTRIES;
}

/*
 * Locking
 */

static void
view_partition(RlCells *view, int number)
{
	view->number = number;
	view->partition = &partitions[number];
	view->heap = heaps + (Size) number * heap_size;
	view->cells = cells;
	view->pool.chunks = chunks;
}

/* The chain of a name within its partition. */
static uint32 *
bucket_of(const RlCells *view, RlKeyHash name)
{
	return &buckets[(Size) view->number * nbuckets + (name.hash & (nbuckets - 1))];
}

/* Locks the partition of the view's name, and views it at the time that is then. */
void
rl_cells_lock(RlCells *view, LWLockMode mode)
{
	view_partition(view, (view->name.hash >> 32) & (npartitions - 1));
	view->bucket = bucket_of(view, view->name);
	LWLockAcquire(&locks[view->number].lock, mode);
	/* Under the lock, so that acts on a key come in the order of their times. */
	view->now = rl_local_now();
}

/* Ends what rl_cells_lock began; what is at hand stays there. */
void
rl_cells_unlock(RlCells *view)
{
	LWLockRelease(&locks[view->number].lock);
}

/* Makes what is at hand free for all.  Must follow the last unlock. */
void
rl_cells_release(RlCells *view)
{
	if (view->nspare == 0 && view->pool.nspare == 0)
		return;
	SpinLockAcquire(&free_memory->mutex);
	if (view->nspare > 0)
	{
		rl_cell_at(view, view->spare_last)->next = free_memory->cells;
		free_memory->cells = view->spare;
	}
	if (view->pool.nspare > 0)
	{
		free_memory->pool.chunks = chunks;
		rl_pool_put(&free_memory->pool, view->pool.spare, view->pool.spare_last, view->pool.nspare);
	}
	SpinLockRelease(&free_memory->mutex);
	view->nspare = 0;
	view->pool.spare = view->pool.spare_last = RL_NO_CHUNK;
	view->pool.nspare = 0;
}

/*
 * The heaps, which share an array: one grows from its front, one from its end.
 */

static HeapItem *
item_at(const RlCells *view, int heap, uint32 at)
{
	return &view->heap[heap == WITHOUT_CHUNKS ? at : heap_size - 1 - at];
}

static void
put_in_heap(RlCells *view, int heap, uint32 at, HeapItem item)
{
	*item_at(view, heap, at) = item;
	rl_cell_at(view, item.cell)->heap_at = at;
	if (at == 0)
		view->partition->soonest[heap] = item.end;
}

/* Puts the item where it belongs, starting from a place that is free. */
static void
sift(RlCells *view, int heap, uint32 at, HeapItem item)
{
	uint32		n = view->partition->n[heap];

	while (at > 0 && item_at(view, heap, (at - 1) / CHILDREN)->end > item.end)
	{
		put_in_heap(view, heap, at, *item_at(view, heap, (at - 1) / CHILDREN));
		at = (at - 1) / CHILDREN;
	}
	for (;;)
	{
		uint32		first = CHILDREN * at + 1;
		uint32		least = first;

		for (uint32 child = first + 1; child < Min(first + CHILDREN, n); child++)
			if (item_at(view, heap, child)->end < item_at(view, heap, least)->end)
				least = child;
		if (least >= n || item_at(view, heap, least)->end >= item.end)
			break;
		put_in_heap(view, heap, at, *item_at(view, heap, least));
		at = least;
	}
	put_in_heap(view, heap, at, item);
}

static void
add_to_heap(RlCells *view, int heap, uint32 c)
{
	RlCell	   *cell = rl_cell_at(view, c);

	cell->heap = heap;
	view->partition->n[heap]++;
	sift(view, heap, view->partition->n[heap] - 1, (HeapItem) {cell->end, c});
}

static void
remove_from_heap(RlCells *view, uint32 c)
{
	RlCell	   *cell = rl_cell_at(view, c);
	int			heap = cell->heap;
	uint32		n = --view->partition->n[heap];
	HeapItem	last = *item_at(view, heap, n);

	if (last.cell != c)
		sift(view, heap, cell->heap_at, last);
	else if (n == 0)
		view->partition->soonest[heap] = PG_INT64_MAX;
}

static int
heap_of(const RlCell *cell)
{
	for (int i = 0; i < 2; i++)
		if (cell->log[i].last != RL_NO_CHUNK || cell->log[i].index_last != RL_NO_CHUNK)
			return WITH_CHUNKS;
	return WITHOUT_CHUNKS;
}

/*
 * Sets a cell's end, after its logs were set.  Its heap only has to know of an
 * earlier one.
 */
void
rl_cell_set_end(RlCells *view, uint32 c, int64 end)
{
	RlCell	   *cell = rl_cell_at(view, c);
	int			heap = heap_of(cell);

	cell->end = end;
	if (heap != cell->heap)
	{
		remove_from_heap(view, c);
		add_to_heap(view, heap, c);
	}
	else if (end < item_at(view, heap, cell->heap_at)->end)
		sift(view, heap, cell->heap_at, (HeapItem) {end, c});
}

/*
 * Cells
 */

/* The name's cell of the limit, or without one of the ban, or RL_NO_CELL. */
uint32
rl_cell_find(const RlCells *view, const RlLimit *limit)
{
	for (uint32 c = *view->bucket; c != RL_NO_CELL; c = rl_cell_at(view, c)->next)
		if (rl_same_key_hash(rl_cell_at(view, c)->name, view->name) && rl_cell_is_of(rl_cell_at(view, c), limit))
			return c;
	return RL_NO_CELL;
}

/* Removes a cell of the view's partition; it and its chunks are then at hand. */
void
rl_cell_remove(RlCells *view, uint32 c)
{
	RlCell	   *cell = rl_cell_at(view, c);
	uint32	   *link = bucket_of(view, cell->name);
	RlCursor	end = {0};

	while (*link != c)
		link = &rl_cell_at(view, *link)->next;
	*link = cell->next;
	for (int i = 0; i < 2; i++)
		rl_log_cut(&view->pool, &cell->log[i], &end);
	remove_from_heap(view, c);
	cell->next = view->spare;
	if (view->nspare++ == 0)
		view->spare_last = c;
	view->spare = c;
}

/* Makes a cell of the key out of one at hand. */
uint32
rl_cell_make(RlCells *view, const RlLimit *limit)
{
	uint32		c = view->spare;
	RlCell	   *cell = rl_cell_at(view, c);

	Assert(view->nspare > 0);
	view->spare = cell->next;
	view->nspare--;
	memset(cell, 0, sizeof(RlCell));
	cell->name = view->name;
	cell->algorithm = RL_BAN_CELL;
	cell->start = -1;
	cell->end = PG_INT64_MAX;
	if (limit != NULL)
	{
		cell->algorithm = limit->algorithm;
		cell->period = limit->period;
		cell->step = limit->step;
		cell->from_first = limit->from_first;
	}
	cell->next = *view->bucket;
	*view->bucket = c;
	add_to_heap(view, WITHOUT_CHUNKS, c);
	return c;
}

/*
 * Room
 */

/* True if the view's partition has no room for so many cells more. */
static bool
is_crowded(const RlCells *view, uint32 more)
{
	return view->partition->n[WITHOUT_CHUNKS] + view->partition->n[WITH_CHUNKS] + more > heap_size;
}

/*
 * Takes what is free until so many cells and chunks are at hand.  Returns false
 * if there are not enough, or no room for cells in the locked partition: then
 * the caller unlocks it, calls rl_cells_evict, and begins again.
 */
bool
rl_cells_reserve(RlCells *view, uint32 cells_wanted, uint32 chunks_wanted)
{
	RlPool	   *pool = &free_memory->pool;

	if (view->nspare >= cells_wanted && view->pool.nspare >= chunks_wanted)
		return !is_crowded(view, cells_wanted);
	SpinLockAcquire(&free_memory->mutex);
	while (view->nspare < cells_wanted)
	{
		uint32		c = free_memory->cells;

		if (c != RL_NO_CELL)
			free_memory->cells = rl_cell_at(view, c)->next;
		else if (free_memory->untouched_cells < ncells)
			c = ++free_memory->untouched_cells;
		else
			break;
		rl_cell_at(view, c)->next = view->spare;
		if (view->nspare++ == 0)
			view->spare_last = c;
		view->spare = c;
	}
	pool->chunks = chunks;
	while (view->pool.nspare < chunks_wanted)
	{
		uint32		c;

		if (pool->nspare > 0)
			c = rl_pool_get(pool);
		else if (free_memory->untouched_chunks < nchunks)
			c = ++free_memory->untouched_chunks;
		else
			break;
		rl_pool_put(&view->pool, c, c, 1);
	}
	SpinLockRelease(&free_memory->mutex);
	return view->nspare >= cells_wanted && view->pool.nspare >= chunks_wanted &&
		!is_crowded(view, cells_wanted);
}

/*
 * Evicts the first cell of a heap that is not of the spared name, from the
 * view's partition, which is locked; unless its end turns out to be later than
 * "latest", or only after CORRECTIONS_AT_ONCE.  *progress tells whether the heap
 * has changed, so that another call may succeed.  *corrections, which is reduced,
 * is how many the act may still make; without any, the heap's order counts.
 */
static bool
evict_first(RlCells *view, int heap, RlKeyHash spared, int64 latest, int *corrections, bool *progress)
{
	uint32		victim = RL_NO_CELL;
	bool		deferred = false;
	int			n = 0;

	while (n < CORRECTIONS_AT_ONCE && victim == RL_NO_CELL && view->partition->n[heap] > 0)
	{
		HeapItem	top = *item_at(view, heap, 0);
		RlCell	   *cell = rl_cell_at(view, top.cell);

		/* All are spared, or another heap's come first. */
		if (top.end == PG_INT64_MAX || (n > 0 && top.end > latest))
			break;
		if (rl_same_key_hash(cell->name, spared))
		{
			top.end = PG_INT64_MAX;
			deferred = true;
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
		sift(view, heap, 0, top);
	}
	if (victim != RL_NO_CELL)
		rl_cell_remove(view, victim);
	if (deferred)
		for (uint32 c = *bucket_of(view, spared); c != RL_NO_CELL; c = rl_cell_at(view, c)->next)
		{
			RlCell	   *cell = rl_cell_at(view, c);

			if (cell->heap == heap && rl_same_key_hash(cell->name, spared))
				sift(view, heap, cell->heap_at, (HeapItem) {cell->end, c});
		}
	*progress = victim != RL_NO_CELL || n > 0;
	return victim != RL_NO_CELL;
}

/*
 * Returns the partition, of n from first on, that has the cell nearest to its
 * end, and sets the heap, and the end of the nearest in any other heap; -1 if
 * there is none.  The heaps of the own partition that have cells of the own key
 * only do not count.
 */
static int
choose_partition(int first, int n, bool with_chunks, int own, const bool *only_own, int *heap,
				 int64 *others)
{
	int			best = -1;
	int64		soonest = PG_INT64_MAX;

	*others = PG_INT64_MAX;
	for (int i = first; i < first + n; i++)
		for (int h = with_chunks ? WITH_CHUNKS : WITHOUT_CHUNKS; h <= WITH_CHUNKS; h++)
		{
			int64		end = partitions[i].soonest[h];

			if (end >= *others || (i == own && only_own[h]))
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
 * Evicts cells of other keys until so many cells and chunks are at hand, and
 * where they are to go there is room; no lock is held before and after.  Returns
 * false if that takes too much, or if there are none of other keys.
 */
bool
rl_cells_evict(RlCells *view, uint32 cells_wanted, uint32 chunks_wanted)
{
	int			own = (view->name.hash >> 32) & (npartitions - 1);
	bool		only_own[2] = {false, false};
	int			evictions = 0;
	int			corrections = MAX_CORRECTIONS;

	while (evictions < MAX_EVICTIONS)
	{
		bool		lacks_chunks = view->pool.nspare < chunks_wanted;
		bool		crowded;
		bool		progress;
		int			heap = WITHOUT_CHUNKS;
		int			number;
		int64		latest;

		view_partition(view, own);
		crowded = is_crowded(view, cells_wanted);
		if (!lacks_chunks && !crowded && view->nspare >= cells_wanted)
			return true;
		if (InterruptPending)
		{
			rl_cells_release(view);
			CHECK_FOR_INTERRUPTS();
		}
		if (crowded)
			number = choose_partition(own, 1, false, own, only_own, &heap, &latest);
		else
			number = choose_partition(0, npartitions, lacks_chunks, own, only_own, &heap, &latest);
		if (number < 0)
			return false;
		view_partition(view, number);
		LWLockAcquire(&locks[number].lock, LW_EXCLUSIVE);
		evictions += evict_first(view, heap, view->name, latest, &corrections, &progress);
		LWLockRelease(&locks[number].lock);
		if (!progress && number == own)
			only_own[heap] = true;
	}
	return false;
}
