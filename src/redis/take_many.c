/*
 * take_many.c
 *		Takes quota of many keys, each by itself.
 *
 * If one server has all keys, a call decides up to RL_MAX_TOGETHER of them, in their
 * order.  A key that fails in such a call, and all keys of a call that ends in an error
 * reply, were not charged.  They are asked again by a call each, which says why.  So
 * are the keys of a call that a cluster's node does not run, because they are in
 * several slots; in a cluster that is known each key has its own call at once.  An error
 * reply to a call with one key fails this key only.
 *
 * An action that asks for a lease has its own call, before the others: of actions on one
 * key, the first asks.
 */
#include "postgres.h"

#include "redis/cluster.h"
#include "redis/pipeline.h"
#include "redis/redis.h"
#include "redis/scripts.h"
#include "redis/take.h"

#define MAX_KEY_BYTES		16384	/* of a call's keys */

typedef struct Taking
{
	const RlAction *const *actions;
	RlTook		took;
	void	   *arg;
	bool		fast;			/* by the faster script for one limit */
	bool		lease;			/* calls with one key: by lease.lua */
	int		   *first;			/* of each call's actions */
	int		   *keys;			/* how many each call has */
	bool	   *again;			/* actions that are to be asked by a call each */
	int		   *alone;			/* those that are asked so now */
	bool		is_last;		/* they are asked the last time */
	int			nalone;
	bool		failed;			/* an error reply has failed a key */
	RlError    *error;			/* the first one */
} Taking;

/*
 * One key in a call
 */

static bool
append_one(RlCommand *command, int i, void *arg)
{
	const Taking *taking = arg;
	const RlAction *action = taking->actions[taking->alone[i]];

	if (taking->lease)
		rl_take_append_lease(command, action);
	else
		rl_take_append(command, action, taking->fast);
	return true;
}

static bool
read_one(int i, const RlReply *reply, void *arg, RlError *error)
{
	Taking	   *taking = arg;
	int			action = taking->alone[i];
	RlDecision	decisions[RL_MAX_LIMITS];
	RlError		failure;
	int64		at;

	if (!rl_redis_check_reply(reply, &failure))
	{
		if (!taking->failed)
			*taking->error = failure;
		taking->failed = true;
		return true;
	}
	if (!taking->is_last && rl_is_outside_windows(reply, taking->actions[action]->limits))
	{
		taking->again[action] = true;
		return true;
	}
	if (!(taking->lease ? rl_take_read_lease(taking->actions[action], reply, decisions, &at, error) :
		  rl_take_read(taking->actions[action], taking->fast, reply, decisions, &at, error)))
		return false;
	taking->took(action, decisions, at, taking->arg);
	return true;
}

/*
 * Asks for each action of "again" that asks for a lease, or for each that does not, by a
 * call; sets those whose windows do not have Redis's time.
 */
static bool
take_one_by_one(Taking *taking, int n, bool lease, int64 *unanswered, RlUsage *usage, RlError *error)
{
	RlScript   *script = NULL;

	taking->nalone = 0;
	taking->lease = lease;
	for (int i = 0; i < n; i++)
	{
		const RlAction *action = taking->actions[i];

		if (!taking->again[i] || rl_take_asks_lease(action) != lease)
			continue;
		if (lease)
			script = &rl_lease_script;
		else if (script == NULL)
		{
			script = rl_take_script(action);
			taking->fast = rl_take_is_alone(action);
		}
		else if (script != &rl_check_mixed_script && rl_take_script(action) != script)
		{
			script = &rl_check_mixed_script;
			taking->fast = false;
		}
		taking->again[i] = false;
		taking->keys[taking->nalone] = 1;
		taking->alone[taking->nalone++] = i;
	}
	return script == NULL ||
		rl_redis_pipeline(script, taking->nalone, taking->keys, append_one, read_one, taking,
						  unanswered, usage, error);
}

/*
 * Many keys in a call
 */

/*
 * Divides the actions that do not ask for a lease into calls, and returns how many there
 * are.  A call takes 1 ms in Redis usually, and 5 ms at most; its reply has RL_MAX_VALUES
 * numbers at most.
 */
