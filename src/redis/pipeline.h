/*
 * pipeline.h
 *		A script run many times in few round trips.
 */
#ifndef PIPELINE_H
#define PIPELINE_H

#include "redis/command.h"

typedef bool (*RlPipelineReply) (int i, const RlReply *reply, void *arg, RlError *error);

extern bool rl_redis_pipeline(RlScript *script, int n, const int *keys, RlAppend append,
							  RlPipelineReply reply, void *arg, int64 *unanswered, RlUsage *usage,
							  RlError *error);

#endif							/* PIPELINE_H */
