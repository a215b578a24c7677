/*
 * scan.c
 *		Reads from Redis: the bans of all keys, and the states of one key.
 *
 * The bans are read by SCAN, in many calls that each read a bounded part of a server's keys.  A
 * cursor is valid only on its server while that runs, so all parts are read over one
 * connection.  If it is lost, the function fails.
 *
 * A ban that is in force during the whole call is found, unless its slot moves to a
 * node that has been read already.
 */
#include "postgres.h"

#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "nodes/pg_list.h"

#include "algorithm/algorithm.h"
#include "algorithm/calendar.h"
#include "error.h"
#include "redis/command.h"
#include "redis/redis.h"
#include "redis/route.h"
#include "redis/scripts.h"

#define MAX_CURSOR			24	/* bytes, with the terminator */
#define BANS_NEED			"+scan and +cluster|shards"
#define INSPECT_NEEDS		"+hkeys"
#define MAX_INSPECT_CALLS	256 /* as many as a key may have states */

typedef struct Text
{
	const char *data;
	int			len;
} Text;

/* Reads a number, or "-" as RL_UNKNOWN, and the byte that follows. */
static bool
read_number(Text *text, char end, int64 *number)
{
	int			n = 0;

	*number = 0;
	while (n < text->len && n < 18 && text->data[n] >= '0' && text->data[n] <= '9')
		*number = *number * 10 + (text->data[n++] - '0');
	if (n == 0 && text->len > 0 && text->data[0] == '-')
	{
		*number = RL_UNKNOWN;
		n++;
	}
	if (n == 0 || n == text->len || text->data[n] != end)
		return false;
	text->data += n + 1;
	text->len -= n + 1;
	return true;
}

static bool
read_bytes(Text *text, const char **data, int *len)
{
	int64		n;

	if (!read_number(text, ':', &n) || n < 0 || n > text->len)
		return false;
	*data = text->data;
	*len = n;
	text->data += n;
	text->len -= n;
	return true;
}

/* Runs a script that returns a text.  Returns false with the error set, which names privileges that lack. */
static bool
run(RlScript *script, RlCommand *command, const char *privileges, Text *text, RlError *error)
{
	RlReply		reply;

	if (!rl_redis_script(script, command, &reply, error))
	{
		/* The texts of Redis 7.0 and later.  An error about EVAL has another reason. */
		if (strstr(error->message, "can't run this command") ||
			(strstr(error->message, "permissions to run") && !strstr(error->message, "'eval")))
			rl_error_detail(error, "%s The user in Redis needs %s.", pstrdup(error->detail), privileges);
		return false;
	}
	if (reply.kind != RL_REPLY_TEXT)
		return rl_wrong_reply(error);
	*text = (Text) {reply.data, reply.len};
	return true;
}

/* Appends the cursor, the pattern of all keys' names, and how long their prefix is. */
static void
append_scan(RlCommand *command, const char *cursor)
{
	char		pattern[2 * RL_MAX_PREFIX + 4];
	int			n = 0;

	for (const char *c = rl_key_prefix; *c != '\0'; c++)
	{
		if (strchr("*?[]\\", *c) != NULL)
			pattern[n++] = '\\';
		pattern[n++] = *c;
	}
	memcpy(pattern + n, "{*", 2);
	rl_command_text(command, cursor);
	rl_command_arg(command, pattern, n + 2);
	rl_command_number(command, strlen(rl_key_prefix));
}

/*
 * Reads the part of a server's bans at the cursor, and sets the cursor.  The command has its
 * keys and the time.  Appends the keys that the script could not read, which the caller frees.
 */
static bool
read_part(RlCommand *command, char *cursor, List **unread, RlKeptFound found, void *arg,
		  RlError *error)
{
	Text		text;
	const char *data;
	int			len;

	CHECK_FOR_INTERRUPTS();
	append_scan(command, cursor);
	if (!run(&rl_bans_script, command, BANS_NEED, &text, error))
		return false;
	if (!read_bytes(&text, &data, &len) || len == 0 || len >= MAX_CURSOR)
		return rl_wrong_reply(error);
	memcpy(cursor, data, len);
	cursor[len] = '\0';
	if (strspn(cursor, "0123456789") != (size_t) len)
		return rl_wrong_reply(error);
	while (text.len > 0)
	{
		char		key[RL_MAX_KEY];
		RlKept		kept = {.name = key,.used = RL_UNKNOWN};

		if (!read_number(&text, ' ', &kept.until) || !read_number(&text, ' ', &kept.began) ||
			!read_bytes(&text, &data, &len) || !read_bytes(&text, &kept.why, &kept.why_len))
			return rl_wrong_reply(error);
		if (!rl_redis_read_key(data, len, key, &kept.name_len))
			continue;
		if (kept.until == RL_UNKNOWN)
			*unread = lappend(*unread, pnstrdup(key, kept.name_len));
		else
		{
			kept.why_len = pg_encoding_verifymbstr(PG_UTF8, kept.why, kept.why_len);
			found(&kept, arg);
		}
	}
	return true;
}

/* Finds the bans of keys that a part could not read, at the nodes that have them now. */
static bool
read_each(const List *unread, RlKeptFound found, void *arg, RlError *error)
{
	ListCell   *cell;

	foreach(cell, unread)
	{
		const char *name = lfirst(cell);
		RlKey		key = {.data = name,.len = strlen(name)};
		RlCommand  *command = rl_command_start();
		char		cursor[MAX_CURSOR] = "0";
		List	   *none = NIL;

		rl_command_hash(command, &key);
		if (!read_part(command, cursor, &none, found, arg, error))
			return false;
		if (none != NIL)
			return rl_wrong_reply(error);
	}
	return true;
}

