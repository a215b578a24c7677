/*
 * pipeline.c
 *		A script run many times in as few round trips as bounded memory
 *		allows, at each of the servers that have the keys.
 *
 * Each server has a line of calls under way.  A call that was not run, because
 * the script is not known there or the key is elsewhere, goes on to who can.
 * When a server is lost the calls on its line have failed; all others go on.
 * Each reply must come within ratelimit.command_timeout of the one before, and
 * all within that time once and again for every CALLS_PER_TIMEOUT calls.
 */
#include "postgres.h"

#include "error.h"
#include "redis/callqueue.h"
#include "redis/cluster.h"
#include "redis/pipeline.h"
#include "redis/redis.h"
#include "redis/route.h"
#include "redis/socket.h"

/*
 * A server in health answers 100 calls in some ms; and fewer than these, one
 * call among them, have the time of one.
 */
#define CALLS_PER_TIMEOUT	100

/* The calls under way to a node. */
typedef struct Line
{
	RlNode	   *node;
	RlStream	stream;
	StringInfoData out;
	bool		reused;			/* the connection was there before */
	bool		answered;		/* a call of this pipeline */
	bool		load;			/* the script is not known there */
	int			loads;			/* calls under way that bring it */
	int			first;			/* of the ring, the oldest; stream.due are in it */
	Call		calls[RL_MAX_DUE];
} Line;

/* One pipeline; pipelines do not nest. */
typedef struct Pipeline
{
	RlScript   *script;
	int			n;
	RlPipelineAppend append;
	RlPipelineSent sent;		/* or NULL */
	RlPipelineReply reply;
	void	   *arg;
	RlUsage    *usage;			/* to which the cost is added; or NULL */
	bool		quiet;
	bool		forgotten;		/* quietly: calls were not run for want of the script */
	bool		all;			/* an error reply is no failure */
	int			next;			/* the call to be sent next */
	int			answered;
	bool		failed;			/* error tells why the first one did */
	RlError    *error;
	RlRoute		route;			/* of the call that is looked at */
	RlCommand  *command;		/* of that call; NULL: not written yet */
	bool		nobody;			/* no server is left to ask */
	int64		end;			/* when all calls must be, if no time is spent on the way to servers */
	int64		progress;		/* when the last call was answered */
	int64		pause_until;	/* before that nothing is sent again */
	Line	   *blocked;		/* the line that the next call must wait for */
	int			resent;			/* calls under way for not the first time */
	CallQueue	again;			/* calls to be sent again */
	int			nlines;
	Line	   *lines[RL_MAX_STREAMS];
} Pipeline;

/* The first line there is; as it is kept it needs no memory in a quiet pipeline. */
static Line *
kept_line(void)
{
	static Line line;

	if (line.out.data == NULL)
		rl_resp_keep(&line.out);
	return &line;
}

static Line *
line_to(const Pipeline *p, const RlNode *node)
{
	for (int i = 0; i < p->nlines; i++)
		if (p->lines[i]->node == node)
			return p->lines[i];
	return NULL;
}

/* Begins a line to a node that is connected. */
static Line *
add_line(Pipeline *p, RlNode *node, bool reused)
{
	Line	   *line = kept_line();

	for (int i = 0; i < p->nlines; i++)
		if (p->lines[i] == line)
		{
			line = palloc(sizeof(Line));
			initStringInfo(&line->out);
			break;
		}
	line->node = node;
	line->reused = reused;
	line->answered = false;
	line->load = false;
	line->loads = 0;
	line->first = 0;
	rl_stream_begin(&line->stream, &node->conn, &line->out);
	p->lines[p->nlines++] = line;
	rl_streams_changed();
	return line;
}

static void
remove_line(Pipeline *p, Line *line)
{
	int			i = 0;

	while (p->lines[i] != line)
		i++;
	p->lines[i] = p->lines[--p->nlines];
	rl_streams_changed();
	if (p->blocked == line)
		p->blocked = NULL;
	if (line != kept_line())
	{
		pfree(line->out.data);
		pfree(line);
	}
}

static void
note_failure(Pipeline *p, const RlError *error)
{
	if (!p->failed)
		*p->error = *error;
	p->failed = true;
}

