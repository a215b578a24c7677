/*
 * store.c
 *		Limits to scripts: what is asked of Redis, and what its numbers mean.
 *
 * All that is known of a key lives in one hash, "<prefix>{<key>}": for each
 * limit a field named by what tells limits' states apart, the limit's tag (for
 * a sliding_log several, see log.lua), and the field "ban".  So every act is
 * one key, atomic and one round trip.
 */
#include "postgres.h"

#include "utils/builtins.h"

#include "algorithm/gcra.h"
#include "algorithm/limits.h"
#include "error.h"
#include "redis/pipeline.h"
#include "redis/redis.h"

/* The fast way of the commonest case: one throttle, without a ban of its own. */
static RlScript throttle_script = {.source =
#include "redis/throttle.lua.h"
};

/* One for limits of one algorithm each, so that no other's code is run. */
static RlScript check_scripts[] = {
	[RL_THROTTLE] = {.source =
#include "redis/check_throttle.lua.h"
	},
	[RL_TOKEN_BUCKET] = {.source =
#include "redis/check_token_bucket.lua.h"
	},
	[RL_FIXED_WINDOW] = {.source =
#include "redis/check_fixed_window.lua.h"
	},
	[RL_SLIDING_WINDOW] = {.source =
#include "redis/check_sliding_window.lua.h"
	},
	[RL_SLIDING_LOG] = {.source =
#include "redis/check_sliding_log.lua.h"
	}
};
static RlScript check_mixed_script = {.source =
#include "redis/check_mixed.lua.h"
};
static RlScript refund_script = {.source =
#include "redis/refund.lua.h"
};
static RlScript reset_script = {.source =
#include "redis/reset.lua.h"
};
static RlScript ban_script = {.source =
#include "redis/ban.lua.h"
};
static RlScript undo_script = {.source =
#include "redis/refund_charges.lua.h"
};
static RlScript version_script = {.source =
#include "redis/version.lua.h"
};

#define MAX_TAG				64

/* Longer than any wait is, unless clocks or numbers have changed. */
#define MAX_WAIT			(2 * RL_MAX_SPAN)

/*
 * Writes the key's name in Redis, which has RL_MAX_REDIS_KEY bytes at most, and
 * returns its length: "<prefix>{<key>}", with braces of the key escaped.
 */
int
rl_redis_key(const RlKey *key, char *name)
{
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
	return n;
}

static void
append_text(RlCommand *command, const char *text)
{
	rl_command_arg(command, text, strlen(text));
}

/* Appends what a script's arguments begin with: the hash, and the time if a test sets it. */
static void
append_key(RlCommand *command, const RlKey *key)
{
	char		name[RL_MAX_REDIS_KEY];

	rl_command_number(command, 1);
	rl_command_arg(command, name, rl_redis_key(key, name));
	append_text(command, rl_debug_now);
}

/* Writes the limit's tag, and returns its length. */
static int
limit_tag(const RlLimit *limit, char *tag)
{
	const char *name = rl_algorithm(limit)->name;
	int			n = strlen(name);

	memcpy(tag, name, n);
	tag[n++] = ':';
	n += pg_lltoa(limit->period, tag + n);
	if (limit->step > 0)
	{
		tag[n++] = ':';
		n += pg_lltoa(limit->step, tag + n);
	}
	if (limit->from_first)
	{
		memcpy(tag + n, ":first", 6);
		n += 6;
	}
	return n;
}

static void
append_tag(RlCommand *command, const RlLimit *limit)
{
	char		tag[MAX_TAG];

	rl_command_arg(command, tag, limit_tag(limit, tag));
}

/* Appends nanoseconds as microseconds and the rest. */
static void
append_ns(RlCommand *command, int64 ns)
{
	rl_command_number(command, ns / 1000);
	rl_command_number(command, ns % 1000);
}

/*
 * Appends one limit as state.lua reads it.  Without trace a refusal is not
 * counted, neither as quota nor for a ban.  The quota may exceed the capacity: no
 * take succeeds then, and a refund is of the whole quota.
 */
