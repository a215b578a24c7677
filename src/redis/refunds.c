/*
 * refunds.c
 *		Refunds the charges of many keys.
 *
 * If one server has all keys, a call refunds the charges of many of them.  A key that fails in
 * such a call, and all keys of a call that ends in an error reply, were not refunded, and have
 * a call each then, which says why.  In a cluster, each key has its own call at once.
 *
 * At the end of a transaction nothing may be raised, there may be no memory, and the client waits.
 * So the calls go only to servers that are connected, one after the other, and only the script's
 * source is sent again.  What is left is for the list of overdue refunds (shared/overdue.h).
 */
#include "postgres.h"

#include "error.h"
#include "redis/call.h"
#include "redis/cluster.h"
#include "redis/pipeline.h"
#include "redis/redis.h"
#include "redis/route.h"
#include "redis/scripts.h"
#include "shared/shared.h"

#define MAX_ARGS			49152	/* bytes of a call's arguments */
#define MAX_CHARGE			768		/* of these, at most, for a charge */
#define MAX_KEY				96		/* and for a key without its name and charges */
#define MAX_DUE_AHEAD		16		/* calls under way ahead of an action */
#define LONGEST_CALL_US		5000	/* of Redis, for one of them */
#define LONGEST_SILENCE		100000	/* at the end of a transaction: microseconds without an answer */
#define LONGEST_END			5000000 /* and in all */
/* Calls under way then, but for the first, which may bring NOSCRIPT: few are in doubt */
#define MAX_DUE_AT_END		4

typedef struct Refunding
{
	RlKeyRefunds *keys;
	int			n;
	int64		until;			/* no call is written after it; at the end of a transaction, no reply
								 * is awaited after it either */
	int		   *first;			/* of each call's keys */
	int		   *nkeys;			/* how many each call has */
	RlError    *why;			/* the last error reply about one key */

	/* At the end of a transaction */
	int			next;			/* key to be sent to the server */
	int64		patience;		/* the longest wait for a reply */
	int64		heard;			/* when the last one came, or the first was waited for */
	int			most_due;		/* calls under way */
} Refunding;

/* Returns the key after the last of the call that begins with this one. */
static int
call_end(const Refunding *refunding, int first)
{
	const RlKeyRefunds *keys = refunding->keys;
	int			share = 0;
	int			bytes = MAX_KEY;
	int			i;

	for (i = first; i < refunding->n && i < first + RL_MAX_TOGETHER; i++)
	{
		if (i > first && (rl_slots_known() || keys[first].alone || keys[i].alone ||
						  keys[i].outcome != RL_REFUND_UNSENT))
			break;
		/* To count refused quota may take as long as the largest state allows. */
		share += keys[i].refused > 0 ? 100 : 0;
		for (int j = 0; j < keys[i].n; j++)
		{
			const RlAlgorithm *algorithm = rl_algorithm(keys[i].refunds[j].limit);

			share += algorithm->refund_share > 0 ? algorithm->refund_share : algorithm->share;
		}
		bytes += MAX_KEY + keys[i].redis_key_len + keys[i].n * MAX_CHARGE;
		if (i > first && (share > 100 || bytes > MAX_ARGS))
			break;
	}
	return i;
}

/* Appends the mark in Redis and the limit's number, or an empty text. */
static void
append_mark(RlCommand *command, uint64 by_mark)
{
	char		text[32];
	unsigned	number = by_mark % RL_MAX_LIMITS;
	int			len =
		snprintf(text, sizeof(text), "%016llx %u", (unsigned long long) (by_mark - number), number);

	rl_command_arg(command, text, by_mark != 0 ? len : 0);
}

static void
append_keys(RlCommand *command, RlKeyRefunds *keys, int n)
{
	rl_command_number(command, n);
	for (int i = 0; i < n; i++)
		rl_command_arg(command, keys[i].redis_key, keys[i].redis_key_len);
	rl_command_text(command, rl_debug_now);
	for (int i = 0; i < n; i++)
	{
		keys[i].outcome = RL_REFUND_SENT;
		rl_command_number(command, keys[i].refused);
		rl_command_number(command, keys[i].n);
		for (int j = 0; j < keys[i].n; j++)
		{
			const RlLimit *limit = keys[i].refunds[j].limit;

			rl_append_limit(command, limit, 0, keys[i].refused > 0);
			rl_append_charge(command, limit, keys[i].refunds[j].charge);
			append_mark(command, keys[i].refunds[j].charge->by_mark);
		}
	}
}

static void
set_outcome(RlKeyRefunds *keys, int n, RlRefundOutcome outcome)
{
	for (int i = 0; i < n; i++)
		keys[i].outcome = outcome;
}

