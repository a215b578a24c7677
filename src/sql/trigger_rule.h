/*
 * trigger_rule.h
 *		The parsed arguments of a trigger.
 */
#ifndef TRIGGER_RULE_H
#define TRIGGER_RULE_H

#include "utils/rel.h"

#include "report.h"
#include "sql/key.h"
#include "sql/trigger_call.h"

#define RL_MAX_PAIRS		RL_MAX_KEYS

/* A piece of the key's template: text, then a value. */
typedef struct Piece
{
	const char *text;
	int			len;
	AttrNumber	attnum;			/* the value is this column */
	RowCall    *call;			/* or what this call returns */
	RlKeyPart	value;			/* of type 0: none; this is the last piece */
} Piece;

/* A key and its limits. */
typedef struct Pair
{
	const char *template;
	Piece	   *pieces;
	Bitmapset  *columns;		/* of the key, also as arguments */
	RlLimits   *limits;			/* with room for its limits only; NULL: those of the call */
	RowCall    *call;			/* returns the limits of a row */
} Pair;

/* A rule and all its data are allocated in a context of its own, of 1 kB for one pair with one limit. */
typedef struct Rule
{
	MemoryContext context;
	int			users;			/* firings in progress that call a function */
	int			nargs;			/* the trigger's arguments */
	char	  **args;
	int			npairs;
	Pair	   *pairs;
	bool		calls;			/* a key or a pair has a call */
	int64		quota;			/* if quota_attnum is 0 */
	AttrNumber	quota_attnum;
	Oid			quota_type;
	const char *quota_text;		/* for rl_triggers; NULL: the default */
} Rule;

struct TupleTableSlot;

extern Rule *rl_rule_find(Relation rel, const Trigger *trigger);
extern RlKey rl_rule_key(const RlOrigin *origin, const Rule *rule, Pair *pair, struct TupleTableSlot *row);
extern void rl_rule_limits(const RlOrigin *origin, const Rule *rule, Pair *pair, const NullableDatum *values,
						   RlLimits *limits);
extern int64 rl_rule_quota(const RlOrigin *origin, const Rule *rule, struct TupleTableSlot *row);
extern int64 rl_rule_check_quota(const RlOrigin *origin, const Rule *rule, int64 quota);
extern Rule *rl_rule_make(Relation rel, const Trigger *trigger, bool *valid, RlError *error);

#endif							/* TRIGGER_RULE_H */