static void
append_limit(RlCommand *command, const RlLimit *limit, int64 quota, bool trace)
{
	bool		possible = quota <= limit->capacity;
	bool		ban = trace && possible && limit->ban > 0;

	append_text(command, rl_algorithm(limit)->name);
	append_tag(command, limit);
	rl_command_number(command, limit->period);
	if (limit->algorithm == RL_THROTTLE)
	{
		append_ns(command, rl_throttle_refund(limit, quota));
		append_ns(command, possible ? rl_throttle_cost(limit, limit->capacity - quota) : -1000);
	}
	else
	{
		rl_command_number(command, limit->capacity);
		rl_command_number(command,
						  limit->algorithm == RL_TOKEN_BUCKET ? limit->count :
						  limit->algorithm == RL_SLIDING_WINDOW ? limit->step :
						  limit->from_first);
		append_text(command, "");
		append_text(command, "");
	}
	append_text(command, trace && possible && limit->count_denied ? "1" : "");
	rl_command_number(command, ban ? limit->ban : 0);
	rl_command_number(command, ban ? limit->ban_after : 0);
}

static bool
wrong_reply(RlError *error)
{
	rl_redis_distrust();
	rl_error_set(error, ERRCODE_PROTOCOL_VIOLATION,
				 "unexpected reply from Redis: it does not answer the script");
	return false;
}

/* True if a limit that is no throttle can have these four numbers. */
static bool
is_plausible(const RlLimit *limit, int64 quota, RlTake how, int64 verdict, const int64 *values)
{
	int64		allowed = values[0];
	int64		used = values[1];
	int64		wait = values[2];
	int64		reset = values[3];
	bool		possible = quota <= limit->capacity;
	bool		lacks = used > limit->capacity - quota;

	if (allowed > 1 || (allowed && !possible) || (used > 0) != (reset > 0) ||
		used > 2 * RL_MAX_COUNT)
		return false;
	if (verdict == 0)
		return allowed && used >= quota && used <= limit->capacity && wait == 0;
	if ((wait > 0) != (possible && lacks))
		return false;
	/* Of an action that was counted as refused the quota is in use. */
	if (verdict == -1 && limit->count_denied && how != RL_TRY && possible && quota > 0)
		return used >= quota && (allowed ? used <= limit->capacity : used >= limit->capacity);
	return allowed != lacks;
}

/*
 * Sets a decision for each limit from the numbers of a check, and for each
 * throttle, whose figures are not charged yet, the backlog.  Returns false if
 * the numbers cannot be a check's.
 */
static bool
read_decisions(const RlLimits *limits, int64 quota, RlTake how, const RlReply *reply,
			   RlDecision *decisions, int64 *backlog)
{
	int64		verdict = reply->values[0];
	int			v = 3;

	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];
		RlDecision *d = &decisions[i];
		const int64 *values = &reply->values[v];

		v += limit->algorithm == RL_THROTTLE ? 1 : 4;
		if (v > reply->nvalues)
			return false;
		for (const int64 *value = values; value < &reply->values[v]; value++)
			if (*value < 0)
				return false;
		d->source = RL_FROM_REDIS;
		d->ban_left = 0;
		if (limit->algorithm == RL_THROTTLE)
		{
			backlog[i] = Min(values[0], RL_MAX_BACKLOG);
			rl_throttle_decide(limit, backlog[i], quota, d);
			continue;
		}
		if (!is_plausible(limit, quota, how, verdict, values))
			return false;
		d->allowed = values[0] == 1;
		d->capacity = limit->capacity;
		d->remaining = Max(limit->capacity - values[1], 0);
		d->retry_after = quota > limit->capacity ? RL_NEVER : Min(values[2], MAX_WAIT);
		d->reset_after = Min(values[3], MAX_WAIT);
	}
	return v == reply->nvalues;
}

/* True if a refusal can bring a ban. */
static bool
may_ban(const RlLimits *limits, RlTake how)
{
	for (int i = 0; i < limits->n; i++)
		if (limits->limit[i].ban > 0)
			return how != RL_TRY;
	return false;
}

/* The fast script, which does not tell the time, does for one throttle without options. */
static bool
is_plain_throttle(const RlLimits *limits)
{
	return limits->n == 1 && limits->limit[0].algorithm == RL_THROTTLE &&
		limits->limit[0].ban == 0 && !limits->timed;
}

