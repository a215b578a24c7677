/*
 * socket.c
 *		A connection's socket, and the errors when it fails.
 *
 * The socket does not block and is driven by the backend's latch, so that cancel, timeouts,
 * termination and barriers work while Redis is silent.  Failures are returned, not raised, but
 * for core's own errors and those of wrong settings for TLS.
 */
#include "postgres.h"

#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "miscadmin.h"
#include "storage/fd.h"
#include "utils/memutils.h"

#include "error.h"
#include "redis/socket.h"
#include "shared/clock.h"

#if PG_VERSION_NUM < 170000
#define CreateWaitEventSet(owner, n) CreateWaitEventSet(TopMemoryContext, (n))
#endif

#define REPLY_FIRST_US		100000	/* in which a call that may be refunded is not interrupted */
#define MAX_HOST_ADDRESSES	16
#define MAX_ADDRESS_TEXT	64	/* an address of IP version 6 with its scope */
#define MAX_CODE			16	/* letters of the code of an error reply */

/*
 * Errors.  These functions set the error and return false.
 */

static bool
set_error(const RlConnection *conn, RlError *error, bool unreachable, const char *what,
		  const char *why)
{
	rl_error_set(error, ERRCODE_STORE_FAILED, "%s: %s", what, why);
	rl_error_detail(error, "The server is %s.", conn->server);
	error->unreachable = unreachable;
	return false;
}

static bool
cannot_connect(const RlConnection *conn, RlError *error, const char *why)
{
	set_error(conn, error, true, "could not connect to Redis", why);
	return rl_error_detail(error, "The server is %s. ratelimit.redis_url says where Redis is.", conn->server);
}

/* This process or machine is short of what the errno names; the server may be well.  See rl_error_is_own. */
static bool
own_shortage(const RlConnection *conn, RlError *error, int code)
{
	set_error(conn, error, false, "could not connect to Redis", strerror(code));
	error->sqlstate = code == EMFILE || code == ENFILE ? ERRCODE_INSUFFICIENT_RESOURCES :
		ERRCODE_OUT_OF_MEMORY;
	return false;
}

/* The connection was not up in time. */
static bool
connecting_late(const RlConnection *conn, RlError *error)
{
	cannot_connect(conn, error, "ratelimit.connect_timeout has passed");
	error->timed_out = true;
	return false;
}

/* The kernel refused a connection. */
static bool
refused(const RlConnection *conn, RlError *error, const char *why)
{
	cannot_connect(conn, error, why);
	error->by_kernel = true;
	return false;
}

/* The connection failed after it was set up. */
bool
rl_connection_lost(const RlConnection *conn, RlError *error, const char *why)
{
	return set_error(conn, error, true, "lost the connection to Redis", why);
}

/*
 * The socket, or TLS over it, failed.  A server with TLS closes a connection whose first bytes are
 * not TLS.  It checks a client's certificate after the handshake, and its alert may get lost.
 */
static bool
transfer_failed(const RlConnection *conn, RlError *error, const char *why)
{
	if (conn->heard || conn->tls == NULL)
		rl_connection_lost(conn, error, why);
	else
		cannot_connect(conn, error, why);
	if (!conn->heard && conn->tls != NULL)
		rl_error_detail(error, "The server is %s. It may want another certificate than that of ratelimit.tls_cert_file.",
						conn->server);
	else if (!conn->heard && strchr(conn->server, '/') == NULL)
		rl_error_detail(error, "The server is %s. It closed the connection without an answer. If it uses TLS, ratelimit.redis_url must begin with rediss://.",
						conn->server);
	return false;
}

/* No reply came in time. */
bool
rl_reply_late(const RlConnection *conn, RlError *error)
{
	rl_connection_lost(conn, error, "ratelimit.command_timeout has passed");
	error->timed_out = true;
	return false;
}

/* The server sent a reply that does not answer the command. */
bool
rl_protocol_violation(const RlConnection *conn, RlError *error, const char *why)
{
	set_error(conn, error, false, "unexpected reply from Redis", why);
	error->answered = true;
	return false;
}

/* The server is a replica, and a call needs the master. */
bool
rl_not_master(const RlConnection *conn, RlError *error)
{
	set_error(conn, error, false, "could not connect to Redis", "the server is a replica");
	error->replica = error->answered = true;
	return false;
}

/*
 * Copies what may be shown of an error reply.  A server can repeat a command's arguments: while
 * the connection is set up the password, later keys.  So of a reply to the set-up only the code
 * is shown, or a text that has no argument.
 */