/* The node's bit in a script's set of nodes. */
static uint64
node_bit(const RlNode *node)
{
	StaticAssertStmt(RL_MAX_NODES <= 64, "a set of nodes has too few bits");
	return UINT64CONST(1) << (rl_node_number(node) - 1);
}

/* The i-th call that a line waits for. */
static Call *
due_call(Line *line, int i)
{
	return &line->calls[(line->first + i) % RL_MAX_DUE];
}

/* Drops a line whose connection is of no use any more. */
static void
break_line(Pipeline *p, Line *line, const RlError *error)
{
	for (int i = 0; i < line->stream.due; i++)
		p->resent -= due_call(line, i)->again;
	p->route.node = line->node;
	remove_line(p, line);
	/* Quietly the time is all servers', and not having it no fault of this one's. */
	if (p->quiet)
		rl_connection_close(&p->route.node->conn);
	else
		rl_route_broken(&p->route, error);
}

/*
 * Sending
 */

/* Queues a call that was not run, to be sent again. */
static void
send_again(Pipeline *p, Call call)
{
	callqueue_push(&p->again, call);
	if (p->sent != NULL)
		p->sent(call.i, false, p->arg);
}

/* Writes the call's command, which from then on counts as sent; false if it is done. */
static bool
write_command(Pipeline *p, const Call *call)
{
	p->command = rl_command_start();
	return p->append(p->command, call->i, p->arg);
}

/* rl_route_try, which takes no time from the calls that are under way elsewhere. */
static bool
try_node(Pipeline *p, bool *others, RlError *error)
{
	int64		start = rl_monotonic_now();
	bool		connected = rl_route_try(&p->route, others, error);
	int64		us = rl_monotonic_now() - start;

	for (int i = 0; i < p->nlines; i++)
		if (p->lines[i]->stream.due > 0)
			p->lines[i]->stream.deadline += us;
	p->progress += us;
	return connected;
}

/*
 * The line of the call; NULL: the call has failed, or is done.  If only its key
 * tells, this writes its command.
 */
static Line *
find_line(Pipeline *p, Call *call)
{
	RlRoute    *route = &p->route;
	RlError		error;
	bool		others = true;

	p->command = NULL;
	call->slot = -1;
	if ((p->quiet || rl_slots_known()) && !write_command(p, call))
		return NULL;
	if (rl_slots_known())
		call->slot = rl_slot(rl_command_key(p->command), p->command->key_len);
	/* Quietly, calls that are for another node have their turn or have failed. */
	if (p->quiet)
		return p->nlines == 0 ? NULL : line_to(p, rl_node_that_has(call->slot));

	route->slot = call->slot;
	route->node = call->node ? rl_node_numbered(call->node) : NULL;
	route->asking = call->asking;
	route->turns = call->turns;
	while (others)
	{
		Line	   *line;

		if (!rl_route_choose(route, &error))
		{
			p->nobody = p->nlines == 0 && route->node == NULL;
			break;
		}
		line = line_to(p, route->node);
		route->deadline = 0;
		if (line == NULL && try_node(p, &others, &error))
			line = add_line(p, route->node, route->reused);
		if (line != NULL)
		{
			call->asking = route->asking;
			return line;
		}
	}
	note_failure(p, &error);
	return NULL;
}

static void
append_call(Pipeline *p, Line *line, Call call)
{
	Call		asking = {.i = -1};

	if (call.asking)
	{
		rl_command_append_asking(&line->out);
		*due_call(line, line->stream.due) = asking;
		rl_stream_appended(&line->stream);
	}
	call.by_source = line->load;
	line->loads += line->load;
	line->load = false;
	p->resent += call.again;
	rl_command_append(&line->out, p->command, p->script, call.by_source);
	*due_call(line, line->stream.due) = call;
	rl_stream_appended(&line->stream);
	if (p->usage != NULL)
		p->usage->round_trips++;
	if (p->sent != NULL)
		p->sent(call.i, true, p->arg);
}

