/*
 * skip.h
 *		The queries that are running, and rows that on_deny=skip must not leave out.
 */
#ifndef SKIP_H
#define SKIP_H

#include "commands/trigger.h"
#include "datatype/timestamp.h"

/* A query of the executor, in its own context, of which the context of a row trigger is a child. */
typedef struct RlQuery
{
	MemoryContext context;
	TimestampTz transaction;	/* its start: the context of deferred triggers can last longer */
	uint64		number;			/* never used again */
	bool		moves_rows;		/* to other partitions */
	struct RlQuery *next;
	MemoryContextCallback end;
} RlQuery;

extern void rl_skip_init(void);
extern RlQuery *rl_query(MemoryContext context, bool note);
extern const char *rl_skip_forbidden(const TriggerData *data);

#endif							/* SKIP_H */
