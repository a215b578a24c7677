/*
 * command.c
 *		Commands and scripts for Redis.
 *
 * Failures are returned, not raised; the only errors raised are the core's
 * own, and those of settings that cannot mean what was wanted.
 */
#include "postgres.h"

#include "common/cryptohash.h"
#include "common/sha1.h"
#include "utils/builtins.h"

#include "redis/cluster.h"
#include "redis/command.h"
#include "redis/redis.h"
#include "redis/route.h"
#include "redis/socket.h"

/*
 * What people call the server that is in use, or that the settings name, NULL
 * if they name none; whether this backend is connected to it; and how its
 * breaker stands.
 */
const char *
rl_redis_server(bool *connected, const char **breaker, int64 *breaker_left)
{
	static char name[RL_MAX_SERVER + 128];
	RlNode	   *node = rl_nodes_are_current() ? rl_node_in_use() : NULL;
	RlTarget	target;
	RlError		error;

	*connected = node != NULL && rl_connection_is_usable(&node->conn);
	*breaker = NULL;
	*breaker_left = 0;
	if (node != NULL)
	{
		rl_connection_name(&node->address, name, sizeof(name));
		*breaker = rl_breaker_state(node->breaker, breaker_left);
	}
	else if (rl_target_parse(rl_redis_url, &target, &error))
	{
		rl_target_name(&target, name, sizeof(name));
		*breaker = rl_breaker_state(rl_breaker_find(name), breaker_left);
	}
	else
		return NULL;
	return name;
}

/* True if answers have told that the server is a cluster's. */
bool
rl_redis_is_cluster(void)
{
	return rl_slots_known();
}

/* Drops the connection of which a reply made no sense. */
void
rl_redis_distrust(void)
{
	RlNode	   *node = rl_node_in_use();

	if (node != NULL)
		rl_connection_close(&node->conn);
}

/*
 * Commands
 */

/* Starts a command in the one buffer there is; append its arguments next. */
RlCommand *
rl_command_start(void)
{
	static RlCommand command;

	rl_resp_keep(&command.args);
	command.nargs = 0;
	command.key_len = 0;
	command.usage = NULL;
	return &command;
}

/* Appends an argument of the given bytes. */
void
rl_command_arg(RlCommand *command, const char *data, int len)
{
	rl_resp_arg(&command->args, data, len);
	if (++command->nargs == 2)
	{
		command->key = command->args.len - 2 - len;
		command->key_len = len;
	}
}

/* Appends a number as an argument. */
void
rl_command_number(RlCommand *command, int64 number)
{
	char		text[32];

	rl_command_arg(command, text, pg_lltoa(number, text));
}

/* The key that the command is about, a script's first; NULL if it has none. */
const char *
rl_command_key(const RlCommand *command)
{
	return command->nargs < 2 ? NULL : command->args.data + command->key;
}

/* Appends a command, which is the arguments of a script if there is one. */
void
rl_command_append(StringInfo out, const RlCommand *command, const RlScript *script, bool by_source)
{
	rl_resp_start(out, command->nargs + (script ? 2 : 0));
	if (script && by_source)
	{
		rl_resp_arg(out, "EVAL", 4);
		rl_resp_arg(out, script->source, strlen(script->source));
	}
	else if (script)
	{
		rl_resp_arg(out, "EVALSHA", 7);
		rl_resp_arg(out, script->sha1, 40);
	}
	appendBinaryStringInfo(out, command->args.data, command->args.len);
}

/* Appends what makes a node run the next command although the slot is on its way. */
void
rl_command_append_asking(StringInfo out)
{
	rl_resp_start(out, 1);
	rl_resp_arg(out, "ASKING", 6);
}

/* To be called before the script is appended. */
void
rl_script_prepare(RlScript *script)
{
	pg_cryptohash_ctx *ctx;
	uint8		digest[SHA1_DIGEST_LENGTH];

	if (script->sha1[0] != '\0')
		return;
	ctx = pg_cryptohash_create(PG_SHA1);
	if (pg_cryptohash_init(ctx) < 0 ||
		pg_cryptohash_update(ctx, (const uint8 *) script->source, strlen(script->source)) < 0 ||
		pg_cryptohash_final(ctx, digest, sizeof(digest)) < 0)
	{
		pg_cryptohash_free(ctx);
		elog(ERROR, "could not compute the SHA1 of a script");
	}
	pg_cryptohash_free(ctx);
	for (int i = 0; i < SHA1_DIGEST_LENGTH; i++)
		snprintf(script->sha1 + 2 * i, 3, "%02x", digest[i]);
}

/* An error reply is the store failing, never a verdict: returns false with the error set. */
bool
rl_redis_accepted(const RlReply *reply, RlError *error)
{
	if (reply->kind != RL_REPLY_ERROR)
		return true;
	return rl_connection_refused(&rl_node_in_use()->conn, false, reply->text, error);
}

/*
 * Sends a command and reads its reply, connecting first if need be.  A
 * connection that turns out to be dead before a byte was sent is made anew,
 * once; where the command was not run it goes on to who can, or by its source.
 * Returns false with the error set.
 */
static bool
send_command(const RlCommand *command, const RlScript *script, RlReply *reply, RlError *error)
{
	static StringInfoData out;
	RlRoute		route;
	bool		by_source = false;

	rl_route_begin(&route, rl_command_key(command), command->key_len);
	for (;;)
	{
		int64		whole = (int64) rl_command_timeout * 1000;
		int64		left;
		RlOutcome	outcome;

		if (!rl_route_connect(&route, error))
			return false;
		rl_resp_keep(&out);
		if (route.asking)
			rl_command_append_asking(&out);
		rl_command_append(&out, command, script, by_source);
		if (command->usage != NULL)
			command->usage->round_trips++;
		left = route.deadline - rl_monotonic_now();
		outcome = rl_connection_exchange(&route.node->conn, &out, route.asking ? 2 : 1,
										 route.deadline, reply, error);
		if (outcome == RL_NOT_SENT && route.reused)
			rl_connection_close(&route.node->conn);
		else if (outcome != RL_DONE)
		{
			/* Who had little time is not to be left alone for it. */
			error->unreachable &= left >= whole / 2;
			rl_route_broken(&route, error);
			return false;
		}
		else if (rl_route_answered(&route, reply))
		{
			if (rl_route_should_pause(&route))
			{
				if (rl_monotonic_now() + whole / 4 >= route.deadline)
					return true;
				rl_pause(route.deadline);
			}
		}
		/* NOSCRIPT means that nothing was run. */
		else if (script != NULL && !by_source && rl_reply_next_step(reply) == RL_STEP_SEND_SOURCE)
			by_source = true;
		else
			return true;
	}
}

static bool
call(const RlCommand *command, const RlScript *script, RlReply *reply, RlError *error)
{
	int64		start = rl_monotonic_now();
	bool		answered = send_command(command, script, reply, error);

	rl_breakers_release();
	if (command->usage != NULL)
		command->usage->us += rl_monotonic_now() - start;
	return answered && rl_redis_accepted(reply, error);
}

/*
 * Runs a plain command.  Returns true with a reply that is not an error, or
 * false with the error set.
 */
bool
rl_redis_command(RlCommand *command, RlReply *reply, RlError *error)
{
	return call(command, NULL, reply, error);
}

/*
 * Runs a script; the command holds what follows its name: the number of keys,
 * the keys, the arguments.  Like rl_redis_command otherwise.
 */
bool
rl_redis_script(RlScript *script, RlCommand *command, RlReply *reply, RlError *error)
{
	rl_script_prepare(script);
	return call(command, script, reply, error);
}
