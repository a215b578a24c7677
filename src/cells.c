/*
 * cells.c
 *		The local store's memory, which is bounded.
 *
 * A cell is one state of one key: of a limit, or the key's ban.  Cells lie in
 * partitions, all of one key in the same, each with a lock, a hash table and a
 * heap by the time from which a cell is of no use.  When a partition is full
 * the cell nearest to its end makes room, an ended one before all.
 *
 * Most acts move a cell's end away.  The heap does not follow them: its times
 * are never later than the cells' own, and are put right when such a cell comes
 * to the top.  So an act on a key that is there touches no other cell.
 *
 * The entries of windows and logs are rings in an area of their own, of fixed
 * size too.
 */
#include "postgres.h"

#include "port/pg_bitutils.h"
#include "storage/ipc.h"
#include "utils/memutils.h"

#include "cells.h"

#define CELLS_PER_PARTITION	2048
#define MAX_PARTITIONS		1024
#define ENTRY_BYTES_PER_KEY	128
#define LEAST_ENTRY_BYTES	(8 * 1024 * 1024)
#define LEAST_RING			4
#define CHILDREN			8	/* in the heap: each move touches another cell */

typedef struct HeapItem
{
	int64		end;			/* never later than the cell's */
	uint32		cell;
} HeapItem;

typedef struct Partition
{
	uint32		untouched;		/* cells from here on were never used */
	uint32		free;			/* the first of those that are free again */
	uint32		n;				/* cells in use, and in the heap */
} Partition;

/* Where the memory is, and each partition's share of it. */
static int	npartitions;
static uint32 ncells;
static uint32 nbuckets;
static LWLockPadded *locks;
static Partition *partitions;
static uint32 *buckets;
static HeapItem *heaps;
static RlCell *cells;
static void *entry_area;

/*
 * Size
 */

static void
set_sizes(void)
{
	npartitions = 1;
	while (npartitions < MAX_PARTITIONS && npartitions * CELLS_PER_PARTITION < rl_local_max_keys)
		npartitions *= 2;
	/* More than one act may need. */
	ncells = Max(rl_local_max_keys / npartitions, 2 * RL_MAX_WANTED);
	nbuckets = pg_nextpower2_32(ncells);
}

static Size
entry_bytes(void)
{
	return MAXALIGN(Max((Size) rl_local_max_keys * ENTRY_BYTES_PER_KEY, LEAST_ENTRY_BYTES));
}

static Size
all_partitions(Size bytes)
{
	return CACHELINEALIGN(mul_size(npartitions, bytes));
}

Size
rl_local_size(void)
{
	Size		size = entry_bytes();

	set_sizes();
	size = add_size(size, all_partitions(sizeof(Partition)));
	size = add_size(size, all_partitions(nbuckets * sizeof(uint32)));
	size = add_size(size, all_partitions(ncells * sizeof(HeapItem)));
	return add_size(size, all_partitions(ncells * sizeof(RlCell)));
}

int
rl_local_locks(void)
{
	set_sizes();
	return npartitions;
}

void
rl_local_attach(void *memory, LWLockPadded *my_locks, bool found)
{
	char	   *p = memory;
	dsa_area   *area;

	set_sizes();
	locks = my_locks;
	entry_area = p;
	p += entry_bytes();
	partitions = (Partition *) p;
	p += all_partitions(sizeof(Partition));
	buckets = (uint32 *) p;
	p += all_partitions(nbuckets * sizeof(uint32));
	heaps = (HeapItem *) p;
	p += all_partitions(ncells * sizeof(HeapItem));
	cells = (RlCell *) p;
	if (found)
		return;
	memset(partitions, 0, all_partitions(sizeof(Partition)));
	memset(buckets, 0, all_partitions(nbuckets * sizeof(uint32)));
	area = dsa_create_in_place(entry_area, entry_bytes(), locks->lock.tranche, NULL);
	dsa_pin(area);
	/* Of this size and no more. */
	dsa_set_size_limit(area, entry_bytes());
	dsa_detach(area);
}

