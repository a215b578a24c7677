/*
 * ratelimit.h
 *		The vocabulary of all files, and the settings.
 *
 * A key names the user or object that a limit counts.  A quota is the cost of
 * one action.  A limit is one rule; limits are one to eight rules that an action
 * must all satisfy.  A decision is the answer of one limit, or of all.  The store
 * keeps the state.
 *
 * Durations are int64 microseconds unless a name says otherwise; GCRA's
 * interval and backlog are int64 nanoseconds.
 *
 * A static that keeps a result for the backend also keeps the values that the
 * result was made from, and compares them at each use, so that nothing has to
 * invalidate it.  rl_settings_version stands for the settings.  The comment
 * beside the static says how much it saves.
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
#if PG_VERSION_NUM < 190000
#define TupleDescFinalize(desc) ((void) 0)
#define SysCacheIdentifier	int
#endif

#define RL_MAX_LIMITS		8
#define RL_MAX_KEYS			8	/* of one action */
#define RL_MAX_SLIDING		8	/* limits with entries of one action on several keys */
#define RL_MAX_COUNT		INT64CONST(1000000000000000)	/* also of quotas */
#define RL_MAX_LOG			100000	/* entries of a sliding_log */
#define RL_MAX_CONCURRENT	1000	/* units of a concurrent limit */
#define RL_MAX_STEPS		100 /* sub-windows of a sliding_window */
#define RL_MAX_LEASE		RL_SECOND
#define RL_MAX_KEY			512 /* bytes of UTF-8 */
#define RL_MAX_PREFIX		64	/* bytes */
#define RL_MAX_ID			128 /* bytes of a reservation's id, in UTF-8 */
#define RL_MAX_HOLD			(31 * RL_DAY)	/* of a reservation */
#define RL_DEFAULT_HOLD		(3600 * RL_SECOND)
#define RL_KEEP_SETTLED		(3600 * RL_SECOND)	/* at most, of a settled reservation */
#define RL_MAX_RESERVATIONS	4096	/* records of a key */
#define RL_DIGEST			16	/* bytes of the hashes in a record */

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

/*
 * PostgREST answers a SQLSTATE PTxyz with HTTP status xyz, and reads the whole
 * answer from an error of the last one.
 */
#define ERRCODE_RATE_LIMITED MAKE_SQLSTATE('P', 'T', '4', '2', '9')
#define ERRCODE_BLOCKED MAKE_SQLSTATE('P', 'T', '4', '0', '3')
#define ERRCODE_RESERVED_OTHERWISE MAKE_SQLSTATE('P', 'T', '4', '0', '9')
#define ERRCODE_ACTION_TOO_LARGE MAKE_SQLSTATE('P', 'T', '4', '1', '3')
#define ERRCODE_STORE_FAILED MAKE_SQLSTATE('P', 'T', '5', '0', '4')
#define ERRCODE_POSTGREST MAKE_SQLSTATE('P', 'G', 'R', 'S', 'T')

/* An error that the caller raises, returns, or treats as ratelimit.on_error says. */
typedef struct RlError
{
	int			sqlstate;
	bool		unreachable;	/* the server is, at least on this connection */
	bool		timed_out;		/* no connection or no answer came in time */
	bool		by_kernel;		/* the kernel said that the server is */
	bool		answered;		/* the server has sent an error reply, or nonsense */
	bool		replica;		/* the server is; another one may be the master */
	bool		wrong_password; /* Redis wants another one, or none */
	bool		of_action;		/* no store has failed, so ratelimit.on_error does not apply */
	int64		retry_after;	/* us until the breaker lets a backend connect, or 0 */
	const char *hint;			/* NULL: none */
	char		message[256];
	char		detail[256];	/* empty: none */
} RlError;

typedef enum RlAlgorithmId
{
	RL_THROTTLE,
	RL_TOKEN_BUCKET,
	RL_FIXED_WINDOW,
	RL_SLIDING_WINDOW,
	RL_SLIDING_LOG,
	RL_CONCURRENT
} RlAlgorithmId;

#define RL_ALGORITHMS		(RL_CONCURRENT + 1)

/* The units of a calendar's windows. */
typedef enum RlCalendar
{
	RL_NO_CALENDAR,
	RL_CALENDAR_DAY,
	RL_CALENDAR_WEEK,			/* ISO 8601: from Monday */
	RL_CALENDAR_MONTH,
	RL_CALENDAR_QUARTER,
	RL_CALENDAR_YEAR
} RlCalendar;

