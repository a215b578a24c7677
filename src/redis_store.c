/*
 * redis_store.c
 *		Limits to scripts: what is asked of Redis, and what its numbers mean.
 *
 * All that is known of a key lives in one hash, "<prefix>{<key>}": the field
 * "throttle:<period>" of each limit, named after what tells limits' states
 * apart, and the field "ban".  So every act is one key, atomic and one round
 * trip.
 */
#include "postgres.h"

#include "utils/builtins.h"

#include "redis.h"

static RlScript throttle_script = {.source =
#include "throttle.lua.h"
};
static RlScript check_script = {.source =
#include "check.lua.h"
};
static RlScript refund_script = {.source =
#include "refund.lua.h"
};
static RlScript ban_script = {.source =
#include "ban.lua.h"
};

#define MAX_FIELD			32

/* Far longer than any limit makes it, and short enough to be added to. */
#define MAX_BACKLOG			(2 * RL_MAX_SPAN * 1000)

/* Appends "<prefix>{<key>}", with what would confuse the braces escaped. */
static void
append_hash(RlCommand *command, const RlKey *key)
{
	char		name[RL_MAX_PREFIX + 3 * RL_MAX_KEY + 2];
	int			n = strlen(rl_key_prefix);

	memcpy(name, rl_key_prefix, n);
	name[n++] = '{';
	for (int i = 0; i < key->len; i++)
	{
		char		c = key->data[i];

		if (c == '%' || c == '{' || c == '}')
		{
			memcpy(name + n, c == '%' ? "%25" : c == '{' ? "%7B" : "%7D", 3);
			n += 3;
		}
		else
			name[n++] = c;
	}
	name[n++] = '}';
	rl_command_arg(command, name, n);
}

/* Starts a script's arguments: the one key, and the time if a test sets it. */
static RlCommand *
start_script(const RlKey *key)
{
	RlCommand  *command = rl_command_start();

	rl_command_arg(command, "1", 1);
	append_hash(command, key);
	rl_command_arg(command, rl_debug_now, strlen(rl_debug_now));
	return command;
}

/* Writes the name of the limit's field, and returns its length. */
static int
state_field(const RlLimit *limit, char *field)
{
	memcpy(field, "throttle:", 9);
	return 9 + pg_lltoa(limit->period, field + 9);
}

static void
append_field(RlCommand *command, const RlLimit *limit)
{
	char		field[MAX_FIELD];

	rl_command_arg(command, field, state_field(limit, field));
}

/* Appends nanoseconds as microseconds and the rest. */
static void
append_ns(RlCommand *command, int64 ns)
{
	rl_command_number(command, ns / 1000);
	rl_command_number(command, ns % 1000);
}

/* True if the script takes quota; otherwise it only looks. */
static bool
takes(const RlLimits *limits, int64 quota, bool peek)
{
	if (peek || quota == 0)
		return false;
	for (int i = 0; i < limits->n; i++)
		if (quota > limits->limit[i].capacity)
			return false;
	return true;
}

/* Raises an error if a limit needs what this version does not do. */
static void
check_supported(const RlLimits *limits)
{
	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];

		if (limit->algorithm != RL_THROTTLE || limit->ban != 0 || limit->refund_on_abort)
			ereport(ERROR,
					(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
					 errmsg("limit \"%s\" is not supported yet", rl_limit_text(limit)),
					 errdetail("This version enforces the algorithm throttle, without the options ban and refund_on_abort.")));
	}
}

static bool
wrong_reply(RlError *error)
{
	rl_error_set(error, ERRCODE_PROTOCOL_VIOLATION,
				 "unexpected reply from Redis: it does not answer the script");
	return false;
}

/*
 * Decides one action and charges it if every limit allows it, unless it is
 * only to be looked at.  Sets a decision for each limit.  Returns false with
 * the error set when the store fails; raises an error for limits that are not
 * supported.
 */
