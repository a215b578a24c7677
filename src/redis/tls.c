/*
 * tls.c
 *		TLS over a socket that does not block: the only file that knows OpenSSL.
 *
 * hiredis's own TLS is not used: version 0.14 has none, and later versions leave the check of
 * the host's name to their caller, and may ask for a key's pass phrase at the terminal.
 *
 * The server must have a certificate for the host of the URL, valid now and signed by an
 * authority in ratelimit.tls_ca_file.  No setting turns this off: without it TLS protects
 * nothing.
 *
 * To read the authorities takes longer than a handshake, so the context is kept, and made again
 * when a setting or a file has changed or TLS has failed.  Session tickets are kept with it: when a
 * server accepts one, it checks no certificates and needs no signature, and neither does this side.
 */
#include "postgres.h"

#include <fcntl.h>

#include "storage/fd.h"

#include "redis/socket.h"

#ifdef USE_TLS

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#define MAX_TICKETS			8	/* of servers; Sentinels are servers, too */

/* A file of the context. */
typedef struct TlsFile
{
	char		path[MAXPGPATH];	/* empty: none */
	struct stat st;
} TlsFile;

/* A session ticket, by which the server continues its last session. */
typedef struct Ticket
{
	char		server[RL_MAX_SERVER];
	SSL_SESSION *session;		/* NULL: none */
} Ticket;

static SSL_CTX *context = NULL;
static TlsFile context_files[3];	/* that the context was made from */
static Ticket tickets[MAX_TICKETS];

/* Without this callback OpenSSL asks at the terminal. */
static int
no_pass_phrase(char *buffer pg_attribute_unused(), int size pg_attribute_unused(),
			   int for_writing pg_attribute_unused(), void *arg pg_attribute_unused())
{
	return -1;
}

static const char *
last_reason(void)
{
	const char *reason = ERR_reason_error_string(ERR_peek_last_error());

	return reason ? reason : "unknown error";
}

/* Loads the settings' files.  Returns the name of the setting whose file is wrong, or NULL. */
static const char *
load_files(SSL_CTX *context)
{
	if (rl_tls_ca_file[0] == '\0' ? SSL_CTX_set_default_verify_paths(context) != 1 :
		SSL_CTX_load_verify_locations(context, rl_tls_ca_file, NULL) != 1)
		return "ratelimit.tls_ca_file";
	if (rl_tls_cert_file[0] == '\0')
		return NULL;
	if (SSL_CTX_use_certificate_chain_file(context, rl_tls_cert_file) != 1)
		return "ratelimit.tls_cert_file";
	if (SSL_CTX_use_PrivateKey_file(context, rl_tls_key_file, SSL_FILETYPE_PEM) != 1)
		return "ratelimit.tls_key_file";
	return NULL;
}

/* Describes the settings' files.  Raises an error if a setting is wrong. */
static void
check_files(TlsFile *files)
{
	memset(files, 0, 3 * sizeof(TlsFile));
	strlcpy(files[0].path, rl_tls_ca_file, MAXPGPATH);
	strlcpy(files[1].path, rl_tls_cert_file, MAXPGPATH);
	strlcpy(files[2].path, rl_tls_key_file, MAXPGPATH);
	if ((rl_tls_cert_file[0] == '\0') != (rl_tls_key_file[0] == '\0'))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("ratelimit.tls_cert_file and ratelimit.tls_key_file must be set together")));
	if (rl_tls_ca_file[0] != '\0')
		files[0].st = rl_check_file("TLS CA file", "ratelimit.tls_ca_file", rl_tls_ca_file, false);
	if (rl_tls_cert_file[0] != '\0')
	{
		files[1].st =
			rl_check_file("TLS certificate file", "ratelimit.tls_cert_file", rl_tls_cert_file, false);
		files[2].st = rl_check_file("TLS key file", "ratelimit.tls_key_file", rl_tls_key_file, true);
	}
}