#define RL_MAX_LIMIT_TEXT	200	/* bytes of a limit's canonical text, with the terminator */
#define RL_MAX_REASON		128	/* bytes of a ban's reason, in UTF-8 */

/* Why a key is banned: empty, or one of these words and a limit's text or the reason, in UTF-8. */
#define RL_WHY_LIMIT		"limit "
#define RL_WHY_REASON		"reason "
#define RL_MAX_WHY			(RL_MAX_LIMIT_TEXT + 6)	/* bytes, with the terminator */

#define RL_MAX_ZONE			35	/* bytes of a time zone's name, with the terminator */

/* Has no padding, so that its bytes can be compared and hashed. */
typedef struct RlLimit
{
	RlAlgorithmId algorithm;
	bool		from_first;
	bool		count_denied;
	bool		refund_on_abort;	/* also of a concurrent limit */
	bool		shadow;			/* decides, but never refuses */
	int64		capacity;		/* the most quota that is ever free */
	int64		held_back;		/* what the list's lease subtracts from the burst that the
								 * text names; capacity is the rest */
	int64		count;			/* quota per period: GCRA's rate, the refill */
	int64		period;			/* calendar: longer than any of its windows */
	int64		interval_ns;	/* throttle: the time that replenishes one unit */
	union
	{
		int64		step;		/* sliding_window: length of a sub-window */
		int64		zone_hash;	/* of the calendar */
	};
	int64		ban;			/* 0: none; of one that grows, its first length */
	int64		ban_to;			/* its longest length; 0: it does not grow */
	int64		ban_after;		/* this many refusals in a period set the ban */
	int32		lease;			/* as the text names it; 0: none */
	uint8		calendar;		/* fixed_window: an RlCalendar */
	char		zone[RL_MAX_ZONE];	/* of the calendar; the rest is zero */
} RlLimit;

StaticAssertDecl(sizeof(RlLimit) == 120, "a limit has padding");

/*
 * The state tag: the values that distinguish the states of two limits on one
 * key.  It has no padding, so that its bytes can be compared and hashed.
 */
typedef struct RlStateTag
{
	uint64		period:56;
	uint64		algorithm:6;
	uint64		from_first:1;
	uint64		shadow:1;
	int64		step;			/* or zone_hash */
} RlStateTag;

StaticAssertDecl(sizeof(RlStateTag) == 16, "a state tag has padding");

typedef enum RlLimitsKind
{
	RL_LISTED,
	RL_UNLIMITED,				/* allows each action without a store */
	RL_BLOCKED					/* refuses each action without a store */
} RlLimitsKind;

/* There may be memory for n limits only: rl_limits_copy copies those. */
typedef struct RlLimits
{
	RlLimitsKind kind;
	int			n;				/* 0 unless RL_LISTED */
	bool		refunds;		/* one of them has refund_on_abort */
	bool		concurrent;		/* one of them is: refusals are not cached */
	int64		lease;			/* the shortest of the limits' leases; 0: none has one */
	uint64		hash;			/* of the canonical text, the same in each release and on each machine: Redis
								 * keeps it */
	RlLimit		limit[RL_MAX_LIMITS];
} RlLimits;

typedef enum RlSource
{
	RL_FROM_REDIS,
	RL_FROM_LOCAL,
	RL_FROM_LEASE,
	RL_FROM_DENIAL_CACHE,
	RL_FROM_BAN,
	RL_FROM_UNLIMITED,
	RL_FROM_BLOCKED,
	RL_FAIL_OPEN,
	RL_FAIL_CLOSED,
	RL_FROM_RESERVED,			/* an open reservation has charged it before */
	RL_FROM_SETTLED,			/* and so has one that is settled */
	RL_SHADOW,					/* shadow mode, or a shadow limit, allows a refused action */
	RL_OFF
} RlSource;

#define RL_NEVER	(-1)		/* a wait: no wait will help */
#define RL_UNKNOWN	(-1)		/* capacity, remaining, reset_after, or the quota of settle */

