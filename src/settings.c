/*
 * settings.c
 *		Settings.
 *
 * Every setting is PGC_SUSET or stronger: a role that can choose the server, the
 * prefix or what happens on failure can lift every limit.  Core checks a value that
 * was SET before the library is loaded again when the setting is defined.
 */
#include "postgres.h"

#include <limits.h>

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/guc.h"
#include "utils/guc_tables.h"

#include "ratelimit.h"

/*
 * A flag of each setting.  A parallel query can be the first to load the library, also in the
 * backend of its client.  Without the flag, core then drops the administrator's values, and the
 * defaults would apply.  Older minor releases lack the flag; there, such a query fails.
 */
#ifdef GUC_ALLOW_IN_PARALLEL
#define EACH_SETTING		GUC_ALLOW_IN_PARALLEL
#else
#define EACH_SETTING		0
#endif

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
int			rl_error_format;
int			rl_log_refusals;
bool		rl_denial_cache;
int			rl_local_max_keys;
bool		rl_local_persistence;
char	   *rl_debug_now;
char	   *rl_debug_clock;

const RlTargetSetting rl_target_settings[RL_TARGET_SETTINGS] = {
	{"ratelimit.redis_url", &rl_redis_url},
	{"ratelimit.redis_passfile", &rl_redis_passfile},
	{"ratelimit.tls_ca_file", &rl_tls_ca_file},
	{"ratelimit.tls_cert_file", &rl_tls_cert_file},
	{"ratelimit.tls_key_file", &rl_tls_key_file}
};

static bool key_prefix_valid;

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

static const struct config_enum_entry error_format_options[] = {
	{"sql", RL_FORMAT_SQL, false},
	{"postgrest", RL_FORMAT_POSTGREST, false},
	{NULL, 0, false}
};

static const struct config_enum_entry log_refusals_options[] = {
	{"sampled", RL_LOG_SAMPLED, false},
	{"all", RL_LOG_ALL, false},
	{"none", RL_LOG_NONE, false},
	{NULL, 0, false}
};

/* Makes results that were computed from the settings out of date. */
static void
count_change(const char *newval pg_attribute_unused(), void *extra pg_attribute_unused())
{
	rl_settings_version++;
}

/* Braces delimit the key.  Only ASCII is the same in every database's encoding. */
static void
assign_key_prefix(const char *newval, void *extra)
{
	key_prefix_valid = strlen(newval) <= RL_MAX_PREFIX;
	for (const char *p = newval; *p; p++)
		key_prefix_valid &= *p > ' ' && *p <= '~' && *p != '{' && *p != '}';
	count_change(newval, extra);
}

/* Raises an error if keys have no valid prefix. */
void
rl_require_key_prefix(void)
{
	if (!key_prefix_valid)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("invalid value for parameter \"ratelimit.key_prefix\""),
				 errdetail("The prefix must be at most %d printable ASCII characters, without spaces and braces.",
						   RL_MAX_PREFIX)));
}

/* Even with the longest limit added, the largest value is exact in Lua, and in ns in an int64. */
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
 * Raises an error if the connection's options have set one of the settings, and the role may not.
 *
 * Before the library is loaded any role may do that.  When the setting is defined,
 * core drops the role's value, but no longer has the administrator's, so that the
 * default would apply: another Redis, another prefix.
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
			setting->reset_source == PGC_S_CLIENT && setting->reset_scontext != PGC_SU_BACKEND &&
			!(IsTransactionState() &&
			  pg_parameter_aclcheck(setting->name, setting->reset_srole, ACL_SET) == ACLCHECK_OK))
			ereport(ERROR,
					(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
					 errmsg("permission denied to set parameter \"%s\"", setting->name),
					 errdetail("The connection's options set it, which needs the privilege SET on this parameter.")));
	}
#if PG_VERSION_NUM >= 160000
	pfree(settings);
#endif
}

/* Defines a setting of a place or a name. */
static void
define_text(const char *name, char **variable, const char *boot, int flags, GucStringAssignHook assign,
			const char *summary, const char *details)
{
	DefineCustomStringVariable(name, summary, details, variable, boot, PGC_SUSET, flags | EACH_SETTING, NULL,
							   assign, NULL);
}