static int
set_calls(Taking *taking, int n)
{
	int			ncalls = 0;
	int			bytes = 0;
	int			share = 0;
	int			values = 0;

	for (int i = 0; i < n; i++)
	{
		const RlAction *action = taking->actions[i];
		const RlLimits *limits = action->limits;
		int			action_share = 0;
		int			action_values = 3;

		if (rl_take_asks_lease(action))
			continue;
		for (int l = 0; l < limits->n; l++)
		{
			action_share += rl_algorithm(&limits->limit[l])->share;
			action_values += taking->fast ? 0 : rl_algorithm(&limits->limit[l])->nreported;
		}
		/* So a call has RL_MAX_TOGETHER limits at most, for which read_call has room. */
		Assert(action_share >= limits->n);
		bytes += action->key.len;
		share += action_share;
		values += action_values;
		if (ncalls == 0 || i > taking->first[ncalls - 1] + taking->keys[ncalls - 1] ||
			bytes > MAX_KEY_BYTES || share > 100 || values > RL_MAX_VALUES - 1)
		{
			taking->first[ncalls] = i;
			taking->keys[ncalls++] = 0;
			bytes = action->key.len;
			share = action_share;
			values = action_values;
		}
		taking->keys[ncalls - 1]++;
	}
	return ncalls;
}

/* Has the actions of a call, none of which was charged, asked one by one. */
static void
ask_again(Taking *taking, int call)
{
	memset(&taking->again[taking->first[call]], true, taking->keys[call]);
}

/* Returns the end of the run that begins with action i: those with the same limits and quota. */
static int
run_end(const RlAction *const *actions, int i, int n)
{
	int			end = i + 1;

	while (end < n && actions[end]->limits == actions[i]->limits && actions[end]->quota == actions[i]->quota)
		end++;
	return end;
}

/* Appends the arguments of check_many.lua or many.lua. */
static bool
append_call(RlCommand *command, int call, void *arg)
{
	Taking	   *taking = arg;
	const RlAction *const *actions = &taking->actions[taking->first[call]];
	int			n = taking->keys[call];
	int			nnumbers = 0;
	int64		numbers[RL_FAST_NUMBERS];
	int			next;

	/* Another call has shown that the server is a cluster's. */
	if (rl_slots_known())
	{
		ask_again(taking, call);
		return false;
	}
	rl_command_number(command, n);
	for (int i = 0; i < n; i++)
	{
		char		name[RL_MAX_REDIS_KEY];

		rl_command_arg(command, name, rl_redis_key(&actions[i]->key, name));
	}
	rl_command_text(command, rl_debug_now);
	for (int i = 0; i < n && taking->fast; i = run_end(actions, i, n))
		nnumbers = Max(nnumbers, rl_take_fast_numbers(actions[i], numbers));
	if (taking->fast)
		rl_command_number(command, 1 + nnumbers);
	for (int i = 0; i < n; i = next)
	{
		const RlAction *action = actions[i];
		const RlLimits *limits = action->limits;

		next = run_end(actions, i, n);
		rl_command_number(command, next - i);
		if (taking->fast)
		{
			rl_take_append_fast(command, action, nnumbers);
			continue;
		}
		rl_command_number(command, limits->n);
		rl_command_number(command, action->quota);
		for (int l = 0; l < limits->n; l++)
			rl_append_limit(command, &limits->limit[l], action->quota, true);
	}
	return true;
}

/* Has the numbers of the reply that are not read yet. */
typedef struct Reader
{
	const RlReply *reply;
	int			at;
	int			pairs;			/* where the pairs of many.lua are */
} Reader;

/*
 * Reads the numbers of action i of a call.  Returns false if no script can send them.
 * Sets *failed, and nothing else, if they say that the key has failed.
 */
static bool
read_key(const Taking *taking, Reader *reader, int i, const RlAction *action, RlTakeReply *take, bool *failed)
{
	const int64 *values = reader->reply->values;
	int			n = reader->reply->nvalues;
	int64		ban = 0;
	int64		number[2];

	if (!taking->fast)
	{
		*failed = reader->at < n && values[reader->at] == -2;
		if (*failed)
			reader->at++;
		return *failed || rl_take_read_check(action, reader->reply, &reader->at, take);
	}
	if (reader->pairs + 1 < n && values[reader->pairs] == i + 1)
	{
		ban = values[reader->pairs + 1];
		reader->pairs += 2;
		if (ban < -1 || ban == 0)
			return false;
	}
	*failed = ban == -1;
	number[0] = ban;
	number[1] = values[reader->at++];
	if (!*failed && !rl_take_set_fast(action, &number[ban == 0], ban == 0 ? 1 : 2, take))
		return false;
	take->at = values[0];
	return true;
}