static RlScript *
take_script(const RlLimits *limits)
{
	if (is_plain_throttle(limits))
		return &throttle_script;
	for (int i = 1; i < limits->n; i++)
		if (limits->limit[i].algorithm != limits->limit[0].algorithm)
			return &check_mixed_script;
	return &check_scripts[limits->limit[0].algorithm];
}

/* True if the throttle's script is to charge, and not only to look. */
static bool
charges(const RlLimit *limit, int64 quota, RlTake how)
{
	return how != RL_PEEK && quota <= limit->capacity;
}

/* Appends the arguments of take_script. */
static void
append_take(RlCommand *command, const RlAction *action)
{
	const RlLimits *limits = action->limits;
	int64		quota = action->quota;
	RlTake		how = action->how;

	append_key(command, &action->key);
	if (is_plain_throttle(limits))
	{
		const RlLimit *limit = &limits->limit[0];
		bool		charge = charges(limit, quota, how);

		append_tag(command, limit);
		append_ns(command, charge ? rl_throttle_cost(limit, quota) : 0);
		append_ns(command, charge ? rl_throttle_cost(limit, limit->capacity - quota) : 0);
		return;
	}
	append_text(command, how == RL_PEEK ? "0" : "1");
	rl_command_number(command, quota);
	for (int i = 0; i < limits->n; i++)
		append_limit(command, &limits->limit[i], quota, how != RL_TRY);
}

/* Brings the throttle's reply to the form in which a check answers, but for the time. */
static bool
read_throttle(const RlLimit *limit, int64 quota, RlTake how, const RlReply *reply, RlReply *check)
{
	int64		backlog = reply->values[0];
	RlDecision	decision;

	if (reply->kind != RL_REPLY_NUMBERS || reply->nvalues != (reply->is_array ? 2 : 1))
		return false;
	check->values[0] = backlog < 0 ? -1 : 0;
	if (reply->is_array)
	{
		if (reply->values[0] <= 0)
			return false;
		check->values[0] = reply->values[0];
		backlog = reply->values[1];
	}
	else
	{
		backlog = backlog < 0 ? -Max(backlog, -RL_MAX_BACKLOG) : Min(backlog, RL_MAX_BACKLOG);
		/* A script that was only to look does not know the verdict. */
		if (!charges(limit, quota, how))
		{
			rl_throttle_decide(limit, backlog, quota, &decision);
			check->values[0] = decision.allowed ? 0 : -1;
		}
	}
	check->values[1] = check->values[2] = 0;
	check->values[3] = backlog;
	check->nvalues = 4;
	return true;
}

/* Sets the decisions that a reply of take_script means, and the store's time. */
static bool
read_take(const RlAction *action, const RlReply *reply, RlDecision *decisions, int64 *at,
		  RlError *error)
{
	const RlLimits *limits = action->limits;
	int64		quota = action->quota;
	RlTake		how = action->how;
	bool		allowed = true;
	int64		backlog[RL_MAX_LIMITS];
	RlReply		throttles;

	if (is_plain_throttle(limits))
	{
		if (!read_throttle(&limits->limit[0], quota, how, reply, &throttles))
			return wrong_reply(error);
		reply = &throttles;
	}
	else if (reply->kind != RL_REPLY_NUMBERS || !reply->is_array || reply->nvalues < 3 ||
			 reply->values[0] < -1 || reply->values[1] < 0 || reply->values[2] < 0 ||
			 (reply->values[1] > 0 && (reply->values[0] != -1 || !may_ban(limits, how))))
		return wrong_reply(error);
	*at = reply->values[2];
	if (!read_decisions(limits, quota, how, reply, decisions, backlog))
		return wrong_reply(error);

	/* What was charged is what the script said; both count alike, or it lies. */
	for (int i = 0; i < limits->n; i++)
		allowed &= decisions[i].allowed;
	if (reply->values[0] <= 0 && allowed != (reply->values[0] == 0))
		return wrong_reply(error);

	if (reply->values[0] > 0)
		rl_apply_ban(decisions, limits->n, Min(reply->values[0], MAX_WAIT), true);
	else if (reply->values[1] > 0)
		rl_apply_ban(decisions, limits->n, Min(reply->values[1], MAX_WAIT), false);
	else if (allowed)
		for (int i = 0; i < limits->n; i++)
			if (limits->limit[i].algorithm == RL_THROTTLE)
				rl_throttle_figures(&limits->limit[i],
									backlog[i] + rl_throttle_cost(&limits->limit[i], quota),
									&decisions[i]);
	return true;
}

