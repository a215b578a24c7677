/*
 * redis.c
 *		Commands and scripts for Redis, over the backend's one connection.
 *
 * Failures are returned, not raised; the only errors raised are the core's
 * own, and those of settings that cannot mean what was wanted.
 */
#include "postgres.h"

#include "common/cryptohash.h"
#include "common/sha1.h"
#include "utils/builtins.h"
#include "utils/memutils.h"

#include "connection.h"
#include "redis.h"
#include "shared.h"

static RlConnection conn;

/* What says where and how to connect, and what it said then, malloc'd. */
static char **const settings[] = {
	&rl_redis_url, &rl_redis_passfile, &rl_tls_ca_file, &rl_tls_cert_file, &rl_tls_key_file
};
static char *conn_settings[lengthof(settings)];

RlRedisUsage rl_redis_usage;

static void
disconnect(void)
{
	rl_connection_close(&conn);
	for (size_t i = 0; i < lengthof(settings); i++)
	{
		free(conn_settings[i]);
		conn_settings[i] = NULL;
	}
}

/*
 * Connects as the settings say.  Returns false with the error set; raises an
 * error if a setting is wrong.
 */
static bool
set_up(int64 *deadline, RlError *error)
{
	RlAddress	address;
	char		password[RL_MAX_PASSWORD] = "";

	if (!rl_address_parse(rl_redis_url, &address, error))
		rl_raise(error);
	if (rl_redis_passfile[0] != '\0')
		rl_password_read(password);
	else if (address.user[0] != '\0')
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("ratelimit.redis_url names a user, but ratelimit.redis_passfile is empty")));

	for (size_t i = 0; i < lengthof(settings); i++)
	{
		conn_settings[i] = strdup(*settings[i]);
		if (conn_settings[i] == NULL)
		{
			rl_error_set(error, ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
						 "could not connect to Redis: out of memory");
			return false;
		}
	}
	return rl_connection_open(&conn, &address, password, deadline, error);
}

/* True if the connection was made with the settings as they are. */
static bool
has_settings(void)
{
	for (size_t i = 0; i < lengthof(settings); i++)
		if (strcmp(conn_settings[i], *settings[i]) != 0)
			return false;
	return true;
}

/* True if there is a connection that can carry the next command. */
static bool
is_usable(void)
{
	return rl_connection_is_usable(&conn) && has_settings();
}

/* The breaker of the server that the settings name; NULL: there is none. */
static RlBreaker *
server_breaker(void)
{
	static uint64 version = 0;
	static RlBreaker *breaker = NULL;
	RlAddress	address;
	RlError		error;
	char		name[RL_MAX_SERVER];

	if (version == rl_settings_version)
		return breaker;
	breaker = NULL;
	if (rl_address_parse(rl_redis_url, &address, &error))
	{
		rl_connection_name(&address, name, sizeof(name));
		breaker = rl_breaker_find(name);
	}
	version = rl_settings_version;
	return breaker;
}

/*
 * Sees to a connection; *reused tells whether it was there before.  Returns
 * false with the error set.
 */
static bool
ensure_connected(bool *reused, int64 *deadline, RlError *error)
{
	*reused = is_usable();
	if (*reused)
		return true;
	disconnect();
	if (set_up(deadline, error))
		return true;
	disconnect();
	return false;
}

/*
 * Sends a command and reads its reply, connecting first if need be.  A
 * connection that turns out to be dead before a byte was sent is made anew,
 * once.  *deadline is set if it is 0.  Returns false with the error set, and
 * drops the connection.
 */
static bool
call_server(void (*append_command) (StringInfo out, const void *arg), const void *arg,
			int64 *deadline, RlReply *reply, RlError *error)
{
	static StringInfoData out;
	RlOutcome	outcome;

	if (out.data == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);

		initStringInfo(&out);
		MemoryContextSwitchTo(old);
	}

	do
	{
		bool		reused;

		if (!ensure_connected(&reused, deadline, error))
			return false;
		resetStringInfo(&out);
		append_command(&out, arg);
		if (*deadline == 0)
			*deadline = rl_monotonic_now() + (int64) rl_command_timeout * 1000;
		rl_redis_usage.round_trips++;
		outcome = rl_connection_exchange(&conn, &out, 1, *deadline, reply, error);
		if (outcome != RL_DONE)
			disconnect();
		if (!reused && outcome == RL_NOT_SENT)
			outcome = RL_FAILED;
	} while (outcome == RL_NOT_SENT);
	return outcome == RL_DONE;
}