/* The area that rings are in, which each process attaches to at first use. */
dsa_area *
rl_ring_area(void)
{
	static dsa_area *area = NULL;

	if (area == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);

		area = dsa_attach_in_place(entry_area, NULL);
		dsa_pin_mapping(area);
		on_shmem_exit(dsa_on_shmem_exit_release_in_place, PointerGetDatum(entry_area));
		MemoryContextSwitchTo(old);
	}
	return area;
}

static void
partition_view(RlCells *view, int number)
{
	view->number = number;
	view->partition = &partitions[number];
	view->heap = heaps + (Size) number * ncells;
	view->cells = cells + (Size) number * ncells;
}

/* The chain of a name within its partition. */
static uint32 *
bucket_of(const RlCells *view, RlName name)
{
	return &buckets[(Size) view->number * nbuckets + (name.hash & (nbuckets - 1))];
}

/* Locks the partition of a name, and views it at the time that is then. */
void
rl_cells_lock(RlCells *view, RlName name, LWLockMode mode)
{
	view->name = name;
	partition_view(view, (view->name.hash >> 32) & (npartitions - 1));
	view->bucket = bucket_of(view, view->name);
	(void) rl_ring_area();
	LWLockAcquire(&locks[view->number].lock, mode);
	/* Under the lock, so that acts on a key come in the order of their times. */
	view->now = rl_local_now();
}

/* Ends what rl_cells_lock began. */
void
rl_cells_unlock(const RlCells *view)
{
	LWLockRelease(&locks[view->number].lock);
}

/*
 * The heap
 */

static void
put_in_heap(RlCells *view, uint32 at, HeapItem item)
{
	view->heap[at] = item;
	rl_cell_at(view, item.cell)->heap_at = at;
}

/* Puts the item where it belongs, starting from a place that is free. */
static void
sift(RlCells *view, uint32 at, HeapItem item)
{
	HeapItem   *heap = view->heap;
	uint32		n = view->partition->n;

	while (at > 0 && heap[(at - 1) / CHILDREN].end > item.end)
	{
		put_in_heap(view, at, heap[(at - 1) / CHILDREN]);
		at = (at - 1) / CHILDREN;
	}
	for (;;)
	{
		uint32		first = CHILDREN * at + 1;
		uint32		least = first;

		for (uint32 child = first + 1; child < Min(first + CHILDREN, n); child++)
			if (heap[child].end < heap[least].end)
				least = child;
		if (least >= n || heap[least].end >= item.end)
			break;
		put_in_heap(view, at, heap[least]);
		at = least;
	}
	put_in_heap(view, at, item);
}

/* Sets a cell's end; the heap only has to know of an earlier one. */
void
rl_cell_set_end(RlCells *view, uint32 c, int64 end)
{
	uint32		at = rl_cell_at(view, c)->heap_at;

	rl_cell_at(view, c)->end = end;
	if (end < view->heap[at].end)
		sift(view, at, (HeapItem) {end, c});
}

/*
 * Cells
 */

/* Forgets a cell. */
void
rl_cell_remove(RlCells *view, uint32 c)
{
	RlCell	   *cell = rl_cell_at(view, c);
	uint32	   *link = bucket_of(view, cell->name);
	uint32		at = cell->heap_at;
	HeapItem	last;

	while (*link != c)
		link = &rl_cell_at(view, *link)->next;
	*link = cell->next;
	if (DsaPointerIsValid(cell->entries))
		dsa_free(rl_ring_area(), cell->entries);
	cell->next = view->partition->free;
	view->partition->free = c;
	last = view->heap[--view->partition->n];
	if (last.cell != c)
		sift(view, at, last);
}

/* The cell nearest to its end, of which the heap then knows the true one. */
static uint32
nearest_to_end(RlCells *view)
{
	for (;;)
	{
		HeapItem	top = view->heap[0];

		if (rl_cell_at(view, top.cell)->end <= top.end)
			return top.cell;
		top.end = rl_cell_at(view, top.cell)->end;
		sift(view, 0, top);
	}
}

/* How many cells can be made before one must go. */
uint32
rl_cells_free(const RlCells *view)
{
	return ncells - view->partition->n;
}

