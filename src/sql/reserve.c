/*
 * reserve.c
 *		The SQL functions of reservations: charges with an id, whose cost is settled later.
 */
#include "postgres.h"

#include <math.h>

#include "common/cryptohash.h"
#include "common/sha2.h"
#include "funcapi.h"
#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "port/pg_bswap.h"
#include "utils/builtins.h"

#include "algorithm/limits.h"
#include "decide.h"
#include "error.h"
#include "shared/counters.h"
#include "shared/known.h"
#include "shared/local_store.h"
#include "sql/arguments.h"

/* Returns the id of a reservation, in UTF-8.  Raises an error if it is NULL, empty or too long. */
static RlKey
id_argument(FunctionCallInfo fcinfo, int n)
{
	const char *given;
	RlKey		id;

	rl_require_argument(fcinfo, n, "id");
	given = text_to_cstring(PG_GETARG_TEXT_PP(n));
	id.data = pg_server_to_any(given, strlen(given), PG_UTF8);
	id.len = strlen(id.data);
	if (id.len == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("id must not be empty")));
	if (id.len > RL_MAX_ID)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("id must not be longer than %d bytes", RL_MAX_ID),
				 errdetail("It has %d bytes in UTF-8.", id.len)));
	return id;
}

/* Returns the hold in microseconds, or 0 if it is NULL.  Raises an error if it is out of range. */
static int64
hold_argument(FunctionCallInfo fcinfo, int n)
{
	double		us;

	if (rl_argument_is_null(fcinfo, n))
		return 0;
	us = rint(PG_GETARG_FLOAT8(n) * RL_SECOND);
	/* Also true for NaN. */
	if (!(us >= 1 && us <= RL_MAX_HOLD))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("hold must be at least a microsecond and at most 31 days")));
	return (int64) us;
}

static void
raise_long_hold(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("hold must not be longer than the period of the concurrent limit")));
}

/*
 * Returns the hold of a reservation: by default the shortest period of a concurrent limit, or an
 * hour.  Raises an error if it is longer than that period.
 */
static int64
hold_under(const RlAction *actions, int n, int64 hold)
{
	int64		shortest = PG_INT64_MAX;

	for (int i = 0; i < n; i++)
		for (int l = 0; l < actions[i].limits->n; l++)
		{
			const RlLimit *limit = &actions[i].limits->limit[l];

			if (rl_algorithm(limit)->until_end)
				shortest = Min(shortest, limit->period);
		}
	if (hold > shortest)
		raise_long_hold();
	if (hold > 0)
		return hold;
	return shortest < PG_INT64_MAX ? Min(shortest, RL_MAX_HOLD) : RL_DEFAULT_HOLD;
}

/* Sets a hash of the text so far. */
static void
set_digest(const StringInfoData *text, uint8 *digest)
{
	pg_cryptohash_ctx *ctx = pg_cryptohash_create(PG_SHA256);
	uint8		whole[PG_SHA256_DIGEST_LENGTH];

	if (pg_cryptohash_init(ctx) < 0 ||
		pg_cryptohash_update(ctx, (const uint8 *) text->data, text->len) < 0 ||
		pg_cryptohash_final(ctx, whole, sizeof(whole)) < 0)
	{
		pg_cryptohash_free(ctx);
		elog(ERROR, "could not compute the hash of a reservation");
	}
	pg_cryptohash_free(ctx);
	memcpy(digest, whole, RL_DIGEST);
}

/*
 * Sets the record's id and keys.  If there are several keys, starts the text that is hashed, with them.  The
 * record is in the state of the last key, so one key needs no hash.
 */
static RlReserve
reserve_of(StringInfo text, const RlKey *keys, int n, RlKey id)
{
	RlReserve	reserve = {.id = id,.nkeys = n};

	if (n == 1)
		return reserve;
	initStringInfo(text);
	for (int i = 0; i < n; i++)
	{
		appendStringInfo(text, "%d:", keys[i].len);
		appendBinaryStringInfo(text, keys[i].data, keys[i].len);
	}
	set_digest(text, reserve.keys);
	return reserve;
}

/*
 * Sets what a retry compares.  SHA-256 takes more than a microsecond, so for one key this is the hash of its
 * limits and the quota themselves.
 */
static void
set_action(RlReserve *reserve, StringInfo text, const RlAction *actions, int n)
{
	uint64		of_one[2] = {pg_hton64(actions[0].limits->hash), pg_hton64(actions[0].quota)};

	StaticAssertStmt(sizeof(of_one) == RL_DIGEST, "the action on one key has the size of a hash");
	if (n == 1)
	{
		memcpy(reserve->action, of_one, RL_DIGEST);
		return;
	}
	for (int i = 0; i < n; i++)
		appendStringInfo(text, " %lld %s", (long long) actions[i].quota, rl_limits_text(actions[i].limits));
	set_digest(text, reserve->action);
	pfree(text->data);
}

/*
 * Decides an action with a reservation; without one if nothing is charged, because then there is nothing to
 * settle.
 */
static void
reserve_keys(RlAction *actions, int n, RlKey id, int64 hold, RlAnswer *answers)
{
	RlKey		keys[RL_MAX_KEYS] = {0};
	RlReserve	reserve;
	StringInfoData text;
	bool		charges = false;

	hold = hold_under(actions, n, hold);
	for (int i = 0; i < n; i++)
	{
		keys[i] = actions[i].key;
		charges |= actions[i].limits->n > 0 && actions[i].quota > 0;
	}
	reserve = reserve_of(&text, keys, n, id);
	reserve.hold = hold;
	for (int i = 0; i < n; i++)
	{
		actions[i].reserve = charges ? &reserve : NULL;
		rl_answer_clear(&answers[i]);
	}
	if (charges)
		set_action(&reserve, &text, actions, n);
	rl_decide_all(actions, n, answers);
}

