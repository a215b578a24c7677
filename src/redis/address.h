/*
 * address.h
 *		Where Redis is, as ratelimit.redis_url says, and the password to it.
 */
#ifndef ADDRESS_H
#define ADDRESS_H

#include "ratelimit.h"

#define RL_MAX_PASSWORD		512

typedef struct RlAddress
{
	bool		tls;
	bool		is_path;		/* host is a socket's path */
	char		host[256];
	int			port;
	int			db;
	char		user[64];		/* empty: none */
} RlAddress;

#define RL_MAX_SEEDS		16

/* What the URL names: one server, or some of a cluster's nodes, or Sentinels. */
typedef struct RlTarget
{
	char		service[128];	/* not empty: of which Sentinels know the master */
	int			n;
	RlAddress	seeds[RL_MAX_SEEDS];
} RlTarget;

extern bool rl_target_parse(const char *url, RlTarget *target, RlError *error);
extern bool rl_address_redirect(const char *text, RlAddress *address);
extern void rl_check_file(const char *kind, const char *path, bool must_be_private);
extern void rl_password_read(char *password);

#endif							/* ADDRESS_H */