static bool
is_same_file(const TlsFile *a, const TlsFile *b)
{
	return strcmp(a->path, b->path) == 0 && a->st.st_dev == b->st.st_dev && a->st.st_ino == b->st.st_ino &&
		a->st.st_size == b->st.st_size && a->st.st_mtim.tv_sec == b->st.st_mtim.tv_sec &&
		a->st.st_mtim.tv_nsec == b->st.st_mtim.tv_nsec;
}

/* Drops the context and its tickets.  A connection that is there keeps what it needs. */
static void
drop_context(void)
{
	SSL_CTX_free(context);
	context = NULL;
	for (Ticket *ticket = tickets; ticket < tickets + MAX_TICKETS; ticket++)
		SSL_SESSION_free(ticket->session);
	memset(tickets, 0, sizeof(tickets));
}

/* Returns the server's ticket, in place of another server's if it has none. */
static Ticket *
ticket_of(const char *server)
{
	static int	next = 0;
	Ticket	   *ticket;

	for (ticket = tickets; ticket < tickets + MAX_TICKETS; ticket++)
		if (strcmp(ticket->server, server) == 0)
			return ticket;
	ticket = &tickets[next++ % MAX_TICKETS];
	SSL_SESSION_free(ticket->session);
	ticket->session = NULL;
	strlcpy(ticket->server, server, sizeof(ticket->server));
	return ticket;
}

/* OpenSSL's callback for a session that the server can continue.  Returns 1 if it is kept. */
static int
keep_session(SSL *tls, SSL_SESSION *session)
{
	Ticket	   *ticket;

	if (SSL_get_SSL_CTX(tls) != context)
		return 0;
	ticket = ticket_of(SSL_get_app_data(tls));
	SSL_SESSION_free(ticket->session);
	ticket->session = session;
	return 1;
}

/*
 * Makes the context for connections with TLS, unless the kept one still is what the settings and
 * their files say.  Raises an error if one of them is wrong, or if memory or descriptors have ended.
 */
void
rl_tls_prepare(void)
{
	TlsFile		files[3];
	const char *wrong;
	int			fd;

	check_files(files);
	if (context != NULL && is_same_file(&files[0], &context_files[0]) &&
		is_same_file(&files[1], &context_files[1]) && is_same_file(&files[2], &context_files[2]))
		return;
	drop_context();
	memcpy(context_files, files, sizeof(files));
	/* OpenSSL does not report authorities of the system that it could not read. */
	fd = OpenTransientFile(DEVNULL, O_RDONLY);
	if (fd < 0)
		ereport(ERROR,
				(errcode_for_file_access(),
				 errmsg("could not open file \"%s\": %m", DEVNULL)));
	CloseTransientFile(fd);

	ERR_clear_error();
	context = SSL_CTX_new(TLS_client_method());
	if (context == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("out of memory")));
	SSL_CTX_set_default_passwd_cb(context, no_pass_phrase);
	wrong = load_files(context);
	if (wrong != NULL)
	{
		const char *reason = last_reason();

		ERR_clear_error();
		drop_context();
		ereport(ERROR,
				(errcode(ERRCODE_CONFIG_FILE_ERROR),
				 errmsg("could not load the file of parameter \"%s\": %s", wrong, reason)));
	}
	SSL_CTX_set_verify(context, SSL_VERIFY_PEER, NULL);
	SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
	SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION);
	if (SSL_CTX_get_min_proto_version(context) < TLS1_2_VERSION)
		SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
#ifdef SSL_OP_IGNORE_UNEXPECTED_EOF
	SSL_CTX_set_options(context, SSL_OP_IGNORE_UNEXPECTED_EOF);
#endif
	SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_CLIENT | SSL_SESS_CACHE_NO_INTERNAL);
	SSL_CTX_sess_set_new_cb(context, keep_session);
	ERR_clear_error();
}

/*
 * Returns a TLS client for a host, after rl_tls_prepare, which the caller frees; NULL: no memory.
 * server names the server as long as the client lives.
 */
