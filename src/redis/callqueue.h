/*
 * callqueue.h
 *		The calls of a pipeline, and a queue of those that are sent again.
 */
#ifndef CALLQUEUE_H
#define CALLQUEUE_H

#include "redis/stream.h"

/* A call and how to send it. */
typedef struct Call
{
	int			i;				/* -1: an ASKING, ahead of its call */
	int16		slot;			/* -1: not known */
	uint8		node;			/* that a reply named; 0: none */
	bool		asking;
	bool		by_source;
	bool		again;			/* it was sent before */
	uint8		turns;
} Call;

/* All zero: empty. */
typedef struct CallQueue
{
	Call	   *calls;
	int			first;
	int			end;
	int			size;
} CallQueue;

static inline bool
callqueue_is_filled(const CallQueue *queue)
{
	return queue->first < queue->end;
}

/* The first call of a queue that has one. */
static inline Call
callqueue_first(const CallQueue *queue)
{
	return queue->calls[queue->first];
}

/* Takes the first call out. */
static inline void
callqueue_pop(CallQueue *queue)
{
	queue->first++;
}

/* Adds a call at the end, marked as sent before. */
static inline void
callqueue_push(CallQueue *queue, Call call)
{
	int			n = queue->end - queue->first;

	if (n == 0)
		queue->first = queue->end = 0;
	if (queue->calls == NULL)
		queue->calls = palloc((queue->size = RL_MAX_DUE) * sizeof(Call));
	else if (queue->end == queue->size && n > queue->size / 2)
		queue->calls = repalloc(queue->calls, (queue->size *= 2) * sizeof(Call));
	else if (queue->end == queue->size)
	{
		memmove(queue->calls, queue->calls + queue->first, n * sizeof(Call));
		queue->first = 0;
		queue->end = n;
	}
	call.again = true;
	queue->calls[queue->end++] = call;
}

static inline void
callqueue_free(CallQueue *queue)
{
	if (queue->calls != NULL)
		pfree(queue->calls);
}

#endif							/* CALLQUEUE_H */
