/*
 * ratelimit.h
 *		The vocabulary: a key is whom a limit counts, a quota what one action
 *		costs, a limit one rule, limits one to eight rules that must all hold,
 *		a decision the answer, the store where state lives.
 *
 * Durations are int64 microseconds unless a name says otherwise; GCRA's
 * interval and backlog are int64 nanoseconds.
 */
#ifndef RATELIMIT_H
#define RATELIMIT_H

#include "fmgr.h"
#if PG_VERSION_NUM >= 160000
#include "varatt.h"
#endif

#if PG_VERSION_NUM < 180000
#define pg_noreturn pg_attribute_noreturn()
#endif

#define RL_MAX_LIMITS		8
#define RL_MAX_COUNT		INT64CONST(1000000000000000)	/* also of quotas */
#define RL_MAX_LOG			100000	/* entries of a sliding_log */
#define RL_MAX_STEPS		100 /* sub-windows of a sliding_window */
#define RL_MAX_KEY			512 /* bytes of UTF-8 */
#define RL_MAX_PREFIX		64	/* bytes */

#define RL_SECOND			INT64CONST(1000000)
#define RL_DAY				(86400 * RL_SECOND)
#define RL_YEAR				(36525 * RL_DAY / 100)
#define RL_MAX_PERIOD		(10 * RL_YEAR)
#define RL_MAX_SPAN			(100 * RL_YEAR) /* to fill an empty limit */

/* PostgreSQL's epoch, in microseconds of Unix time */
#define RL_UNIX_EPOCH		INT64CONST(946684800000000)

/* Longer than any wait is, unless clocks or a limit's numbers have changed */
#define RL_MAX_WAIT			(2 * RL_MAX_SPAN)

/* ns; longer than any limit makes it, and short enough to be added to */
#define RL_MAX_BACKLOG		(2 * RL_MAX_SPAN * 1000)

/* PostgREST answers this SQLSTATE with HTTP status 429. */
#define ERRCODE_RATE_LIMITED MAKE_SQLSTATE('P', 'T', '4', '2', '9')

/* An error that the caller raises, passes on, or weighs against on_error. */
typedef struct RlError
{
	int			sqlstate;
	bool		unreachable;	/* the server, also for others */
	char		message[256];
	char		detail[256];	/* empty: none */
} RlError;

typedef enum RlAlgorithmId
{
	RL_THROTTLE,
	RL_TOKEN_BUCKET,
	RL_FIXED_WINDOW,
	RL_SLIDING_WINDOW,
	RL_SLIDING_LOG
} RlAlgorithmId;

#define RL_ALGORITHMS		(RL_SLIDING_LOG + 1)

typedef struct RlLimit
{
	RlAlgorithmId algorithm;
	int64		capacity;		/* the most quota that is ever free */
	int64		count;			/* quota per period: GCRA's rate, the refill */
	int64		period;
	int64		interval_ns;	/* throttle: what one quota takes to leak */
	int64		step;			/* sliding_window: length of a sub-window */
	int64		ban;			/* 0: none */
	int64		ban_after;		/* refusals in a period that bring the ban */
	bool		from_first;
	bool		count_denied;
	bool		refund_on_abort;
} RlLimit;

/*
 * The state tag: the values that distinguish the states of two limits on one
 * key.  It has no padding, so that its bytes can be compared and hashed.
 */
typedef struct RlStateTag
{
	uint64		period:56;
	uint64		algorithm:6;
	uint64		from_first:1;
	uint64		unused:1;		/* 0 */
	int64		step;
} RlStateTag;

StaticAssertDecl(sizeof(RlStateTag) == 16, "a state tag has padding");

typedef struct RlLimits
{
	int			n;
	bool		refunds;		/* one of them has refund_on_abort */
	bool		timed;			/* charges may be taken back: their time is wanted */
	uint64		hash;			/* of the canonical text's meaning */
	RlLimit		limit[RL_MAX_LIMITS];
} RlLimits;

typedef enum RlSource
{
	RL_FROM_REDIS,
	RL_FROM_LOCAL,
	RL_FROM_DENIAL_CACHE,
	RL_FROM_BAN,
	RL_FAIL_OPEN,
	RL_FAIL_CLOSED,
	RL_SHADOW,					/* refused, but let through */
	RL_OFF
} RlSource;

