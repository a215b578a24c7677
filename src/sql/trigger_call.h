/*
 * trigger_call.h
 *		Calls of functions of a row.
 */
#ifndef TRIGGER_CALL_H
#define TRIGGER_CALL_H

#include "lib/stringinfo.h"
#include "nodes/primnodes.h"
#include "utils/rel.h"

#include "ratelimit.h"

/* An argument: a column of the row. */
typedef struct CallArgument
{
	AttrNumber	attnum;
	Oid			type;
	bool		byval;
	int16		len;
} CallArgument;

/* A call of a function of a row's columns. */
typedef struct RowCall
{
	int			nargs;
	CallArgument *args;
	const char *signature;		/* the function's name and the arguments' types */
	FuncExpr   *function;		/* the call, with a Param for each argument */
	bool		sets_path;		/* the function has SET search_path */
	bool		unsafe;			/* it is SECURITY DEFINER, and its caller chooses the search_path */
	MemoryContext context;		/* of the state */
	struct CallState *state;	/* for the next run, or NULL */
	LocalTransactionId transaction; /* in which the state was made */
	Oid			role;			/* whose EXECUTE was checked then */
	uint64		changes;		/* of the catalogs, before it was made */
} RowCall;

struct TupleTableSlot;

extern void rl_calls_outdate(void);
extern bool rl_is_call(const char *text);
extern RowCall *rl_call_make(Relation rel, const Trigger *trigger, const char **text, char end,
							 MemoryContext context, RlError *error);
extern void rl_call_read(const RowCall *call, struct TupleTableSlot *row, NullableDatum *values);
extern void rl_call_append(const RowCall *call, const NullableDatum *values, StringInfo bytes);
extern void rl_call_restore(const RowCall *call, const char *bytes, NullableDatum *values);
extern Datum rl_call_run(RowCall *call, const NullableDatum *values, bool nested, bool *isnull);

#endif							/* TRIGGER_CALL_H */
