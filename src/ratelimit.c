/*
 * ratelimit.c
 *		Settings, and the start of the library.
 *
 * Every setting is PGC_SUSET or stronger: whoever can choose the server, the
 * prefix or what happens on failure can lift every limit.  A value that was SET
 * before the library is loaded is checked again by core when the setting is
 * defined.
 */
#include "postgres.h"

#include <limits.h>

#include "miscadmin.h"
#include "utils/guc.h"
#include "utils/guc_tables.h"

#include "ratelimit.h"
#include "shared/shared.h"

PG_MODULE_MAGIC;

uint64		rl_settings_version = 0;
char	   *rl_redis_url;
char	   *rl_redis_passfile;
char	   *rl_tls_ca_file;
char	   *rl_tls_cert_file;
char	   *rl_tls_key_file;
char	   *rl_key_prefix;
int			rl_connect_timeout;
int			rl_command_timeout;
int			rl_retry_interval;
int			rl_on_error;
int			rl_store_is_local;
int			rl_mode;
bool		rl_denial_cache;
int			rl_local_max_keys;
char	   *rl_debug_now;

static const struct config_enum_entry on_error_options[] = {
	{"error", RL_ON_ERROR_ERROR, false},
	{"allow", RL_ON_ERROR_ALLOW, false},
	{"deny", RL_ON_ERROR_DENY, false},
	{"local", RL_ON_ERROR_LOCAL, false},
	{NULL, 0, false}
};

static const struct config_enum_entry store_options[] = {
	{"redis", false, false},
	{"local", true, false},
	{NULL, 0, false}
};

static const struct config_enum_entry mode_options[] = {
	{"enforce", RL_MODE_ENFORCE, false},
	{"shadow", RL_MODE_SHADOW, false},
	{"off", RL_MODE_OFF, false},
	{NULL, 0, false}
};

void		_PG_init(void);

/*
 * Braces delimit the key, and choose the slot in Redis Cluster.  Only ASCII is
 * the same in every database's encoding.
 */
static bool
check_key_prefix(char **newval, void **extra pg_attribute_unused(),
				 GucSource source pg_attribute_unused())
{
	for (const char *p = *newval; *p; p++)
		if (*p <= ' ' || *p > '~' || *p == '{' || *p == '}')
		{
			GUC_check_errdetail("The prefix must be printable ASCII without spaces and braces.");
			return false;
		}
	if (strlen(*newval) > RL_MAX_PREFIX)
	{
		GUC_check_errdetail("The prefix must not be longer than %d bytes.", RL_MAX_PREFIX);
		return false;
	}
	return true;
}

/* Only says that what was made of the settings is to be made anew. */
static void
count_change(const char *newval pg_attribute_unused(), void *extra pg_attribute_unused())
{
	rl_settings_version++;
}

/* With the longest limit added it stays exact in Lua, and in ns in an int64. */
static bool
check_debug_now(char **newval, void **extra pg_attribute_unused(),
				 GucSource source pg_attribute_unused())
{
	size_t		len = strlen(*newval);

	if (strspn(*newval, "0123456789") == len && len <= 16 &&
		strtoll(*newval, NULL, 10) <= INT64CONST(4000000000000000))
		return true;
	GUC_check_errdetail("The value must be empty, or microseconds since 1970 as a whole number up to 4000000000000000.");
	return false;
}

/*
 * Raises an error if the connection's options have set one of the settings.
 *
 * Before the library is loaded any role may do that.  Core takes the value away
 * when the setting is defined, but has forgotten the administrator's value by
 * then, so that the default would apply: another Redis, another prefix.
 */
static void
refuse_client_options(void)
{
	static const char prefix[] = "ratelimit.";
	int			n;
#if PG_VERSION_NUM >= 160000
	struct config_generic **settings = get_guc_variables(&n);
#else
	struct config_generic **settings = get_guc_variables();

	n = GetNumConfigOptions();
#endif

	for (int i = 0; i < n; i++)
	{
		const struct config_generic *setting = settings[i];

		if (pg_strncasecmp(setting->name, prefix, strlen(prefix)) == 0 &&
			(setting->flags & GUC_CUSTOM_PLACEHOLDER) &&
			setting->reset_source == PGC_S_CLIENT && setting->reset_scontext != PGC_SU_BACKEND)
			ereport(ERROR,
					(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
					 errmsg("permission denied to set parameter \"%s\"", setting->name),
					 errdetail("The connection's options set it, which only a superuser may.")));
	}
#if PG_VERSION_NUM >= 160000
	pfree(settings);
#endif
}

