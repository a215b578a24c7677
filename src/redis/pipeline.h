/*
 * pipeline.h
 *		A script run many times in few round trips.
 */
#ifndef PIPELINE_H
#define PIPELINE_H

#include "redis/command.h"

typedef bool (*RlPipelineAppend) (RlCommand *command, int i, void *arg);
typedef bool (*RlPipelineReply) (int i, const RlReply *reply, void *arg, RlError *error);

#define RL_MAX_NO_THROW_ARGS	49152	/* bytes of a call's arguments with no_throw */

extern bool rl_redis_pipeline(RlScript *script, int n, const int *keys, RlPipelineAppend append,
							  RlPipelineReply reply, void *arg, int64 *unanswered, RlUsage *usage,
							  RlError *error);
extern void rl_redis_reserve(RlScript *script);
extern bool rl_redis_pipeline_all(RlScript *script, int n, RlPipelineAppend append,
								  RlPipelineReply reply, void *arg, bool no_throw, RlUsage *usage,
								  RlError *error);

#endif							/* PIPELINE_H */
