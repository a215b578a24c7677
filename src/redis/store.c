/*
 * store.c
 *		The store in Redis: turns calls into scripts and their arguments, and
 *		replies into decisions.
 *
 * Redis keeps a key in one hash, "<prefix>{<key>}".  The hash has a field for
 * each state, named by the limit's state tag, and the field "ban".  (A
 * sliding_log has more fields, see log.lua.)  So each call uses one Redis key, is
 * atomic, and takes one round trip.
 */
#include "postgres.h"

#include "mb/pg_wchar.h"

#include "redis/pipeline.h"
#include "redis/redis.h"
#include "redis/scripts.h"

/*
 * Writes the key's name in Redis, which has RL_MAX_REDIS_KEY bytes at most, and
 * returns its length: "<prefix>{<key>}".  Escapes braces in the key, because Redis
 * Cluster reads them.
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

/*
 * Reads the part of a name that is between the braces into a buffer of RL_MAX_KEY
 * bytes, and sets *len.  Returns false if it is not the name of a key.
 */
bool
rl_redis_read_key(const char *name, int name_len, char *key, int *len)
{
	int			n = 0;

	for (int i = 0; i < name_len; i++)
	{
		char		c = name[i];

		if (n == RL_MAX_KEY || c == '{' || c == '}')
			return false;
		if (c == '%')
		{
			const char *code = name + i + 1;

			if (name_len - i < 3)
				return false;
			c = memcmp(code, "25", 2) == 0 ? '%' : memcmp(code, "7B", 2) == 0 ? '{' :
				memcmp(code, "7D", 2) == 0 ? '}' : '\0';
			if (c == '\0')
				return false;
			i += 2;
		}
		key[n++] = c;
	}
	*len = n;
	return n > 0 && pg_encoding_verifymbstr(PG_UTF8, key, n) == n;
}

static void
append_tag(RlCommand *command, const RlLimit *limit)
{
	char		name[RL_MAX_STATE_NAME];

	rl_command_arg(command, name, rl_state_name(limit, name));
}

/* Appends the numbers that the algorithm's script reads. */
static void
append_numbers(RlCommand *command, const RlLimit *limit, int64 quota)
{
	int64		numbers[RL_NUMBERS];
	int			n = rl_algorithm(limit)->numbers(limit, quota, numbers);

	for (int i = 0; i < n; i++)
		rl_command_number(command, numbers[i]);
	for (int i = n; i < RL_NUMBERS; i++)
		rl_command_arg(command, "", 0);
}

/*
 * Appends the LIMIT arguments of one limit, in the order in which load_limits
 * in state.lua unpacks them.  Without trace, a refusal is not counted, neither
 * as quota nor for a ban.  The quota may exceed the capacity: then no action
 * is allowed, and a refund has the whole quota.
 */
static void
append_limit(RlCommand *command, const RlLimit *limit, int64 quota, bool trace)
{
	bool		possible = quota <= limit->capacity;
	bool		ban = trace && possible && limit->ban > 0;

	rl_command_text(command, rl_algorithm(limit)->name);
	append_tag(command, limit);
	rl_command_number(command, limit->period);
	append_numbers(command, limit, quota);
	rl_command_text(command, trace && possible && limit->count_denied ? "1" : "");
	rl_command_number(command, ban ? limit->ban : 0);
	rl_command_number(command, ban ? limit->ban_after : 0);
}

/* The reply of a script that take_script returns */
typedef struct TakeReply
{
	int64		verdict;		/* 0: allowed, -1: refused, else the rest of a ban */
	int64		ban;			/* length of the ban that this refusal starts, or 0 */
	int64		at;				/* the store's time, or 0: not known */
	const int64 *reported;		/* the numbers of all limits */
	int			nreported;
	int64		alone;			/* "reported" of a script for one limit */
} TakeReply;

/*
 * Sets a decision for each limit from the reported numbers.  Returns false if no
 * action can have these numbers.
 */
static bool
read_decisions(const RlAction *action, const TakeReply *take, RlDecision *decisions)
{
	const RlLimits *limits = action->limits;
	RlVerdict	verdict = take->verdict == 0 ? RL_VERDICT_ALLOWED :
		take->verdict > 0 ? RL_VERDICT_BANNED :
		action->how == RL_TRY ? RL_VERDICT_UNCOUNTED : RL_VERDICT_REFUSED;
	int			next = 0;

	for (int i = 0; i < take->nreported; i++)
		if (take->reported[i] < 0)
			return false;
	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];
		const RlAlgorithm *algorithm = rl_algorithm(limit);
		const int64 *reported = &take->reported[next];

		next += algorithm->nreported;
		if (next > take->nreported ||
			!algorithm->decide(limit, action->quota, verdict, reported, &decisions[i]))
			return false;
		decisions[i].source = RL_FROM_REDIS;
		decisions[i].ban_left = 0;
	}
	return next == take->nreported;
}

