/*
 * resp.h
 *		Redis's protocol: a command's bytes, and a reply as a small struct.
 */
#ifndef RESP_H
#define RESP_H

#include "lib/stringinfo.h"
#include "ratelimit.h"

#define RL_MAX_VALUES		(50 + 3 * RL_MAX_TOGETHER)	/* of a reply: time, numbers of keys, text */
#define RL_MAX_TOGETHER		100 /* keys that one call decides, each by itself */
#define RL_MAX_TEXT			32768	/* bytes of a string */

typedef enum RlReplyKind
{
	RL_REPLY_NUMBERS,			/* an integer, a string that is one, or an
								 * array of these */
	RL_REPLY_MIXED,				/* an array of these, and then a string that is none */
	RL_REPLY_STATUS,
	RL_REPLY_ERROR,
	RL_REPLY_NIL,
	RL_REPLY_ADDRESS,			/* an array of a host and a port */
	RL_REPLY_TEXT,				/* a string that is no number */
	RL_REPLY_HELLO,				/* what HELLO tells of the server */
	RL_REPLY_OTHER				/* no answer to any command of this extension */
} RlReplyKind;

/* A reply of bounded size: one that does not fit is RL_REPLY_OTHER.  It is too large to zero in each call. */
typedef struct RlReply
{
	RlReplyKind kind;
	bool		is_array;
	bool		replica;		/* of RL_REPLY_HELLO: its role */
	bool		cluster;		/* and its mode */
	int			nvalues;
	int64		values[RL_MAX_VALUES];
	char		text[320];		/* the line of an error or a status, in ASCII; a host */
	const char *data;			/* of RL_REPLY_TEXT, and of the string of RL_REPLY_MIXED:
								 * its bytes, which last until the next such reply */
	int			len;
} RlReply;

/* The next step of a call that got an error reply. */
typedef enum RlNextStep
{
	RL_STEP_FAIL,				/* the call fails; the server stays in use */
	RL_STEP_CONNECT,			/* the call fails; the next one connects again */
	RL_STEP_WAIT,				/* the server can run it a moment later */
	RL_STEP_SEND_SOURCE,		/* the server needs the script's source */
	RL_STEP_SEND_WINDOWS,		/* the script needs other windows of a calendar */
	RL_STEP_LEAVE,				/* another server may be able to run it */
	RL_STEP_ASK_SENTINELS,		/* the same, if there are Sentinels */
	RL_STEP_MOVED,				/* the server that the reply names has the slot */
	RL_STEP_ASK					/* that server has the slot for this call only */
} RlNextStep;

struct redisReader;

extern bool rl_is_printable(const char *data, int len);
extern RlNextStep rl_reply_next_step(const RlReply *reply);
extern bool rl_reply_may_pass(const RlReply *reply);
extern void rl_resp_reset(StringInfo out);
extern void rl_resp_start(StringInfo out, int nargs);
extern void rl_resp_arg(StringInfo out, const char *data, int len);
extern void rl_resp_attach(struct redisReader *reader, RlReply **place, RlReply *reply);

#endif							/* RESP_H */