/* Defines one that only a superuser may read, because it names a file on the server. */
static void
define_file(const char *name, char **variable, const char *summary, const char *details)
{
	define_text(name, variable, "", GUC_SUPERUSER_ONLY, count_change, summary, details);
}

/* Defines a setting of a clock for tests. */
static void
define_clock(const char *name, char **variable, const char *summary, const char *details)
{
	DefineCustomStringVariable(name, summary, details, variable, "", PGC_SUSET,
							   GUC_NOT_IN_SAMPLE | EACH_SETTING, check_debug_now, NULL, NULL);
}

/* Defines a setting of milliseconds. */
static void
define_time(const char *name, int *variable, int boot, int least, const char *summary, const char *details)
{
	DefineCustomIntVariable(name, summary, details, variable, boot, least, INT_MAX / 2, PGC_SUSET,
							GUC_UNIT_MS | EACH_SETTING, NULL, NULL, NULL);
}

/* Defines a setting with a list of values. */
static void
define_enum(const char *name, int *variable, int boot, const struct config_enum_entry *options,
			const char *summary, const char *details)
{
	DefineCustomEnumVariable(name, summary, details, variable, boot, options, PGC_SUSET, EACH_SETTING, NULL,
							 NULL, NULL);
}

/* Where Redis is, and how its keys begin. */
static void
define_server_settings(void)
{
	/*
	 * Superuser only: another Redis is a fresh set of limits.  Only pg_read_all_settings may
	 * read it, because clients need no address of an inner network.  The value is read at the
	 * next connection, so that a wrong one is an error and never the default.
	 */
	define_text("ratelimit.redis_url", &rl_redis_url, "redis://127.0.0.1:6379/0", GUC_SUPERUSER_ONLY,
				count_change,
				"Sets the Redis server that keeps the state of the limits.",
				"redis://[user@]host[:port][,host[:port] ...][/db], redis+sentinel://[user@]host[:port][,...]/service[/db], with rediss for TLS, or unix://[user@]/path[?db=n]. A password belongs in ratelimit.redis_passfile.");

	/* No setting holds the password, because every role can SHOW a setting before the library loads. */
	define_file("ratelimit.redis_passfile", &rl_redis_passfile,
				"Sets the file that holds the Redis password.",
				"Its first line is the password. No other user than the server's may have access to it. Empty: no password.");

	/*
	 * Superuser only: with other authorities a role could put its own Redis in
	 * between, and with another certificate it could make Redis fail, so that
	 * on_error applies.
	 */
	define_file("ratelimit.tls_ca_file", &rl_tls_ca_file,
				"Sets the file with the certificate authorities that verify the certificate of Redis.",
				"For rediss://. Empty: the authorities that the system trusts.");
	define_file("ratelimit.tls_cert_file", &rl_tls_cert_file,
				"Sets the file with the certificate that is shown to Redis.",
				"For rediss://. Empty: none.");
	define_file("ratelimit.tls_key_file", &rl_tls_key_file,
				"Sets the file with the private key of ratelimit.tls_cert_file.",
				"No other user than the server's may have access to it.");

	/*
	 * Superuser only: another prefix is a fresh set of limits.  A wrong value is an error
	 * at the next call: in a check hook, the default would take its place.
	 */
	define_text("ratelimit.key_prefix", &rl_key_prefix, "rl:", 0, assign_key_prefix,
				"Sets the prefix of every key in Redis.", NULL);
}

/* How long to wait for Redis. */
static void
define_time_settings(void)
{
	/* Superuser only: with a timeout that is too short, on_error applies. */
	define_time("ratelimit.connect_timeout", &rl_connect_timeout, 200, 1,
				"Sets the maximum time to wait for a connection to Redis.",
				NULL);
	define_time("ratelimit.command_timeout", &rl_command_timeout, 100, 1,
				"Sets the maximum time to wait for the reply to a command.",
				NULL);

	/* Superuser only: during this time on_error applies to all sessions. */
	define_time("ratelimit.retry_interval", &rl_retry_interval, 1000, 0,
				"Sets the longest time until Redis is retried when it could not be reached.",
				"With shared memory, all sessions share it, and one of them retries. 0: each call retries.");
}

