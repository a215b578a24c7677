/*
 * status.c
 *		rl_status(): the settings of the store, the state of Redis, and the fill
 *		level of shared memory, and the build.
 */
#include "postgres.h"

#include "utils/guc.h"
#include "utils/timestamp.h"

#include "commit.h"
#include "decide.h"
#include "error.h"
#include "redis/redis.h"
#include "shared/breaker.h"
#include "shared/cells.h"
#include "shared/counters.h"
#include "shared/known.h"
#include "shared/overdue.h"
#include "shared/store_file.h"
#include "sql/arguments.h"

#define COLUMNS				26

PG_FUNCTION_INFO_V1(rl_status);
Datum
rl_status(PG_FUNCTION_ARGS)
{
	Datum		values[COLUMNS] = {0};
	bool		nulls[COLUMNS];
	char		version[64];
	char		recovery[256];
	RlError		error;
	bool		asked = !rl_store()->is_local;
	bool		answered;
	bool		connected;
	const char *breaker;
	const char *warning;
	int64		left;
	int			n = 0;

	rl_shared_start();
	if (asked)
		rl_breakers_watch();
	answered = asked && rl_redis_version(version, sizeof(version), &error);
	warning = answered ? rl_redis_warning() : NULL;
	memset(nulls, true, sizeof(nulls));
	rl_set_text(values, nulls, n++, rl_store()->name);
	rl_set_text(values, nulls, n++, GetConfigOption("ratelimit.mode", false, false));
	rl_set_text(values, nulls, n++, GetConfigOption("ratelimit.on_error", false, false));
	rl_set_text(values, nulls, n++, rl_redis_server(&connected, &breaker, &left));
	values[n] = BoolGetDatum(connected);
	nulls[n++] = false;
	rl_set_text(values, nulls, n++, answered ? version : NULL);
	rl_set_text(values, nulls, n++, !asked || answered ? NULL : rl_error_text(&error));
	rl_set_text(values, nulls, n++, warning);
	rl_set_text(values, nulls, n++, breaker);
	values[n] = Float8GetDatum((double) left / RL_SECOND);
	nulls[n++] = (breaker == NULL || left == 0);
	if (rl_shared_available())
	{
		RlCellsFill fill;
		RlKnownFill known;
		RlOverdueFill overdue;

		rl_cells_fill(&fill);
		rl_known_fill(&known);
		rl_overdue_fill(&overdue);
		values[n] = Int64GetDatum(fill.keys);
		values[n + 1] = Int64GetDatum(fill.max_keys);
		values[n + 2] = Int64GetDatum(fill.entries);
		values[n + 3] = Int64GetDatum(fill.max_entries);
		values[n + 4] = Int64GetDatum(fill.evicted);
		values[n + 5] = Int64GetDatum(known.leases);
		values[n + 6] = Int64GetDatum(known.max_leases);
		values[n + 7] = Int64GetDatum(known.denials_evicted);
		values[n + 8] = Int64GetDatum(overdue.waiting);
		values[n + 9] = Float8GetDatum((double) overdue.oldest / RL_SECOND);
		values[n + 10] = Int64GetDatum(overdue.sent);
		values[n + 11] = Int64GetDatum(overdue.lost);
		values[n + 12] = TimestampTzGetDatum(rl_counters_since());
		for (int i = 0; i < 13; i++)
			nulls[n + i] = i == 9 && overdue.waiting == 0;
		rl_set_text(values, nulls, COLUMNS - 3, rl_file_status(recovery, sizeof(recovery)));
		rl_set_text(values, nulls, COLUMNS - 2, recovery[0] == '\0' ? NULL : recovery);
	}
	rl_set_text(values, nulls, COLUMNS - 1, RL_COMMIT[0] == '\0' ? RL_VERSION :
				RL_VERSION " (" RL_COMMIT ")");
	return rl_row(fcinfo, values, nulls);
}