static bool
redis_take(const RlAction *action, RlDecision *decisions, int64 *at, RlError *error)
{
	RlCommand  *command = rl_command_start();
	RlReply		reply;

	append_take(command, action);
	return rl_redis_script(take_script(action->limits), command, &reply, error) &&
		read_take(action, &reply, decisions, at, error);
}

typedef struct Taking
{
	const RlAction *const *actions;
	int64	   *unanswered;
	RlTookOne	took;
	void	   *arg;
} Taking;

static bool
append_one(RlCommand *command, int i, void *arg)
{
	const Taking *taking = arg;

	append_take(command, taking->actions[i]);
	return true;
}

static void
sent_one(int i pg_attribute_unused(), bool sent, void *arg)
{
	const Taking *taking = arg;

	*taking->unanswered += sent ? 1 : -1;
}

static bool
read_one(int i, const RlReply *reply, void *arg, RlError *error)
{
	const Taking *taking = arg;
	RlDecision	decisions[RL_MAX_LIMITS];
	int64		at;

	if (reply->kind != RL_REPLY_ERROR)
	{
		if (!read_take(taking->actions[i], reply, decisions, &at, error))
			return false;
		taking->took(i, decisions, at, taking->arg);
	}
	--*taking->unanswered;
	return true;
}

/*
 * Takes for many actions under the same limits, each for itself; took() is told of
 * each that was answered.  *unanswered is increased while calls are under way; by
 * those that never get an answer, of which it is not known what they did, it stays
 * so.  Returns false with the error set when the store fails.
 */
bool
rl_redis_take_many(const RlAction *const *actions, int n, int64 *unanswered,
				   RlTookOne took, void *arg, RlError *error)
{
	Taking		taking = {actions, unanswered, took, arg};

	return rl_redis_pipeline(take_script(actions[0]->limits), n, append_one, sent_one, read_one,
							 &taking, error);
}

/* Reads the one number that all but checks answer: how many things were done. */
static bool
read_count(const RlReply *reply, int64 *count, RlError *error)
{
	if (reply->kind != RL_REPLY_NUMBERS || reply->is_array || reply->nvalues != 1 ||
		reply->values[0] < 0)
		return wrong_reply(error);
	*count = reply->values[0];
	return true;
}

/* Reads the 1 of a script that always does what it is for. */
static bool
read_done(const RlReply *reply, RlError *error)
{
	int64		count;

	return read_count(reply, &count, error) && (count == 1 || wrong_reply(error));
}

static bool
redis_refund(const RlKey *key, const RlLimits *limits, int64 quota, RlError *error)
{
	RlCommand  *command = rl_command_start();
	RlReply		reply;

	append_key(command, key);
	append_text(command, "");
	rl_command_number(command, quota);
	for (int i = 0; i < limits->n; i++)
		append_limit(command, &limits->limit[i], quota, false);
	return rl_redis_script(&refund_script, command, &reply, error) && read_done(&reply, error);
}

/* Reads whether anything was removed. */
static bool
read_found(const RlReply *reply, bool *found, RlError *error)
{
	int64		count;

	if (!read_count(reply, &count, error))
		return false;
	*found = count > 0;
	return true;
}

static bool
redis_reset(const RlKey *key, const RlLimits *limits, bool *found, RlError *error)
{
	RlCommand  *command = rl_command_start();
	char		name[RL_MAX_REDIS_KEY];
	RlReply		reply;

	if (limits == NULL)
	{
		append_text(command, "UNLINK");
		rl_command_arg(command, name, rl_redis_key(key, name));
		return rl_redis_command(command, &reply, error) && read_found(&reply, found, error);
	}
	append_key(command, key);
	for (int i = 0; i < limits->n; i++)
		append_tag(command, &limits->limit[i]);
	return rl_redis_script(&reset_script, command, &reply, error) &&
		read_found(&reply, found, error);
}

