/*
 * trigger_limits.h
 *		Limits of a trigger that a function returns.
 */
#ifndef TRIGGER_LIMITS_H
#define TRIGGER_LIMITS_H

#include "lib/stringinfo.h"
#include "nodes/primnodes.h"
#include "utils/rel.h"

#include "report.h"

/* An argument: a column of the row. */
typedef struct LimitsArgument
{
	AttrNumber	attnum;
	Oid			type;
	bool		byval;
	int16		len;
} LimitsArgument;

/* A call of a function of columns that returns the row's limits. */
typedef struct LimitsCall
{
	int			nargs;
	LimitsArgument *args;
	const char *signature;		/* the function's name and the arguments' types */
	FuncExpr   *function;		/* the call, with a Param for each argument */
	MemoryContext context;		/* of the state */
	struct CallState *state;	/* for the next run, or NULL */
	LocalTransactionId transaction; /* in which the state was made */
	Oid			role;			/* whose EXECUTE was checked then */
	uint64		changes;		/* of the catalogs, before it was made */
} LimitsCall;

struct TupleTableSlot;

extern void rl_limits_calls_outdate(void);
extern bool rl_limits_is_call(const char *text);
extern LimitsCall *rl_limits_call_make(Relation rel, const Trigger *trigger, const char *text,
									   MemoryContext context, RlError *error);
extern void rl_limits_call_read(const LimitsCall *call, struct TupleTableSlot *row,
								NullableDatum *values);
extern void rl_limits_call_append(const LimitsCall *call, const NullableDatum *values,
								  StringInfo bytes);
extern void rl_limits_call_restore(const LimitsCall *call, const char *bytes, NullableDatum *values);
extern void rl_limits_call_run(LimitsCall *call, const RlOrigin *origin, const NullableDatum *values,
							   bool nested, RlLimits *limits);

#endif							/* TRIGGER_LIMITS_H */
