/*
 * callqueue.h
 *		The calls of a pipeline, and a queue of those that are sent again.
 */
#ifndef CALLQUEUE_H
#define CALLQUEUE_H

#include "lib/stringinfo.h"

/* A call, and how to send it. */
typedef struct Call
{
	int			i;				/* -1: an ASKING, ahead of its call */
	int16		slot;			/* -1: not known */
	uint8		node;			/* number of the one that a reply named; 0: none */
	bool		asking;
	bool		by_source;
	bool		resent;			/* it was sent before */
	uint8		resends;		/* as of a route */
} Call;

/* All zero: empty.  The calls are the bytes from cursor to len. */
typedef StringInfoData CallQueue;

/* Returns the first call, or NULL if there is none. */
static inline const Call *
callqueue_first(const CallQueue *queue)
{
	return queue->cursor < queue->len ? (const Call *) (queue->data + queue->cursor) : NULL;
}

/* Removes the first call. */
static inline void
callqueue_pop(CallQueue *queue)
{
	queue->cursor += sizeof(Call);
}

/* Adds a call at the end, marked as sent before. */
static inline void
callqueue_push(CallQueue *queue, Call call)
{
	if (queue->data == NULL)
		initStringInfo(queue);
	if (queue->cursor > queue->len / 2)
	{
		queue->len -= queue->cursor;
		memmove(queue->data, queue->data + queue->cursor, queue->len);
		queue->cursor = 0;
	}
	call.resent = true;
	appendBinaryStringInfo(queue, (const char *) &call, sizeof(Call));
}

#endif							/* CALLQUEUE_H */