typedef struct RlDecision
{
	bool		allowed;
	bool		fits;			/* the limit takes the quota if the action is allowed: false
								 * also of a shadow limit that it does not fit */
	bool		ban_started;	/* by this refusal */
	int64		capacity;		/* or RL_UNKNOWN: unlimited or blocked */
	int64		remaining;		/* or RL_UNKNOWN */
	int64		retry_after;	/* or RL_NEVER; 0 when allowed, unless in shadow */
	int64		reset_after;	/* or RL_UNKNOWN */
	int64		ban_left;		/* 0: no ban is in force */
	int64		life;			/* of a charged state, as in RlCharge */
	const char *ban_rule;		/* of a ban in force: the text of the limit that set it, in
								 * the memory context of the call; NULL: not known */
	RlSource	source;
} RlDecision;

/* A key: 1 to RL_MAX_KEY bytes of UTF-8, without a terminator. */
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
	RL_PEEK						/* only decide, and change nothing */
} RlTake;

/* The record that an action on some keys makes of its charges, in the state of the last key. */
typedef struct RlReserve
{
	RlKey		id;
	int64		hold;
	int			nkeys;
	uint8		keys[RL_DIGEST];	/* hash of the keys, in their order; of one key zeros */
	/* Hash of the keys, their limits and quotas; of one key the hash of its limits, and its quota. */
	uint8		action[RL_DIGEST];
} RlReserve;

/*
 * The times of a store.  Store time decides everything that has a length; the wall clock decides
 * which window of the clock or of a calendar it is.  Only the local store has two.
 */
typedef struct RlTimes
{
	int64		store;			/* never set: forward or back */
	int64		wall;
} RlTimes;

/* What a store has done with a reservation. */
typedef struct RlSettled
{
	enum
	{
		RL_SETTLED_NONE,		/* there is no such reservation (any more) */
		RL_SETTLED_DONE,
		RL_SETTLED_LONG_HOLD	/* longer than the period of a concurrent limit */
	}			how;
	int64		quotas[RL_MAX_KEYS];	/* that were charged to each key, if it is settled now; otherwise 0 */
	uint64		limits[RL_MAX_KEYS];	/* the hash of each key's limits, then */
} RlSettled;

/* A request. */
typedef struct RlAction
{
	RlKey		key;
	const RlLimits *limits;
	int64		quota;
	RlTake		how;
	bool		timed;			/* the caller may refund the charges, which needs their time */
	uint64		by_mark;		/* of a call to Redis under a concurrent limit, as in RlCharge */
	const struct RlOrigin *origin;	/* the trigger (report.h); NULL: none */
	const RlReserve *reserve;	/* NULL: none */
	struct RlLeaseCall *lease;	/* what the call also asks for (algorithm.h); NULL: nothing */
} RlAction;

/* The cost of calls to Redis. */
typedef struct RlUsage
{
	int64		round_trips;
	int64		us;				/* connecting and waiting */
} RlUsage;

/*
 * The answer to an action.  The caller zeroes it first.  "each" and "charges" are
 * NULL, or the caller's room for the decision and the charge of each limit; it
 * zeroes the charges too.
 */
typedef struct RlAnswer
{
	RlDecision	decision;		/* the binding limit's */
	int			binding;		/* index of the binding limit; -1: another key is blocked */
	int			shadow;			/* 1 + index of the first shadow limit that alone would have
								 * refused the allowed action; 0: none */
	bool		local;			/* the local store decided, and not Redis */
	RlTimes		at;				/* the store's times; 0: not known */
	RlUsage		usage;			/* is increased, not set */
	const RlError *error;		/* why no store decided; NULL: one did.  In the
								 * memory context of the call */
	RlDecision *each;
	struct RlCharge *charges;	/* amount 0: nothing was charged */
} RlAnswer;

/*
 * Zeroes an answer.  In one piece, gcc would use "rep stos", with which a denial in the cache takes 5 %
 * longer.
 */
static inline void
rl_answer_clear(RlAnswer *answer)
{
	memset(answer, 0, sizeof(RlDecision));
	memset((char *) answer + sizeof(RlDecision), 0, sizeof(RlAnswer) - sizeof(RlDecision));
}

/* Is told the decision of each limit of action i, the store's times, and if it is charged; must not throw. */
typedef void (*RlTook) (int i, const RlDecision *each, RlTimes at, bool charged, void *arg);

typedef enum RlOnError
{
	RL_ON_ERROR_ERROR,
	RL_ON_ERROR_ALLOW,
	RL_ON_ERROR_DENY,
	RL_ON_ERROR_LOCAL
} RlOnError;

typedef enum RlErrorFormat
{
	RL_FORMAT_SQL,
	RL_FORMAT_POSTGREST
} RlErrorFormat;