static void
copy_shown(bool set_up, const char *line, char *shown, size_t size)
{
	static const char *const texts[] = {
		"ERR AUTH <password> called without any password configured",
		"ERR DB index is out of range",
		"ERR SELECT is not allowed in cluster mode",
		"ERR max number of clients reached"
	};
	size_t		len = strlen(line);

	if (set_up)
	{
		len = strspn(line, "ABCDEFGHIJKLMNOPQRSTUVWXYZ");
		if (len > MAX_CODE || (line[len] != ' ' && line[len] != '\0'))
			len = 0;
		for (size_t i = 0; i < lengthof(texts); i++)
			if (strncmp(line, texts[i], strlen(texts[i])) == 0)
				len = strlen(texts[i]);
		line = len > 0 ? line : "it has no code";
		len = len > 0 ? len : strlen(line);
	}
	else
	{
		/* As in: unknown command 'EVALSHA', with args beginning with: '<sha1>' ... */
		const char *args = strstr(line, "with args");
		const char *key = strchr(line, '{');	/* in each name, and in no text of Redis */

		if (args != NULL)
			len = args - line;
		if (key != NULL && key < line + len)
			for (len = key - line; len > 0 && line[len - 1] != ' ';)
				len--;
		while ((args != NULL || key != NULL) && len > 0 && strchr(" ,:", line[len - 1]) != NULL)
			len--;
	}
	strlcpy(shown, line, Min(size, len + 1));
}

/* The server sent an error reply, with set_up while the connection was set up. */
bool
rl_error_reply(const RlConnection *conn, bool set_up, const char *line, RlError *error)
{
	char		shown[sizeof(error->message)];

	copy_shown(set_up, line, shown, sizeof(shown));
	set_error(conn, error, false, "Redis answered with an error", shown);
	error->answered = true;
	error->wrong_password = strncmp(line, "NOAUTH", 6) == 0 ||
		(set_up && (strstr(line, "AUTH") || strstr(line, "PASS") || strstr(line, "password")));
	if (set_up)
		rl_error_detail(error, "The server is %s. It answered a command that sets up the connection, such as AUTH.%s",
						conn->server, !error->wrong_password ? "" : rl_redis_passfile[0] == '\0' ?
						" ratelimit.redis_passfile names no file with a password." :
						" The password is that of ratelimit.redis_passfile.");
	else if (strncmp(line, "ERR unknown command", 19) == 0)
		rl_error_detail(error, "The server is %s. If it is a Sentinel, ratelimit.redis_url must be redis+sentinel://host:port/service.",
						conn->server);
	return false;
}

/*
 * Waiting
 */

/*
 * Returns a set with the latch and room for sockets, which the caller frees.  Raises if there is
 * no descriptor.
 */
WaitEventSet *
rl_events_create(int nsockets)
{
	WaitEventSet *set = CreateWaitEventSet(NULL, nsockets + 2);

	AddWaitEventToSet(set, WL_LATCH_SET, PGINVALID_SOCKET, MyLatch, NULL);
	if (IsUnderPostmaster)
		AddWaitEventToSet(set, WL_EXIT_ON_PM_DEATH, PGINVALID_SOCKET, NULL, NULL);
	return set;
}

/* Waits serve no interrupt before this monotonic time. */
static int64 uninterrupted_until = 0;

/*
 * Lets the waits of the next REPLY_FIRST_US serve no interrupt.  To be called when a call is sent
 * that the transaction may have to refund: without its reply, the transaction would not know
 * whether there is a charge.  An interrupt that came meanwhile stays pending.
 */
void
rl_socket_reply_first(void)
{
	uninterrupted_until = rl_monotonic_now() + REPLY_FIRST_US;
}

/* Ends this, when no such call is under way. */
void
rl_socket_reply_read(void)
{
	uninterrupted_until = 0;
}

/* Waits until sockets are ready.  Returns how many, at most n; 0 if late.  May raise at an interrupt. */
int
rl_events_wait(WaitEventSet *set, int64 deadline, WaitEvent *events, int n)
{
	for (;;)
	{
		int64		now = rl_monotonic_now();
		int64		left = Max(deadline - now, 0);
		int64		wait = left;
		int			found;
		int			ready = 0;

		/* The latch was reset when the interrupt came. */
		if (!InterruptPending || uninterrupted_until == 0)
			CHECK_FOR_INTERRUPTS();
		else
			wait = Min(left, Max(uninterrupted_until - now, 0));
		found = WaitEventSetWait(set, (wait + 999) / 1000, events, n, rl_wait_event());
		for (int i = 0; i < found; i++)
		{
			if (events[i].events & WL_LATCH_SET)
				ResetLatch(MyLatch);
			else
				events[ready++] = events[i];
		}
		/* After each deadline, look once more: this process may have been slow. */
		if (ready > 0 || (found == 0 && left == 0))
			return ready;
		if (found == 0 && now >= uninterrupted_until)
			uninterrupted_until = 0;
	}
}