/* Returns true if a refusal can start a ban. */
static bool
may_ban(const RlAction *action)
{
	for (int i = 0; i < action->limits->n; i++)
		if (action->limits->limit[i].ban > 0)
			return action->how != RL_TRY;
	return false;
}

/*
 * Returns true if the faster script for one limit suffices: it counts no
 * refusals for a ban, does not report the time, and is not for rl_peek.
 */
static bool
acts_alone(const RlAction *action)
{
	const RlLimits *limits = action->limits;

	return limits->n == 1 && limits->limit[0].ban == 0 && !limits->timed &&
		action->how != RL_PEEK && rl_algorithm(&limits->limit[0])->act_alone != NULL;
}

static RlScript *
take_script(const RlAction *action)
{
	const RlLimits *limits = action->limits;

	if (acts_alone(action))
		return &rl_alone_scripts[limits->limit[0].algorithm];
	for (int i = 1; i < limits->n; i++)
		if (limits->limit[i].algorithm != limits->limit[0].algorithm)
			return &rl_check_mixed_script;
	return &rl_check_scripts[limits->limit[0].algorithm];
}

/* Appends the arguments of the script that take_script returns. */
static void
append_take(RlCommand *command, const RlAction *action)
{
	const RlLimits *limits = action->limits;
	int64		quota = action->quota;
	RlTake		how = action->how;

	rl_command_hash(command, &action->key);
	if (acts_alone(action))
	{
		append_tag(command, &limits->limit[0]);
		append_numbers(command, &limits->limit[0], quota);
		return;
	}
	rl_command_text(command, how == RL_PEEK ? "0" : "1");
	rl_command_number(command, quota);
	for (int i = 0; i < limits->n; i++)
		append_limit(command, &limits->limit[i], quota, how != RL_TRY);
}

/*
 * Reads the reply of a script for one limit: the number that it reports, negative
 * if the action is refused.  Under a ban, the rest of the ban comes first.
 */
static bool
read_alone(const RlAction *action, const RlReply *reply, TakeReply *take)
{
	const RlLimit *limit = &action->limits->limit[0];
	RlDecision	decision;

	if (reply->kind != RL_REPLY_NUMBERS || reply->nvalues != (reply->is_array ? 2 : 1))
		return false;
	*take = (TakeReply) {.reported = &take->alone,.nreported = 1};
	take->alone = reply->values[reply->nvalues - 1];
	if (reply->is_array)
	{
		take->verdict = reply->values[0];
		return take->verdict > 0;
	}
	if (take->alone < 0)
	{
		take->alone = -Max(take->alone, -PG_INT64_MAX);
		take->verdict = -1;
	}
	/* If the script cannot charge anything, the number alone says the verdict. */
	if (action->quota > limit->capacity)
	{
		rl_algorithm(limit)->decide(limit, action->quota, RL_VERDICT_ALLOWED, &take->alone, &decision);
		take->verdict = decision.allowed ? 0 : -1;
	}
	return true;
}

/* Reads the reply of check.lua. */
static bool
read_check(const RlAction *action, const RlReply *reply, TakeReply *take)
{
	if (reply->kind != RL_REPLY_NUMBERS || !reply->is_array || reply->nvalues < 3)
		return false;
	*take = (TakeReply) {.verdict = reply->values[0],.ban = reply->values[1],.at = reply->values[2],
	.reported = &reply->values[3],.nreported = reply->nvalues - 3};
	return take->verdict >= -1 && take->ban >= 0 && take->at >= 0 &&
		(take->ban == 0 || (take->verdict == -1 && may_ban(action)));
}

/*
 * Sets the decisions from the reply, and the store's time.  Returns false with
 * the error set if no script replies so.
 */
static bool
read_take(const RlAction *action, const RlReply *reply, RlDecision *decisions, int64 *at,
		  RlError *error)
{
	const RlLimits *limits = action->limits;
	bool		allowed = true;
	TakeReply	take;

	if (!(acts_alone(action) ? read_alone(action, reply, &take) : read_check(action, reply, &take)) ||
		!read_decisions(action, &take, decisions))
		return rl_wrong_reply(error);
	*at = take.at;

	/* The script charged the action or not; the figures must say the same. */
	for (int i = 0; i < limits->n; i++)
		allowed &= decisions[i].allowed;
	if (take.verdict <= 0 && allowed != (take.verdict == 0))
		return rl_wrong_reply(error);

	if (take.verdict > 0)
		rl_apply_ban(decisions, limits->n, Min(take.verdict, RL_MAX_WAIT), true);
	else if (take.ban > 0)
		rl_apply_ban(decisions, limits->n, Min(take.ban, RL_MAX_WAIT), false);
	return true;
}