bool
rl_store_take(const RlKey *key, const RlLimits *limits, int64 quota, bool peek,
			  RlDecision *decisions, RlError *error)
{
	bool		single = limits->n == 1;
	bool		charge = takes(limits, quota, peek);
	bool		allowed = true;
	int64		ban = 0;
	int64		backlog[RL_MAX_LIMITS];
	bool		refused = false;
	RlCommand  *command;
	RlReply		reply;

	check_supported(limits);
	command = start_script(key);
	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];

		append_field(command, limit);
		append_ns(command, charge ? rl_throttle_cost(limit, quota) : 0);
		append_ns(command, charge ? rl_throttle_cost(limit, limit->capacity - quota) : 0);
	}
	if (!rl_redis_script(single ? &throttle_script : &check_script, command, &reply, error))
		return false;

	if (reply.kind != RL_REPLY_NUMBERS)
		return wrong_reply(error);
	if (single && !reply.is_array && reply.nvalues == 1)
	{
		refused = reply.values[0] < 0;
		backlog[0] = refused ? -Max(reply.values[0], -MAX_BACKLOG) : reply.values[0];
	}
	else if (reply.is_array && reply.nvalues == limits->n + 1)
	{
		refused = reply.values[0] < 0;
		ban = Max(reply.values[0], 0);
		memcpy(backlog, reply.values + 1, limits->n * sizeof(int64));
	}
	else
		return wrong_reply(error);

	for (int i = 0; i < limits->n; i++)
	{
		if (backlog[i] < 0)
			return wrong_reply(error);
		backlog[i] = Min(backlog[i], MAX_BACKLOG);
		rl_throttle_decide(&limits->limit[i], backlog[i], quota, &decisions[i]);
		allowed &= decisions[i].allowed;
	}
	/* What was charged is what the script said; both count alike, or it lies. */
	if (charge && ban == 0 && allowed == refused)
		return wrong_reply(error);

	for (int i = 0; i < limits->n; i++)
	{
		RlDecision *d = &decisions[i];

		if (ban > 0)
		{
			d->allowed = false;
			d->remaining = 0;
			d->reset_after = Max(d->reset_after, ban);
			if (d->retry_after != RL_NEVER)
				d->retry_after = Max(d->retry_after, ban);
			d->source = RL_FROM_BAN;
		}
		else if (allowed)
			rl_throttle_charge(&limits->limit[i],
							   backlog[i] + rl_throttle_cost(&limits->limit[i], quota), d);
	}
	return true;
}

/*
 * Gives quota back to each of the limits, as far as it is not free already.
 * A quota over a limit's capacity fills it.  Returns false with the error set
 * when the store fails.
 */
bool
rl_store_refund(const RlKey *key, const RlLimits *limits, int64 quota, RlError *error)
{
	RlCommand  *command;
	RlReply		reply;

	check_supported(limits);
	command = start_script(key);
	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];

		append_field(command, limit);
		append_ns(command, rl_throttle_cost(limit, Min(quota, limit->capacity)));
	}
	return rl_redis_script(&refund_script, command, &reply, error);
}

/* Runs a command that answers how many things it removed. */
static bool
remove_things(RlCommand *command, bool *found, RlError *error)
{
	RlReply		reply;

	if (!rl_redis_command(command, &reply, error))
		return false;
	if (reply.kind != RL_REPLY_NUMBERS || reply.is_array || reply.nvalues != 1)
		return wrong_reply(error);
	*found = reply.values[0] > 0;
	return true;
}

/*
 * Forgets the key, or of it what the limits counted if they are not NULL;
 * *found tells whether there was anything.  Returns false with the error set
 * when the store fails.
 */
bool
rl_store_reset(const RlKey *key, const RlLimits *limits, bool *found, RlError *error)
{
	RlCommand  *command;

	if (limits != NULL)
		check_supported(limits);
	command = rl_command_start();
	rl_command_arg(command, limits ? "HDEL" : "DEL", limits ? 4 : 3);
	append_hash(command, key);
	for (int i = 0; limits && i < limits->n; i++)
		append_field(command, &limits->limit[i]);
	return remove_things(command, found, error);
}

/*
 * Bans the key for the duration from now on.  Returns false with the error
 * set when the store fails.
 */
bool
rl_store_ban(const RlKey *key, int64 duration, RlError *error)
{
	RlCommand  *command = start_script(key);
	RlReply		reply;

	rl_command_number(command, duration);
	return rl_redis_script(&ban_script, command, &reply, error);
}

/*
 * Lifts the key's ban; *found tells whether one was stored.  Returns false
 * with the error set when the store fails.
 */
bool
rl_store_unban(const RlKey *key, bool *found, RlError *error)
{
	RlCommand  *command = rl_command_start();

	rl_command_arg(command, "HDEL", 4);
	append_hash(command, key);
	rl_command_arg(command, "ban", 3);
	return remove_things(command, found, error);
}
