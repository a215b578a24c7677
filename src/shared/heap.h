/*
 * heap.h
 *		The heaps of the local store's cells.
 */
#ifndef HEAP_H
#define HEAP_H

#include "shared/cells.h"

/* The two heaps of a partition. */
#define RL_WITHOUT_CHUNKS	0
#define RL_WITH_CHUNKS		1

/* Protected by the partition's lock. */
typedef struct RlHeapItem
{
	int64		end;			/* never later than the cell's */
	uint32		cell;
} RlHeapItem;

/* Protected by the partition's lock. */
typedef struct RlPartition
{
	int64		lives;			/* as many have begun, for rl_cell_life */
	uint32		n[2];			/* cells in the heaps */
	volatile int64 soonest[2];	/* the first item's end, or PG_INT64_MAX; also
								 * read without the lock, as a hint */
} RlPartition;

extern Size rl_heaps_size(uint32 ncells, int npartitions);
extern void rl_heaps_attach(void *memory, bool found);

extern uint32 *rl_heap_pages(int partition);
extern RlHeapItem *rl_heap_item(const RlCells *view, int heap, uint32 at);
extern void rl_heap_sift(RlCells *view, int heap, uint32 at, RlHeapItem item);
extern void rl_heap_add(RlCells *view, int heap, uint32 c);
extern void rl_heap_remove(RlCells *view, uint32 c);

#endif							/* HEAP_H */