/* call_server, unless others have found that the server cannot be reached. */
static bool
call(void (*append_command) (StringInfo out, const void *arg), const void *arg,
	 int64 *deadline, RlReply *reply, RlError *error)
{
	RlBreaker  *breaker = server_breaker();
	int64		start = rl_monotonic_now();
	bool		answered;

	if (!rl_breaker_admits(breaker, error))
		return false;
	answered = call_server(append_command, arg, deadline, reply, error);
	rl_redis_usage.us += rl_monotonic_now() - start;
	if (answered)
		rl_breaker_succeeded(breaker);
	else if (error->unreachable)
		rl_breaker_failed(breaker, error);
	return answered;
}

/*
 * What people call the server that the settings name, NULL if they name none;
 * whether this backend is connected to it; and how its breaker stands.
 */
const char *
rl_redis_server(bool *connected, const char **breaker, int64 *breaker_left)
{
	static char name[RL_MAX_SERVER];
	RlAddress	address;
	RlError		error;

	*connected = is_usable();
	*breaker = rl_breaker_state(server_breaker(), breaker_left);
	if (!rl_address_parse(rl_redis_url, &address, &error))
		return NULL;
	rl_connection_name(&address, name, sizeof(name));
	return name;
}

/* Drops the connection, of which a reply made no sense. */
void
rl_redis_distrust(void)
{
	disconnect();
}

/*
 * Commands
 */

/* Starts a command in the one buffer there is; append its arguments next. */
RlCommand *
rl_command_start(void)
{
	static RlCommand command;

	if (command.args.data == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);

		initStringInfo(&command.args);
		MemoryContextSwitchTo(old);
	}
	resetStringInfo(&command.args);
	command.nargs = 0;
	return &command;
}

/* Appends an argument of the given bytes. */
void
rl_command_arg(RlCommand *command, const char *data, int len)
{
	rl_resp_arg(&command->args, data, len);
	command->nargs++;
}

/* Appends a number as an argument. */
void
rl_command_number(RlCommand *command, int64 number)
{
	char		text[32];

	rl_command_arg(command, text, pg_lltoa(number, text));
}

static void
append_plain(StringInfo out, const void *arg)
{
	const RlCommand *command = arg;

	rl_resp_start(out, command->nargs);
	appendBinaryStringInfo(out, command->args.data, command->args.len);
}

typedef struct ScriptCall
{
	const RlScript *script;
	const RlCommand *command;
	bool		by_source;
} ScriptCall;

static void
append_script(StringInfo out, const void *arg)
{
	const ScriptCall *sc = arg;

	rl_resp_start(out, sc->command->nargs + 2);
	if (sc->by_source)
	{
		rl_resp_arg(out, "EVAL", 4);
		rl_resp_arg(out, sc->script->source, strlen(sc->script->source));
	}
	else
	{
		rl_resp_arg(out, "EVALSHA", 7);
		rl_resp_arg(out, sc->script->sha1, 40);
	}
	appendBinaryStringInfo(out, sc->command->args.data, sc->command->args.len);
}

static void
compute_sha1(RlScript *script)
{
	pg_cryptohash_ctx *ctx = pg_cryptohash_create(PG_SHA1);
	uint8		digest[SHA1_DIGEST_LENGTH];

	if (pg_cryptohash_init(ctx) < 0 ||
		pg_cryptohash_update(ctx, (const uint8 *) script->source, strlen(script->source)) < 0 ||
		pg_cryptohash_final(ctx, digest, sizeof(digest)) < 0)
	{
		pg_cryptohash_free(ctx);
		elog(ERROR, "could not compute the SHA1 of a script");
	}
	pg_cryptohash_free(ctx);
	for (int i = 0; i < SHA1_DIGEST_LENGTH; i++)
		snprintf(script->sha1 + 2 * i, 3, "%02x", digest[i]);
}