void
_PG_init(void)
{
	refuse_client_options();

	/*
	 * Superuser only: it says whom this server trusts with its limits.  Read
	 * at the next connection, so that a wrong value is an error there and
	 * never means the default.
	 */
	DefineCustomStringVariable("ratelimit.redis_url",
							   "The Redis server that keeps the limits' state.",
							   "redis://[user@]host[:port][,host[:port] ...][/db], redis+sentinel://[user@]host[:port][,...]/service[/db], with rediss for TLS, or unix://[user@]/path[?db=n]. A password belongs in ratelimit.redis_passfile.",
							   &rl_redis_url,
							   "redis://127.0.0.1:6379/0",
							   PGC_SUSET, 0,
							   NULL, count_change, NULL);

	/*
	 * Superuser only, also to read: it names a file on the server.  The
	 * password itself is no setting, because before the library is loaded
	 * every role can SHOW a setting.
	 */
	DefineCustomStringVariable("ratelimit.redis_passfile",
							   "The file that holds the Redis password.",
							   "Its first line is the password. No other user than the server's may have access to it. Empty: no password.",
							   &rl_redis_passfile,
							   "",
							   PGC_SUSET, GUC_SUPERUSER_ONLY,
							   NULL, NULL, NULL);

	/*
	 * Superuser only: who chooses whom to trust can put a Redis of his own in
	 * the way, and who chooses another client can be refused by Redis, which
	 * turns on_error on.  Also to read, for they name files on the server.
	 */
	DefineCustomStringVariable("ratelimit.tls_ca_file",
							   "The file with the certificates of the authorities that may vouch for Redis.",
							   "For rediss://. Empty: the authorities that the system trusts.",
							   &rl_tls_ca_file,
							   "",
							   PGC_SUSET, GUC_SUPERUSER_ONLY,
							   NULL, NULL, NULL);
	DefineCustomStringVariable("ratelimit.tls_cert_file",
							   "The file with the certificate that is shown to Redis.",
							   "For rediss://. Empty: none.",
							   &rl_tls_cert_file,
							   "",
							   PGC_SUSET, GUC_SUPERUSER_ONLY,
							   NULL, NULL, NULL);
	DefineCustomStringVariable("ratelimit.tls_key_file",
							   "The file with the private key of ratelimit.tls_cert_file.",
							   "No other user than the server's may have access to it.",
							   &rl_tls_key_file,
							   "",
							   PGC_SUSET, GUC_SUPERUSER_ONLY,
							   NULL, NULL, NULL);

	/* Superuser only: another prefix is a fresh set of limits. */
	DefineCustomStringVariable("ratelimit.key_prefix",
							   "What every key in Redis starts with.",
							   NULL,
							   &rl_key_prefix,
							   "rl:",
							   PGC_SUSET, 0,
							   check_key_prefix, count_change, NULL);

	/* Superuser only: a timeout too short to meet turns on_error on. */
	DefineCustomIntVariable("ratelimit.connect_timeout",
							"The longest time to wait for a connection to Redis.",
							NULL,
							&rl_connect_timeout,
							200, 1, INT_MAX / 2,
							PGC_SUSET, GUC_UNIT_MS,
							NULL, NULL, NULL);

	/* Superuser only, for the same reason. */
	DefineCustomIntVariable("ratelimit.command_timeout",
							"The longest time to wait for the reply to a command.",
							NULL,
							&rl_command_timeout,
							100, 1, INT_MAX / 2,
							PGC_SUSET, GUC_UNIT_MS,
							NULL, NULL, NULL);

	/* Superuser only: for so long a failure turns on_error on for others. */
	DefineCustomIntVariable("ratelimit.retry_interval",
							"How long a Redis server is left alone after it could not be reached.",
							"Shared by all sessions if the library is preloaded; one of them tries then. 0: each call tries.",
							&rl_retry_interval,
							1000, 0, INT_MAX / 2,
							PGC_SUSET, GUC_UNIT_MS,
							NULL, NULL, NULL);

	/* Superuser only: "allow" lets everything through while Redis is away. */
	DefineCustomEnumVariable("ratelimit.on_error",
							 "What functions that take quota do when Redis fails.",
							 "error: raise the failure; allow: let the action happen; deny: refuse it; local: let this server decide alone.",
							 &rl_on_error,
							 RL_ON_ERROR_ERROR,
							 on_error_options,
							 PGC_SUSET, 0,
							 NULL, NULL, NULL);

	/* Superuser only: another store is a fresh set of limits. */
	DefineCustomEnumVariable("ratelimit.store",
							 "Where the limits' state is kept.",
							 "redis: in Redis, for all servers that share it; local: in this server's shared memory.",
							 &rl_store_is_local,
							 false,
							 store_options,
							 PGC_SUSET, 0,
							 NULL, NULL, NULL);

	/* Superuser only: all modes but "enforce" let everything through. */
	DefineCustomEnumVariable("ratelimit.mode",
							 "Whether limits are enforced.",
							 "enforce: refuse what they refuse; shadow: decide, count and log, but allow; off: allow unasked.",
							 &rl_mode,
							 RL_MODE_ENFORCE,
							 mode_options,
							 PGC_SUSET, 0,
							 NULL, NULL, NULL);

	/* Superuser only: without it a flood of refused calls reaches Redis. */
	DefineCustomBoolVariable("ratelimit.denial_cache",
							 "Refuse without asking Redis what it has just refused.",
							 "Needs shared memory, and is of no effect without.",
							 &rl_denial_cache,
							 true,
							 PGC_SUSET, 0,
							 NULL, NULL, NULL);

	/* At server start, because it says how much memory there is. */
	if (process_shared_preload_libraries_in_progress)
		DefineCustomIntVariable("ratelimit.local_max_keys",
								"How many limits' states this server's shared memory holds.",
								"When it is full, the state nearest to its end is forgotten.",
								&rl_local_max_keys,
								100000, 100, 100000000,
								PGC_POSTMASTER, 0,
								NULL, NULL, NULL);

	/* Superuser only: who sets the clock forward is never limited. */
	DefineCustomStringVariable("ratelimit.debug_now",
							   "Time that limits are decided at, for tests.",
							   "Microseconds since 1970. Empty: the clock of Redis.",
							   &rl_debug_now,
							   "",
							   PGC_SUSET, GUC_NOT_IN_SAMPLE,
							   check_debug_now, NULL, NULL);

	MarkGUCPrefixReserved("ratelimit");

	if (process_shared_preload_libraries_in_progress)
		rl_shared_request();
}