/* What actions get from the limits. */
static void
define_outcome_settings(void)
{
	/* Superuser only: "allow" allows every action while Redis fails. */
	define_enum("ratelimit.on_error", &rl_on_error, RL_ON_ERROR_ERROR, on_error_options,
				"Selects what functions that take quota do when Redis fails.",
				"error: raise the error; allow: let the action happen; deny: refuse it; local: let this server decide alone.");

	/* Superuser only: another store is a fresh set of limits. */
	define_enum("ratelimit.store", &rl_store_is_local, false, store_options,
				"Selects where the state of the limits is kept.",
				"redis: in Redis, for all servers that share it; local: in this server's shared memory.");

	/* Superuser only: every other mode than "enforce" allows every action. */
	define_enum("ratelimit.mode", &rl_mode, RL_MODE_ENFORCE, mode_options,
				"Selects whether limits are enforced.",
				"enforce: refuse actions that exceed a limit; shadow: decide, count and log, but allow; off: allow without asking the store.");

	/* Superuser only: clients rely on the SQLSTATE. */
	define_enum("ratelimit.error_format", &rl_error_format, RL_FORMAT_SQL, error_format_options,
				"Selects the form of the errors that refuse an action or report a failed store.",
				"sql: SQLSTATE PT429, PT403, PT413 or PT504, with detail and hint; postgrest: SQLSTATE PGRST with JSON, from which PostgREST answers with status and headers.");

	/* Superuser only, as log_min_messages is. */
	define_enum("ratelimit.log_refusals", &rl_log_refusals, RL_LOG_SAMPLED, log_refusals_options,
				"Selects the refusals (SQLSTATE PT429 and PT403) that are written to the server log.",
				"sampled: one a second for each key, and at most 20 a second (about 100 lines); all; none. Clients get each error.");
}

/* Shared memory, and the clock of tests. */
static void
define_other_settings(void)
{
	/* Superuser only: without the cache, a flood of refused calls reaches Redis. */
	DefineCustomBoolVariable("ratelimit.denial_cache",
							 "Sets whether an action that Redis has just refused is refused without asking Redis.",
							 "Has no effect without shared memory.",
							 &rl_denial_cache,
							 true,
							 PGC_SUSET, EACH_SETTING,
							 NULL, NULL, NULL);

	/*
	 * Read once, because it sets the size of shared memory: at server start, or by
	 * the backend that creates the memory.
	 */
	DefineCustomIntVariable("ratelimit.local_max_keys",
							"Sets how many states of limits this server's shared memory holds.",
							"It is read when the shared memory is created. When the memory is full, the state nearest to its end is evicted.",
							&rl_local_max_keys,
							/* A process with 32 bits has addresses for less than 20,000,000. */
							100000, 100, sizeof(Size) > 4 ? 100000000 : 10000000,
							process_shared_preload_libraries_in_progress ? PGC_POSTMASTER : PGC_SIGHUP,
							EACH_SETTING,
							NULL, NULL, NULL);

	DefineCustomBoolVariable("ratelimit.local_persistence",
							 "Sets whether the local store's counts survive a restart or crash of the server.",
							 "Needs shared_preload_libraries. It is read when the server starts.",
							 &rl_local_persistence,
							 false,
							 process_shared_preload_libraries_in_progress ? PGC_POSTMASTER : PGC_SIGHUP,
							 EACH_SETTING,
							 NULL, NULL, NULL);

	/* Superuser only: a role that sets the clock forward is never refused. */
	define_clock("ratelimit.debug_now", &rl_debug_now,
				 "Sets the time at which limits are decided, for tests.",
				 "Microseconds since 1970. Empty: the clock of Redis.");

	/* Superuser only: a role that sets this clock back uses leases that have ended. */
	define_clock("ratelimit.debug_clock", &rl_debug_clock,
				 "Sets the time of this server's clock by which leases end, for tests.",
				 "Microseconds. Empty: the clock since the system's start; no leases while ratelimit.debug_now is set.");
}

/*
 * Defines all settings.  Raises an error if the client must not have set one, or the library cannot be loaded
 * now.
 */
void
rl_settings_define(void)
{
	if (EACH_SETTING == 0 && IsInParallelMode())
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("ratelimit cannot be loaded during a parallel operation")));
	refuse_client_options();
	define_server_settings();
	define_time_settings();
	define_outcome_settings();
	define_other_settings();
	MarkGUCPrefixReserved("ratelimit");
}
