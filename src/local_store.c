/*
 * local_store.c
 *		The store in this server's shared memory: states by the same algorithms
 *		as in Redis, and bounded memory.
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
#include "utils/dsa.h"
#include "utils/memutils.h"

#include "charges.h"

#define CELLS_PER_PARTITION	2048
#define MAX_PARTITIONS		1024
#define ENTRY_BYTES_PER_KEY	128
#define LEAST_ENTRY_BYTES	(8 * 1024 * 1024)
#define LEAST_RING			4

#define BAN					255 /* in place of an algorithm */
#define NO_CELL				0	/* cells are numbered from 1 */

/* The cells that one act may need: its limits' and the ban. */
#define MAX_WANTED			(RL_MAX_LIMITS + 1)

typedef struct Cell
{
	RlName		name;
	int64		period;			/* what tells limits' states apart */
	int64		step;
	uint8		algorithm;
	bool		from_first;
	int			size;			/* as in RlState, also the next seven */
	int			first;
	int			n;
	dsa_pointer entries;
	int64		start;			/* of a ban: its end */
	int64		used;
	int64		refused_since;
	int64		refused;
	int64		end;			/* when it is of no use any more */
	uint32		next;			/* in its hash chain, or among the free */
	uint32		heap_at;
} Cell;

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
static Cell *cells;
static void *entry_area;

/* An act's view of its partition, which is locked. */
typedef struct View
{
	int			number;
	Partition  *partition;
	uint32	   *bucket;			/* of the key */
	HeapItem   *heap;
	RlName		name;
	int64		now;
} View;

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
	ncells = Max(rl_local_max_keys / npartitions, 2 * MAX_WANTED);
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
	return add_size(size, all_partitions(ncells * sizeof(Cell)));
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
	cells = (Cell *) p;
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
static dsa_area *
ring_area(void)
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
partition_view(View *view, int number)
{
	view->number = number;
	view->partition = &partitions[number];
	view->heap = heaps + (Size) number * ncells;
}

static Cell *
cell_at(const View *view, uint32 c)
{
	return &cells[(Size) view->number * ncells + c - 1];
}

/* The chain of a name within its partition. */
static uint32 *
bucket_of(const View *view, RlName name)
{
	return &buckets[(Size) view->number * nbuckets + (name.hash & (nbuckets - 1))];
}

static void
lock_name(View *view, RlName name, LWLockMode mode)
{
	view->name = name;
	partition_view(view, (view->name.hash >> 32) & (npartitions - 1));
	view->bucket = bucket_of(view, view->name);
	(void) ring_area();
	LWLockAcquire(&locks[view->number].lock, mode);
	/* Under the lock, so that acts on a key come in the order of their times. */
	view->now = rl_local_now();
}

static void
lock_key(View *view, const RlKey *key, LWLockMode mode)
{
	lock_name(view, rl_name(key), mode);
}

static void
unlock(const View *view)
{
	LWLockRelease(&locks[view->number].lock);
}

/*
 * The heap
 */

static void
put_in_heap(View *view, uint32 at, HeapItem item)
{
	view->heap[at] = item;
	cell_at(view, item.cell)->heap_at = at;
}

/* Puts the item where it belongs, starting from a place that is free. */
static void
sift(View *view, uint32 at, HeapItem item)
{
	HeapItem   *heap = view->heap;
	uint32		n = view->partition->n;

	while (at > 0 && heap[(at - 1) / 2].end > item.end)
	{
		put_in_heap(view, at, heap[(at - 1) / 2]);
		at = (at - 1) / 2;
	}
	for (;;)
	{
		uint32		child = 2 * at + 1;

		if (child + 1 < n && heap[child + 1].end < heap[child].end)
			child++;
		if (child >= n || heap[child].end >= item.end)
			break;
		put_in_heap(view, at, heap[child]);
		at = child;
	}
	put_in_heap(view, at, item);
}

/* Sets a cell's end; the heap only has to know of an earlier one. */
static void
set_end(View *view, uint32 c, int64 end)
{
	uint32		at = cell_at(view, c)->heap_at;

	cell_at(view, c)->end = end;
	if (end < view->heap[at].end)
		sift(view, at, (HeapItem) {end, c});
}

/*
 * Cells
 */

