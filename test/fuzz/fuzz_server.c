/*
 * fuzz_server.c
 *		Connections to a server whose replies are the input of a target.
 *
 * The linker replaces the functions that wait or do I/O (WRAPPED in script/fuzz), so that all
 * code above them runs as usual.  The input consists of parts that end with a byte 0xff, which
 * UTF-8 does not have.  A connection receives the next part when something is sent over it, and
 * when it waits for more.  After the last part the server closes connections, and accepts none.
 */
#include "postgres.h"

#include <hiredis/hiredis.h>
#include <sys/socket.h>

#include "fuzz.h"
#include "shared/breaker.h"

#define PART_END			0xff
#define FIRST_FD			1000000 /* no descriptor is so large */
#define CONNECTIONS			256

typedef struct Received
{
	const char *at;
	const char *end;
} Received;

static const char *rest;		/* of the input */
static const char *rest_end;
static int	most;				/* bytes that a call receives */
static int	opened;				/* connections */
static bool closed;				/* the server has closed all of them */
static Received received[CONNECTIONS];
static int64 now = RL_SECOND;
static Received *starving;		/* was looked at, and had nothing */

bool		__wrap_rl_socket_open(RlConnection *conn, const RlAddress *address, int64 deadline, RlError *error);
bool		__wrap_rl_socket_wait(RlConnection *conn, uint32 what, int64 deadline, bool no_throw);
bool		__wrap_rl_descriptors_left(int n);
void		__wrap_rl_pause(int64 deadline);
int64		__wrap_rl_monotonic_now(void);
bool		__wrap_rl_attempt_begin(RlAttempt *attempt, const char *server, bool search, int64 *patience, int64 until,
									RlError *error);
bool		__wrap_rl_may_search(const char *target, int64 connected);
ssize_t		__wrap_send(int fd, const void *data, size_t len, int flags);
ssize_t		__wrap_recv(int fd, void *data, size_t len, int flags);

/* Starts a server with these replies, of which a call receives at most so many bytes. */
void
fuzz_server_start(const char *replies, int len, int most_bytes)
{
	rest = replies;
	rest_end = replies + len;
	most = most_bytes;
	opened = 0;
	closed = false;
	starving = NULL;
}

/* Returns true if the server has sent nothing that was not received. */
bool
fuzz_server_is_silent(RlConnection *conn)
{
	while (rest < rest_end && *rest == (char) PART_END)
		rest++;
	return rest == rest_end && rl_socket_is_silent(conn);
}

static Received *
received_by(int fd)
{
	REQUIRE(fd >= FIRST_FD && fd < FIRST_FD + opened);
	return &received[(fd - FIRST_FD) % CONNECTIONS];
}

/* Lets a connection receive the next part, or the end of all connections. */
static void
feed(Received *to)
{
	const char *end;

	if (rest == rest_end)
	{
		closed = true;
		return;
	}
	end = memchr(rest, PART_END, rest_end - rest);
	*to = (Received) {rest, end ? end : rest_end};
	rest = end ? end + 1 : rest_end;
}

bool
__wrap_rl_socket_open(RlConnection *conn, const RlAddress *address, int64 deadline pg_attribute_unused(), RlError *error)
{
	rl_address_name(address, conn->server);
	if (rest == rest_end)
		return rl_connection_lost(conn, error, "the input has ended");
	conn->ctx = redisConnectFd(FIRST_FD + opened++);
	REQUIRE(conn->ctx != NULL && conn->ctx->reader != NULL);
	*received_by(conn->ctx->fd) = (Received) {0};
	conn->send_wants = WL_SOCKET_WRITEABLE;
	conn->receive_wants = WL_SOCKET_READABLE;
	return true;
}

bool
__wrap_rl_socket_wait(RlConnection *conn, uint32 what, int64 deadline, bool no_throw pg_attribute_unused())
{
	Received   *from = received_by(conn->ctx->fd);

	if ((what & WL_SOCKET_WRITEABLE) || from->at < from->end || closed)
		return true;
	/* One of several streams is looked at. */
	if (deadline == 0)
	{
		starving = from;
		return false;
	}
	feed(from);
	if (from->at < from->end || closed)
		return true;
	now = Max(now, deadline) + 1;
	return false;
}

/* Several streams are looked at by turns. */
bool
__wrap_rl_descriptors_left(int n)
{
	return n > 1;
}

void
__wrap_rl_pause(int64 deadline)
{
	now = Max(now, Min(deadline, now + RL_PAUSE_MS * 1000)) + 1;
	if (starving != NULL)
		feed(starving);
	starving = NULL;
}

int64
__wrap_rl_monotonic_now(void)
{
	return now++;
}

/* A server is asked also after failures. */
bool
__wrap_rl_attempt_begin(RlAttempt *attempt, const char *server pg_attribute_unused(), bool search, int64 *patience pg_attribute_unused(),
						int64 until pg_attribute_unused(), RlError *error pg_attribute_unused())
{
	*attempt = (RlAttempt) {.search = search,.began = now};
	return true;
}

bool
__wrap_rl_may_search(const char *target pg_attribute_unused(), int64 connected pg_attribute_unused())
{
	return true;
}

ssize_t
__wrap_send(int fd, const void *data pg_attribute_unused(), size_t len, int flags pg_attribute_unused())
{
	Received   *to = received_by(fd);

	if (to->at == to->end)
		feed(to);
	return len;
}

ssize_t
__wrap_recv(int fd, void *data, size_t len, int flags)
{
	Received   *from = received_by(fd);
	size_t		n = Min(len, (size_t) Min(from->end - from->at, most));

	if (n == 0 && closed)
		return 0;
	if (n == 0)
	{
		errno = EAGAIN;
		return -1;
	}
	memcpy(data, from->at, n);
	if (!(flags & MSG_PEEK))
		from->at += n;
	return n;
}
