/*
 * command.h
 *		Commands and scripts for Redis, one at a time.
 */
#ifndef COMMAND_H
#define COMMAND_H

#include "redis/resp.h"

struct RlNode;

struct RlCommand;

/* Writes the arguments of call i, also again if it was not run.  Returns false if that call is done. */
typedef bool (*RlAppend) (struct RlCommand *command, int i, void *arg);

typedef struct RlScript
{
	const char *source;
	char		sha1[41];		/* computed at first use */
} RlScript;

/* A command under construction; EVAL or EVALSHA, and the script, are written ahead of it. */
typedef struct RlCommand
{
	StringInfoData args;
	int			nargs;
	int			key;			/* where in args the second argument is: the key */
	int			key_len;
	RlAppend	append;			/* writes the arguments again; NULL: they stay */
	void	   *arg;
	RlUsage    *usage;			/* to which the cost of the call is added; or NULL */
	bool		several;		/* as in RlRoute */
	struct RlNode *node;		/* the only node that may run it; NULL: any */
	bool		asking;			/* send ASKING first: slots may be moving to the node */
	bool		resumes;		/* fail unless the node's connection is still open */
	bool		reply_first;	/* the transaction or statement may have to refund what it charges, or
								 * this refunds it: an interrupt waits for the reply
								 * (rl_socket_reply_first) */
	bool		delivers;		/* as in RlConnection */
} RlCommand;

extern RlCommand *rl_command_start(void);
extern void rl_command_arg(RlCommand *command, const char *data, int len);
extern void rl_command_text(RlCommand *command, const char *text);
extern void rl_command_number(RlCommand *command, int64 number);
extern void rl_command_hash(RlCommand *command, const RlKey *key);
extern const char *rl_command_key(const RlCommand *command);
extern void rl_command_append(StringInfo out, const RlCommand *command, const RlScript *script,
							  bool by_source, bool asking);
extern void rl_script_prepare(RlScript *script);

extern int64 rl_redis_time(void);
extern bool rl_redis_set_time(const RlReply *reply);
extern bool rl_redis_call(RlScript *script, RlAppend append, void *arg, RlUsage *usage,
						  RlReply *reply, RlError *error);
extern bool rl_redis_script(RlScript *script, RlCommand *command, RlReply *reply, RlError *error);
extern bool rl_redis_check_reply(const RlReply *reply, RlError *error);
extern bool rl_wrong_reply(RlError *error);
extern bool rl_read_done(const RlReply *reply, RlError *error);

#endif							/* COMMAND_H */