PG_FUNCTION_INFO_V1(rl_reserve);
Datum
rl_reserve(PG_FUNCTION_ARGS)
{
	RlKey		key = rl_key_argument(fcinfo, 0);
	const RlLimits *limits = rl_limits_argument(fcinfo, 1, &key);
	RlAction	action = {.key = key,.limits = limits,.quota = rl_quota_argument(fcinfo, 2),.how = RL_TAKE};
	RlKey		id = id_argument(fcinfo, 3);
	RlAnswer	answer;

	reserve_keys(&action, 1, id, hold_argument(fcinfo, 4), &answer);
	return rl_decision_row(fcinfo, limits, &answer);
}

PG_FUNCTION_INFO_V1(rl_reserve_all);
Datum
rl_reserve_all(PG_FUNCTION_ARGS)
{
	RlAction	actions[RL_MAX_KEYS];
	RlAnswer	answers[RL_MAX_KEYS];
	const RlLimits *limits[RL_MAX_KEYS];
	Datum	   *keys;
	int			n = rl_actions_argument(fcinfo, actions, &keys);
	RlKey		id = id_argument(fcinfo, 3);

	for (int i = 0; i < n; i++)
		limits[i] = actions[i].limits;
	InitMaterializedSRF(fcinfo, 0);
	reserve_keys(actions, n, id, hold_argument(fcinfo, 4), answers);
	for (int i = 0; i < n; i++)
		rl_put_decision(fcinfo, keys[i], limits[i], &answers[i]);
	return (Datum) 0;
}

/* Settles a reservation, or if quotas is NULL extends it.  Returns false if there is none. */
static bool
settle(const RlKey *keys, int n, RlKey id, const int64 *quotas, int64 hold)
{
	const RlStore *store;
	RlSettled	settled = {.how = RL_SETTLED_NONE};
	volatile bool done = false;
	StringInfoData text;
	RlReserve	of = reserve_of(&text, keys, n, id);
	RlError		error;

	of.hold = hold;
	rl_shared_start();
	for (int i = 0; i < n; i++)
		rl_known_end(&keys[i], RL_END_DENIALS, NULL);
	store = rl_asked_store(&keys[n - 1]);
	/* As for a repair: an interrupt ends the wait for a command that Redis still runs. */
	PG_TRY();
	{
		done = store->settle(keys, &of, quotas, &settled, &error);
	}
	PG_FINALLY();
	{
		for (int i = 0; i < n; i++)
			rl_known_end(&keys[i], RL_END_DENIALS, NULL);
	}
	PG_END_TRY();
	/* While Redis failed, this server may have made the reservation. */
	if (done && settled.how == RL_SETTLED_NONE && !store->is_local && rl_on_error == RL_ON_ERROR_LOCAL)
	{
		rl_require_local_store("ratelimit.on_error = local");
		done = rl_local_store.settle(keys, &of, quotas, &settled, &error);
	}
	if (!done)
		rl_raise(&error);
	if (settled.how == RL_SETTLED_LONG_HOLD)
		raise_long_hold();
	for (int i = 0; i < n; i++)
		if (settled.quotas[i] > 0)
			rl_counters_add_settled(settled.limits[i], &keys[i], Max(settled.quotas[i] - quotas[i], 0),
									Max(quotas[i] - settled.quotas[i], 0));
	return settled.how == RL_SETTLED_DONE;
}

PG_FUNCTION_INFO_V1(rl_settle);
Datum
rl_settle(PG_FUNCTION_ARGS)
{
	RlKey		key = rl_key_argument(fcinfo, 0);
	RlKey		id = id_argument(fcinfo, 1);
	int64		quota = rl_quota_argument(fcinfo, 2);

	PG_RETURN_BOOL(settle(&key, 1, id, &quota, 0));
}

PG_FUNCTION_INFO_V1(rl_settle_all);
Datum
rl_settle_all(PG_FUNCTION_ARGS)
{
	RlKey		keys[RL_MAX_KEYS];
	int64		quotas[RL_MAX_KEYS];
	Datum	   *values;
	int			n = rl_keys_argument(fcinfo, 0, &values, keys);
	RlKey		id = id_argument(fcinfo, 1);

	rl_quotas_argument(fcinfo, 2, n, quotas);
	PG_RETURN_BOOL(settle(keys, n, id, quotas, 0));
}

PG_FUNCTION_INFO_V1(rl_extend);
Datum
rl_extend(PG_FUNCTION_ARGS)
{
	RlKey		key = rl_key_argument(fcinfo, 0);
	RlKey		id = id_argument(fcinfo, 1);

	PG_RETURN_BOOL(settle(&key, 1, id, NULL, hold_argument(fcinfo, 2)));
}

PG_FUNCTION_INFO_V1(rl_extend_all);
Datum
rl_extend_all(PG_FUNCTION_ARGS)
{
	RlKey		keys[RL_MAX_KEYS];
	Datum	   *values;
	int			n = rl_keys_argument(fcinfo, 0, &values, keys);
	RlKey		id = id_argument(fcinfo, 1);

	PG_RETURN_BOOL(settle(keys, n, id, NULL, hold_argument(fcinfo, 2)));
}