typedef enum RlLogRefusals
{
	RL_LOG_SAMPLED,
	RL_LOG_ALL,
	RL_LOG_NONE
} RlLogRefusals;

typedef enum RlMode
{
	RL_MODE_ENFORCE,
	RL_MODE_SHADOW,
	RL_MODE_OFF
} RlMode;

/*
 * A store, which keeps the state.  Each function returns false with the error set
 * if the store fails, and raises errors of wrong settings and of interrupts only.
 * A store is not asked about limits that are unlimited or blocked.
 *
 * take decides an action without a reservation and, as the action says, charges it if every limit
 * allows it.  It sets the decision of each limit and the answer's time, and adds to the
 * answer's usage.
 *
 * take_many does this for n actions, each by itself, and calls took() for each one
 * when its reply comes; after a failure some have none.  It is fastest if all have
 * the same limits.  *unanswered is increased while calls are under way, and stays
 * increased by those that were perhaps run but have no reply.  A store whose actions
 * are as fast one by one has no take_many.
 *
 * take_all decides n actions on different keys, RL_MAX_KEYS at most, as one: it charges
 * all of them or none, in one step, and then calls took() for each.  With a reservation, which all of them
 * have, it also makes the record, and keys may have no limits.  If the store cannot do so because the keys
 * are apart, it changes nothing and returns false, with *apart set unless there is a reservation.  Then
 * take_parts charges each key or not, by itself: it calls took() when the answer of a key comes, and
 * *unanswered is as for take_many.  A store that keeps all keys together has no take_parts.
 *
 * refund refunds the quota to each of the limits, never above full.  reset deletes
 * the states of the limits, or all of the key if they are NULL, and unban the ban; both
 * set *found to whether there was something to delete.  "why" of a ban has less than
 * RL_MAX_WHY bytes.  settle makes the quotas the costs of the keys of a reservation, of which it
 * gets no "action"; if quotas is NULL, it starts the hold again instead, with another length unless "hold" is
 * 0.
 */
typedef struct RlStore
{
	const char *name;			/* as ratelimit.store says it */
	bool		is_local;		/* the store is this server's shared memory */
	bool		may_cache;		/* the denial cache may answer in its place */
	bool		(*take) (const RlAction *action, RlDecision *each, RlAnswer *answer, RlError *error);
	bool		(*take_many) (const RlAction *const *actions, int n, RlTook took, void *arg,
							  int64 *unanswered, RlUsage *usage, RlError *error);
	bool		(*take_all) (const RlAction *const *actions, int n, RlTook took, void *arg,
							 bool *apart, RlUsage *usage, RlError *error);
	bool		(*take_parts) (const RlAction *const *actions, int n, RlTook took, void *arg,
							   int64 *unanswered, RlUsage *usage, RlError *error);
	bool		(*refund) (const RlKey *key, const RlLimits *limits, int64 quota, RlError *error);
	bool		(*reset) (const RlKey *key, const RlLimits *limits, bool *found, RlError *error);
	bool		(*ban) (const RlKey *key, int64 duration, const char *why, RlError *error);
	bool		(*unban) (const RlKey *key, bool *found, RlError *error);
	bool		(*settle) (const RlKey *keys, const RlReserve *of, const int64 *quotas, RlSettled *settled,
						   RlError *error);
} RlStore;

/* settings.c: settings, and a number that grows when the URL, a file or the prefix is set */
extern uint64 rl_settings_version;
extern char *rl_redis_url;
extern char *rl_redis_passfile;
extern char *rl_tls_ca_file;
extern char *rl_tls_cert_file;
extern char *rl_tls_key_file;

/* The settings that say where and how Redis is reached; redis_url is the first. */
#define RL_TARGET_SETTINGS	5
typedef struct RlTargetSetting
{
	const char *name;
	char	  **value;
} RlTargetSetting;
extern const RlTargetSetting rl_target_settings[RL_TARGET_SETTINGS];
extern char *rl_key_prefix;
extern int	rl_connect_timeout;
extern int	rl_command_timeout;
extern int	rl_retry_interval;
extern int	rl_on_error;
extern int	rl_store_is_local;
extern int	rl_mode;
extern int	rl_error_format;
extern int	rl_log_refusals;
extern bool rl_denial_cache;
extern int	rl_local_max_keys;
extern bool rl_local_persistence;
extern char *rl_debug_now;
extern char *rl_debug_clock;
extern void rl_settings_define(void);
extern void rl_require_key_prefix(void);

#endif							/* RATELIMIT_H */
