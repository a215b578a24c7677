/*
 * stream.c
 *		Commands and their replies over a connection: one after the other, or
 *		many under way.
 *
 * An ERROR may jump out of any wait: in_flight is up from before the first
 * byte until the last reply is read, and whoever wants the connection next
 * drops it if the flag is up.  So no reply is ever read by the wrong call.
 */
#include "postgres.h"

#include <hiredis/hiredis.h>

#include "miscadmin.h"

#include "redis/socket.h"
#include "redis/stream.h"
#include "shared/shared.h"

#define MAX_REPLY_BYTES		65536

/*
 * Finds the next reply, to which the reader is attached, in what was read.
 * Returns false with the error set; *found is false if more must be read.
 */
static bool
find_reply(RlConnection *conn, const RlReply *reply, bool *found, RlError *error)
{
	redisReader *reader = conn->ctx->reader;
	void	   *object = NULL;

	/* The reader would begin a reply with nothing, and could not be left then. */
	if (reader->pos < reader->len && redisReaderGetReply(reader, &object) != REDIS_OK)
		return rl_protocol_violation(conn, error, conn->ctx->reader->errstr);
	*found = object != NULL;
	if (!*found && conn->reply_bytes > MAX_REPLY_BYTES)
		return rl_protocol_violation(conn, error, "it is too long");
	if (!*found)
		return true;
	conn->reply_bytes = 0;
	if (reply->kind == RL_REPLY_OTHER)
		return rl_protocol_violation(conn, error, "it does not answer the command");
	return true;
}

/* After the last reply: what is left over would be taken for the next call's. */
static bool
nothing_left(RlConnection *conn, RlError *error)
{
	if (conn->ctx->reader->pos < conn->ctx->reader->len)
		return rl_protocol_violation(conn, error, "it is followed by another");
	conn->in_flight = false;
	return true;
}

/* Reads the next reply.  Returns false with the error set. */
static bool
read_reply(RlConnection *conn, RlReply *reply, int64 deadline, RlError *error)
{
	rl_resp_attach(conn->ctx->reader, reply);
	for (bool late = false;; late = rl_monotonic_now() > deadline)
	{
		bool		found;

		if (!find_reply(conn, reply, &found, error))
			return false;
		if (found)
			return true;
		if (late || !rl_socket_wait(conn, conn->receive_wants, deadline))
			return rl_connection_lost(conn, error, "ratelimit.command_timeout has passed");
		if (!rl_socket_receive(conn, error))
			return false;
	}
}

/*
 * How sending failed.  If the server hung up on us at once it may have said why,
 * and is there.
 */
static RlOutcome
cannot_send(RlConnection *conn, bool sent, RlError *error)
{
	RlReply		reply;
	RlError		why;
	bool		found;

	if (sent)
		return RL_FAILED;
	if (!conn->heard && conn->tls == NULL)
	{
		rl_resp_attach(conn->ctx->reader, &reply);
		if (rl_socket_receive(conn, &why) && find_reply(conn, &reply, &found, &why) && found &&
			reply.kind == RL_REPLY_ERROR)
			rl_connection_refused(conn, false, reply.text, error);
	}
	return RL_NOT_SENT;
}

/*
 * Sends what out holds, n commands of which all but the last must answer with a
 * status, and reads their replies up to the first that does not; the last one
 * read is in *reply.
 */
RlOutcome
rl_connection_exchange(RlConnection *conn, StringInfo out, int n, int64 deadline,
					   RlReply *reply, RlError *error)
{
	int			sent = 0;

	conn->in_flight = true;
	conn->due = -1;
	for (;;)
	{
		if (!rl_socket_send(conn, out, &sent, error))
			return cannot_send(conn, sent > 0, error);
		if (sent == out->len)
			break;
		if (!rl_socket_wait(conn, conn->send_wants, deadline))
		{
			rl_connection_lost(conn, error, "ratelimit.command_timeout has passed");
			return RL_FAILED;
		}
	}
	for (int i = 0; i < n; i++)
	{
		conn->due = n - i;
		if (!read_reply(conn, reply, deadline, error))
			return RL_FAILED;
		conn->due--;
		if (reply->kind != RL_REPLY_STATUS && i < n - 1)
			return RL_DONE;
	}
	return nothing_left(conn, error) ? RL_DONE : RL_FAILED;
}

/*
 * Streams: many commands under way on a connection.  Neither side ever holds
 * more than RL_MAX_DUE replies, nor this one more than RL_MAX_UNSENT bytes and a
 * command.
 */

/* Begins a stream; out is for what is not sent yet. */
void
rl_stream_begin(RlStream *stream, RlConnection *conn, StringInfo out)
{
	resetStringInfo(out);
	stream->conn = conn;
	stream->out = out;
	stream->sent = 0;
	stream->due = 0;
	stream->wrote = false;
	stream->ready = false;
	conn->in_flight = true;
	conn->due = 0;
	rl_resp_attach(conn->ctx->reader, &stream->reply);
}

/* True if commands may be appended to out, each followed by rl_stream_appended. */
bool
rl_stream_has_room(RlStream *stream)
{
	if (stream->sent == stream->out->len)
	{
		resetStringInfo(stream->out);
		stream->sent = 0;
	}
	/* A command may have another ahead of it. */
	return stream->due < RL_MAX_DUE - 1 && stream->out->len < RL_MAX_UNSENT;
}

void
rl_stream_appended(RlStream *stream)
{
	if (stream->due++ == 0)
		stream->deadline = rl_monotonic_now() + (int64) rl_command_timeout * 1000;
	stream->conn->due = -1;
}

bool
rl_stream_is_sent(const RlStream *stream)
{
	return stream->sent == stream->out->len;
}