/*
 * Puts calls on their lines, until one has no room; then many at a time, so
 * that a write is many commands' too.  While some must be sent again no new
 * ones are: what is asked of one key more than once is asked in order, but for
 * calls that were under way together.
 */
static void
fill_lines(Pipeline *p)
{
	if (p->blocked != NULL && p->blocked->stream.due <= RL_MAX_DUE / 2 &&
		rl_stream_is_sent(&p->blocked->stream))
		p->blocked = NULL;
	while (p->blocked == NULL && !p->nobody)
	{
		bool		again = callqueue_is_filled(&p->again) && rl_monotonic_now() >= p->pause_until;
		Call		call = {.i = p->next};
		Line	   *line;

		if (again)
			call = callqueue_first(&p->again);
		else if (p->next == p->n || callqueue_is_filled(&p->again) || p->resent > 0)
			return;
		line = find_line(p, &call);
		if (line != NULL && !rl_stream_has_room(&line->stream))
		{
			p->blocked = line;
			return;
		}
		if (again)
			callqueue_pop(&p->again);
		else
			p->next++;
		if (line != NULL && (p->command != NULL || write_command(p, &call)))
			append_call(p, line, call);
	}
}

static void
send_line(Pipeline *p, Line *line)
{
	RlError		error;
	RlOutcome	outcome = rl_stream_send(&line->stream, &error);

	if (outcome == RL_DONE)
		return;
	if (outcome == RL_NOT_SENT && line->reused && !p->quiet)
	{
		/* It was dead before; nobody can have run anything. */
		for (int i = 0; i < line->stream.due; i++)
		{
			Call		call = *due_call(line, i);

			p->resent -= call.again;
			if (call.i >= 0)
				send_again(p, call);
		}
		rl_connection_close(&line->node->conn);
		remove_line(p, line);
		return;
	}
	note_failure(p, &error);
	break_line(p, line, &error);
}

/*
 * Receiving
 */

/* Takes a call's reply.  Returns false with the error set if it makes no sense. */
static bool
take_reply(Pipeline *p, Line *line, Call call, const RlReply *reply, RlError *error)
{
	RlRoute    *route = &p->route;
	RlError		refused;

	route->node = line->node;
	route->slot = call.slot;
	route->asking = call.asking;
	route->turns = call.turns;
	if (p->quiet && rl_reply_next_step(reply) == RL_STEP_SEND_SOURCE && !call.by_source)
	{
		/* The calls that are not sent yet, and then this one, bring the source. */
		line->load = line->loads == 0;
		p->forgotten = true;
		return true;
	}
	if (p->quiet && reply->kind == RL_REPLY_ERROR)
		rl_node_answers(line->node);
	else if (rl_route_answered(route, reply))
	{
		int64		now = rl_monotonic_now();
		int64		whole = (int64) rl_command_timeout * 1000;

		if (rl_route_should_pause(route))
			p->pause_until = now + RL_PAUSE_MS * 1000;
		if (!rl_route_should_pause(route) ||
			(now < p->progress + whole && now < p->end + route->spent - whole / 4))
		{
			call.slot = route->slot;
			call.node = route->node ? rl_node_number(route->node) : 0;
			call.asking = route->asking;
			call.turns = Min(route->turns, 100);
			send_again(p, call);
			return true;
		}
	}
	else if (rl_reply_next_step(reply) == RL_STEP_SEND_SOURCE && !call.by_source)
	{
		/* Those sent before the script came there say so too. */
		line->load = line->loads == 0;
		call.node = call.asking ? rl_node_number(line->node) : 0;
		send_again(p, call);
		return true;
	}
	/* Who does not know what he was told will not know it the next time. */
	else if (rl_reply_next_step(reply) == RL_STEP_SEND_SOURCE)
		return rl_redis_accepted(reply, error);
	if (reply->kind == RL_REPLY_ERROR && !p->all)
	{
		rl_connection_refused(&line->node->conn, false, reply->text, &refused);
		note_failure(p, &refused);
		return p->reply(call.i, reply, p->arg, error);
	}
	if (!p->reply(call.i, reply, p->arg, error))
		return false;
	if (reply->kind != RL_REPLY_ERROR)
		p->script->nodes |= node_bit(line->node);
	p->answered++;
	line->answered = true;
	p->progress = rl_monotonic_now();
	return true;
}

