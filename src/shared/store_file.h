/*
 * store_file.h
 *		The file that keeps the local store's cells and chunks, and the undo of acts.
 */
#ifndef STORE_FILE_H
#define STORE_FILE_H

#include "shared/shared.h"

/* The cells and chunks of a store. */
typedef struct RlSlots
{
	int			npartitions;
	uint32		ncells;
	uint32		nchunks;
	struct RlCell *cells;
	int64	   *lives;			/* of the cells */
	struct RlChunk *chunks;
#ifdef USE_ASSERT_CHECKING
	/*
	 * Whether this process has locked the partition of keys whose hash has this low half; how many
	 * chunks have ever been used
	 */
	bool		(*holds) (uint64 low);
	uint32		(*used_chunks) (void);
#endif
} RlSlots;

/* What the last recovery found. */
typedef struct RlRecovered
{
	int64		states;			/* cells that were found: states, bans, levels and reservations */
	int64		damaged;		/* that were dropped */
	int64		no_room;		/* that were dropped because the store is smaller now */
	int64		undone;			/* acts that had not ended */
} RlRecovered;

extern bool rl_keeps;			/* this process's acts are undone if it is killed; set by rl_file_recover */

extern void rl_file_request(void);
extern bool rl_file_is_wanted(void);
extern void rl_file_find(RlHash *secret, int64 *now);
extern int64 rl_file_first_life(void);
extern const char *rl_file_status(char *recovery, Size size);

#ifdef USE_ASSERT_CHECKING
extern bool rl_keep_in_act(void);	/* always false but under debug_now */
#endif
extern void rl_keep_begin(int partition);
extern void rl_keep_cell(uint32 c);
extern void rl_keep_chunk(uint32 number);
extern void rl_keep_end(int64 now);

/* For recover.c */
extern void rl_file_make(RlSlots *slots, void *state, LWLockPadded *locks);
extern Size rl_file_state_size(const RlSlots *slots);
extern void rl_file_recover(void (*insert) (const RlSlots *found, RlRecovered *recovered));

#endif							/* STORE_FILE_H */
