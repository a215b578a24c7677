/*
 * address.h
 *		Where Redis is: what ratelimit.redis_url says, taken apart.
 */
#ifndef ADDRESS_H
#define ADDRESS_H

#include "ratelimit.h"

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

#endif							/* ADDRESS_H */
