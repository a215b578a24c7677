/*
 * cells.h
 *		The local store's memory: a cell for each state, and chunks of entries.
 */
#ifndef CELLS_H
#define CELLS_H

#include "common/hashfn.h"

#include "algorithm/algorithm.h"
#include "algorithm/limits.h"
#include "shared/shared.h"
#include "shared/store_file.h"

#define RL_BAN_CELL			63	/* in place of an algorithm */
#define RL_RECORD_CELL		62	/* a reservation */
#define RL_LEVEL_CELL		61	/* of bans that grow */
#define RL_REST_CELL		60	/* a further cell of a text */
#define RL_NO_CELL			0	/* cells are numbered from 1 */

#define RL_CELL_TEXT		56	/* bytes of a ban's text in a cell */

/* The most cells that a ban needs. */
#define RL_MAX_BAN_CELLS	((RL_MAX_KEY + RL_MAX_WHY + RL_CELL_TEXT - 1) / RL_CELL_TEXT)

/* The most bytes of a record for so many keys. */
#define RL_RECORD_SIZE(keys) (72 + RL_MAX_ID + (keys) * (16 + RL_MAX_LIMITS * (72 + RL_MAX_ZONE)))
#define RL_MAX_RECORD		RL_RECORD_SIZE(RL_MAX_KEYS)

/*
 * The most cells that an act on one key may need: one for each limit, and those of the ban, its level
 * and a record.
 */
#define RL_MAX_WANTED		(RL_MAX_LIMITS + RL_MAX_BAN_CELLS + 1 + RL_RECORD_SIZE(1) / RL_CELL_TEXT + 1)

/*
 * A key has up to four kinds of cells:
 *
 * - the state of a limit
 * - the ban; its text is the key itself, for rl_bans, and then the limit or the reason (RL_MAX_WHY)
 * - the level of bans that grow: "state.start" is the length of the last ban, and a ban that begins before
 *   "end" is longer than that
 * - the record of a reservation; its text is the id, and then a Record (local_store.c)
 *
 * A text that is too long for its cell goes on in further cells, which are in no hash chain and in no heap.
 * Of their members only "key_hash", "tag", "text", "rest" and "used" are set.
 *
 * The lock of the key's partition protects all members while the cell is in use; else the mutex
 * of the free memory protects "next".  With 128 bytes it fills two cache lines.
 */
typedef struct RlCell
{
	RlKeyHash	key_hash;
	RlStateTag	tag;			/* for a ban, its level or a record only the algorithm is set; for a
								 * record also step, a hash of its id */
	union
	{
		RlState		state;
		struct
		{
			int64		until;
			int64		began;	/* of a record, rl_text_sum */
			uint16		key_len:15; /* or of the id */
			uint16		settled:1;	/* of a reservation */
			uint16		why_len;
			uint32		rest;	/* the cell with the rest of the text, or RL_NO_CELL */
			char		text[RL_CELL_TEXT];
		}			ban;
	};
	int64		end;			/* from then on it is as if it did not exist */
	uint32		next;			/* in its hash chain or list of free cells */
	uint32		heap_at:30;		/* its position in its heap */
	uint32		heap:1;			/* which of the partition's heaps that is */
	uint32		used:1;
} RlCell;

StaticAssertDecl(sizeof(RlCell) == 128, "a cell is in more than two cache lines");

struct RlPartition;

/*
 * Access to one partition, by an act on a key or for a slice, and the spare cells and chunks
 * that the act has set aside, which no other backend can reach.  Starts with key_hash set and all
 * else zero.
 *
 * An act on several keys instead sets keys and nkeys, and locks all their partitions;
 * rl_cells_select chooses the key for the other functions.
 */
typedef struct RlCells
{
	RlKeyHash	key_hash;
	const RlKeyHash *keys;		/* of an act on several keys; also of one key,
								 * once it has evicted */
	int			nkeys;
	int64		now;			/* store time, when the partition was locked */
	int64		wall;			/* for rl_cells_times; 0: not read yet */
	int			number;
	struct RlPartition *partition;
	uint32	   *bucket;			/* of the key; of a slice, the next one */
	uint32	   *pages;			/* of its heaps */
	RlCell	   *cells;
	RlPool		pool;			/* spare chunks */
	uint32		spare;			/* list of spare cells */
	uint32		spare_last;
	uint32		nspare;
} RlCells;