static bool
redis_ban(const RlKey *key, int64 duration, RlError *error)
{
	RlCommand  *command = rl_command_start();
	RlReply		reply;

	append_key(command, key);
	append_text(command, "");
	rl_command_number(command, duration);
	return rl_redis_script(&ban_script, command, &reply, error) && read_done(&reply, error);
}

static bool
redis_unban(const RlKey *key, bool *found, RlError *error)
{
	RlCommand  *command = rl_command_start();
	char		name[RL_MAX_REDIS_KEY];
	RlReply		reply;

	append_text(command, "HDEL");
	rl_command_arg(command, name, rl_redis_key(key, name));
	append_text(command, "ban");
	return rl_redis_command(command, &reply, error) && read_found(&reply, found, error);
}

const RlStore rl_redis_store = {
	.name = "redis",
	.may_cache = true,
	.take = redis_take,
	.refund = redis_refund,
	.reset = redis_reset,
	.ban = redis_ban,
	.unban = redis_unban
};

/*
 * Refunding charges
 */

/* A pipeline's calls. */
typedef struct RefundCalls
{
	RlRefundCall *calls;
	RlError    *why;			/* the last error reply */
} RefundCalls;

static bool
append_refund_call(RlCommand *command, int i, void *arg)
{
	RlRefundCall *call = &((const RefundCalls *) arg)->calls[i];

	/* A no-throw pipeline asks again at each node. */
	if (call->outcome == RL_REFUND_DONE || call->outcome == RL_REFUND_FAILED)
		return false;
	call->outcome = RL_REFUND_SENT;
	rl_command_number(command, 1);
	rl_command_arg(command, call->redis_key, call->redis_key_len);
	append_text(command, rl_debug_now);
	append_text(command, "");
	rl_command_number(command, 0);
	for (int j = 0; j < call->n; j++)
	{
		const RlLimit *limit = call->refunds[j].limit;
		const RlCharge *charge = call->refunds[j].charge;
		bool		ns = limit->algorithm == RL_THROTTLE;

		append_limit(command, limit, 0, false);
		rl_command_number(command, ns ? charge->amount / 1000 : charge->amount);
		rl_command_number(command, ns ? charge->amount % 1000 : 0);
		rl_command_number(command, charge->at);
		rl_command_number(command, charge->mark);
	}
	return true;
}

static bool
read_refund_call(int i, const RlReply *reply, void *arg, RlError *error)
{
	const RefundCalls *all = arg;
	bool		accepted = rl_redis_accepted(reply, all->why);

	if (accepted && !read_done(reply, error))
		return false;
	all->calls[i].outcome = accepted ? RL_REFUND_DONE : RL_REFUND_FAILED;
	return true;
}

/*
 * Runs n calls, whose outcome is RL_REFUND_UNSENT, and sets their outcomes; also
 * when an error or the end of the backend interrupts it.  *why is set to the last
 * error reply, if there is any.  Returns false with the error set when some calls
 * have no reply.  With no_throw it connects to no server, and neither throws nor
 * allocates memory; it then needs rl_redis_reserve_refunds, and ends within
 * ratelimit.command_timeout.
 */
bool
rl_redis_refund_charges(RlRefundCall *calls, int n, bool no_throw, RlError *why, RlError *error)
{
	RefundCalls all = {calls, why};

	return rl_redis_pipeline_all(&undo_script, n, append_refund_call, read_refund_call, &all,
								 no_throw, error);
}

/*
 * Allocates what rl_redis_refund_charges needs with no_throw; throws if there is
 * no memory.
 */
void
rl_redis_reserve_refunds(void)
{
	rl_redis_reserve(&undo_script);
}

/* Asks which server it is, and of which version, for people. */
bool
rl_redis_version(char *version, Size size, RlError *error)
{
	RlCommand  *command = rl_command_start();
	RlReply		reply;
	int			number;

	rl_command_number(command, 0);
	if (!rl_redis_script(&version_script, command, &reply, error))
		return false;
	if (reply.kind != RL_REPLY_NUMBERS || reply.nvalues != 2)
		return wrong_reply(error);
	number = reply.values[1] & 0xffffff;
	snprintf(version, size, "%s %d.%d.%d", reply.values[0] == 1 ? "Valkey" : "Redis",
			 number >> 16, (number >> 8) & 0xff, number & 0xff);
	return true;
}
