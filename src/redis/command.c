/*
 * command.c
 *		Commands and scripts for Redis.
 *
 * Failures are returned, not raised, but for core's own errors and those of wrong settings.
 */
#include "postgres.h"

#include "common/cryptohash.h"
#include "common/sha1.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "algorithm/calendar.h"
#include "error.h"
#include "redis/cluster.h"
#include "redis/command.h"
#include "redis/redis.h"
#include "redis/route.h"
#include "shared/clock.h"

/* Returns true if this backend has a connection that works, by all that is known. */
bool
rl_redis_is_connected(void)
{
	RlNode	   *node = rl_nodes_are_current() ? rl_node_in_use() : NULL;

	return node != NULL && rl_connection_is_usable(&node->conn);
}

/*
 * Returns the name of the server that is in use, or that the settings name, in a static buffer;
 * NULL if they name none.  Sets whether this backend is connected, the state of the breaker, and
 * how long it stays open.
 */
const char *
rl_redis_server(bool *connected, const char **breaker, int64 *breaker_left)
{
	static char name[RL_MAX_TARGET];
	RlNode	   *node = rl_nodes_are_current() ? rl_node_in_use() : NULL;
	RlTarget	target;
	RlError		error;

	*connected = rl_redis_is_connected();
	*breaker = NULL;
	*breaker_left = 0;
	if (node != NULL)
	{
		rl_address_name(&node->address, name);
		*breaker = rl_breaker_state(name, false, breaker_left);
	}
	else if (rl_target_parse(rl_redis_url, &target, &error))
	{
		rl_target_name(&target, name);
		*breaker = rl_breaker_state(name, target.deployment == RL_SENTINELS, breaker_left);
	}
	else
		return NULL;
	return name;
}

/*
 * Asks the servers of a list that are not in use whether they are masters, too: there calls of
 * another PostgreSQL server may count.  Returns a text in a static buffer, or NULL.  Takes at most
 * ratelimit.connect_timeout and ratelimit.command_timeout in all.  Raises an error at an interrupt.
 */
const char *
rl_redis_warning(void)
{
	static char text[2 * RL_MAX_SERVER + 100];
	RlNode	   *node = rl_nodes_are_current() ? rl_node_in_use() : NULL;
	int64		end = rl_monotonic_now() + ((int64) rl_connect_timeout + rl_command_timeout) * 1000;
	char		name[RL_MAX_SERVER];

	if (node == NULL || !node->conn.master || node->conn.cluster || rl_target.deployment == RL_SENTINELS)
		return NULL;
	for (int i = 0; i < rl_target.n; i++)
	{
		int64		now = rl_monotonic_now();

		if (rl_node_at(&rl_target.seeds[i]) == node ||
			!rl_connection_finds_master(&rl_target.seeds[i], now + (end - now) / (rl_target.n - i)))
			continue;
		rl_address_name(&rl_target.seeds[i], name);
		snprintf(text, sizeof(text),
				 "two masters: %s is in use, and %s of ratelimit.redis_url is a master, too",
				 node->conn.server, name);
		return text;
	}
	return NULL;
}

/* Drops the connection of a reply that does not answer its script.  Returns false with the error set. */
bool
rl_wrong_reply(RlError *error)
{
	RlNode	   *node = rl_node_in_use();

	if (node != NULL)
		rl_connection_close(&node->conn);
	rl_error_set(error, ERRCODE_STORE_FAILED,
				 "unexpected reply from Redis: it does not answer the script");
	return false;
}

/* Returns true for the reply 1.  Otherwise does the same. */
bool
rl_read_done(const RlReply *reply, RlError *error)
{
	return (reply->kind == RL_REPLY_NUMBERS && !reply->is_array && reply->nvalues == 1 &&
			reply->values[0] == 1) || rl_wrong_reply(error);
}

/* Starts a command, in a buffer that the next one reuses. */
RlCommand *
rl_command_start(void)
{
	static RlCommand command;

	rl_resp_reset(&command.args);
	command = (RlCommand) {.args = command.args};
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

/* As rl_command_arg, of a text. */
void
rl_command_text(RlCommand *command, const char *text)
{
	rl_command_arg(command, text, strlen(text));
}

/* As rl_command_arg, of a number. */
void
rl_command_number(RlCommand *command, int64 number)
{
	char		text[32];

	rl_command_arg(command, text, pg_lltoa(number, text));
}

/* Appends the number of keys, 1, the name of the key's hash, and ARGV[1]: the time if a test sets it. */
void
rl_command_hash(RlCommand *command, const RlKey *key)
{
	char		name[RL_MAX_REDIS_KEY];

	rl_command_number(command, 1);
	rl_command_arg(command, name, rl_redis_key(key, name));
	rl_command_text(command, rl_debug_now);
}

/* Returns the key that the command is about, a script's first; NULL if it has none. */
const char *
rl_command_key(const RlCommand *command)
{
	return command->nargs < 2 ? NULL : command->args.data + command->key;
}

/*
 * Appends a command as it is sent; with a script, the command is its arguments.  With asking,
 * ASKING is ahead: a node runs the command although the slot is only moving there.
 */
void
rl_command_append(StringInfo out, const RlCommand *command, const RlScript *script, bool by_source,
				  bool asking)
{
	if (asking)
	{
		rl_resp_start(out, 1);
		rl_resp_arg(out, "ASKING", 6);
	}
	rl_resp_start(out, command->nargs + (script ? 2 : 0));
	if (script)
	{
		const char *body = by_source ? script->source : script->sha1;

		rl_resp_arg(out, by_source ? "EVAL" : "EVALSHA", by_source ? 4 : 7);
		rl_resp_arg(out, body, strlen(body));
	}
	appendBinaryStringInfo(out, command->args.data, command->args.len);
}

/* Computes the script's SHA1; to be called before the script is appended. */
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
	script->sha1[hex_encode((char *) digest, SHA1_DIGEST_LENGTH, script->sha1)] = '\0';
}

