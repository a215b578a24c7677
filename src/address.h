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

extern bool rl_address_parse(const char *url, RlAddress *address, RlError *error);
extern void rl_check_file(const char *kind, const char *path, bool must_be_private);
extern void rl_password_read(char *password);

#endif							/* ADDRESS_H */
