/*
 * pipeline.c
 *		A script run many times in as few round trips as bounded memory
 *		allows, at each of the servers that have the keys.
 *
 * Each server has a line of calls under way.  A call that was not run, because the server does
 * not know the script or another server has the key, is sent again.  When a server is lost, the
 * calls on its line fail, and all others go on.  Each reply must come within
 * ratelimit.command_timeout of the one before, and all of them within that time, plus as much
 * for each KEYS_PER_TIMEOUT keys.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "nodes/pg_list.h"

#include "error.h"
#include "redis/cluster.h"
#include "redis/pipeline.h"
#include "redis/route.h"
#include "shared/clock.h"

/* A healthy server answers for 100 keys in some ms; fewer keys have the time of one call. */
#define KEYS_PER_TIMEOUT	100

/* One pipeline; pipelines do not nest. */
typedef struct Pipeline
{
	RlScript   *script;
	int			n;
	const int  *keys;			/* how many each call is about; NULL: one */
	int			nkeys;			/* all of them */
	int			max_due;		/* calls under way on a line */
	RlAppend	append;
	RlPipelineReply reply;
	void	   *arg;
	int64	   *unanswered;		/* to which the keys of calls under way are added */
	RlUsage    *usage;			/* to which the cost is added; or NULL */
	RlError    *error;
	bool		failed;			/* error is that of the first call */
	int			next;			/* the call to be sent next */
	RlRoute		route;			/* of the call that is looked at */
	RlCommand  *command;		/* of that call; NULL: not written yet */
	bool		no_server;		/* none is left to ask */
	int64		end;			/* of the time for all calls, to which route.spent is added */
	int64		progress;		/* when the last call was answered */
	List	   *to_resend;		/* calls */
	int64		pause_until;	/* before that nothing is sent again */
	RlLine	   *blocked;		/* the line that the next call must wait for */
	int			resent;			/* calls under way that were sent before */
	bool		replies_first;	/* calls under way may have to be refunded (RlCommand) */
	int			nlines;
	RlLine	   *lines[RL_MAX_STREAMS];
} Pipeline;

/* The first line of each pipeline, which most have only. */
static RlLine kept_line;

/* Begins a line to a node that is connected, as rl_stream_begin does.  The caller sets "load". */
void
rl_line_begin(RlLine *line, RlNode *node, int64 deadline, bool no_throw)
{
	rl_resp_reset(&line->out);
	line->node = node;
	line->loads = line->first = 0;
	rl_stream_begin(&line->stream, &node->conn, &line->out, &line->reply, deadline, no_throw);
}

static RlCall *
due_call(RlLine *line, int i)
{
	return &line->calls[(line->first + i) % RL_MAX_DUE];
}

/* Puts a call, with its command, on a line, which must have room. */
void
rl_line_append(RlLine *line, const RlCommand *command, const RlScript *script, RlCall call)
{
	call.by_source = line->load;
	line->loads += line->load;
	line->load = false;
	rl_command_append(&line->out, command, script, call.by_source, call.asking);
	line->node->conn.delivers = command->delivers;
	if (call.asking)
	{
		*due_call(line, line->stream.due) = (RlCall) {.i = -1};
		rl_stream_appended(&line->stream);
	}
	*due_call(line, line->stream.due) = call;
	rl_stream_appended(&line->stream);
}

/*
 * Reads the replies that have come, and passes each with its call to take().  Returns false with
 * the error set if the line failed, or take() does.
 */
bool
rl_line_receive(RlLine *line, RlLineReply take, void *arg, RlError *error)
{
	if (!rl_stream_receive(&line->stream, error))
		return false;
	for (;;)
	{
		RlCall		call = *due_call(line, 0);

		if (!rl_stream_next(&line->stream, error))
			return false;
		if (!line->stream.found)
			return true;
		line->first = (line->first + 1) % RL_MAX_DUE;
		line->loads -= call.by_source;
		if (call.i >= 0 && !take(line, call, arg, error))
			return false;
	}
}

