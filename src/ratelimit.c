/*
 * ratelimit.c
 *		The start of the library.
 */
#include "postgres.h"

#include "fmgr.h"
#include "miscadmin.h"

#include "ratelimit.h"
#include "shared/refusal_log.h"
#include "shared/shared.h"
#include "transaction.h"

/* From PostgreSQL 18 on, pg_get_loaded_modules() shows the version. */
#ifdef PG_MODULE_MAGIC_EXT
PG_MODULE_MAGIC_EXT(.name = "ratelimit", .version = RL_VERSION);
#else
PG_MODULE_MAGIC;
#endif

void		_PG_init(void);

void
_PG_init(void)
{
	rl_settings_define();
	rl_refusal_log_init();
	rl_transaction_init();

	if (process_shared_preload_libraries_in_progress)
		rl_shared_request();
}