struct ssl_st *
rl_tls_new(const char *host, char *server)
{
	SSL		   *tls = SSL_new(context);

	if (tls != NULL && SSL_set_app_data(tls, server) == 1 &&
		(X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(tls), host) == 1 ||
		 (SSL_set1_host(tls, host) == 1 && SSL_set_tlsext_host_name(tls, host) == 1)))
	{
		Ticket	   *ticket = ticket_of(server);

		SSL_set_connect_state(tls);
		if (ticket->session != NULL)
			(void) SSL_set_session(tls, ticket->session);
	}
	else
	{
		SSL_free(tls);
		tls = NULL;
	}
	ERR_clear_error();
	return tls;
}

/* Puts TLS over the socket, which the caller closes.  Returns false if memory ended. */
bool
rl_tls_attach(struct ssl_st *tls, int fd)
{
	bool		done = SSL_set_fd(tls, fd) == 1;

	ERR_clear_error();
	return done;
}

/*
 * Takes a step.  Returns how many bytes were done (1 for a handshake), or 0 if the socket must
 * be ready for *wants first, or -1 with the reason in why, of RL_TLS_WHY bytes.
 */
int
rl_tls_step(struct ssl_st *tls, RlTlsStep step, void *data, int len, uint32 *wants, char *why)
{
	int			n;
	int			saved_errno;
	long		verdict;

	/* Errors of other code would be read as this step's. */
	ERR_clear_error();
	errno = 0;
	n = step == RL_TLS_HANDSHAKE ? SSL_do_handshake(tls) :
		step == RL_TLS_SEND ? SSL_write(tls, data, len) :
		step == RL_TLS_RECEIVE ? SSL_read(tls, data, len) : SSL_peek(tls, data, len);
	saved_errno = errno;
	if (n > 0)
		return n;

	switch (SSL_get_error(tls, n))
	{
		case SSL_ERROR_WANT_READ:
			*wants = WL_SOCKET_READABLE;
			return 0;
		case SSL_ERROR_WANT_WRITE:
			*wants = WL_SOCKET_WRITEABLE;
			return 0;
		case SSL_ERROR_ZERO_RETURN:
			strlcpy(why, "Server closed the connection", RL_TLS_WHY);
			break;
		case SSL_ERROR_SYSCALL:
			strlcpy(why, saved_errno ? strerror(saved_errno) : "Server closed the connection",
					RL_TLS_WHY);
			break;
		default:
			drop_context();
			verdict = SSL_get_verify_result(tls);
			if (verdict != X509_V_OK)
				snprintf(why, RL_TLS_WHY, "the server's certificate is not trusted: %s",
						 X509_verify_cert_error_string(verdict));
			else
				snprintf(why, RL_TLS_WHY, "TLS failed: %s", last_reason());
	}
	ERR_clear_error();
	return -1;
}

/* Frees TLS, which may be NULL.  The socket stays open. */
void
rl_tls_free(struct ssl_st *tls)
{
	/* Otherwise OpenSSL would not use the session's ticket, because nothing says goodbye. */
	if (tls != NULL)
		SSL_set_shutdown(tls, SSL_SENT_SHUTDOWN);
	SSL_free(tls);
}

#else							/* !USE_TLS */

void
rl_tls_prepare(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("rediss:// is not supported because ratelimit was built without TLS")));
}

struct ssl_st *
rl_tls_new(const char *host pg_attribute_unused(), char *server pg_attribute_unused())
{
	pg_unreachable();
}

bool
rl_tls_attach(struct ssl_st *tls pg_attribute_unused(), int fd pg_attribute_unused())
{
	pg_unreachable();
}

int
rl_tls_step(struct ssl_st *tls pg_attribute_unused(), RlTlsStep step pg_attribute_unused(),
			void *data pg_attribute_unused(), int len pg_attribute_unused(),
			uint32 *wants pg_attribute_unused(), char *why pg_attribute_unused())
{
	pg_unreachable();
}

void
rl_tls_free(struct ssl_st *tls pg_attribute_unused())
{
}

#endif