static RlLine *
line_to(const Pipeline *p, const RlNode *node)
{
	for (int i = 0; i < p->nlines; i++)
		if (p->lines[i]->node == node)
			return p->lines[i];
	return NULL;
}

static RlLine *
add_line(Pipeline *p, RlNode *node, bool reused)
{
	RlLine	   *line = &kept_line;

	for (int i = 0; i < p->nlines; i++)
		if (p->lines[i] == line)
		{
			line = palloc(sizeof(RlLine));
			initStringInfo(&line->out);
			break;
		}
	rl_line_begin(line, node, 0, false);
	line->reused = reused;
	line->load = false;
	p->lines[p->nlines++] = line;
	rl_streams_changed();
	return line;
}

/* Ends a line; if calls are under way the caller closes the connection. */
static void
remove_line(Pipeline *p, RlLine *line)
{
	RlStream   *stream = &line->stream;
	int			i = 0;

	for (int c = 0; c < stream->due; c++)
		p->resent -= due_call(line, c)->resent;
	while (p->lines[i] != line)
		i++;
	p->lines[i] = p->lines[--p->nlines];
	rl_streams_changed();
	if (p->blocked == line)
		p->blocked = NULL;
	if (line != &kept_line)
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

/* Drops a line that failed, and with "fails" the pipeline. */
static void
break_line(Pipeline *p, RlLine *line, bool fails, const RlError *error)
{
	p->route.node = line->node;
	remove_line(p, line);
	rl_route_failed(&p->route, error);
	if (fails)
		note_failure(p, error);
}

static void
send_again(Pipeline *p, RlCall call)
{
	call.resent = true;
	p->to_resend = lappend(p->to_resend, memcpy(palloc(sizeof(RlCall)), &call, sizeof(RlCall)));
	*p->unanswered -= call.n;
}

/* Writes the call's command.  Returns false if the call is already done. */
static bool
write_command(Pipeline *p, const RlCall *call)
{
	p->command = rl_command_start();
	return p->append(p->command, call->i, p->arg);
}

/* Calls rl_route_try; the calls under way elsewhere get the time that it takes. */
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

/* Returns the call's line, or NULL if it has failed or is done; may write its command. */
static RlLine *
find_line(Pipeline *p, RlCall *call)
{
	RlRoute    *route = &p->route;
	RlError		error;
	bool		others = true;

	p->command = NULL;
	call->slot = -1;
	if (rl_slots_known())
	{
		if (!write_command(p, call))
			return NULL;
		call->slot = rl_slot(rl_command_key(p->command), p->command->key_len);
	}
	route->slot = call->slot;
	route->node = call->node ? rl_node_numbered(call->node) : NULL;
	route->asking = call->asking;
	route->resends = call->resends;
	while (others)
	{
		RlLine	   *line;

		if (!rl_route_choose(route, &error))
		{
			p->no_server = p->nlines == 0 && route->node == NULL;
			break;
		}
		line = line_to(p, route->node);
		/* The node is connected again when it has answered all. */
		if (line != NULL && route->node->conn.retired && line->stream.due == 0)
		{
			remove_line(p, line);
			line = NULL;
		}
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

/* Returns true if an interrupt waits for the replies to the calls under way, and no more is to be sent. */
static bool
is_interrupted(const Pipeline *p)
{
	return p->replies_first && InterruptPending && INTERRUPTS_CAN_BE_PROCESSED();
}

/*
 * Puts calls on their lines until a line has no room, and goes on when it has room for many, so
 * that a write has many commands.  While calls must be sent again no new ones are sent: calls
 * about one key keep their order, unless they were under way together.
 */
static void
fill_lines(Pipeline *p)
{
	if (p->blocked != NULL && p->blocked->stream.due <= p->max_due / 2 &&
		rl_stream_is_sent(&p->blocked->stream))
		p->blocked = NULL;
	while (p->blocked == NULL && !p->no_server && !is_interrupted(p))
	{
		RlCall	   *again = p->to_resend != NIL ? linitial(p->to_resend) : NULL;
		RlCall		call = {.i = p->next,.n = 1};
		RlLine	   *line;

		if (again ? rl_monotonic_now() < p->pause_until : p->next == p->n || p->resent > 0)
			return;
		if (again)
			call = *again;
		else if (p->keys != NULL)
			call.n = p->keys[call.i];
		line = find_line(p, &call);
		if (line != NULL && (line->stream.due >= p->max_due || !rl_stream_has_room(&line->stream) ||
							 line->node->conn.retired))
		{
			p->blocked = line;
			return;
		}
		if (again)
		{
			p->to_resend = list_delete_first(p->to_resend);
			pfree(again);
		}
		else
			p->next++;
		if (line == NULL || (p->command == NULL && !write_command(p, &call)))
			continue;
		rl_line_append(line, p->command, p->script, call);
		if (p->command->reply_first)
		{
			p->replies_first = true;
			rl_socket_reply_first();
		}
		p->resent += call.resent;
		if (p->usage != NULL)
			p->usage->round_trips++;
		*p->unanswered += call.n;
	}
}

static void
send_line(Pipeline *p, RlLine *line)
{
	RlError		error;
	RlOutcome	outcome = rl_stream_send(&line->stream, &error);

	if (outcome == RL_NOT_SENT && line->reused)
	{
		/* The connection was dead before, so no call was run. */
		for (int i = 0; i < line->stream.due; i++)
			if (due_call(line, i)->i >= 0)
			{
				if (p->usage != NULL)
					p->usage->round_trips--;
				send_again(p, *due_call(line, i));
			}
		rl_connection_close(&line->node->conn);
		remove_line(p, line);
	}
	else if (outcome != RL_DONE)
		break_line(p, line, true, &error);
}

/* Returns true if the time suffices to send a call again; sets the pause before that. */
static bool
may_resend(Pipeline *p)
{
	int64		whole = (int64) rl_command_timeout * 1000;
	int64		now;

	if (p->route.resends <= RL_FREE_RESENDS)
		return true;
	now = rl_monotonic_now();
	p->pause_until = now + RL_PAUSE_MS * 1000;
	return now < p->progress + whole && now < p->end + p->route.spent - whole / 4;
}

static bool
take_reply(RlLine *line, RlCall call, void *arg, RlError *error)
{
	Pipeline   *p = arg;
	RlRoute    *route = &p->route;
	const RlReply *reply = &line->reply;
	bool		no_script = rl_reply_next_step(reply) == RL_STEP_SEND_SOURCE;

	p->resent -= call.resent;
	route->node = line->node;
	route->slot = call.slot;
	route->asking = call.asking;
	route->resends = call.resends;
	if (rl_route_answered(route, reply) && may_resend(p))
	{
		call.slot = route->slot;
		call.node = route->node ? rl_node_number(route->node) : 0;
		call.asking = route->asking;
		call.resends = Min(route->resends, 100);
		send_again(p, call);
		return true;
	}
	/* The source would bring the same answer again. */
	if (no_script && call.by_source)
		return rl_redis_check_reply(reply, error);
	/* The calls sent before the source came there are answered so too. */
	if (no_script)
		line->load = line->loads == 0;
	else if (!call.has_time && rl_redis_set_time(reply))
		call.has_time = true;
	else
	{
		if (!p->reply(call.i, reply, p->arg, error))
			return false;
		p->progress = rl_monotonic_now();
		*p->unanswered -= call.n;
		return true;
	}
	call.node = call.asking ? rl_node_number(line->node) : 0;
	send_again(p, call);
	return true;
}

static void
receive_line(Pipeline *p, RlLine *line)
{
	RlError		error;
	bool		due = line->stream.due > 0;

	if (!rl_line_receive(line, take_reply, p, &error))
		break_line(p, line, due, &error);
}

/* Waits until a line can go on, or a call may be resent.  Returns false if no line has calls. */
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
	if (p->to_resend != NIL && p->blocked == NULL)
		until = Min(until, p->pause_until);
	until = Min(until, p->end + p->route.spent);
	rl_streams_wait(streams, p->nlines, until);
	return true;
}

/* Ends the pipeline when its time is over: calls without an answer have failed. */
static void
give_up(Pipeline *p)
{
	RlError		error;
	bool		unsent = p->next < p->n || p->to_resend != NIL;

	rl_error_set(&error, ERRCODE_STORE_FAILED,
				 "lost the connection to Redis: calls for %d keys took longer than ratelimit.command_timeout allows",
				 p->nkeys);
	for (int i = p->nlines - 1; i >= 0; i--)
	{
		RlLine	   *line = p->lines[i];

		if (line->stream.due == 0)
			continue;
		rl_error_detail(&error, "The server is %s.", line->node->conn.server);
		break_line(p, line, true, &error);
	}
	if (unsent)
		note_failure(p, &error);
	p->no_server = true;
}

/* Serves an interrupt if no call is under way.  Raises an error then, unless it is no cancel. */
static void
serve_interrupt(Pipeline *p)
{
	for (int i = 0; i < p->nlines; i++)
		if (p->lines[i]->stream.due > 0)
			return;
	rl_socket_reply_read();
	p->replies_first = false;
	CHECK_FOR_INTERRUPTS();
}

static void
run(Pipeline *p)
{
	RlError		error;

	for (;;)
	{
		bool		late;

		if (is_interrupted(p))
			serve_interrupt(p);
		/* Late, look once more: this process may have been slow. */
		late = rl_monotonic_now() > p->end + p->route.spent;
		if (!late)
			fill_lines(p);
		/* From the end, because lines may be removed. */
		for (int i = p->nlines - 1; i >= 0; i--)
			send_line(p, p->lines[i]);
		if (wait_for_lines(p))
		{
			for (int i = p->nlines - 1; i >= 0; i--)
				receive_line(p, p->lines[i]);
		}
		else if (p->no_server || (p->next == p->n && p->to_resend == NIL))
			break;
		else if (p->to_resend != NIL && !late)
			rl_pause(p->pause_until);
		if (late)
			give_up(p);
	}
	while (p->nlines > 0)
	{
		RlLine	   *line = p->lines[p->nlines - 1];

		if (rl_stream_end(&line->stream, &error))
			remove_line(p, line);
		else
			break_line(p, line, true, &error);
	}
}

/*
 * Runs a script n times. reply() gets the replies, also error replies, as they come, and
 * returns false with the error set if one makes no sense.  Call i is about keys[i] keys, or
 * about one if keys is NULL.  At most max_due keys are under way, or two calls: many would lose
 * their order if a call had to be sent again.  *unanswered is increased by the keys of calls under
 * way, and stays increased by those that may have run and have no reply.  Returns false with the
 * first such call's error set.  Raises an error if a setting is wrong, or at an interrupt.
 */
bool
rl_redis_pipeline(RlScript *script, int n, const int *keys, int max_due, RlAppend append,
				  RlPipelineReply reply, void *arg, int64 *unanswered, RlUsage *usage, RlError *error)
{
	Pipeline	p =
		{.script = script,.n = n,.keys = keys,.nkeys = n,.append = append,.reply = reply,.arg = arg,
	.unanswered = unanswered,.usage = usage,.error = error};
	int64		start = rl_monotonic_now();

	for (int i = 0; keys != NULL && i < n; i++)
		p.nkeys += keys[i] - 1;
	p.max_due = Max(max_due * n / p.nkeys, 2);
	rl_script_prepare(script);
	rl_route_begin(&p.route, NULL, 0);
	rl_streams_changed();
	p.progress = start;
	p.end = start + (int64) rl_command_timeout * 1000 * (1 + p.nkeys / KEYS_PER_TIMEOUT);
	run(&p);
	rl_socket_reply_read();
	rl_breakers_release();
	list_free_deep(p.to_resend);
	if (usage != NULL)
		usage->us += rl_monotonic_now() - start;
	return !p.failed;
}