/* Takes what has come on a line.  Returns false with the error set to give it up. */
static bool
take_replies(Pipeline *p, Line *line, RlError *error)
{
	bool		found;

	if (!rl_stream_receive(&line->stream, error))
		return false;
	for (;;)
	{
		Call		call = line->calls[line->first];

		if (!rl_stream_next(&line->stream, &found, error))
			return false;
		if (!found)
			return true;
		line->first = (line->first + 1) % RL_MAX_DUE;
		line->loads -= call.by_source;
		p->resent -= call.again;
		if (call.i >= 0 && !take_reply(p, line, call, &line->stream.reply, error))
			return false;
		rl_stream_taken(&line->stream);
	}
}

/* Waits until a line can go on, or a call may be sent again.  False if no line has calls. */
static bool
wait_for_lines(Pipeline *p)
{
	RlStream   *streams[RL_MAX_STREAMS];
	int64		until = PG_INT64_MAX;

	for (int i = 0; i < p->nlines; i++)
	{
		streams[i] = &p->lines[i]->stream;
		if (streams[i]->due > 0)
			until = Min(until, streams[i]->deadline);
	}
	if (until == PG_INT64_MAX)
		return false;
	if (callqueue_is_filled(&p->again) && p->blocked == NULL)
		until = Min(until, p->pause_until);
	until = Min(until, p->end + p->route.spent);
	rl_streams_wait(streams, p->nlines, until);
	return true;
}

/* Takes the replies that have come on all lines, and drops the lines that fail. */
static void
take_all_replies(Pipeline *p)
{
	RlError		error;

	/* From the end, as lines may go. */
	for (int i = p->nlines - 1; i >= 0; i--)
	{
		bool		due = p->lines[i]->stream.due > 0;

		if (take_replies(p, p->lines[i], &error))
			continue;
		if (due)
			note_failure(p, &error);
		break_line(p, p->lines[i], &error);
	}
}

/* The time of all calls is over: those that are not answered have failed. */
static void
give_up(Pipeline *p)
{
	RlError		error;
	bool		unsent = p->next < p->n || callqueue_is_filled(&p->again);

	rl_error_set(&error, ERRCODE_CONNECTION_FAILURE,
				 "lost the connection to Redis: %d calls took longer than ratelimit.command_timeout allows", p->n);
	for (int i = p->nlines - 1; i >= 0; i--)
	{
		Line	   *line = p->lines[i];

		if (line->stream.due == 0)
			continue;
		rl_error_detail(&error, "The server is %s.", line->node->conn.server);
		/* A server that answers is slow, but a single call may have time enough there. */
		error.unreachable = !line->answered &&
			rl_monotonic_now() >= line->stream.deadline - (int64) rl_command_timeout * 500;
		note_failure(p, &error);
		break_line(p, line, &error);
	}
	if (unsent)
		note_failure(p, &error);
	p->nobody = true;
}

/* Runs all calls that can be. */
static void
run(Pipeline *p)
{
	RlError		error;

	for (;;)
	{
		/* Late, look once more: this process may have been what was slow. */
		bool		late = rl_monotonic_now() > p->end + p->route.spent;

		if (!late)
			fill_lines(p);
		/* From the end, as lines may go. */
		for (int i = p->nlines - 1; i >= 0; i--)
			send_line(p, p->lines[i]);
		if (wait_for_lines(p))
			take_all_replies(p);
		else if (p->nobody || (p->next == p->n && !callqueue_is_filled(&p->again)))
			break;
		else if (callqueue_is_filled(&p->again) && !late)
			rl_pause(p->pause_until);
		if (late)
			give_up(p);
	}
	while (p->nlines > 0)
	{
		Line	   *line = p->lines[p->nlines - 1];

		if (rl_stream_end(&line->stream, &error))
			remove_line(p, line);
		else
		{
			note_failure(p, &error);
			break_line(p, line, &error);
		}
	}
}

