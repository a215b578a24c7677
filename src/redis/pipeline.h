/*
 * pipeline.h
 *		A script run many times in few round trips.
 */
#ifndef PIPELINE_H
#define PIPELINE_H

#include "redis/command.h"
#include "redis/node.h"

typedef bool (*RlPipelineReply) (int i, const RlReply *reply, void *arg, RlError *error);

/* A call, and how to send it. */
typedef struct RlCall
{
	int			i;				/* -1: an ASKING, ahead of its call */
	int			n;				/* keys that it is about */
	int16		slot;			/* -1: not known */
	uint8		node;			/* number of the one that a reply named; 0: none */
	bool		asking;
	bool		by_source;
	bool		has_time;		/* its windows are those around the server's time */
	bool		resent;			/* it was sent before */
	uint8		resends;		/* as of a route */
} RlCall;

/* The calls under way to a node. */
typedef struct RlLine
{
	RlNode	   *node;
	RlStream	stream;
	StringInfoData out;
	RlReply		reply;
	bool		reused;			/* the connection was there before */
	bool		load;			/* the next call is to bring the script's source */
	int			loads;			/* calls under way that bring it */
	int			first;			/* of the ring, the oldest; stream.due are in it */
	RlCall		calls[RL_MAX_DUE];
} RlLine;

/*
 * Takes the reply of a call, which is in line->reply.  Returns false with the error set if it makes no sense.
 */
typedef bool (*RlLineReply) (RlLine *line, RlCall call, void *arg, RlError *error);

extern void rl_line_begin(RlLine *line, RlNode *node, int64 deadline, bool no_throw);
extern void rl_line_append(RlLine *line, const RlCommand *command, const RlScript *script, RlCall call);
extern bool rl_line_receive(RlLine *line, RlLineReply take, void *arg, RlError *error);
extern bool rl_redis_pipeline(RlScript *script, int n, const int *keys, int max_due, RlAppend append,
							  RlPipelineReply reply, void *arg, int64 *unanswered, RlUsage *usage,
							  RlError *error);

#endif							/* PIPELINE_H */