static bool
redis_take(const RlAction *action, RlDecision *decisions, RlAnswer *answer, RlError *error)
{
	RlCommand  *command = rl_command_start();
	RlReply		reply;

	command->usage = &answer->usage;
	append_take(command, action);
	return rl_redis_script(take_script(action), command, &reply, error) &&
		read_take(action, &reply, decisions, &answer->at, error);
}

typedef struct Taking
{
	const RlAction *const *actions;
	RlTook		took;
	void	   *arg;
} Taking;

static bool
append_one(RlCommand *command, int i, void *arg)
{
	const Taking *taking = arg;

	append_take(command, taking->actions[i]);
	return true;
}

static bool
read_one(int i, const RlReply *reply, void *arg, RlError *error)
{
	const Taking *taking = arg;
	RlDecision	decisions[RL_MAX_LIMITS];
	int64		at;

	if (!read_take(taking->actions[i], reply, decisions, &at, error))
		return false;
	taking->took(i, decisions, at, taking->arg);
	return true;
}

static bool
redis_take_many(const RlAction *const *actions, int n, RlTook took, void *arg,
				int64 *unanswered, RlUsage *usage, RlError *error)
{
	Taking		taking = {actions, took, arg};

	return rl_redis_pipeline(take_script(actions[0]), n, append_one, read_one, &taking,
							 unanswered, usage, error);
}

/* Returns true if the reply is one number, and not negative. */
static bool
is_count(const RlReply *reply)
{
	return reply->kind == RL_REPLY_NUMBERS && !reply->is_array && reply->nvalues == 1 &&
		reply->values[0] >= 0;
}

/* Reads the 1 that a script returns when it is done. */
static bool
read_done(const RlReply *reply, RlError *error)
{
	return (is_count(reply) && reply->values[0] == 1) || rl_wrong_reply(error);
}

static bool
redis_refund(const RlKey *key, const RlLimits *limits, int64 quota, RlError *error)
{
	RlCommand  *command = rl_command_start();
	RlReply		reply;

	rl_command_hash(command, key);
	rl_command_text(command, "");
	rl_command_number(command, quota);
	for (int i = 0; i < limits->n; i++)
		append_limit(command, &limits->limit[i], quota, false);
	return rl_redis_script(&rl_refund_script, command, &reply, error) && read_done(&reply, error);
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
		append_tag(command, &limits->limit[i]);
		rl_command_text(command, rl_algorithm(&limits->limit[i])->has_logs ? "1" : "");
	}
	return delete_from(&rl_reset_script, command, found, error);
}

static bool
redis_ban(const RlKey *key, int64 duration, RlError *error)
{
	RlCommand  *command = rl_command_start();
	RlReply		reply;

	rl_command_hash(command, key);
	rl_command_text(command, "");
	rl_command_number(command, duration);
	return rl_redis_script(&rl_ban_script, command, &reply, error) && read_done(&reply, error);
}

static bool
redis_unban(const RlKey *key, bool *found, RlError *error)
{
	RlCommand  *command = rl_command_start();
	char		name[RL_MAX_REDIS_KEY];

	rl_command_text(command, "HDEL");
	rl_command_arg(command, name, rl_redis_key(key, name));
	rl_command_text(command, "ban");
	return delete_from(NULL, command, found, error);
}

const RlStore rl_redis_store = {
	.name = "redis",
	.may_cache = true,
	.take = redis_take,
	.take_many = redis_take_many,
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
	rl_command_text(command, rl_debug_now);
	rl_command_text(command, "");
	rl_command_number(command, 0);
	for (int j = 0; j < call->n; j++)
	{
		const RlLimit *limit = call->refunds[j].limit;
		const RlCharge *charge = call->refunds[j].charge;
		int64		split = rl_algorithm(limit)->in_ns ? 1000 : 1;

		append_limit(command, limit, 0, false);
		rl_command_number(command, charge->amount / split);
		rl_command_number(command, charge->amount % split);
		rl_command_number(command, charge->at);
		rl_command_number(command, charge->mark);
	}
	return true;
}

static bool
read_refund_call(int i, const RlReply *reply, void *arg, RlError *error)
{
	const RefundCalls *all = arg;
	bool		accepted = rl_redis_check_reply(reply, all->why);

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
rl_redis_refund_charges(RlRefundCall *calls, int n, bool no_throw, RlUsage *usage, RlError *why,
						RlError *error)
{
	RefundCalls all = {calls, why};

	return rl_redis_pipeline_all(&rl_refund_charges_script, n, append_refund_call, read_refund_call,
								 &all, no_throw, usage, error);
}

/*
 * Allocates the memory that rl_redis_refund_charges needs with no_throw;
 * throws if there is no memory.
 */
void
rl_redis_reserve_refunds(void)
{
	rl_redis_reserve(&rl_refund_charges_script);
}

/*
 * Writes the server's name and version.  Returns false with the error set when
 * the store fails.
 */
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