/* Forgets a cell. */
static void
remove_cell(View *view, uint32 c)
{
	Cell	   *cell = cell_at(view, c);
	uint32	   *link = bucket_of(view, cell->name);
	uint32		at = cell->heap_at;
	HeapItem	last;

	while (*link != c)
		link = &cell_at(view, *link)->next;
	*link = cell->next;
	if (DsaPointerIsValid(cell->entries))
		dsa_free(ring_area(), cell->entries);
	cell->next = view->partition->free;
	view->partition->free = c;
	last = view->heap[--view->partition->n];
	if (last.cell != c)
		sift(view, at, last);
}

/* The cell nearest to its end, of which the heap then knows the true one. */
static uint32
nearest_to_end(View *view)
{
	for (;;)
	{
		HeapItem	top = view->heap[0];

		if (cell_at(view, top.cell)->end <= top.end)
			return top.cell;
		top.end = cell_at(view, top.cell)->end;
		sift(view, 0, top);
	}
}

static uint32
free_cells(const View *view)
{
	return ncells - view->partition->n;
}

/* True if the cell is the limit's; without a limit, the ban. */
static bool
is_of(const Cell *cell, const RlLimit *limit)
{
	if (limit == NULL)
		return cell->algorithm == BAN;
	return cell->algorithm == limit->algorithm && cell->period == limit->period &&
		cell->step == limit->step && cell->from_first == limit->from_first;
}

static uint32
find_cell(const View *view, const RlLimit *limit)
{
	for (uint32 c = *view->bucket; c != NO_CELL; c = cell_at(view, c)->next)
		if (rl_same_name(cell_at(view, c)->name, view->name) && is_of(cell_at(view, c), limit))
			return c;
	return NO_CELL;
}

/* Makes sure that so many cells are free, besides n that are to stay. */
static void
reserve(View *view, uint32 wanted, const uint32 *stay, int n)
{
	int64		ends[MAX_WANTED];

	if (free_cells(view) >= wanted)
		return;
	for (int i = 0; i < n; i++)
	{
		ends[i] = cell_at(view, stay[i])->end;
		cell_at(view, stay[i])->end = PG_INT64_MAX;
	}
	while (free_cells(view) < wanted)
		remove_cell(view, nearest_to_end(view));
	for (int i = 0; i < n; i++)
		set_end(view, stay[i], ends[i]);
}

/* Makes a cell of the key, for which there is room. */
static uint32
make_cell(View *view, const RlLimit *limit)
{
	uint32		c = view->partition->free;
	Cell	   *cell;

	if (c != NO_CELL)
		view->partition->free = cell_at(view, c)->next;
	else
		c = ++view->partition->untouched;
	cell = cell_at(view, c);
	memset(cell, 0, sizeof(Cell));
	cell->name = view->name;
	cell->algorithm = BAN;
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
evict_ring(View *view)
{
	uint32		best = NO_CELL;

	for (uint32 i = 0; i < view->partition->n; i++)
	{
		uint32		c = view->heap[i].cell;

		if (DsaPointerIsValid(cell_at(view, c)->entries) &&
			!rl_same_name(cell_at(view, c)->name, view->name) &&
			(best == NO_CELL || cell_at(view, c)->end < cell_at(view, best)->end))
			best = c;
	}
	if (best != NO_CELL)
		remove_cell(view, best);
	return best != NO_CELL;
}

/* The same in another partition that nobody uses now. */
static bool
evict_ring_elsewhere(const View *view)
{
	for (int i = 1; i < npartitions; i++)
	{
		View		other = *view;
		bool		evicted;

		partition_view(&other, (view->number + i) & (npartitions - 1));
		if (!LWLockConditionalAcquire(&locks[other.number].lock, LW_EXCLUSIVE))
			continue;
		evicted = evict_ring(&other);
		unlock(&other);
		if (evicted)
			return true;
	}
	return false;
}

/*
 * Gives the state a ring with room for one more entry, a copy of the cell's.
 * Returns it, or an invalid pointer if there is no memory.
 */
static dsa_pointer
make_ring(View *view, RlState *state)
{
	int			size = Max(LEAST_RING, 2 * state->size);
	dsa_pointer ring;

	do
		ring = dsa_allocate_extended(ring_area(), size * sizeof(RlEntry), DSA_ALLOC_NO_OOM);
	while (!DsaPointerIsValid(ring) && (evict_ring(view) || evict_ring_elsewhere(view)));
	if (DsaPointerIsValid(ring))
		rl_move_entries(state, dsa_get_address(ring_area(), ring), size);
	return ring;
}

/*
 * States
 */

/* What a cell keeps, as a state; of no cell, that of a limit never used. */
static void
load_state(const View *view, uint32 c, RlState *state)
{
	const Cell *cell;

	memset(state, 0, sizeof(*state));
	state->start = -1;
	if (c == NO_CELL)
		return;
	cell = cell_at(view, c);
	state->start = cell->start;
	state->used = cell->used;
	state->refused_since = cell->refused_since;
	state->refused = cell->refused;
	if (DsaPointerIsValid(cell->entries))
	{
		state->entries = dsa_get_address(ring_area(), cell->entries);
		state->size = cell->size;
		state->first = cell->first;
		state->n = cell->n;
	}
}

/* True if a state that was changed is one that Redis would have no field for. */
static bool
is_empty(const RlLimit *limit, const Cell *cell)
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
save_state(View *view, uint32 c, const RlLimit *limit, const RlState *state, dsa_pointer ring)
{
	Cell	   *cell = c == NO_CELL ? NULL : cell_at(view, c);
	RlState		kept;

	if (!state->changed)
	{
		if (DsaPointerIsValid(ring))
			dsa_free(ring_area(), ring);
		if (state->refused == (cell ? cell->refused : 0) &&
			state->refused_since == (cell ? cell->refused_since : 0))
			return;
	}
	if (cell == NULL)
	{
		c = make_cell(view, limit);
		cell = cell_at(view, c);
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
				dsa_free(ring_area(), cell->entries);
			cell->entries = ring;
		}
		cell->size = state->size;
		cell->first = state->first;
		cell->n = state->n;
		if (is_empty(limit, cell))
		{
			remove_cell(view, c);
			return;
		}
	}
	if (!state->changed)
	{
		load_state(view, c, &kept);
		state = &kept;
	}
	set_end(view, c, rl_state_end(limit, state));
}

