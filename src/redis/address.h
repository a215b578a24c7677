/*
 * address.h
 *		Where Redis is, as ratelimit.redis_url says, and its password.
 */
#ifndef ADDRESS_H
#define ADDRESS_H

#include <sys/stat.h>

#include "ratelimit.h"

#define RL_MAX_PASSWORD		512
#define RL_MAX_SEEDS		16
#define RL_MAX_SERVER		300 /* bytes of an address's name with its terminator */
#define RL_MAX_SERVICE		128

/* Bytes of a target's name with its terminator. */
#define RL_MAX_TARGET		(RL_MAX_SERVER + RL_MAX_SERVICE)

typedef struct RlAddress
{
	bool		tls;
	bool		is_path;		/* host is a socket's path */
	char		host[256];
	int			port;
	int			db;
	char		user[64];		/* empty: none */
} RlAddress;

typedef enum RlDeployment
{
	RL_SERVERS,					/* the seeds are servers: one, several, or some of a
								 * cluster's, as their replies tell */
	RL_SENTINELS				/* the seeds are Sentinels, which know the server */
} RlDeployment;

/* The servers or Sentinels that the URL names. */
typedef struct RlTarget
{
	RlDeployment deployment;
	char		service[RL_MAX_SERVICE];	/* whose master the Sentinels know */
	int			n;
	int			first;			/* of the seeds, the one to ask first */
	RlAddress	seeds[RL_MAX_SEEDS];
} RlTarget;

extern bool rl_target_parse(const char *url, RlTarget *target, RlError *error);
extern void rl_target_name(const RlTarget *target, char *name);
extern bool rl_address_redirect(const char *text, RlAddress *address);
extern void rl_address_name(const RlAddress *address, char *name);
extern struct stat rl_check_file(const char *kind, const char *setting, const char *path,
								 bool must_be_private);
extern void rl_password_read(char *password);

#endif							/* ADDRESS_H */
