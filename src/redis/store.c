/*
 * store.c
 *		The store in Redis: turns calls into scripts and their arguments, and
 *		reads the replies.  call.c has those that take quota.
 *
 * Redis keeps a key in one hash, "<prefix>{<key>}" (src/README.md).  So each call uses one Redis
 * key, is atomic, and takes one round trip.
 */
#include "postgres.h"

#include "redis/call.h"
#include "redis/redis.h"
#include "redis/scripts.h"

static bool
is_count(const RlReply *reply)
{
	return reply->kind == RL_REPLY_NUMBERS && !reply->is_array && reply->nvalues == 1 &&
		reply->values[0] >= 0;
}

static bool
read_done(const RlReply *reply, RlError *error)
{
	return (is_count(reply) && reply->values[0] == 1) || rl_wrong_reply(error);
}

static bool
append_refund(RlCommand *command, int i pg_attribute_unused(), void *arg)
{
	const RlAction *action = arg;

	rl_command_hash(command, &action->key);
	rl_command_text(command, "");
	rl_command_number(command, action->quota);
	for (int l = 0; l < action->limits->n; l++)
		rl_append_limit(command, &action->limits->limit[l], action->quota, false);
	return true;
}

static bool
redis_refund(const RlKey *key, const RlLimits *limits, int64 quota, RlError *error)
{
	RlAction	action = {.key = *key,.limits = limits,.quota = quota};
	RlReply		reply;

	return rl_redis_call(&rl_refund_script, append_refund, &action, NULL, &reply, error) &&
		read_done(&reply, error);
}

/* Runs a script, or a plain command if it is NULL, whose reply is the number of deletions. */
static bool
delete_from(RlScript *script, RlCommand *command, bool *found, RlError *error)
{
	RlReply		reply;

	if (!rl_redis_script(script, command, &reply, error))
		return false;
	*found = is_count(&reply) && reply.values[0] > 0;
	return is_count(&reply) || rl_wrong_reply(error);
}

static bool
redis_reset(const RlKey *key, const RlLimits *limits, bool *found, RlError *error)
{
	RlCommand  *command = rl_command_start();
	char		name[RL_MAX_REDIS_KEY];

	if (limits == NULL)
	{
		rl_command_text(command, "UNLINK");
		rl_command_arg(command, name, rl_redis_key(key, name));
		return delete_from(NULL, command, found, error);
	}
	rl_command_hash(command, key);
	for (int i = 0; i < limits->n; i++)
	{
		rl_append_tag(command, &limits->limit[i]);
		rl_command_text(command, rl_algorithm(&limits->limit[i])->has_logs ? "1" : "");
	}
	return delete_from(&rl_reset_script, command, found, error);
}

static bool
redis_ban(const RlKey *key, int64 duration, const char *why, RlError *error)
{
	RlCommand  *command = rl_command_start();
	RlReply		reply;

	rl_command_hash(command, key);
	rl_command_text(command, "");
	rl_command_number(command, duration);
	rl_command_text(command, why);
	return rl_redis_script(&rl_ban_script, command, &reply, error) && read_done(&reply, error);
}

static bool
redis_unban(const RlKey *key, bool *found, RlError *error)
{
	RlCommand  *command = rl_command_start();

	/* The script also deletes a hash that has nothing else.  No state has this tag. */
	rl_command_hash(command, key);
	rl_command_text(command, "ban");
	rl_command_text(command, "");
	return delete_from(&rl_reset_script, command, found, error);
}

const RlStore rl_redis_store = {
	.name = "redis",
	.may_cache = true,
	.take = rl_redis_take,
	.take_many = rl_redis_take_many,
	.take_all = rl_redis_take_all,
	.take_parts = rl_redis_take_parts,
	.refund = redis_refund,
	.reset = redis_reset,
	.ban = redis_ban,
	.unban = redis_unban
};

/* Writes the server's name and version.  Returns false with the error set when the store fails. */
bool
rl_redis_version(char *version, Size size, RlError *error)
{
	RlCommand  *command = rl_command_start();
	RlReply		reply;
	int			number;

	rl_command_number(command, 0);
	if (!rl_redis_script(&rl_version_script, command, &reply, error))
		return false;
	if (reply.kind != RL_REPLY_NUMBERS || reply.nvalues != 2)
		return rl_wrong_reply(error);
	number = reply.values[1] & 0xffffff;
	snprintf(version, size, "%s %d.%d.%d", reply.values[0] == 1 ? "Valkey" : "Redis",
			 number >> 16, (number >> 8) & 0xff, number & 0xff);
	return true;
}