static bool
run_pipeline(Pipeline *p)
{
	int64		start = rl_monotonic_now();

	rl_script_prepare(p->script);
	rl_route_begin(&p->route, NULL, 0);
	rl_streams_changed();
	p->progress = start;
	p->end = start + (int64) rl_command_timeout * 1000 * (1 + p->n / CALLS_PER_TIMEOUT);
	run(p);
	rl_breakers_release();
	callqueue_free(&p->again);
	if (p->usage != NULL)
		p->usage->us += rl_monotonic_now() - start;
	return !p->failed;
}

/*
 * Runs a script n times.  append() writes the arguments of call i, and may be
 * asked for them again, or returns false when that call is done; sent() is told
 * before call i is sent, or that it was not run and has to be sent again; reply()
 * gets the replies, in the order in which they come, and returns false with the
 * error set if one makes no sense.  Returns false with the first call's error set
 * when calls fail: those with an error reply, and those that were sent and have no
 * reply, of which it is not known whether they ran.
 */
bool
rl_redis_pipeline(RlScript *script, int n, RlPipelineAppend append, RlPipelineSent sent,
				  RlPipelineReply reply, void *arg, RlUsage *usage, RlError *error)
{
	Pipeline	p = {.script = script,.n = n,.append = append,.sent = sent,.reply = reply,.arg = arg,
	.usage = usage,.error = error};

	return run_pipeline(&p);
}

/* Makes sure that the script can be run quietly later. */
void
rl_redis_reserve(RlScript *script)
{
	enlargeStringInfo(&kept_line()->out,
					  RL_MAX_UNSENT + RL_MAX_QUIET_ARGS + strlen(script->source) + 128);
	enlargeStringInfo(&rl_command_start()->args, RL_MAX_QUIET_ARGS);
	rl_script_prepare(script);
}

/*
 * Runs at one node what the no-throw pipeline has for it.  A node that has run
 * the script needs only its SHA1.  If it has forgotten the script meanwhile, the
 * calls that it did not run are sent again behind the source; each round runs
 * one at least.
 */
static void
run_at(Pipeline *p, RlNode *node)
{
	bool		load = (p->script->nodes & node_bit(node)) == 0;

	do
	{
		p->forgotten = false;
		add_line(p, node, true)->load = load;
		p->next = 0;
		run(p);
		load = true;
	} while (p->forgotten && node->conn.ctx != NULL);
}

/*
 * rl_redis_pipeline that leaves error replies to reply().  Quietly, which is for
 * the end of a transaction and after rl_redis_reserve, it does not throw, needs
 * no memory, connects to nobody, and all of it ends within
 * ratelimit.command_timeout; one server after the other is told, each in its
 * share of the time, and what is for one that is not connected fails.
 */
bool
rl_redis_pipeline_all(RlScript *script, int n, RlPipelineAppend append, RlPipelineReply reply,
					  void *arg, bool quietly, RlUsage *usage, RlError *error)
{
	Pipeline	p = {.script = script,.n = n,.append = append,.reply = reply,.arg = arg,
	.usage = usage,.error = error,.quiet = quietly,.all = true,.end = PG_INT64_MAX};
	int64		end = rl_monotonic_now() + (int64) rl_command_timeout * 1000;
	int			connected = 0;

	if (!quietly)
		return run_pipeline(&p);
	rl_error_set(error, ERRCODE_CONNECTION_DOES_NOT_EXIST, "there is no connection to Redis");
	rl_streams_changed();
	for (int i = 1; i <= RL_MAX_NODES; i++)
		connected += (rl_node_numbered(i)->conn.ctx != NULL);
	for (int i = 1; i <= RL_MAX_NODES && p.answered < n && rl_nodes_are_current(); i++)
	{
		RlNode	   *node = rl_node_numbered(i);
		int64		left = end - rl_monotonic_now();
		RlError		why;

		if (node->conn.ctx == NULL || left < 0)
			continue;
		node->conn.quiet_until = end - left + left / connected--;
		if (rl_connection_settle(&node->conn, &why))
		{
			run_at(&p, node);
			node->conn.quiet_until = 0;
		}
		else
		{
			note_failure(&p, &why);
			rl_connection_close(&node->conn);
		}
	}
	return p.answered == n;
}
