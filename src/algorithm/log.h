/*
 * log.h
 *		Logs: entries in chunks of one size, of counters or of actions.
 */
#ifndef LOG_H
#define LOG_H

#define RL_CHUNK_ENTRIES	7
#define RL_CHUNK_BLOCKS		4
#define RL_BLOCK_CHUNKS		64
#define RL_NO_CHUNK			0	/* chunks are numbered from 1 */

#define RL_MAX_INSERT		1000	/* entries of a log into which rl_log_add_own inserts */

/* Units that were charged or refused at one time, or in one sub-window */
typedef struct RlEntry
{
	int64		time;			/* or the sub-window's number */
	int64		units:63;
	uint64		own:1;			/* of one reservation: it merges with no other entry */
} RlEntry;

/* A list of chunks of entries, none of them empty, with the sum of their units */
typedef struct RlBlock
{
	int64		newest;			/* time of the last entry */
	uint32		units;			/* fits: only sliding logs are so long */
	uint32		first;
	uint32		last;
	uint32		nchunks;
} RlBlock;

/* A chunk of a log, or in a list of spare chunks */
typedef struct RlChunk
{
	uint32		next;			/* in its list, or RL_NO_CHUNK */
	uint32		n;				/* entries, or blocks, in use */
	union
	{
		RlEntry		entry[RL_CHUNK_ENTRIES];
		RlBlock		block[RL_CHUNK_BLOCKS];
	};
	uint64		owner;			/* of its pool, when it was taken; only checked after a crash */
} RlChunk;

StaticAssertDecl(sizeof(RlChunk) == 128, "a chunk is in more than two cache lines");

/*
 * A log, oldest entry first.  A full block is closed: the index lists it, so that searching and
 * cutting a long log does not visit each chunk.  A log of zeros is empty.
 */
typedef struct RlLog
{
	uint32		first;			/* the open block */
	uint32		last;
	uint32		nchunks;
	uint32		index_first;	/* chunks of the closed blocks */
	uint32		index_last;
} RlLog;

/*
 * The chunks of all logs of a store: the chunk with number n is chunks[n - 1].  Before an act,
 * the owner puts enough spare chunks here, and after it takes the rest.
 */
typedef struct RlPool
{
	RlChunk    *chunks;
	uint32		spare;			/* a list */
	uint32		spare_last;
	uint32		nspare;
	uint64		owner;
	void		(*keep) (uint32 number);	/* called before a chunk changes, or NULL */
} RlPool;

/* A position in a log: before an entry or, if whole is set, before a closed block */
typedef struct RlCursor
{
	uint32		index;			/* the closed block's chunk; RL_NO_CHUNK: the open block */
	uint32		block;			/* and its index there */
	uint32		chunk;			/* RL_NO_CHUNK: at the end */
	uint32		i;				/* entry in the chunk */
	int64		skipped;		/* units of the entry before the position */
	bool		whole;
} RlCursor;

extern int	rl_log_chunks_wanted(const RlPool *pool, const RlLog *log);
extern int64 rl_log_newest(const RlPool *pool, const RlLog *log);
extern bool rl_log_ends_with_own(const RlPool *pool, const RlLog *log);
extern int64 rl_log_seek(const RlPool *pool, const RlLog *log, int64 gone, RlCursor *cursor);
extern void rl_log_skip(const RlPool *pool, const RlLog *log, RlCursor *cursor, int64 units);
extern int64 rl_log_unit(const RlPool *pool, const RlLog *const logs[2], RlCursor cursors[2], int64 n);
extern void rl_log_cut(RlPool *pool, RlLog *log, const RlCursor *cursor);
extern void rl_log_clear(RlPool *pool, RlLog *log);
extern void rl_log_append(RlPool *pool, RlLog *log, int64 time, int64 units);
extern int64 rl_log_remove(RlPool *pool, RlLog *log, int64 time, int64 units, bool own);
extern bool rl_log_has_own(const RlPool *pool, const RlLog *log, int64 time);
extern int64 rl_log_add_own(RlPool *pool, RlLog *log, int64 time, int64 units);
extern int64 rl_log_copy(const RlPool *from, const RlLog *log, bool own_only, RlPool *pool, RlLog *copy);
extern void rl_pool_put(RlPool *pool, uint32 first, uint32 last, uint32 n);
extern uint32 rl_pool_get(RlPool *pool);

#endif							/* LOG_H */