static inline RlCell *
rl_cell_at(const RlCells *view, uint32 c)
{
	return &view->cells[c - 1];
}

/* Returns a cell that will be changed.  Its partition is locked, exclusively. */
static inline RlCell *
rl_cell_change(const RlCells *view, uint32 c)
{
	if (view->pool.keep != NULL)
		rl_keep_cell(c);
	return rl_cell_at(view, c);
}

/*
 * Returns the times of an act.  The wall clock is read at the first call after the lock, which many
 * acts do without.
 */
static inline RlTimes
rl_cells_times(RlCells *view)
{
	if (view->wall == 0)
		view->wall = rl_wall_now();
	return (RlTimes) {view->now, view->wall};
}

/*
 * Returns how many cells a ban needs, with so many bytes of its key and about why, or a record, of its
 * id and the rest.
 */
static inline uint32
rl_ban_cells(int key_len, int why_len)
{
	return (key_len + why_len + RL_CELL_TEXT - 1) / RL_CELL_TEXT;
}

/* Copies the text of a ban, which begins in this cell: the key, then why. */
static inline void
rl_cell_ban_text(const RlCells *view, const RlCell *cell, char *text)
{
	int			len = cell->ban.key_len + cell->ban.why_len;

	for (int at = 0;; cell = rl_cell_at(view, cell->ban.rest))
	{
		memcpy(text + at, cell->ban.text, Min(len - at, RL_CELL_TEXT));
		at += RL_CELL_TEXT;
		if (at >= len)
			break;
	}
}

/* Returns a sum of a text, with which a text of cells that a crash has mixed differs. */
static inline int64
rl_text_sum(const char *text, int len)
{
	return (int64) hash_bytes_extended((const unsigned char *) text, len, 0);
}

/* True if the cell is the limit's; without a limit, the ban. */
static inline bool
rl_cell_is_of(const RlCell *cell, const RlLimit *limit)
{
	if (limit == NULL)
		return cell->tag.algorithm == RL_BAN_CELL;
	return rl_same_tag(cell->tag, rl_state_tag(limit));
}

/* True if the cell is a ban or a record, which may have further cells. */
static inline bool
rl_cell_has_text(const RlCell *cell)
{
	return cell->tag.algorithm == RL_BAN_CELL || cell->tag.algorithm == RL_RECORD_CELL;
}

/* The fill level of the memory. */
typedef struct RlCellsFill
{
	int64		keys;			/* cells in use */
	int64		max_keys;
	int64		entries;		/* those that the chunks in use have room for */
	int64		max_entries;
	int64		evicted;		/* cells that were evicted before their end */
} RlCellsFill;

extern const RlSharedPart rl_cells_part;
extern void rl_cells_fill(RlCellsFill *fill);
extern void rl_cells_sizes(int max_keys, RlSlots *slots);
extern void rl_cells_place(const RlSlots *slots);

extern void rl_cells_lock(RlCells *view, LWLockMode mode);
extern void rl_cells_lock_all(RlCells *view);
extern void rl_cells_select(RlCells *view, int i);
extern void rl_cells_end_act(const RlCells *view);
extern void rl_cells_unlock(RlCells *view);
extern void rl_cells_release(RlCells *view);
extern bool rl_cells_set_aside(RlCells *view, uint32 cells, uint32 chunks);
extern bool rl_cells_evict(RlCells *view, uint32 cells, uint32 chunks);

extern int	rl_cells_slices(void);
extern const uint32 *rl_cells_lock_slice(RlCells *view, int slice);

extern uint32 rl_cell_find(const RlCells *view, const RlLimit *limit);
extern uint32 rl_cell_find_tag(const RlCells *view, RlStateTag tag);
extern uint32 rl_cell_make_text(RlCells *view, RlStateTag tag, const char *text, int len);
extern uint32 rl_cell_make(RlCells *view, RlStateTag tag);
extern int64 rl_cell_life(uint32 c);
extern void rl_cell_set_life(uint32 c, int64 life);
extern void rl_cell_set_end(RlCells *view, uint32 c, int64 end);
extern void rl_cell_remove(RlCells *view, uint32 c);
extern void rl_cell_remove_at(RlCells *view, uint32 *link);

#endif							/* CELLS_H */
