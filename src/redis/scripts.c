/*
 * scripts.c
 *		The Lua scripts that Redis runs: the files in src/redis/scripts.
 */
#include "postgres.h"

#include "redis/scripts.h"
#include "redis/scripts.lua.h"

const RlScripts rl_scripts[RL_ALGORITHMS] = {
	[RL_THROTTLE] = {.single = &rl_single_throttle_script,.many = &rl_many_throttle_script},
	[RL_TOKEN_BUCKET] = {.single = &rl_single_token_bucket_script},
	[RL_FIXED_WINDOW] = {.single = &rl_single_fixed_window_script},
	[RL_SLIDING_WINDOW] = {.single = &rl_single_sliding_window_script},
	[RL_SLIDING_LOG] = {.single = &rl_single_sliding_log_script},
};