/* Returns false with the error set if the last reply is an error reply, which is no verdict. */
bool
rl_redis_check_reply(const RlReply *reply, RlError *error)
{
	if (reply->kind != RL_REPLY_ERROR)
		return true;
	return rl_error_reply(&rl_node_in_use()->conn, false, reply->text, error);
}

/*
 * How far Redis's clock is ahead, if its time was in none of the windows around this server's; otherwise 0.
 */
static int64 clock_ahead = 0;

/* Returns the time around which a script gets the windows of calendars. */
int64
rl_redis_time(void)
{
	if (rl_debug_now[0] != '\0')
		return strtoll(rl_debug_now, NULL, 10);
	return GetCurrentTimestamp() + RL_UNIX_EPOCH + clock_ahead;
}

/* Takes Redis's time from a reply that asks for other windows.  Returns false if there is none. */
bool
rl_redis_set_time(const RlReply *reply)
{
	int64		now;

	if (rl_reply_next_step(reply) != RL_STEP_SEND_WINDOWS || rl_debug_now[0] != '\0')
		return false;
	now = strtoll(strchr(reply->text, ' '), NULL, 10);
	if (now <= 0 || now >= RL_CALENDAR_END)
		return false;
	clock_ahead = now - (GetCurrentTimestamp() + RL_UNIX_EPOCH);
	return true;
}

/*
 * Sends a command and reads its reply.  If the connection proves dead before a byte was sent,
 * connects again.  A call that was not run is sent to the server that can run it, with the
 * script's source, or with other windows.
 */
static bool
send_command(RlCommand *command, const RlScript *script, RlReply *reply, RlError *error)
{
	static StringInfoData out;
	RlRoute		route;
	bool		by_source = false;
	bool		has_time = command->append == NULL;

	rl_route_begin(&route, rl_command_key(command), command->key_len);
	route.several = command->several;
	if (command->node != NULL)
	{
		route.node = command->node;
		route.asking = command->asking;
		route.pinned = true;
	}
	for (;;)
	{
		RlOutcome	outcome;

		/* An interrupt that came while the reply was waited for: nothing was charged. */
		CHECK_FOR_INTERRUPTS();
		if (!rl_route_connect(&route, error))
			return false;
		if (command->node != NULL && command->resumes && (!route.reused || route.node != command->node))
			return rl_connection_lost(&route.node->conn, error, "it was closed between two calls");
		rl_resp_reset(&out);
		rl_command_append(&out, command, script, by_source, route.asking);
		if (command->usage != NULL)
			command->usage->round_trips++;
		if (command->reply_first)
			rl_socket_reply_first();
		outcome = rl_stream_exchange(&route.node->conn, &out, route.asking ? 2 : 1,
									 route.deadline, reply, error);
		rl_socket_reply_read();
		/* What is not sent is no round trip: a lease then keeps its leftovers. */
		if (outcome == RL_NOT_SENT && command->usage != NULL)
			command->usage->round_trips--;
		if (outcome == RL_NOT_SENT && route.reused)
			rl_connection_close(&route.node->conn);
		else if (outcome != RL_DONE)
		{
			rl_route_failed(&route, error);
			return false;
		}
		else if (rl_route_answered(&route, reply))
		{
			if (route.resends > RL_FREE_RESENDS)
			{
				if (rl_monotonic_now() + (int64) rl_command_timeout * 250 >= route.deadline)
					return true;
				rl_pause(route.deadline);
			}
		}
		else if (script != NULL && !by_source && rl_reply_next_step(reply) == RL_STEP_SEND_SOURCE)
			by_source = true;
		else if (!has_time && rl_redis_set_time(reply))
		{
			has_time = true;
			rl_resp_reset(&command->args);
			command->nargs = 0;
			(void) command->append(command, 0, command->arg);
		}
		else
			return true;
	}
}

/*
 * Runs a script with the command's number of keys, keys and arguments, or the command if script
 * is NULL.  Returns true with a reply that is no error reply, or false with the error set.
 * Raises an error if a setting is wrong, or at an interrupt.
 */
bool
rl_redis_script(RlScript *script, RlCommand *command, RlReply *reply, RlError *error)
{
	int64		start = rl_monotonic_now();
	bool		answered;

	if (script != NULL)
		rl_script_prepare(script);
	answered = send_command(command, script, reply, error);
	rl_breakers_release();
	if (command->usage != NULL)
		command->usage->us += rl_monotonic_now() - start;
	return answered && rl_redis_check_reply(reply, error);
}

/* Does the same with arguments that append() writes.  Adds the cost to *usage, if that is not NULL. */
bool
rl_redis_call(RlScript *script, RlAppend append, void *arg, RlUsage *usage, RlReply *reply, RlError *error)
{
	RlCommand  *command = rl_command_start();

	command->append = append;
	command->arg = arg;
	command->usage = usage;
	(void) append(command, 0, arg);
	return rl_redis_script(script, command, reply, error);
}