/* An error reply is the store failing, never a verdict: returns false with the error set. */
bool
rl_redis_accepted(const RlReply *reply, RlError *error)
{
	if (reply->kind != RL_REPLY_ERROR)
		return true;
	return rl_connection_refused(&conn, false, reply->text, error);
}

/*
 * Runs a plain command.  Returns true with a reply that is not an error, or
 * false with the error set.
 */
bool
rl_redis_command(RlCommand *command, RlReply *reply, RlError *error)
{
	int64		deadline = 0;

	return call(append_plain, command, &deadline, reply, error) && rl_redis_accepted(reply, error);
}

static bool
is_noscript(const RlReply *reply)
{
	return reply->kind == RL_REPLY_ERROR && strncmp(reply->text, "NOSCRIPT", 8) == 0;
}

/* rl_redis_script, but a reply can be an error. */
static bool
call_script(RlScript *script, RlCommand *command, bool by_source, RlReply *reply, RlError *error)
{
	ScriptCall	sc = {script, command, by_source};
	int64		deadline = 0;

	if (script->sha1[0] == '\0')
		compute_sha1(script);
	if (!call(append_script, &sc, &deadline, reply, error))
		return false;
	/* NOSCRIPT means that nothing was run. */
	if (is_noscript(reply) && !by_source)
	{
		sc.by_source = true;
		return call(append_script, &sc, &deadline, reply, error);
	}
	return true;
}

/*
 * Runs a script; the command holds what follows its name: the number of keys,
 * the keys, the arguments.  Like rl_redis_command otherwise.
 */
bool
rl_redis_script(RlScript *script, RlCommand *command, RlReply *reply, RlError *error)
{
	return call_script(script, command, false, reply, error) && rl_redis_accepted(reply, error);
}

/*
 * Pipelines
 */

typedef struct Pipeline
{
	RlScript   *script;
	int			n;
	RlPipelineAppend append;
	RlPipelineReply reply;
	void	   *arg;
	int			next;			/* the call to be sent next */
	int			answered;		/* calls before it were answered */
	bool		quiet;
	bool		all;			/* reply() is for error replies too */
	RlReply    *held;			/* once one was answered NOSCRIPT, the replies
								 * from it on */
	int			nheld;
} Pipeline;

static bool
append_next(StringInfo out, void *arg)
{
	Pipeline   *p = arg;
	RlCommand  *command = rl_command_start();
	ScriptCall	sc = {p->script, command, false};

	if (p->held != NULL || p->next == p->n)
		return false;
	/* A script that is not known could not be sent again quietly. */
	sc.by_source = p->quiet && p->next == 0;
	p->append(command, p->next++, p->arg);
	rl_redis_usage.round_trips++;
	append_script(out, &sc);
	return true;
}

static bool
answer(Pipeline *p, const RlReply *reply, RlError *error)
{
	if ((!p->all && !rl_redis_accepted(reply, error)) || !p->reply(p->answered, reply, p->arg, error))
		return false;
	p->answered++;
	return true;
}

static bool
take_reply(const RlReply *reply, void *arg, RlError *error)
{
	Pipeline   *p = arg;

	if (p->quiet || (p->held == NULL && !is_noscript(reply)))
		return answer(p, reply, error);
	if (p->held == NULL)
		p->held = palloc((p->next - p->answered) * sizeof(RlReply));
	p->held[p->nheld++] = *reply;
	return true;
}

/*
 * Goes on where the script was not known.  The first call runs by its source,
 * after which the rest can be sent again; only if somebody else made the
 * script known meanwhile, so that later ones have run, those between go one
 * by one, to be answered in order.
 */
