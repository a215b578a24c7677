/*
 * scripts.h
 *		The Lua scripts that Redis runs, each in src/redis/scripts.
 */
#ifndef SCRIPTS_H
#define SCRIPTS_H

#include "redis/command.h"

/* An algorithm's scripts for one limit without options (is_single in call.c); NULL: there is none. */
typedef struct RlScripts
{
	RlScript   *single;			/* for one key */
	RlScript   *many;			/* for many keys, each decided by itself */
} RlScripts;

extern const RlScripts rl_scripts[RL_ALGORITHMS];

extern RlScript rl_check_script;
extern RlScript rl_check_many_script;
extern RlScript rl_check_all_script;
extern RlScript rl_lease_script;
extern RlScript rl_reserve_script;
extern RlScript rl_settle_script;
extern RlScript rl_refund_charges_script;
extern RlScript rl_reset_script;
extern RlScript rl_ban_script;
extern RlScript rl_bans_script;
extern RlScript rl_masters_script;
extern RlScript rl_inspect_script;
extern RlScript rl_version_script;

#endif							/* SCRIPTS_H */