/* Sets the outcome of a call's keys.  Returns false with the error set if the reply makes no sense. */
static bool
read_keys(RlKeyRefunds *keys, int n, const RlReply *reply, RlError *why, RlError *error)
{
	if (rl_reply_may_pass(reply))
	{
		(void) rl_redis_check_reply(reply, why);
		set_outcome(keys, n, RL_REFUND_LATER);
		return true;
	}
	if (reply->kind == RL_REPLY_ERROR)
	{
		if (n == 1)
			(void) rl_redis_check_reply(reply, why);
		for (int i = 0; n > 1 && i < n; i++)
			keys[i].alone = true;
		set_outcome(keys, n, n > 1 ? RL_REFUND_UNSENT : RL_REFUND_FAILED);
		return true;
	}
	if (reply->kind != RL_REPLY_NUMBERS || reply->nvalues == 0 || (!reply->is_array && reply->values[0] != 1))
		return rl_wrong_reply(error);
	/* The positions of the keys that have failed; the first key cannot. */
	for (int i = 0; reply->is_array && i < reply->nvalues; i++)
		if (reply->values[i] <= (i > 0 ? reply->values[i - 1] : 1) || reply->values[i] > n)
			return rl_wrong_reply(error);
	set_outcome(keys, n, RL_REFUND_DONE);
	for (int i = 0; reply->is_array && i < reply->nvalues; i++)
	{
		keys[reply->values[i] - 1].alone = true;
		keys[reply->values[i] - 1].outcome = RL_REFUND_UNSENT;
	}
	return true;
}

/*
 * Units of any charges
 */

static bool
append_one(RlCommand *command, int i pg_attribute_unused(), void *arg)
{
	append_keys(command, arg, 1);
	return true;
}

/* RlStore.refund */
bool
rl_redis_refund(const RlKey *key, const RlLimits *limits, int64 quota, RlError *error)
{
	char		name[RL_MAX_REDIS_KEY];
	RlCharge	charges[RL_MAX_LIMITS];
	RlRefund	refunds[RL_MAX_LIMITS];
	RlKeyRefunds key_refunds =
		{.redis_key = name,.redis_key_len = rl_redis_key(key, name),.n = limits->n,.refunds = refunds};
	RlReply		reply;

	for (int i = 0; i < limits->n; i++)
	{
		charges[i] = rl_charge_of(&limits->limit[i], quota, RL_OF_ANY, 0, 0);
		refunds[i] = (RlRefund) {&limits->limit[i], &charges[i]};
	}
	return rl_redis_call(&rl_refund_charges_script, append_one, &key_refunds, NULL, &reply, error) &&
		rl_read_done(&reply, error);
}

/*
 * By a pipeline
 */

static bool
append_call(RlCommand *command, int i, void *arg)
{
	const Refunding *refunding = arg;
	RlKeyRefunds *keys = &refunding->keys[refunding->first[i]];
	int			n = refunding->nkeys[i];
	bool		late = rl_monotonic_now() > refunding->until;

	/*
	 * Another call may have shown that the server is a cluster's.  A call that is asked for again was not
	 * run.
	 */
	if (late || (n > 1 && rl_slots_known()))
	{
		set_outcome(keys, n, RL_REFUND_UNSENT);
		for (int j = 0; j < n; j++)
			keys[j].late = late;
		return false;
	}
	command->delivers = true;
	/* A refund to a counter whose reply is not read is lost. */
	command->reply_first = true;
	append_keys(command, keys, n);
	return true;
}

static bool
read_call(int i, const RlReply *reply, void *arg, RlError *error)
{
	const Refunding *refunding = arg;

	return read_keys(&refunding->keys[refunding->first[i]], refunding->nkeys[i], reply, refunding->why,
					 error);
}

/*
 * Refunds n keys, whose outcome is RL_REFUND_UNSENT, and sets their outcomes, also at an error.
 * Begins no call after "until": keys that are left then stay RL_REFUND_UNSENT, and are "late".
 * *why is set to the last error reply, if there is any.  Returns false with the error set when
 * some keys have no reply.  Raises an error if a setting is wrong, or at an interrupt.
 */
bool
rl_redis_refund_until(RlKeyRefunds *keys, int n, int64 until, RlUsage *usage, RlError *why,
					  RlError *error)
{
	Refunding	refunding = {.keys = keys,.n = n,.until = until,.why = why};
	int			max_due = RL_MAX_DUE;
	int64		unanswered = 0;
	bool		done = true;
	int			ncalls = n;

	/*
	 * Replies to sent calls are awaited also after "until".  Therefore at most as many calls are under way
	 * as Redis can run in the time that is left now, but always one.
	 */
	if (until != PG_INT64_MAX)
		max_due = Max(Min((until - rl_monotonic_now()) / LONGEST_CALL_US, MAX_DUE_AHEAD), 1);
	refunding.first = palloc(2 * n * sizeof(int));
	refunding.nkeys = refunding.first + n;
	/* The second time for keys that are asked alone. */
	for (int round = 0; round < 2 && done && ncalls > 0; round++)
	{
		int			end;

		ncalls = 0;
		for (int i = 0; i < n; i = end)
		{
			end = i + 1;
			if (keys[i].outcome != RL_REFUND_UNSENT || keys[i].late)
				continue;
			end = call_end(&refunding, i);
			refunding.first[ncalls] = i;
			refunding.nkeys[ncalls++] = end - i;
		}
		done = ncalls == 0 ||
			rl_redis_pipeline(&rl_refund_charges_script, ncalls, refunding.nkeys, max_due, append_call,
							  read_call, &refunding, &unanswered, usage, error);
	}
	pfree(refunding.first);
	return done;
}