static bool
load_and_catch_up(Pipeline *p, RlError *error)
{
	int			n = p->nheld;

	while (n > 1 && is_noscript(&p->held[n - 1]))
		n--;
	for (int i = 0; i < n; i++)
	{
		RlReply    *reply = &p->held[i];

		if (is_noscript(reply))
		{
			RlCommand  *command = rl_command_start();

			p->append(command, p->answered, p->arg);
			if (!call_script(p->script, command, i == 0, reply, error))
				return false;
		}
		if (!answer(p, reply, error))
			return false;
	}
	pfree(p->held);
	p->held = NULL;
	p->nheld = 0;
	return true;
}

static bool
run_pipeline(Pipeline *p, RlError *error)
{
	RlOutcome	outcome = RL_DONE;
	RlBreaker  *breaker = server_breaker();
	int64		start = rl_monotonic_now();
	int64		us = rl_redis_usage.us;

	if (!rl_breaker_admits(breaker, error))
		return false;
	error->unreachable = false;
	if (p->script->sha1[0] == '\0')
		compute_sha1(p->script);
	while (outcome != RL_FAILED && p->answered < p->n)
	{
		bool		reused;
		int64		deadline = 0;

		if (!ensure_connected(&reused, &deadline, error))
			break;
		p->next = p->answered;
		outcome = rl_connection_stream(&conn, append_next, take_reply, p, error);
		if (outcome != RL_DONE)
			disconnect();
		if (!reused && outcome == RL_NOT_SENT)
			outcome = RL_FAILED;
		if (outcome == RL_DONE)
			rl_breaker_succeeded(breaker);
		if (outcome == RL_DONE && p->held != NULL && !load_and_catch_up(p, error))
			break;
	}
	rl_redis_usage.us = us + rl_monotonic_now() - start;
	if (outcome == RL_DONE && p->answered == p->n)
		return true;
	if (error->unreachable)
		rl_breaker_failed(breaker, error);
	return false;
}

/*
 * Runs a script n times in as few round trips as bounded memory allows.
 * append() writes the arguments of call i, and may be asked for them again;
 * reply() gets the replies in order, and returns false with the error set if
 * one makes no sense.  Returns false with the error set when one call fails;
 * of those from *answered on it is not known whether they ran.
 */
bool
rl_redis_pipeline(RlScript *script, int n, RlPipelineAppend append, RlPipelineReply reply,
				  void *arg, int *answered, RlError *error)
{
	Pipeline	p = {.script = script,.n = n,.append = append,.reply = reply,.arg = arg};
	bool		done = run_pipeline(&p, error);

	*answered = p.answered;
	return done;
}

/* Makes sure that the script can be run quietly later. */
void
rl_redis_reserve(RlScript *script)
{
	rl_connection_reserve(RL_MAX_QUIET_ARGS + strlen(script->source) + 128);
	enlargeStringInfo(&rl_command_start()->args, RL_MAX_QUIET_ARGS);
	if (script->sha1[0] == '\0')
		compute_sha1(script);
}

/*
 * rl_redis_pipeline that goes on after a call that Redis refuses: reply() gets
 * error replies too.  Quietly, which is for the end of a transaction and after
 * rl_redis_reserve, it does not throw, needs no memory, connects to nobody, and
 * all of it ends within ratelimit.command_timeout.
 */
bool
rl_redis_pipeline_all(RlScript *script, int n, RlPipelineAppend append, RlPipelineReply reply,
					  void *arg, bool quietly, RlError *error)
{
	Pipeline	p = {.script = script,.n = n,.append = append,.reply = reply,.arg = arg,
	.quiet = quietly,.all = true};
	bool		done;

	if (!quietly)
		return run_pipeline(&p, error);
	if (conn.ctx == NULL || !has_settings())
	{
		rl_error_set(error, ERRCODE_CONNECTION_DOES_NOT_EXIST, "there is no connection to Redis");
		return false;
	}
	conn.quiet_until = rl_monotonic_now() + (int64) rl_command_timeout * 1000;
	done = rl_connection_settle(&conn, error) &&
		rl_connection_stream(&conn, append_next, take_reply, &p, error) == RL_DONE;
	conn.quiet_until = 0;
	if (!done)
		disconnect();
	return done;
}
