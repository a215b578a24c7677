/*
 * store.c
 *		The store in Redis: turns calls into scripts and their arguments, and
 *		reads the replies.  call.c has those that take quota.
 *
 * Redis keeps a key in one hash, "<prefix>{<key>}" (src/README.md).  So each call uses one Redis
 * key, is atomic, and takes one round trip.
 */
#include "postgres.h"

#include "algorithm/calendar.h"
#include "error.h"
#include "redis/call.h"
#include "redis/redis.h"
#include "redis/scripts.h"

static bool
is_count(const RlReply *reply)
{
	return reply->kind == RL_REPLY_NUMBERS && !reply->is_array && reply->nvalues == 1 &&
		reply->values[0] >= 0;
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
	return rl_redis_script(&rl_ban_script, command, &reply, error) && rl_read_done(&reply, error);
}

static bool
redis_unban(const RlKey *key, bool *found, RlError *error)
{
	RlCommand  *command = rl_command_start();

	/* The script also deletes a hash that has nothing else.  No state has these tags. */
	rl_command_hash(command, key);
	rl_command_text(command, "ban");
	rl_command_text(command, "");
	rl_command_text(command, RL_LEVEL_NAME);
	rl_command_text(command, "");
	return delete_from(&rl_reset_script, command, found, error);
}

#define MAX_CALENDARS		(RL_MAX_KEYS * RL_MAX_LIMITS)

/* A call of settle.lua. */
typedef struct Settling
{
	const RlKey *keys;
	const RlReserve *of;		/* its hold is 0 for the same hold */
	const int64 *quotas;		/* NULL: the hold starts again */
	int			n;
	RlLimit    *limit;			/* calendars that were charged, MAX_CALENDARS at most: only the members of the
								 * state tag */
} Settling;

static bool
append_settle(RlCommand *command, int index pg_attribute_unused(), void *arg)
{
	const Settling *settling = arg;
	const RlReserve *of = settling->of;

	rl_command_number(command, of->nkeys);
	for (int i = 0; i < of->nkeys; i++)
	{
		char		name[RL_MAX_REDIS_KEY];

		rl_command_arg(command, name, rl_redis_key(&settling->keys[i], name));
	}
	rl_command_text(command, rl_debug_now);
	rl_command_arg(command, of->id.data, of->id.len);
	rl_append_keys(command, of);
	if (of->hold == 0)
		rl_command_text(command, "");
	else
		rl_command_number(command, of->hold);
	for (int i = 0; i < of->nkeys; i++)
		if (settling->quotas == NULL)
			rl_command_text(command, "");
		else
			rl_command_number(command, settling->quotas[i]);
	for (int l = 0; l < settling->n; l++)
	{
		rl_append_tag(command, &settling->limit[l]);
		rl_append_windows(command, &settling->limit[l]);
	}
	return true;
}

/* Reads the tags of calendars, a line each.  Returns false with the error set if they are no such tags. */
static bool
read_calendars(const RlReply *reply, Settling *settling, RlError *error)
{
	const char *at = reply->data;
	const char *end = at + reply->len;

	for (settling->n = 0; at < end; settling->n++)
	{
		const char *line_end = memchr(at, '\n', end - at);
		RlLimit    *limit = &settling->limit[settling->n];

		if (line_end == NULL || settling->n == MAX_CALENDARS)
			return rl_wrong_reply(error);
		if (!rl_calendar_of_name(at, line_end - at, limit))
			return limit->calendar == RL_NO_CALENDAR ? rl_wrong_reply(error) :
				rl_error_set(error, ERRCODE_INVALID_TEXT_REPRESENTATION,
							 "a time zone of the reservation is not known");
		at = line_end + 1;
	}
	return settling->n > 0 || rl_wrong_reply(error);
}

/* Reads what was charged to each key of a reservation that is settled now. */
static bool
read_settled(const RlReply *reply, int n, RlSettled *settled, RlError *error)
{
	bool		charged = false;

	if (reply->nvalues != 3 * n)
		return rl_wrong_reply(error);
	settled->how = RL_SETTLED_DONE;
	for (int i = 0; i < n; i++)
	{
		const int64 *values = &reply->values[3 * i];

		if (values[0] < 0 || values[0] > RL_MAX_COUNT)
			return rl_wrong_reply(error);
		charged |= values[0] > 0;
		settled->quotas[i] = values[0];
		/* The hash is sent in two parts. */
		settled->limits[i] = (uint64) values[1] << 32 | (uint32) values[2];
	}
	return charged || rl_wrong_reply(error);
}

/* It needs one call, or two if calendars are charged. */
static bool
redis_settle(const RlKey *keys, const RlReserve *of, const int64 *quotas, RlSettled *settled, RlError *error)
{
	RlLimit		calendars[MAX_CALENDARS];
	Settling	settling = {.keys = keys,.of = of,.quotas = quotas,.limit = calendars};
	RlReply		reply;

	reply.kind = RL_REPLY_NIL;
	if (!rl_in_one_slot(keys, of->nkeys))
		return rl_reserved_apart(error);
	for (int calls = 0; calls < 2; calls++)
	{
		if (!rl_redis_call(&rl_settle_script, append_settle, &settling, NULL, &reply, error))
			return rl_learn_slots(&reply, &keys[0]) ? rl_reserved_apart(error) : false;
		if (reply.kind != RL_REPLY_TEXT)
			break;
		if (calls > 0 || quotas == NULL)
			return rl_wrong_reply(error);
		if (!read_calendars(&reply, &settling, error))
			return false;
	}
	*settled = (RlSettled) {.how = RL_SETTLED_NONE};
	if (reply.kind != RL_REPLY_NUMBERS || reply.is_array != (quotas != NULL && reply.nvalues > 1))
		return rl_wrong_reply(error);
	if (reply.is_array)
		return read_settled(&reply, of->nkeys, settled, error);
	if (reply.values[0] < 0 && reply.values[0] >= -RL_MAX_KEYS)
		return rl_reserved_otherwise(-reply.values[0], error);
	if (reply.values[0] < 0 || reply.values[0] > 3 || reply.values[0] == 2 ||
		(reply.values[0] == 3 && (quotas != NULL || of->hold == 0)))
		return rl_wrong_reply(error);
	settled->how = reply.values[0] == 3 ? RL_SETTLED_LONG_HOLD : reply.values[0] == 1 ? RL_SETTLED_DONE :
		RL_SETTLED_NONE;
	return true;
}

const RlStore rl_redis_store = {
	.name = "redis",
	.may_cache = true,
	.take = rl_redis_take,
	.take_many = rl_redis_take_many,
	.take_all = rl_redis_take_all,
	.take_parts = rl_redis_take_parts,
	.refund = rl_redis_refund,
	.reset = redis_reset,
	.ban = redis_ban,
	.unban = redis_unban,
	.settle = redis_settle
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