/*
 * Returns true if this process can open n more descriptors, 2 at most, or sets errno.  A socket needs
 * one, and so does rl_events_create.
 */
bool
rl_descriptors_left(int n)
{
	int			opened[2];
	int			acquired = 0;
	int			nopened = 0;
	int			saved_errno;

	while (acquired < n && AcquireExternalFD())
		acquired++;
	while (nopened < acquired && (opened[nopened] = socket(AF_UNIX, SOCK_DGRAM, 0)) >= 0)
		nopened++;
	saved_errno = errno;
	for (int i = 0; i < nopened; i++)
		close(opened[i]);
	for (int i = 0; i < acquired; i++)
		ReleaseExternalFD();
	errno = saved_errno;
	return nopened == n;
}

static bool
poll_socket(const RlConnection *conn, uint32 what, int64 deadline)
{
	struct pollfd fd = {.fd = conn->ctx->fd};

	fd.events = ((what & WL_SOCKET_READABLE) ? POLLIN : 0) | ((what & WL_SOCKET_WRITEABLE) ? POLLOUT : 0);
	for (;;)
	{
		int64		left = Max(deadline - rl_monotonic_now(), 0);

		if (poll(&fd, 1, (left + 999) / 1000) > 0)
			return true;
		if (left == 0)
			return false;
	}
}

/*
 * Waits until the socket is ready for what (WL_SOCKET_READABLE, _WRITEABLE or both).  Returns
 * false once the deadline has passed.  May raise an error at an interrupt; with no_throw it
 * raises nothing, and cannot be interrupted.
 */
bool
rl_socket_wait(RlConnection *conn, uint32 what, int64 deadline, bool no_throw)
{
	WaitEvent	event;

	if (no_throw)
		return poll_socket(conn, what, deadline);
	ModifyWaitEvent(conn->events, conn->socket_event, what, NULL);
	return rl_events_wait(conn->events, deadline, &event, 1) > 0;
}

/* Sleeps for RL_PAUSE_MS, until the deadline at most.  May raise at an interrupt, as rl_events_wait does. */
void
rl_pause(int64 deadline)
{
	int64		until = Min(deadline, rl_monotonic_now() + RL_PAUSE_MS * 1000);

	/* Streams without a descriptor for their joint events are waited for so. */
	if (until < uninterrupted_until)
		pg_usleep(Max(until - rl_monotonic_now(), 0));
	else
		rl_sleep_until(until, rl_wait_event());
}

/*
 * Opening and closing
 */

/*
 * Frees neither TLS nor the claim to a descriptor.  A connection that is not up, or has a call under
 * way, is reset: what the kernel still holds of it then never reaches the server.  A refund may come
 * late, so a connection that carries refunds is closed.
 */
