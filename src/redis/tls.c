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
 */
#include "postgres.h"

#include "redis/socket.h"

#ifdef USE_TLS

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

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

/* Returns a TLS client, which the caller frees; NULL: no memory.  Raises an error if a setting is wrong. */
struct ssl_st *
rl_tls_new(const char *host)
{
	SSL_CTX    *context;
	SSL		   *tls;
	const char *wrong;

	if ((rl_tls_cert_file[0] == '\0') != (rl_tls_key_file[0] == '\0'))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("ratelimit.tls_cert_file and ratelimit.tls_key_file must be set together")));
	if (rl_tls_ca_file[0] != '\0')
		rl_check_file("TLS CA file", rl_tls_ca_file, false);
	if (rl_tls_cert_file[0] != '\0')
	{
		rl_check_file("TLS certificate file", rl_tls_cert_file, false);
		rl_check_file("TLS key file", rl_tls_key_file, true);
	}

	ERR_clear_error();
	context = SSL_CTX_new(TLS_client_method());
	if (context == NULL)
		return NULL;
	SSL_CTX_set_default_passwd_cb(context, no_pass_phrase);
	wrong = load_files(context);
	if (wrong != NULL)
	{
		const char *reason = last_reason();

		ERR_clear_error();
		SSL_CTX_free(context);
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

	tls = SSL_new(context);
	if (tls != NULL &&
		(X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(tls), host) == 1 ||
		 (SSL_set1_host(tls, host) == 1 && SSL_set_tlsext_host_name(tls, host) == 1)))
		SSL_set_connect_state(tls);
	else
	{
		SSL_free(tls);
		tls = NULL;
	}
	ERR_clear_error();
	SSL_CTX_free(context);
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
	SSL_free(tls);
}

#else							/* !USE_TLS */

struct ssl_st *
rl_tls_new(const char *host pg_attribute_unused())
{
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("rediss:// is not supported because ratelimit was built without TLS")));
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
