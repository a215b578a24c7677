/*
 * cells.h
 *		The local store's memory: a cell for each state of a key.
 */
#ifndef CELLS_H
#define CELLS_H

#include "utils/dsa.h"

#include "algorithm.h"
#include "shared.h"

#define RL_BAN_CELL			255 /* in place of an algorithm */
#define RL_NO_CELL			0	/* cells are numbered from 1 */

/* The cells that one act may need: its limits' and the ban. */
#define RL_MAX_WANTED		(RL_MAX_LIMITS + 1)

typedef struct RlCell
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
} RlCell;

struct Partition;
struct HeapItem;

/* An act's view of its partition, which is locked. */
typedef struct RlCells
{
	int			number;
	struct Partition *partition;
	uint32	   *bucket;			/* of the key */
	struct HeapItem *heap;
	RlCell	   *cells;			/* the partition's */
	RlName		name;
	int64		now;
} RlCells;

static inline RlCell *
rl_cell_at(const RlCells *view, uint32 c)
{
	return &view->cells[c - 1];
}

/* True if the cell is the limit's; without a limit, the ban. */
static inline bool
rl_cell_is_of(const RlCell *cell, const RlLimit *limit)
{
	if (limit == NULL)
		return cell->algorithm == RL_BAN_CELL;
	return cell->algorithm == limit->algorithm && cell->period == limit->period &&
		cell->step == limit->step && cell->from_first == limit->from_first;
}

extern void rl_cells_lock(RlCells *view, RlName name, LWLockMode mode);
extern void rl_cells_unlock(const RlCells *view);
extern uint32 rl_cells_free(const RlCells *view);
extern void rl_cells_reserve(RlCells *view, uint32 wanted, const uint32 *stay, int n);

extern uint32 rl_cell_find(const RlCells *view, const RlLimit *limit);
extern uint32 rl_cell_make(RlCells *view, const RlLimit *limit);
extern void rl_cell_set_end(RlCells *view, uint32 c, int64 end);
extern void rl_cell_remove(RlCells *view, uint32 c);

extern dsa_area *rl_ring_area(void);
extern dsa_pointer rl_ring_make(RlCells *view, RlState *state);

#endif							/* CELLS_H */