/* Sends what the socket takes. */
RlOutcome
rl_stream_send(RlStream *stream, RlError *error)
{
	if (rl_stream_is_sent(stream))
		return RL_DONE;
	if (!rl_socket_send(stream->conn, stream->out, &stream->sent, error))
		return cannot_send(stream->conn, stream->wrote || stream->sent > 0, error);
	stream->wrote = true;
	if (rl_stream_is_sent(stream))
		stream->conn->due = stream->due;
	return RL_DONE;
}

/* What the stream's socket must be waited for. */
static uint32
stream_wants(const RlStream *stream)
{
	return stream->conn->receive_wants |
		(rl_stream_is_sent(stream) ? 0 : stream->conn->send_wants);
}

static WaitEventSet *joint_events = NULL;	/* of the streams that are waited for together */
static int	joint_members = 0;

/* To be called before streams are waited for, and when they change. */
void
rl_streams_changed(void)
{
	WaitEventSet *events = joint_events;

	joint_events = NULL;
	joint_members = 0;
	if (events != NULL)
		FreeWaitEventSet(events);
}

static void
watch_streams(RlStream **streams, int n)
{
	if (joint_events == NULL)
	{
		joint_events = CreateWaitEventSet(NULL, n + 2);
		AddWaitEventToSet(joint_events, WL_LATCH_SET, PGINVALID_SOCKET, MyLatch, NULL);
		if (IsUnderPostmaster)
			AddWaitEventToSet(joint_events, WL_EXIT_ON_PM_DEATH, PGINVALID_SOCKET, NULL, NULL);
	}
	for (int i = 0; i < n; i++)
	{
		RlStream   *stream = streams[i];
		uint32		wants = stream_wants(stream);

		if (i >= joint_members)
		{
			stream->joint_event = AddWaitEventToSet(joint_events, wants, stream->conn->ctx->fd,
													NULL, stream);
			joint_members = i + 1;
		}
		else if (stream->joint_wants != wants)
			ModifyWaitEvent(joint_events, stream->joint_event, wants, NULL);
		stream->joint_wants = wants;
	}
}

/*
 * Waits until one of the streams is ready to go on, or until then; those that
 * are get their flag set.  May raise what CHECK_FOR_INTERRUPTS raises, and the
 * lack of a descriptor if there are several.
 */
void
rl_streams_wait(RlStream **streams, int n, int64 until)
{
	WaitEvent	events[RL_MAX_STREAMS];
	int			nevents;
	int64		left = Max(until - rl_monotonic_now(), 0);

	if (n == 1)
	{
		streams[0]->ready = rl_socket_wait(streams[0]->conn, stream_wants(streams[0]), until);
		return;
	}
	watch_streams(streams, n);
	nevents = WaitEventSetWait(joint_events, (left + 999) / 1000, events, lengthof(events), rl_wait_event());
	for (int i = 0; i < nevents; i++)
	{
		if (events[i].events & WL_LATCH_SET)
		{
			ResetLatch(MyLatch);
			CHECK_FOR_INTERRUPTS();
		}
		else
			((RlStream *) events[i].user_data)->ready = true;
	}
}

/* Reads what has come, if something has.  Returns false with the error set. */
bool
rl_stream_receive(RlStream *stream, RlError *error)
{
	int64		quiet_until = stream->conn->quiet_until;

	/* However steadily replies come. */
	if (quiet_until != 0 && rl_monotonic_now() > quiet_until)
		return rl_connection_lost(stream->conn, error, "ratelimit.command_timeout has passed");
	if (stream->ready && !rl_socket_receive(stream->conn, error))
		return false;
	stream->ready = false;
	return true;
}

/*
 * Finds the next reply, which is then in reply.  Returns false with the error
 * set; *found is false if none is there.
 */
bool
rl_stream_next(RlStream *stream, bool *found, RlError *error)
{
	*found = false;
	if (stream->due == 0)
		return true;
	if (!find_reply(stream->conn, &stream->reply, found, error))
		return false;
	if (!*found)
	{
		int64		now = rl_monotonic_now();

		if (now <= stream->deadline && (stream->conn->quiet_until == 0 || now <= stream->conn->quiet_until))
			return true;
		return rl_connection_lost(stream->conn, error, "ratelimit.command_timeout has passed");
	}
	stream->due--;
	if (stream->conn->due > 0)
		stream->conn->due--;
	stream->deadline = rl_monotonic_now() + (int64) rl_command_timeout * 1000;
	return true;
}

/* The reply was taken: makes room for the next one. */
void
rl_stream_taken(RlStream *stream)
{
	rl_resp_attach(stream->conn->ctx->reader, &stream->reply);
}

/* After the last reply.  Returns false with the error set. */
bool
rl_stream_end(RlStream *stream, RlError *error)
{
	return nothing_left(stream->conn, error);
}

/*
 * Makes the connection usable again by reading what an interrupted call has
 * left due.  Does not throw if quiet_until is set.  Returns false with the
 * error set.
 */
bool
rl_connection_settle(RlConnection *conn, RlError *error)
{
	RlReply		reply;

	if (!conn->in_flight)
		return rl_connection_is_usable(conn) || rl_connection_lost(conn, error, "it is not usable");
	/* The reader must not be within a reply: that goes to memory long gone. */
	if (conn->ctx == NULL || !conn->is_set_up || conn->due < 0 || conn->ctx->reader->ridx != -1)
		return rl_connection_lost(conn, error, "a call was interrupted");
	for (; conn->due > 0; conn->due--)
		if (!read_reply(conn, &reply, conn->quiet_until, error))
			return false;
	return nothing_left(conn, error);
}