#define RL_NEVER	(-1)		/* of a wait: no wait will help */
#define RL_UNKNOWN	(-1)		/* of remaining and reset_after */

typedef struct RlDecision
{
	bool		allowed;
	int64		capacity;
	int64		remaining;		/* or RL_UNKNOWN */
	int64		retry_after;	/* 0 when allowed, or RL_NEVER */
	int64		reset_after;	/* or RL_UNKNOWN */
	int64		ban_left;		/* 0: no ban was in force */
	RlSource	source;
} RlDecision;

/* A key in UTF-8, of 1 to RL_MAX_KEY bytes, not terminated. */
typedef struct RlKey
{
	const char *data;
	int			len;
} RlKey;

/* How to take quota. */
typedef enum RlTake
{
	RL_TAKE,
	RL_TRY,						/* a refusal is not counted, and brings no ban */
	RL_PEEK						/* decide only, and change nothing */
} RlTake;

/* One request. */
typedef struct RlAction
{
	RlKey		key;
	const RlLimits *limits;
	int64		quota;
	RlTake		how;
} RlAction;

/* What calls to Redis have cost. */
typedef struct RlUsage
{
	int64		round_trips;
	int64		us;				/* connecting and waiting */
} RlUsage;

/*
 * The answer to an action.  The caller zeroes it, and the charges, before it asks;
 * "each" and "charges" are NULL, or room for one of each limit.
 */
typedef struct RlAnswer
{
	RlDecision	decision;		/* the binding limit's */
	int			binding;		/* index of the binding limit */
	bool		local;			/* the local store decided, and not Redis */
	int64		at;				/* the store's time; 0: not known */
	RlUsage		usage;			/* is added up over the attempts of a wait */
	const RlError *error;		/* why no store decided, in the memory context
								 * of the caller; or NULL */
	RlDecision *each;
	struct RlCharge *charges;	/* amount 0: nothing was charged */
} RlAnswer;

/* Gets the decisions of action i of many; must not throw. */
typedef void (*RlTook) (int i, const RlDecision *each, int64 at, void *arg);

typedef enum RlOnError
{
	RL_ON_ERROR_ERROR,
	RL_ON_ERROR_ALLOW,
	RL_ON_ERROR_DENY,
	RL_ON_ERROR_LOCAL
} RlOnError;

typedef enum RlMode
{
	RL_MODE_ENFORCE,
	RL_MODE_SHADOW,
	RL_MODE_OFF
} RlMode;

/*
 * Where state lives.  Each function returns false with the error set when the
 * store fails.  take decides one action and charges it if every limit allows
 * it, or as "how" says, and sets a decision for each limit and the store's time
 * of it (0: not known).  refund gives quota
 * back to each of the limits, as far as it is not free already.  reset forgets
 * the key, or of it what the limits counted if they are not NULL; *found tells,
 * as of unban, whether there was anything.
 */
typedef struct RlStore
{
	const char *name;			/* as ratelimit.store says it */
	bool		is_local;		/* the store is this server's shared memory */
	bool		may_cache;		/* the denial cache may answer for it */
	bool		(*take) (const RlAction *action, RlDecision *each, RlAnswer *answer, RlError *error);
	bool		(*take_many) (const RlAction *const *actions, int n, RlTook took, void *arg,
							  int64 *unanswered, RlUsage *usage, RlError *error);
	bool		(*refund) (const RlKey *key, const RlLimits *limits, int64 quota, RlError *error);
	bool		(*reset) (const RlKey *key, const RlLimits *limits, bool *found, RlError *error);
	bool		(*ban) (const RlKey *key, int64 duration, RlError *error);
	bool		(*unban) (const RlKey *key, bool *found, RlError *error);
} RlStore;

/* ratelimit.c: settings, and a number that grows when the URL or the prefix is set */
extern uint64 rl_settings_version;
extern char *rl_redis_url;
extern char *rl_redis_passfile;
extern char *rl_tls_ca_file;
extern char *rl_tls_cert_file;
extern char *rl_tls_key_file;
extern char *rl_key_prefix;
extern int	rl_connect_timeout;
extern int	rl_command_timeout;
extern int	rl_retry_interval;
extern int	rl_on_error;
extern int	rl_store_is_local;
extern int	rl_mode;
extern bool rl_denial_cache;
extern int	rl_local_max_keys;
extern char *rl_debug_now;

#endif							/* RATELIMIT_H */
