/*
 * scripts.c
 *		The Lua scripts that Redis runs.  The Makefile says which files are in
 *		each script.
 */
#include "postgres.h"

#include "redis/scripts.h"

/* For one limit without a ban, of an algorithm that has act_alone. */
RlScript	rl_alone_scripts[RL_ALGORITHMS] = {
#include "redis/alone.lua.h"
};

/* The same for many keys, each decided by itself. */
RlScript	rl_many_scripts[RL_ALGORITHMS] = {
#include "redis/many.lua.h"
};

/* For limits of one algorithm each, so that Redis runs no code of the others. */
RlScript	rl_check_scripts[RL_ALGORITHMS] = {
#include "redis/check.lua.h"
};

RlScript	rl_check_mixed_script = {.source =
#include "redis/check_mixed.lua.h"
};

/* For many keys, each decided by itself. */
RlScript	rl_check_many_script = {.source =
#include "redis/check_many.lua.h"
};

/* For one action on several keys. */
RlScript	rl_check_all_script = {.source =
#include "redis/check_all.lua.h"
};

/* For calls that also ask for a lease. */
RlScript	rl_lease_script = {.source =
#include "redis/lease.lua.h"
};

RlScript	rl_refund_script = {.source =
#include "redis/refund.lua.h"
};

RlScript	rl_refund_charges_script = {.source =
#include "redis/refund_charges.lua.h"
};

RlScript	rl_reset_script = {.source =
#include "redis/reset.lua.h"
};

RlScript	rl_ban_script = {.source =
#include "redis/ban.lua.h"
};

RlScript	rl_bans_script = {.source =
#include "redis/bans.lua.h"
};

RlScript	rl_masters_script = {.source =
#include "redis/masters.lua.h"
};

RlScript	rl_inspect_script = {.source =
#include "redis/inspect.lua.h"
};

RlScript	rl_version_script = {.source =
#include "redis/version.lua.h"
};