static void
set_ban(View *view, uint32 c, int64 until)
{
	if (c == NO_CELL)
		c = make_cell(view, NULL);
	cell_at(view, c)->start = until;
	set_end(view, c, until);
}

/* The key's cells of the limits, and their states. */
static void
load_states(const View *view, const RlLimits *limits, uint32 *found, RlState *states)
{
	for (int i = 0; i < limits->n; i++)
	{
		found[i] = find_cell(view, &limits->limit[i]);
		load_state(view, found[i], &states[i]);
	}
}

/*
 * Makes room for whatever an act may write: for cells, one of a ban among
 * them, and for entries.  Returns false with the error set.
 */
static bool
prepare(View *view, const RlLimits *limits, int64 quota, const uint32 *found, uint32 ban,
		RlState *states, dsa_pointer *rings, RlError *error)
{
	uint32		stay[MAX_WANTED];
	int			n = 0;
	int			missing = 0;

	for (int i = 0; i < limits->n; i++)
	{
		if (found[i] != NO_CELL)
			stay[n++] = found[i];
		else
			missing++;
	}
	for (int i = 0; i < limits->n && ban == NO_CELL; i++)
		if (limits->limit[i].ban > 0)
		{
			missing++;
			break;
		}
	if (ban != NO_CELL)
		stay[n++] = ban;
	reserve(view, missing, stay, n);

	for (int i = 0; i < limits->n; i++)
	{
		if (rl_entries_wanted(&limits->limit[i], &states[i], view->now, quota) <= states[i].size)
			continue;
		rings[i] = make_ring(view, &states[i]);
		if (DsaPointerIsValid(rings[i]))
			continue;
		while (i-- > 0)
			if (DsaPointerIsValid(rings[i]))
				dsa_free(ring_area(), rings[i]);
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
take_throttle(View *view, const RlLimit *limit, int64 quota, RlDecision *decision)
{
	uint32		c = NO_CELL;
	int64		now = view->now * 1000;
	int64		backlog = 0;

	for (uint32 i = *view->bucket; i != NO_CELL; i = cell_at(view, i)->next)
	{
		if (!rl_same_name(cell_at(view, i)->name, view->name))
			continue;
		if (is_of(cell_at(view, i), limit))
			c = i;
		else if (is_of(cell_at(view, i), NULL))
			return false;
	}
	if (c != NO_CELL && cell_at(view, c)->refused > 0)
		return false;
	if (c != NO_CELL)
		backlog = Max(cell_at(view, c)->start - now, 0);
	else if (free_cells(view) == 0)
		return false;
	backlog = rl_throttle_act(limit, backlog, quota, decision);
	if (!decision->allowed || quota == 0)
		return true;
	if (c == NO_CELL)
		c = make_cell(view, limit);
	cell_at(view, c)->start = now + backlog;
	set_end(view, c, view->now + backlog / 1000 + 1);
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
	View		view;

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
		unlock(&view);
		return true;
	}
	load_states(&view, limits, found, states);
	for (int i = 0; i < limits->n; i++)
		rings[i] = InvalidDsaPointer;
	ban = find_cell(&view, NULL);
	banned_until = old_ban = ban == NO_CELL ? 0 : cell_at(&view, ban)->start;
	if (how != RL_PEEK && quota > 0 && banned_until <= view.now &&
		!prepare(&view, limits, quota, found, ban, states, rings, error))
	{
		unlock(&view);
		return false;
	}
	rl_act(limits, states, &banned_until, view.now, quota, how != RL_PEEK, decisions);
	for (int i = 0; how != RL_PEEK && i < limits->n; i++)
		save_state(&view, found[i], &limits->limit[i], &states[i], rings[i]);
	if (banned_until != old_ban)
		set_ban(&view, ban, banned_until);
	unlock(&view);
	return true;
}

static bool
local_refund(const RlKey *key, const RlLimits *limits, int64 quota, RlError *error pg_attribute_unused())
{
	RlState		states[RL_MAX_LIMITS];
	uint32		found[RL_MAX_LIMITS];
	View		view;

	lock_key(&view, key, LW_EXCLUSIVE);
	load_states(&view, limits, found, states);
	rl_give_back(limits, states, view.now, quota);
	for (int i = 0; i < limits->n; i++)
		save_state(&view, found[i], &limits->limit[i], &states[i], InvalidDsaPointer);
	unlock(&view);
	return true;
}

/* A cell that has ended counts as gone, but not for a test's clock. */
static bool
is_there(const View *view, uint32 c)
{
	return rl_debug_now[0] != '\0' || cell_at(view, c)->end > view->now;
}

/* Forgets the key's cell of the limit, or its ban; tells whether it was there. */
static bool
forget(View *view, const RlLimit *limit)
{
	uint32		c = find_cell(view, limit);
	bool		found = c != NO_CELL && is_there(view, c);

	if (c != NO_CELL)
		remove_cell(view, c);
	return found;
}

static bool
local_reset(const RlKey *key, const RlLimits *limits, bool *found, RlError *error pg_attribute_unused())
{
	View		view;
	uint32		next;

	*found = false;
	lock_key(&view, key, LW_EXCLUSIVE);
	for (int i = 0; limits && i < limits->n; i++)
		*found |= forget(&view, &limits->limit[i]);
	for (uint32 c = limits ? NO_CELL : *view.bucket; c != NO_CELL; c = next)
	{
		next = cell_at(&view, c)->next;
		if (!rl_same_name(cell_at(&view, c)->name, view.name))
			continue;
		*found |= is_there(&view, c);
		remove_cell(&view, c);
	}
	unlock(&view);
	return true;
}

static bool
local_ban(const RlKey *key, int64 duration, RlError *error pg_attribute_unused())
{
	View		view;
	uint32		ban;

	lock_key(&view, key, LW_EXCLUSIVE);
	ban = find_cell(&view, NULL);
	if (ban == NO_CELL)
		reserve(&view, 1, NULL, 0);
	set_ban(&view, ban, view.now + duration);
	unlock(&view);
	return true;
}

static bool
local_unban(const RlKey *key, bool *found, RlError *error pg_attribute_unused())
{
	View		view;

	lock_key(&view, key, LW_EXCLUSIVE);
	*found = forget(&view, NULL);
	unlock(&view);
	return true;
}

/* Takes a charge back, as far as it has not leaked; does not throw. */
void
rl_local_undo(RlName name, const RlLimit *limit, const RlCharge *charge)
{
	RlState		state;
	uint32		found;
	View		view;

	lock_name(&view, name, LW_EXCLUSIVE);
	found = find_cell(&view, limit);
	if (found != NO_CELL)
	{
		load_state(&view, found, &state);
		rl_undo(limit, &state, view.now, charge);
		save_state(&view, found, limit, &state, InvalidDsaPointer);
	}
	unlock(&view);
}

const RlStore rl_local_store = {
	.take = local_take,
	.refund = local_refund,
	.reset = local_reset,
	.ban = local_ban,
	.unban = local_unban
};

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
