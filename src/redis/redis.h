/*
 * redis.h
 *		Commands and scripts for Redis.
 */
#ifndef REDIS_H
#define REDIS_H

#include "redis/resp.h"

typedef struct RlScript
{
	const char *source;
	char		sha1[41];		/* computed at first use */
	uint64		nodes;			/* a bit for each node that a pipeline ran it at */
} RlScript;

/*
 * A command under construction.  The buffer is kept from call to call; what
 * comes before the arguments of a script is written when it is sent.
 */
typedef struct RlCommand
{
	StringInfoData args;
	int			nargs;
	int			key;			/* where in args the second argument is: the key */
	int			key_len;
} RlCommand;

/* What Redis has cost since somebody set it to 0. */
typedef struct RlRedisUsage
{
	int64		round_trips;
	int64		us;				/* waiting and connecting */
} RlRedisUsage;

extern RlRedisUsage rl_redis_usage;

typedef bool (*RlPipelineAppend) (RlCommand *command, int i, void *arg);
typedef void (*RlPipelineSent) (int i, bool sent, void *arg);
typedef bool (*RlPipelineReply) (int i, const RlReply *reply, void *arg, RlError *error);

#define RL_MAX_QUIET_ARGS	49152	/* bytes of a call that is run quietly */

extern RlCommand *rl_command_start(void);
extern void rl_command_arg(RlCommand *command, const char *data, int len);
extern void rl_command_number(RlCommand *command, int64 number);

extern const char *rl_command_key(const RlCommand *command);
extern void rl_command_append(StringInfo out, const RlCommand *command, const RlScript *script,
							  bool by_source);
extern void rl_command_append_asking(StringInfo out);
extern void rl_script_prepare(RlScript *script);

extern bool rl_redis_command(RlCommand *command, RlReply *reply, RlError *error);
extern void rl_redis_distrust(void);
extern bool rl_redis_is_cluster(void);
extern const char *rl_redis_server(bool *connected, const char **breaker, int64 *breaker_left);
extern bool rl_redis_script(RlScript *script, RlCommand *command, RlReply *reply, RlError *error);

/* pipeline.c */
extern bool rl_redis_pipeline(RlScript *script, int n, RlPipelineAppend append, RlPipelineSent sent,
							  RlPipelineReply reply, void *arg, RlError *error);
extern void rl_redis_reserve(RlScript *script);
extern bool rl_redis_pipeline_all(RlScript *script, int n, RlPipelineAppend append,
								  RlPipelineReply reply, void *arg, bool quietly, RlError *error);
extern bool rl_redis_accepted(const RlReply *reply, RlError *error);

#endif							/* REDIS_H */