/* The name's cell of the limit, or without one of the ban, or RL_NO_CELL. */
uint32
rl_cell_find(const RlCells *view, const RlLimit *limit)
{
	for (uint32 c = *view->bucket; c != RL_NO_CELL; c = rl_cell_at(view, c)->next)
		if (rl_same_name(rl_cell_at(view, c)->name, view->name) && rl_cell_is_of(rl_cell_at(view, c), limit))
			return c;
	return RL_NO_CELL;
}

/* Makes sure that so many cells are free, besides n that are to stay. */
void
rl_cells_reserve(RlCells *view, uint32 wanted, const uint32 *stay, int n)
{
	int64		ends[RL_MAX_WANTED];

	if (rl_cells_free(view) >= wanted)
		return;
	for (int i = 0; i < n; i++)
	{
		ends[i] = rl_cell_at(view, stay[i])->end;
		rl_cell_at(view, stay[i])->end = PG_INT64_MAX;
	}
	while (rl_cells_free(view) < wanted)
		rl_cell_remove(view, nearest_to_end(view));
	for (int i = 0; i < n; i++)
		rl_cell_set_end(view, stay[i], ends[i]);
}

/* Makes a cell of the key, for which there is room. */
uint32
rl_cell_make(RlCells *view, const RlLimit *limit)
{
	uint32		c = view->partition->free;
	RlCell	   *cell;

	if (c != RL_NO_CELL)
		view->partition->free = rl_cell_at(view, c)->next;
	else
		c = ++view->partition->untouched;
	cell = rl_cell_at(view, c);
	memset(cell, 0, sizeof(RlCell));
	cell->name = view->name;
	cell->algorithm = RL_BAN_CELL;
	cell->start = -1;
	cell->entries = InvalidDsaPointer;
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
	sift(view, view->partition->n++, (HeapItem) {cell->end, c});
	return c;
}

/*
 * Rings
 */

/* Forgets the cell with a ring that is nearest to its end, but none of the key. */
static bool
evict_ring(RlCells *view)
{
	uint32		best = RL_NO_CELL;

	for (uint32 i = 0; i < view->partition->n; i++)
	{
		uint32		c = view->heap[i].cell;

		if (DsaPointerIsValid(rl_cell_at(view, c)->entries) &&
			!rl_same_name(rl_cell_at(view, c)->name, view->name) &&
			(best == RL_NO_CELL || rl_cell_at(view, c)->end < rl_cell_at(view, best)->end))
			best = c;
	}
	if (best != RL_NO_CELL)
		rl_cell_remove(view, best);
	return best != RL_NO_CELL;
}

/* The same in another partition that nobody uses now. */
static bool
evict_ring_elsewhere(const RlCells *view)
{
	for (int i = 1; i < npartitions; i++)
	{
		RlCells		other = *view;
		bool		evicted;

		partition_view(&other, (view->number + i) & (npartitions - 1));
		if (!LWLockConditionalAcquire(&locks[other.number].lock, LW_EXCLUSIVE))
			continue;
		evicted = evict_ring(&other);
		rl_cells_unlock(&other);
		if (evicted)
			return true;
	}
	return false;
}

/*
 * Gives the state a ring with room for one more entry, a copy of the cell's.
 * Returns it, or an invalid pointer if there is no memory.
 */
dsa_pointer
rl_ring_make(RlCells *view, RlState *state)
{
	int			size = Max(LEAST_RING, 2 * state->size);
	dsa_pointer ring;

	do
		ring = dsa_allocate_extended(rl_ring_area(), size * sizeof(RlEntry), DSA_ALLOC_NO_OOM);
	while (!DsaPointerIsValid(ring) && (evict_ring(view) || evict_ring_elsewhere(view)));
	if (DsaPointerIsValid(ring))
		rl_move_entries(state, dsa_get_address(rl_ring_area(), ring), size);
	return ring;
}

/* How many states are kept now. */
int64
rl_local_keys(void)
{
	int64		n = 0;

	for (int i = 0; i < npartitions; i++)
	{
		LWLockAcquire(&locks[i].lock, LW_SHARED);
		n += partitions[i].n;
		LWLockRelease(&locks[i].lock);
	}
	return n;
}
