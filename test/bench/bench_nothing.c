/*
 * bench_nothing.c
 *		A C function that takes the arguments of rl_throttle, returns an
 *		rl_decision, and does nothing else: the least that such a call costs.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "fmgr.h"
#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/memutils.h"

PG_MODULE_MAGIC;

PG_FUNCTION_INFO_V1(bench_nothing);

Datum
bench_nothing(PG_FUNCTION_ARGS)
{
	static TupleDesc desc = NULL;
	Datum		values[6];
	bool		nulls[6] = {false};

	if (desc == NULL)
	{
		TupleDesc	found;
		MemoryContext caller;

		if (get_call_result_type(fcinfo, NULL, &found) != TYPEFUNC_COMPOSITE)
			elog(ERROR, "return type must be a row type");
		if (found->natts != lengthof(values))
			elog(ERROR, "return type must have %d columns", (int) lengthof(values));
		caller = MemoryContextSwitchTo(TopMemoryContext);
		desc = BlessTupleDesc(CreateTupleDescCopy(found));
		MemoryContextSwitchTo(caller);
	}

	values[0] = BoolGetDatum(true);
	values[1] = Int64GetDatum(PG_GETARG_INT64(1));
	values[2] = Int64GetDatum(PG_GETARG_INT64(1) - PG_GETARG_INT64(4));
	values[3] = (Datum) 0;
	nulls[3] = true;
	values[4] = Float8GetDatum(PG_GETARG_FLOAT8(3));
	values[5] = CStringGetTextDatum("redis");
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(desc, values, nulls)));
}
