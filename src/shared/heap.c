/*
 * heap.c
 *		The two heaps of a partition's cells, ordered by the cells' ends.
 *
 * The caller has locked the view's partition, exclusively to change a heap.
 */
#include "postgres.h"

#include "shared/heap.h"

#define CHILDREN			8	/* of a heap's item; few levels need few moves */

uint32		rl_heap_size;

/* Returns an item.  The two heaps share an array: one grows from its front, the other from its end. */
RlHeapItem *
rl_heap_item(const RlCells *view, int heap, uint32 at)
{
	return &view->heap[heap == RL_WITHOUT_CHUNKS ? at : rl_heap_size - 1 - at];
}

static void
put_in_heap(RlCells *view, int heap, uint32 at, RlHeapItem item)
{
	*rl_heap_item(view, heap, at) = item;
	rl_cell_at(view, item.cell)->heap_at = at;
	if (at == 0)
		view->partition->soonest[heap] = item.end;
}

/* Puts an item into the heap: at a free position, or at its place above or below it. */
void
rl_heap_sift(RlCells *view, int heap, uint32 at, RlHeapItem item)
{
	uint32		n = view->partition->n[heap];

	while (at > 0 && rl_heap_item(view, heap, (at - 1) / CHILDREN)->end > item.end)
	{
		put_in_heap(view, heap, at, *rl_heap_item(view, heap, (at - 1) / CHILDREN));
		at = (at - 1) / CHILDREN;
	}
	for (;;)
	{
		uint32		first = CHILDREN * at + 1;
		uint32		least = first;

		for (uint32 child = first + 1; child < Min(first + CHILDREN, n); child++)
			if (rl_heap_item(view, heap, child)->end < rl_heap_item(view, heap, least)->end)
				least = child;
		if (least >= n || rl_heap_item(view, heap, least)->end >= item.end)
			break;
		put_in_heap(view, heap, at, *rl_heap_item(view, heap, least));
		at = least;
	}
	put_in_heap(view, heap, at, item);
}

/* Adds a cell, whose end is set. */
void
rl_heap_add(RlCells *view, int heap, uint32 c)
{
	RlCell	   *cell = rl_cell_at(view, c);

	cell->heap = heap;
	view->partition->n[heap]++;
	rl_heap_sift(view, heap, view->partition->n[heap] - 1, (RlHeapItem) {cell->end, c});
}

/* Removes a cell. */
void
rl_heap_remove(RlCells *view, uint32 c)
{
	RlCell	   *cell = rl_cell_at(view, c);
	int			heap = cell->heap;
	uint32		n = --view->partition->n[heap];
	RlHeapItem	last = *rl_heap_item(view, heap, n);

	if (last.cell != c)
		rl_heap_sift(view, heap, cell->heap_at, last);
	else if (n == 0)
		view->partition->soonest[heap] = PG_INT64_MAX;
}

static int
heap_of(const RlCell *cell)
{
	for (int i = 0; i < 2 && !rl_cell_has_text(cell); i++)
		if (cell->state.log[i].last != RL_NO_CHUNK || cell->state.log[i].index_last != RL_NO_CHUNK)
			return RL_WITH_CHUNKS;
	return RL_WITHOUT_CHUNKS;
}

/* Sets a cell's end, after its logs.  The heap changes only if the end is earlier, or the heap is another. */
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
