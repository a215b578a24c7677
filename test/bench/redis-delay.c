/*
 * redis-delay.c
 *		A proxy that delays: redis-delay LISTEN CONNECT MICROSECONDS.
 *
 * For each client of the unix socket LISTEN it connects to the unix socket CONNECT,
 * and passes on the bytes of each direction that many microseconds after it has
 * received them.  It sleeps in between, so it costs little processor time.  It ends at
 * a signal.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define MAX_PAIRS	256

/* Bytes that were received together. */
typedef struct Chunk
{
	struct Chunk *next;
	int64_t		due;			/* ns of CLOCK_MONOTONIC */
	ssize_t		len;
	char		data[16384];
} Chunk;

/* Side 0 is the client, and side 1 the server. */
typedef struct Pair
{
	int			fd[2];
	Chunk	   *first[2];		/* received from this side, the oldest first */
	Chunk	   *last[2];
} Pair;

static Pair pairs[MAX_PAIRS];
static int	npairs = 0;

static void
fail(const char *what)
{
	perror(what);
	exit(1);
}

static int64_t
now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* Returns a socket that listens at the path, or is connected to it; -1: not connected. */
static int
open_socket(const char *path, int listens)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int			fd = socket(AF_UNIX, SOCK_STREAM, 0);

	if (fd < 0 || strlen(path) >= sizeof(address.sun_path))
		fail(path);
	strcpy(address.sun_path, path);
	if (!listens)
	{
		if (connect(fd, (struct sockaddr *) &address, sizeof(address)) == 0)
			return fd;
		close(fd);
		return -1;
	}
	if (bind(fd, (struct sockaddr *) &address, sizeof(address)) < 0 || listen(fd, MAX_PAIRS) < 0)
		fail(path);
	return fd;
}

static void
open_pair(int listener, const char *path)
{
	int			client = accept(listener, NULL, NULL);
	int			server = npairs < MAX_PAIRS ? open_socket(path, 0) : -1;

	if (client >= 0 && server >= 0)
		pairs[npairs++] = (Pair) {.fd = {client, server}};
	else if (client >= 0)
		close(client);
}

static void
close_pair(Pair *pair)
{
	for (int side = 0; side < 2; side++)
	{
		close(pair->fd[side]);
		while (pair->first[side] != NULL)
		{
			Chunk	   *chunk = pair->first[side];

			pair->first[side] = chunk->next;
			free(chunk);
		}
	}
	*pair = pairs[--npairs];
}

/* Returns 0 if that side has closed the connection. */
static int
receive(Pair *pair, int side, int64_t delay)
{
	Chunk	   *chunk = malloc(sizeof(Chunk));

	if (chunk == NULL)
		fail("malloc");
	chunk->len = recv(pair->fd[side], chunk->data, sizeof(chunk->data), 0);
	if (chunk->len <= 0)
	{
		free(chunk);
		return 0;
	}
	chunk->due = now() + delay;
	chunk->next = NULL;
	if (pair->first[side] == NULL)
		pair->first[side] = chunk;
	else
		pair->last[side]->next = chunk;
	pair->last[side] = chunk;
	return 1;
}

/*
 * Sends what is due from that side to the other side, and lowers *next to when the next
 * bytes are due.  Returns 0 if the other side has closed the connection.
 */
static int
pass_on(Pair *pair, int side, int64_t *next)
{
	for (Chunk *chunk; (chunk = pair->first[side]) != NULL;)
	{
		if (chunk->due > now())
		{
			if (chunk->due < *next)
				*next = chunk->due;
			return 1;
		}
		for (ssize_t sent = 0, n; sent < chunk->len; sent += n)
			if ((n = send(pair->fd[!side], chunk->data + sent, chunk->len - sent, MSG_NOSIGNAL)) <= 0)
				return 0;
		pair->first[side] = chunk->next;
		free(chunk);
	}
	return 1;
}

int
main(int argc, char **argv)
{
	int64_t		delay;
	int			listener;

	if (argc != 4 || (delay = atoll(argv[3]) * 1000) <= 0)
	{
		fprintf(stderr, "usage: redis-delay LISTEN CONNECT MICROSECONDS\n");
		return 2;
	}
	/* Otherwise the kernel may wake the process up to 50 us late. */
	if (prctl(PR_SET_TIMERSLACK, 1UL) < 0)
		fail("prctl");
	listener = open_socket(argv[1], 1);
	for (;;)
	{
		struct pollfd polled[2 * MAX_PAIRS + 1];
		int			n;
		int64_t		next = INT64_MAX;
		int64_t		wait;
		struct timespec timeout;

		for (int i = npairs - 1; i >= 0; i--)
			if (!pass_on(&pairs[i], 0, &next) || !pass_on(&pairs[i], 1, &next))
				close_pair(&pairs[i]);
		n = npairs;
		for (int i = 0; i < 2 * n; i++)
			polled[i] = (struct pollfd) {.fd = pairs[i / 2].fd[i % 2],.events = POLLIN};
		polled[2 * n] = (struct pollfd) {.fd = listener,.events = POLLIN};
		wait = next - now();
		wait = wait > 0 ? wait : 0;
		timeout = (struct timespec) {wait / 1000000000, wait % 1000000000};
		if (ppoll(polled, 2 * n + 1, next == INT64_MAX ? NULL : &timeout, NULL) < 0 && errno != EINTR)
			fail("ppoll");
		/* From the last, so that a pair that takes the place of a closed one was seen. */
		for (int i = n - 1; i >= 0; i--)
			for (int side = 0; side < 2; side++)
				if (polled[2 * i + side].revents != 0 && !receive(&pairs[i], side, delay))
				{
					close_pair(&pairs[i]);
					break;
				}
		if (polled[2 * n].revents != 0)
			open_pair(listener, argv[2]);
	}
}