static void
close_descriptor(RlConnection *conn)
{
	static const struct linger at_once = {.l_onoff = 1};

	if (conn->ctx != NULL && conn->in_flight && !conn->delivers)
		(void) setsockopt(conn->ctx->fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
	if (conn->events != NULL)
		FreeWaitEventSet(conn->events);
	conn->events = NULL;
	if (conn->ctx != NULL)
		redisFree(conn->ctx);
	conn->ctx = NULL;
}

/* Closes the connection, if there is one, also after a failed or interrupted opening. */
void
rl_connection_close(RlConnection *conn)
{
	rl_tls_free(conn->tls);
	close_descriptor(conn);
	if (conn->fd_acquired)
		ReleaseExternalFD();
	memset(conn, 0, sizeof(*conn));
}

/* Returns true if the server's backlog is full: an error in hiredis 0.14, later a connection in progress. */
static bool
backlog_is_full(const RlConnection *conn, const RlAddress *address)
{
	struct sockaddr_storage peer;
	socklen_t	len = sizeof(peer);

	if (!address->is_path)
		return false;
	if (conn->ctx->err)
		return conn->ctx->err == REDIS_ERR_IO && errno == EAGAIN;
	return getpeername(conn->ctx->fd, (struct sockaddr *) &peer, &len) != 0;
}

static bool
start_tls(RlConnection *conn, int64 deadline, RlError *error)
{
	char		first = 0;		/* byte from the server */

	if (!rl_tls_attach(conn->tls, conn->ctx->fd))
		return own_shortage(conn, error, ENOMEM);
	for (bool late = false;; late = rl_monotonic_now() > deadline)
	{
		uint32		wants;
		char		why[RL_TLS_WHY];
		int			done = rl_tls_step(conn->tls, RL_TLS_HANDSHAKE, NULL, 0, &wants, why);

		if (done > 0)
			return true;
		if (done < 0 || late || !rl_socket_wait(conn, wants, deadline, false))
		{
			if (done < 0)
				cannot_connect(conn, error, why);
			else
				connecting_late(conn, error);
			/* Redis without TLS waits for more, and later sends an error reply. */
			if (first == 0 || first == '-')
				rl_error_detail(error, "The server is %s. It has not answered by TLS. If it uses no TLS, ratelimit.redis_url must begin with redis://.",
								conn->server);
			return false;
		}
		if (first == 0)
			(void) recv(conn->ctx->fd, &first, 1, MSG_PEEK | MSG_DONTWAIT);
	}
}

static bool
is_shortage(int error)
{
	return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

/*
 * Writes the host's addresses, as redis-cli first of IP version 4.  Returns how many, or 0 with
 * the error set.
 */
static int
look_up(const RlConnection *conn, const char *host, char (*found)[MAX_ADDRESS_TEXT],
		RlError *error)
{
	struct addrinfo hints = {.ai_family = AF_UNSPEC,.ai_socktype = SOCK_STREAM};
	struct addrinfo *list;
	int			status;
	int			n = 0;

	errno = 0;
	status = getaddrinfo(host, NULL, &hints, &list);
	if (status == EAI_MEMORY || (status != 0 && is_shortage(errno)))
		return own_shortage(conn, error, status == EAI_MEMORY ? ENOMEM : errno);
	if (status != 0)
		return cannot_connect(conn, error, status == EAI_SYSTEM ? strerror(errno) : gai_strerror(status));
	for (int pass = 0; pass < 2; pass++)
		for (struct addrinfo *info = list; info != NULL && n < MAX_HOST_ADDRESSES; info = info->ai_next)
			if ((info->ai_family == AF_INET) == (pass == 0) &&
				getnameinfo(info->ai_addr, info->ai_addrlen, found[n], MAX_ADDRESS_TEXT,
							NULL, 0, NI_NUMERICHOST) == 0)
				n++;
	freeaddrinfo(list);
	if (n == 0)
		cannot_connect(conn, error, "the host has no address");
	return n;
}

static bool
begin_connecting(RlConnection *conn, const RlAddress *address, const char *host, int64 deadline,
				 RlError *error)
{
	for (;;)
	{
		conn->ctx = address->is_path ? redisConnectUnixNonBlock(host)
			: redisConnectNonBlock(host, address->port);
		if (conn->ctx == NULL)
			return own_shortage(conn, error, ENOMEM);
		if (!backlog_is_full(conn, address))
			break;
		if (rl_monotonic_now() >= deadline)
			return connecting_late(conn, error);
		close_descriptor(conn);
		rl_pause(deadline);
	}
	if (conn->ctx->err)
		return is_shortage(errno) ? own_shortage(conn, error, errno) :
			refused(conn, error, conn->ctx->errstr);
	if (conn->ctx->reader == NULL)
		return own_shortage(conn, error, ENOMEM);
	return true;
}

/*
 * Has the kernel end an idle connection within 8 s when the server is lost without a word, so that no
 * call has to find that out.  It also keeps gateways from forgetting the connection.
 */
static void
keep_alive(int fd)
{
	static const struct
	{
		int			level;
		int			option;
		int			value;
	}			options[] = {
		{SOL_SOCKET, SO_KEEPALIVE, 1},
		{IPPROTO_TCP, TCP_KEEPIDLE, 5},
		{IPPROTO_TCP, TCP_KEEPINTVL, 1},
		{IPPROTO_TCP, TCP_KEEPCNT, 3}
	};

	for (size_t i = 0; i < lengthof(options); i++)
		(void) setsockopt(fd, options[i].level, options[i].option, &options[i].value, sizeof(int));
}

/* Waits until the socket is up.  Returns false with the error set; the caller closes the connection. */
static bool
connect_to(RlConnection *conn, const RlAddress *address, const char *host, int64 deadline,
		   RlError *error)
{
	int			socket_error = 0;
	socklen_t	len = sizeof(socket_error);

	if (!begin_connecting(conn, address, host, deadline, error))
		return false;
	/* Programs that the server starts must not inherit it. */
	(void) fcntl(conn->ctx->fd, F_SETFD, FD_CLOEXEC);
	if (!address->is_path)
		keep_alive(conn->ctx->fd);

	conn->events = rl_events_create(1);
	conn->socket_event = AddWaitEventToSet(conn->events, WL_SOCKET_WRITEABLE,
										  conn->ctx->fd, NULL, NULL);

	if (!rl_socket_wait(conn, WL_SOCKET_WRITEABLE, deadline, false))
		return connecting_late(conn, error);
	if (getsockopt(conn->ctx->fd, SOL_SOCKET, SO_ERROR, &socket_error, &len) != 0)
		socket_error = errno;
	if (socket_error != 0)
		return refused(conn, error, strerror(socket_error));
	return true;
}

/*
 * Connects to the first of the server's addresses that accepts, with TLS if the address says
 * so, after rl_tls_prepare.  Each has an equal share of the time that is left.  Returns false with
 * the first one's error set; the caller closes the connection.
 */
bool
rl_socket_open(RlConnection *conn, const RlAddress *address, int64 deadline, RlError *error)
{
	char		hosts[MAX_HOST_ADDRESSES][MAX_ADDRESS_TEXT];
	int			n = 1;
	bool		up = false;
	RlError		failure;

	rl_address_name(address, conn->server);
	/* Neither the resolver nor OpenSSL reports that it could not open a file. */
	if (!rl_descriptors_left(2))
		return own_shortage(conn, error, errno);
	if (address->tls)
	{
		conn->tls = rl_tls_new(address->host, conn->server);
		if (conn->tls == NULL)
			return own_shortage(conn, error, ENOMEM);
	}
	conn->fd_acquired = AcquireExternalFD();
	if (!address->is_path)
		n = look_up(conn, address->host, hosts, error);

	for (int i = 0; i < n && !up; i++)
	{
		int64		now = rl_monotonic_now();

		close_descriptor(conn);
		up = connect_to(conn, address, address->is_path ? address->host : hosts[i],
						now + (deadline - now) / (n - i), &failure);
		if (!up && (i == 0 || !failure.unreachable))
			*error = failure;
		if (!up && !failure.unreachable)
			break;
	}
	if (!up)
		return false;
	conn->send_wants = WL_SOCKET_WRITEABLE;
	conn->receive_wants = WL_SOCKET_READABLE;
	return conn->tls == NULL || start_tls(conn, deadline, error);
}

/*
 * Sending and receiving
 */

/* As rl_tls_step, also without TLS. */
static int
transfer(RlConnection *conn, RlTlsStep step, void *data, int len, uint32 *wants, char *why)
{
	int			n;

	if (conn->tls != NULL)
		return rl_tls_step(conn->tls, step, data, len, wants, why);
	n = step == RL_TLS_SEND ? send(conn->ctx->fd, data, len, 0) :
		recv(conn->ctx->fd, data, len, step == RL_TLS_PEEK ? MSG_PEEK | MSG_DONTWAIT : 0);
	if (n > 0)
		return n;
	if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
		return 0;
	strlcpy(why, n < 0 ? strerror(errno) : "Server closed the connection", RL_TLS_WHY);
	return -1;
}

/* Returns true if an idle connection has no end, no error and, without TLS, no byte to read. */
bool
rl_socket_is_silent(RlConnection *conn)
{
	char		byte;
	char		why[RL_TLS_WHY];

	return transfer(conn, RL_TLS_PEEK, &byte, 1, &conn->receive_wants, why) == 0;
}

/* Sends as much of out as the socket takes, from *sent on.  Returns false with the error set. */
bool
rl_socket_send(RlConnection *conn, StringInfo out, int *sent, RlError *error)
{
	char		why[RL_TLS_WHY];
	int			n = transfer(conn, RL_TLS_SEND, out->data + *sent, out->len - *sent, &conn->send_wants, why);

	if (n < 0)
		return transfer_failed(conn, error, why);
	*sent += n;
	return true;
}

/* Reads the bytes that have come, up to a limit.  Returns false with the error set. */
bool
rl_socket_receive(RlConnection *conn, RlError *error)
{
	char		buffer[16384];	/* as much as TLS may hold back */
	char		why[RL_TLS_WHY];
	int			n = transfer(conn, RL_TLS_RECEIVE, buffer, sizeof(buffer), &conn->receive_wants, why);

	if (n == 0)
		return true;
	if (n < 0)
		return transfer_failed(conn, error, why);
	conn->heard = true;
	conn->reply_bytes += n;
	if (redisReaderFeed(conn->ctx->reader, buffer, n) != REDIS_OK)
		return rl_protocol_violation(conn, error, conn->ctx->reader->errstr);
	return true;
}
