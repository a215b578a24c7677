/*
 * trigger_rule.h
 *		What a trigger's arguments say, parsed for its table.
 */
#ifndef TRIGGER_RULE_H
#define TRIGGER_RULE_H

#include "utils/rel.h"

#include "sql/key.h"

/* A piece of the key: text, or if it is NULL a column. */
typedef struct Piece
{
	char	   *text;
	AttrNumber	attnum;
	RlKeyPart	column;
} Piece;

typedef struct Rule
{
	MemoryContext context;
	int			nargs;			/* what it was made from */
	char	  **args;
	int			npieces;
	Piece	   *pieces;
	RlLimits	limits;
	int64		quota;			/* unless quota_attnum is set */
	AttrNumber	quota_attnum;
	Oid			quota_type;
	bool		skip;			/* leave a refused row out */
	char	   *quota_text;		/* for rl_triggers; NULL: the default */
} Rule;

extern Rule *rl_rule_find(Relation rel, const Trigger *trigger);
struct TupleTableSlot;

extern RlKey rl_rule_key(Rule *rule, Relation rel, struct TupleTableSlot *row);
extern int64 rl_rule_quota(Rule *rule, Relation rel, struct TupleTableSlot *row);
extern Rule *rl_rule_make(Relation rel, const Trigger *trigger, bool *valid, RlError *error);

#endif							/* TRIGGER_RULE_H */
