/*
 * scripts.c
 *		The Lua scripts that Redis runs: the files in src/redis/scripts.
 */
#include "postgres.h"

#include "redis/scripts.h"
#include "redis/scripts.lua.h"

/* For one limit: the straight scripts (is_straight in call.c). */
RlScript	rl_alone_scripts[RL_ALGORITHMS] = {
	[RL_THROTTLE] = {.source = alone_throttle_lua},
	[RL_TOKEN_BUCKET] = {.source = alone_token_bucket_lua},
	[RL_FIXED_WINDOW] = {.source = alone_fixed_window_lua},
	[RL_SLIDING_WINDOW] = {.source = alone_sliding_window_lua},
	[RL_SLIDING_LOG] = {.source = alone_sliding_log_lua},
};

/* The same for many keys, each decided by itself. */
RlScript	rl_many_scripts[RL_ALGORITHMS] = {
	[RL_THROTTLE] = {.source = many_throttle_lua},
};

/* For limits of one algorithm each, so that Redis runs no code of the others. */
RlScript	rl_check_scripts[RL_ALGORITHMS] = {
	[RL_THROTTLE] = {.source = check_throttle_lua},
	[RL_TOKEN_BUCKET] = {.source = check_token_bucket_lua},
	[RL_FIXED_WINDOW] = {.source = check_fixed_window_lua},
	[RL_SLIDING_WINDOW] = {.source = check_sliding_window_lua},
	[RL_SLIDING_LOG] = {.source = check_sliding_log_lua},
	[RL_CONCURRENT] = {.source = check_concurrent_lua},
};

RlScript	rl_check_mixed_script = {.source = check_mixed_lua};

/* For many keys, each decided by itself. */
RlScript	rl_check_many_script = {.source = check_many_lua};

/* For one action on several keys. */
RlScript	rl_check_all_script = {.source = check_all_lua};

/* For calls that also ask for a lease. */
RlScript	rl_lease_script = {.source = lease_lua};

/* For reservations. */
RlScript	rl_reserve_script = {.source = reserve_lua};

RlScript	rl_settle_script = {.source = settle_lua};

RlScript	rl_refund_script = {.source = refund_lua};
RlScript	rl_refund_charges_script = {.source = refund_charges_lua};
RlScript	rl_reset_script = {.source = reset_lua};
RlScript	rl_ban_script = {.source = ban_lua};
RlScript	rl_bans_script = {.source = bans_lua};
RlScript	rl_masters_script = {.source = masters_lua};
RlScript	rl_inspect_script = {.source = inspect_lua};
RlScript	rl_version_script = {.source = version_lua};