/* Finds the bans at one server.  Outside of a Cluster it is the server of the last call. */
static bool
scan_server(RlNode *node, bool in_cluster, RlKeptFound found, void *arg, RlError *error)
{
	char		cursor[MAX_CURSOR] = "0";
	bool		resumes = !in_cluster;

	do
	{
		RlCommand  *command = rl_command_start();
		List	   *unread = NIL;

		command->node = node;
		command->asking = in_cluster;
		command->resumes = resumes;
		rl_command_number(command, 0);
		rl_command_text(command, rl_debug_now);
		if (!read_part(command, cursor, &unread, found, arg, error) || !read_each(unread, found, arg, error))
			return false;
		list_free_deep(unread);
		resumes = true;
	} while (strcmp(cursor, "0") != 0);
	return true;
}

/* Reads a master from the text of the server at "asked".  Returns its node, or NULL. */
static RlNode *
read_master(Text *masters, const RlAddress *asked)
{
	RlAddress	address = *asked;
	int64		port;
	int64		tls_port;
	const char *host;
	int			len;

	if (!read_number(masters, ' ', &port) || !read_number(masters, ' ', &tls_port) ||
		!read_bytes(masters, &host, &len) || !rl_is_printable(host, len))
		return NULL;
	if (asked->tls ? tls_port > 0 : port == 0)
		port = tls_port;
	if (!rl_address_redirect(psprintf("%.*s:%lld", len, host, (long long) port), &address))
		return NULL;
	/* Nodes that were used before the last call may be replaced. */
	return rl_node_find(&address, rl_node_in_use()->used);
}

/*
 * Calls found() for each ban under the key_prefix, perhaps more than once.  Returns false with the error set.
 */
bool
rl_redis_bans(RlKeptFound found, void *arg, RlError *error)
{
	RlCommand  *command = rl_command_start();
	RlAddress	asked;
	Text		masters;

	rl_command_number(command, 0);
	rl_command_text(command, psprintf("%s{}", rl_key_prefix));
	if (!run(&rl_masters_script, command, BANS_NEED, &masters, error))
		return false;
	if (masters.len == 0)
		return scan_server(rl_node_in_use(), false, found, arg, error);

	asked = rl_node_in_use()->address;
	/* The next reply replaces the text. */
	masters.data = memcpy(palloc(masters.len), masters.data, masters.len);
	while (masters.len > 0)
	{
		RlNode	   *master = read_master(&masters, &asked);

		if (master == NULL)
			return rl_wrong_reply(error);
		if (!scan_server(master, true, found, arg, error))
			return false;
	}
	return true;
}

/* Returns true if it can be the name of a state or a reservation, whose id is shortened to valid UTF-8. */
static bool
is_name(const char *name, int *len)
{
	int			word = strlen(RL_RECORD_NAME);

	if (*len < word || memcmp(name, RL_RECORD_NAME, word) != 0)
		return rl_is_printable(name, *len);
	*len = pg_encoding_verifymbstr(PG_UTF8, name, *len);
	return true;
}

/*
 * Returns true if it is a window of a calendar, or its refusals, that a wrong clock has opened: the script
 * has no windows.
 */
static bool
is_too_late(const RlKept *kept)
{
	static const char refused[] = ":refused";
	int			suffix = strlen(refused);
	int			len = kept->name_len;
	Text		raw = {kept->raw, kept->raw_len};
	int64		name;
	RlLimit		limit;

	if (len > suffix && memcmp(kept->name + len - suffix, refused, suffix) == 0)
		len -= suffix;
	return rl_calendar_of_name(kept->name, len, &limit) && read_number(&raw, ' ', &name) &&
		rl_is_too_late(&limit, name, rl_redis_time());
}

/*
 * Calls found() for each state of the key, and its ban.  Returns false with the error set if the store fails.
 */
bool
rl_redis_inspect(const RlKey *key, RlKeptFound found, void *arg, RlError *error)
{
	char		more[RL_MAX_KEPT_NAME] = "";
	int			calls = 0;

	do
	{
		RlCommand  *command = rl_command_start();
		Text		text;
		const char *data;
		int			len;

		rl_command_hash(command, key);
		rl_command_text(command, more);
		if (!run(&rl_inspect_script, command, INSPECT_NEEDS, &text, error))
			return false;
		if (!read_bytes(&text, &data, &len) || len >= RL_MAX_KEPT_NAME || !is_name(data, &len))
			return rl_wrong_reply(error);
		memcpy(more, data, len);
		more[len] = '\0';
		if (++calls > MAX_INSPECT_CALLS)
			return rl_wrong_reply(error);
		while (text.len > 0)
		{
			RlKept		kept;

			if (!read_number(&text, ' ', &kept.used) || !read_number(&text, ' ', &kept.until) ||
				!read_bytes(&text, &kept.name, &kept.name_len) ||
				!read_bytes(&text, &kept.raw, &kept.raw_len) ||
				kept.name_len >= RL_MAX_KEPT_NAME || !is_name(kept.name, &kept.name_len))
				return rl_wrong_reply(error);
			/* A ban may have a reason. */
			if (kept.name_len == 3 && memcmp(kept.name, "ban", 3) == 0)
				kept.raw_len = pg_encoding_verifymbstr(PG_UTF8, kept.raw, kept.raw_len);
			else if (!rl_is_printable(kept.raw, kept.raw_len))
				return rl_wrong_reply(error);
			if (!is_too_late(&kept))
				found(&kept, arg);
		}
	} while (more[0] != '\0');
	return true;
}
