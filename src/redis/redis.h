/*
 * redis.h
 *		The store in Redis, for other modules.
 */
#ifndef REDIS_H
#define REDIS_H

#include "algorithm/inspect.h"

#define RL_MAX_REDIS_KEY	(RL_MAX_PREFIX + 3 * RL_MAX_KEY + 2)	/* bytes of a name */
#define RL_MAX_REFUNDS		16	/* of one call */

/* A charge to be refunded, and the limit that was charged. */
typedef struct RlRefund
{
	const RlLimit *limit;
	const RlCharge *charge;
} RlRefund;

typedef enum RlRefundOutcome
{
	RL_REFUND_UNSENT,
	RL_REFUND_SENT,				/* without a reply: whether it ran is not known */
	RL_REFUND_DONE,
	RL_REFUND_LATER,			/* not run, but a later call may be */
	RL_REFUND_FAILED			/* with an error reply, as another call would */
} RlRefundOutcome;

/* Charges of one key that are refunded in one call, also together with those of other keys. */
typedef struct RlKeyRefunds
{
	const char *redis_key;		/* the key's name in Redis */
	int			redis_key_len;
	int			n;				/* RL_MAX_REFUNDS at most */
	const RlRefund *refunds;
	RlRefundOutcome outcome;
	int64		refused;		/* units to be counted as refused by limits with
								 * count_denied, or 0 */
	/* For refunds.c; zero at first: */
	bool		late;			/* there was no time to send it */
	bool		alone;			/* it has a call of its own */
} RlKeyRefunds;

/* cluster.c */
extern bool rl_slots_known(void);

/* store.c */
extern const RlStore rl_redis_store;
extern bool rl_redis_version(char *version, Size size, RlError *error);

/* key_name.c */
extern int	rl_redis_key(const RlKey *key, char *redis_key);
extern bool rl_redis_read_key(const char *name, int name_len, char *key, int *len);

/* refunds.c */
extern void rl_redis_prepare_refunds(void);
extern bool rl_redis_refund(const RlKey *key, const RlLimits *limits, int64 quota, RlError *error);
extern bool rl_redis_refund_until(RlKeyRefunds *keys, int n, int64 until, RlUsage *usage,
								  RlError *why, RlError *error);
extern bool rl_redis_refund_no_throw(RlKeyRefunds *keys, int n, RlError *why, RlError *error);

/* scan.c */
extern bool rl_redis_bans(RlKeptFound found, void *arg, RlError *error);
extern bool rl_redis_inspect(const RlKey *key, RlKeptFound found, void *arg, RlError *error);

/* command.c */
extern bool rl_redis_is_connected(void);
extern const char *rl_redis_warning(void);
extern const char *rl_redis_server(bool *connected, const char **breaker, int64 *breaker_left);

#endif							/* REDIS_H */