/*
 * At the end of a transaction
 */

/* The calls to a server, which have their memory before. */
static RlLine line;

/* Allocates the memory that rl_redis_refund_no_throw needs.  Throws if there is none. */
void
rl_redis_prepare_refunds(void)
{
	RlScript   *script = &rl_refund_charges_script;

	if (line.out.data == NULL)
	{
		rl_resp_reset(&line.out);
		enlargeStringInfo(&line.out, RL_MAX_UNSENT + MAX_ARGS + strlen(script->source) + 256);
	}
	enlargeStringInfo(&rl_command_start()->args, MAX_ARGS);
	rl_script_prepare(script);
}

/* Writes the next call for the server.  Returns false if there is none, or no time. */
static bool
write_next(Refunding *refunding)
{
	int			first = refunding->next;
	RlCommand  *command;

	if (rl_monotonic_now() > refunding->until)
		return false;
	while (first < refunding->n &&
		   (refunding->keys[first].outcome != RL_REFUND_UNSENT ||
			rl_node_that_has(refunding->keys[first].redis_key,
							 refunding->keys[first].redis_key_len) != line.node))
		first++;
	refunding->next = first;
	if (first == refunding->n)
		return false;
	refunding->next = call_end(refunding, first);
	command = rl_command_start();
	command->delivers = true;
	append_keys(command, &refunding->keys[first], refunding->next - first);
	rl_line_append(&line, command, &rl_refund_charges_script,
				   (RlCall) {.i = first,.n = refunding->next - first});
	return true;
}

static bool
take_reply(RlLine *from pg_attribute_unused(), RlCall sent, void *arg, RlError *error)
{
	Refunding  *refunding = arg;
	RlKeyRefunds *keys = &refunding->keys[sent.i];

	refunding->heard = rl_monotonic_now();
	refunding->most_due = MAX_DUE_AT_END;
	line.stream.deadline = Min(refunding->heard + refunding->patience, refunding->until);
	rl_node_answered(line.node);
	if (rl_reply_next_step(&line.reply) != RL_STEP_SEND_SOURCE || sent.by_source)
		return read_keys(keys, sent.n, &line.reply, refunding->why, error);
	/* The calls sent before the source came there are answered so too. */
	line.load = line.loads == 0;
	set_outcome(keys, sent.n, RL_REFUND_UNSENT);
	refunding->next = Min(refunding->next, sent.i);
	return true;
}

/* Sends the calls for a server.  Returns false with the error set if it is lost. */
static bool
run_line(Refunding *refunding, RlNode *node, RlError *error)
{
	RlStream   *stream = &line.stream;

	refunding->heard = rl_monotonic_now();
	refunding->next = 0;
	refunding->most_due = 1;
	line.load = false;
	rl_line_begin(&line, node, Min(refunding->heard + refunding->patience, refunding->until), true);
	for (;;)
	{
		while (stream->due < refunding->most_due && rl_stream_has_room(stream) && write_next(refunding))
			;
		if (stream->due == 0)
			return rl_stream_end(stream, error);
		if (rl_stream_send(stream, error) != RL_DONE)
			return false;
		rl_streams_wait(&stream, 1, stream->deadline);
		if (!rl_line_receive(&line, take_reply, refunding, error))
			return false;
	}
}

/*
 * Refunds as rl_redis_refund_until does, but raises nothing, opens no connection, and needs
 * only the memory of rl_redis_prepare_refunds.  It gives up after ratelimit.command_timeout or
 * LONGEST_SILENCE without a reply, whichever is shorter, and after LONGEST_END even while replies come.
 */
bool
rl_redis_refund_no_throw(RlKeyRefunds *keys, int n, RlError *why, RlError *error)
{
	int64		silence = Min((int64) rl_command_timeout * 1000, LONGEST_SILENCE);
	Refunding	refunding = {.keys = keys,.n = n,.why = why};

	refunding.until = rl_monotonic_now() + LONGEST_END;
	rl_error_set(error, ERRCODE_STORE_FAILED, "there is no connection to Redis");
	for (int i = 1; i <= RL_MAX_NODES && rl_nodes_are_of_url() && silence > 0; i++)
	{
		RlNode	   *node = rl_node_numbered(i);

		refunding.patience = silence;
		if (!rl_connection_is_usable(&node->conn) || run_line(&refunding, node, error))
			continue;
		silence -= rl_monotonic_now() - refunding.heard;
		rl_connection_close(&node->conn);
	}
	for (int i = 0; i < n; i++)
		if (keys[i].outcome == RL_REFUND_UNSENT || keys[i].outcome == RL_REFUND_SENT)
			return false;
	return true;
}
