/*
 * tls.h
 *		TLS over a socket that does not block.
 */
#ifndef TLS_H
#define TLS_H

#include "ratelimit.h"

typedef enum RlTlsStep
{
	RL_TLS_HANDSHAKE,
	RL_TLS_SEND,
	RL_TLS_RECEIVE,
	RL_TLS_PEEK
} RlTlsStep;

#define RL_TLS_WHY			192

struct ssl_st;

extern struct ssl_st *rl_tls_new(const char *host);
extern bool rl_tls_attach(struct ssl_st *tls, int fd);
extern int	rl_tls_step(struct ssl_st *tls, RlTlsStep step, void *data, int len,
						uint32 *wants, char *why);
extern void rl_tls_free(struct ssl_st *tls);

#endif							/* TLS_H */