/* Answers the actions of a call, or has them asked one by one. */
static bool
read_call(int call, const RlReply *reply, void *arg, RlError *error)
{
	Taking	   *taking = arg;
	int			first = taking->first[call];
	int			n = taking->keys[call];
	RlDecision	decisions[RL_MAX_TOGETHER];
	RlDecision *each[RL_MAX_TOGETHER];
	int64		at[RL_MAX_TOGETHER];
	RlDecision *next = decisions;
	Reader		reader = {.reply = reply,.at = taking->fast,.pairs = n + 1};

	if (reply->kind == RL_REPLY_ERROR)
	{
		char		name[RL_MAX_REDIS_KEY];

		/* This reply shows that the server is a cluster's. */
		if (strncmp(reply->text, "CROSSSLOT", 9) == 0)
			rl_slot_learn(rl_slot(name, rl_redis_key(&taking->actions[first]->key, name)), 0);
		ask_again(taking, call);
		return true;
	}
	if (reply->kind != RL_REPLY_NUMBERS || !reply->is_array ||
		(taking->fast && (reply->nvalues <= n || reply->values[0] < 0)))
		return rl_wrong_reply(error);
	/* A wrong number must not be found when some actions are answered already. */
	for (int i = 0; i < n; i++)
	{
		const RlAction *action = taking->actions[first + i];
		RlTakeReply take = {0};
		bool		failed;

		if (!read_key(taking, &reader, i, action, &take, &failed) ||
			(!failed && !rl_take_decide(action, &take, take.verdict == 0, next)))
			return rl_wrong_reply(error);
		each[i] = failed ? NULL : next;
		at[i] = take.at;
		next += action->limits->n;
	}
	if ((taking->fast ? reader.pairs : reader.at) != reply->nvalues)
		return rl_wrong_reply(error);
	for (int i = 0; i < n; i++)
	{
		if (each[i] != NULL)
			taking->took(first + i, each[i], at[i], taking->arg);
		else
			taking->again[first + i] = true;
	}
	return true;
}

/* Asks for actions without a lease by calls with many keys; sets those that are to be asked again. */
static bool
take_together(Taking *taking, int n, int64 *unanswered, RlUsage *usage, RlError *error)
{
	const RlLimit *limit = &taking->actions[0]->limits->limit[0];
	int			ncalls;

	StaticAssertStmt(RL_MAX_VALUES >= RL_MAX_KEYS * (3 + 4 * RL_MAX_LIMITS), "check_all.lua has too long a reply");

	taking->fast = true;
	for (int i = 0; i < n && taking->fast; i++)
		taking->fast = rl_take_is_fast(taking->actions[i]) &&
			taking->actions[i]->limits->limit[0].algorithm == limit->algorithm;
	ncalls = set_calls(taking, n);
	return ncalls == 0 ||
		rl_redis_pipeline(taking->fast ? &rl_many_scripts[limit->algorithm] : &rl_check_many_script,
						  ncalls, taking->keys, append_call, read_call, taking, unanswered, usage, error);
}

bool
rl_redis_take_many(const RlAction *const *actions, int n, RlTook took, void *arg,
				   int64 *unanswered, RlUsage *usage, RlError *error)
{
	Taking		taking = {.actions = actions,.took = took,.arg = arg,.error = error};
	bool		together = n > 1 && !rl_slots_known();
	bool		done;

	taking.first = palloc(n * sizeof(int));
	taking.keys = palloc(n * sizeof(int));
	taking.alone = palloc(n * sizeof(int));
	taking.again = palloc(n * sizeof(bool));
	memset(taking.again, true, n);
	/* After a failure, no more is sent to the server. */
	done = take_one_by_one(&taking, n, true, unanswered, usage, error);
	if (together)
	{
		for (int i = 0; i < n; i++)
			taking.again[i] &= rl_take_asks_lease(actions[i]);
		done = done && take_together(&taking, n, unanswered, usage, error);
	}
	done = done && take_one_by_one(&taking, n, false, unanswered, usage, error);
	taking.is_last = true;
	for (int lease = 1; lease >= 0; lease--)
		done = done && take_one_by_one(&taking, n, lease == 1, unanswered, usage, error);
	pfree(taking.first);
	pfree(taking.keys);
	pfree(taking.alone);
	pfree(taking.again);
	return done && !taking.failed;
}
