/*
 * resp.c
 *		Redis's protocol: commands into bytes, and bytes into a bounded reply.
 *
 * The parser is hiredis's.  Its own functions end the process when memory ends (version 0.14),
 * and allocate as much as a reply's lengths say.  So it calls those of this file, which fill a
 * struct of fixed size, and one buffer for a text.
 */
#include "postgres.h"

#include <hiredis/hiredis.h>

#include "utils/builtins.h"
#include "utils/memutils.h"

#include "redis/resp.h"

/* hiredis 1.0 has more reply types, and counts elements by size_t. */
#if HIREDIS_MAJOR >= 1
typedef size_t ElementCount;
#else
typedef int ElementCount;
#endif

static RlReply *
reply_of(const redisReadTask *task)
{
	return *(RlReply **) task->privdata;
}

/* The parser's functions return the reply, because NULL would be a lack of memory. */
static void *
got_value(const redisReadTask *task, bool valid, int64 value)
{
	RlReply    *reply = reply_of(task);
	bool		top = task->parent == NULL;

	if (reply->kind == RL_REPLY_HELLO)
		return reply;
	if (!valid || (!top && task->parent->parent != NULL) || reply->nvalues == RL_MAX_VALUES)
		reply->kind = RL_REPLY_OTHER;
	else
		reply->values[reply->nvalues++] = value;
	return reply;
}

/* Returns false if the string is no decimal int64. */
static bool
read_int64(const char *str, size_t len, int64 *value)
{
	char		copy[21];
	char	   *end;

	if (len == 0 || len >= sizeof(copy) || strspn(str, "-0123456789") < len)
		return false;
	memcpy(copy, str, len);
	copy[len] = '\0';
	errno = 0;
	*value = strtoll(copy, &end, 10);
	return errno == 0 && end == copy + len;
}

/* Takes a string of the reply to HELLO.  Returns false if this is another reply. */
static bool
got_hello(const redisReadTask *task, const char *str, size_t len)
{
	RlReply    *reply = reply_of(task);

	if (task->parent == NULL)
		return false;
	/* A host has that name in an array of two. */
	if (task->parent->parent == NULL && task->idx == 0 && task->parent->elements > 2 &&
		len == 6 && memcmp(str, "server", 6) == 0)
	{
		reply->kind = RL_REPLY_HELLO;
		reply->replica = reply->cluster = false;
	}
	if (reply->kind != RL_REPLY_HELLO)
		return false;
	if (task->parent->parent == NULL && task->idx % 2 == 1 && len == 7)
	{
		reply->replica |= memcmp(str, "replica", 7) == 0;
		reply->cluster |= memcmp(str, "cluster", 7) == 0;
	}
	return true;
}

static void *
got_string(const redisReadTask *task, char *str, size_t len)
{
	/* Static, because RlReply is on the stack of each call and must be small. */
	static char text[RL_MAX_TEXT];
	RlReply    *reply = reply_of(task);

	if (task->type == REDIS_REPLY_STRING && got_hello(task, str, len))
		return reply;
	if (task->type == REDIS_REPLY_STRING)
	{
		int64		value = 0;
		bool		valid = read_int64(str, len, &value);
		bool		is_last = task->parent != NULL && task->parent->parent == NULL &&
			task->idx > 0 && (size_t) task->idx + 1 == (size_t) task->parent->elements;

		/* A string that ends its reply is read before another reply can replace it. */
		if (!valid && (task->parent == NULL || (is_last && len > 0 && reply->kind == RL_REPLY_NUMBERS)) &&
			len <= sizeof(text))
		{
			reply->kind = is_last ? RL_REPLY_MIXED : RL_REPLY_TEXT;
			reply->data = memcpy(text, str, len);
			reply->len = len;
			return reply;
		}
		if (!valid && task->parent != NULL && task->parent->parent == NULL && task->idx == 0 &&
			len < sizeof(reply->text) && reply->kind == RL_REPLY_NUMBERS &&
			rl_is_printable(str, len) && memchr(str, ' ', len) == NULL)
		{
			reply->kind = RL_REPLY_ADDRESS;
			memcpy(reply->text, str, len);
			reply->text[len] = '\0';
			return reply;
		}
		return got_value(task, valid, value);
	}

	if (task->parent != NULL ||
		(task->type != REDIS_REPLY_ERROR && task->type != REDIS_REPLY_STATUS))
	{
		reply->kind = RL_REPLY_OTHER;
		return reply;
	}
	reply->kind = task->type == REDIS_REPLY_ERROR ? RL_REPLY_ERROR : RL_REPLY_STATUS;
	len = Min(len, sizeof(reply->text) - 1);
	for (size_t i = 0; i < len; i++)
		reply->text[i] = (str[i] >= ' ' && str[i] <= '~') ? str[i] : '?';
	reply->text[len] = '\0';
	return reply;
}

static void *
got_array(const redisReadTask *task, ElementCount n)
{
	RlReply    *reply = reply_of(task);

	if (reply->kind == RL_REPLY_HELLO)
		return reply;
	/* Maps and sets come here too. */
	if (task->parent != NULL || task->type != REDIS_REPLY_ARRAY || n > RL_MAX_VALUES)
		reply->kind = RL_REPLY_OTHER;
	reply->is_array = true;
	return reply;
}

static void *
got_integer(const redisReadTask *task, long long value)
{
	return got_value(task, true, value);
}

static void *
got_nil(const redisReadTask *task)
{
	if (task->parent != NULL)
		return got_value(task, false, 0);
	reply_of(task)->kind = RL_REPLY_NIL;
	return reply_of(task);
}

#if HIREDIS_MAJOR >= 1
static void *
got_double(const redisReadTask *task, double value pg_attribute_unused(),
		   char *str pg_attribute_unused(), size_t len pg_attribute_unused())
{
	return got_value(task, false, 0);
}

static void *
got_bool(const redisReadTask *task, int value pg_attribute_unused())
{
	return got_value(task, false, 0);
}
#endif

static void
free_nothing(void *object pg_attribute_unused())
{
}

static redisReplyObjectFunctions object_functions = {
	.createString = got_string,
	.createArray = got_array,
	.createInteger = got_integer,
	.createNil = got_nil,
#if HIREDIS_MAJOR >= 1
	.createDouble = got_double,
	.createBool = got_bool,
#endif
	.freeObject = free_nothing
};

/*
 * Makes the reader put the next reply, or the rest of one, into *reply, empty first. place is the reader's.
 */
void
rl_resp_attach(struct redisReader *reader, RlReply **place, RlReply *reply)
{
	*place = reply;
	reply->kind = RL_REPLY_NUMBERS;
	reply->is_array = false;
	reply->nvalues = 0;
	reply->data = "";
	reply->len = 0;
	reader->fn = &object_functions;
	reader->privdata = place;
}

/* Returns true if all bytes are printable ASCII. */
bool
rl_is_printable(const char *data, int len)
{
	for (int i = 0; i < len; i++)
		if (data[i] < ' ' || data[i] > '~')
			return false;
	return true;
}

/* Appends one argument of a command. */
void
rl_resp_arg(StringInfo out, const char *data, int len)
{
	char	   *p;

	/* Room for "$", the length, two ends of line, and a terminator. */
	if (out->maxlen - out->len <= len + 16)
		enlargeStringInfo(out, len + 16);
	p = out->data + out->len;
	*p++ = '$';
	if (len < 10)
		*p++ = '0' + len;
	else
		p += pg_ultoa_n(len, p);
	*p++ = '\r';
	*p++ = '\n';
	memcpy(p, data, len);
	p += len;
	*p++ = '\r';
	*p++ = '\n';
	out->len = p - out->data;
}

/*
 * The next step for each error code; any other code is RL_STEP_FAIL.  The first code that the
 * reply begins with counts.  Unless the step is RL_STEP_FAIL, the server has not run the call.
 */
static const struct
{
	const char *code;
	RlNextStep	step;
}			error_codes[] = {
	{"MOVED ", RL_STEP_MOVED},
	{"ASK ", RL_STEP_ASK},
	{"NOSCRIPT", RL_STEP_SEND_SOURCE},
	/* A script's error: Redis's time is in none of the windows of a calendar. */
	{"NOWINDOW ", RL_STEP_SEND_WINDOWS},

	/* The keys of the call are on two nodes while their slot moves. */
	{"TRYAGAIN", RL_STEP_WAIT},

	/* A replica; another server is the master. */
	{"READONLY", RL_STEP_LEAVE},
	/* A replica that lost its master. */
	{"MASTERDOWN", RL_STEP_LEAVE},
	/* A master that lost its replicas: Sentinels may have made one of them the master. */
	{"NOREPLICAS", RL_STEP_ASK_SENTINELS},
	/* It has just been started; its replica may be the new master. */
	{"LOADING", RL_STEP_LEAVE},
	/* A node that is cut off from the others. */
	{"CLUSTERDOWN The cluster is down", RL_STEP_LEAVE},
	/* The same with cluster-allow-reads-when-down. */
	{"ERR Script attempted to execute a write command while the cluster is down", RL_STEP_LEAVE},
	{"ERR Can not execute a write command", RL_STEP_LEAVE}, /* Valkey 9 */
	/* The nodes agree that no node has the slot. */
	{"CLUSTERDOWN", RL_STEP_FAIL},

	/* The server no longer knows who this is. */
	{"NOAUTH", RL_STEP_CONNECT},

	/* Only an operator can help. */
	{"OOM", RL_STEP_FAIL},
	{"MISCONF", RL_STEP_FAIL},
	{"NOPERM", RL_STEP_FAIL},
	/* The same in a script. */
	{"ERR The user executing the script", RL_STEP_FAIL},
	{"ERR ACL failure in script", RL_STEP_FAIL},	/* Redis 7.2 */
	/* A script has run for seconds, so waiting takes more than a call has. */
	{"BUSY", RL_STEP_FAIL}
};

/* Returns the number of the reply's error code, or -1. */
static int
find_code(const RlReply *reply)
{
	for (size_t i = 0; i < lengthof(error_codes) && reply->kind == RL_REPLY_ERROR; i++)
		if (strncmp(reply->text, error_codes[i].code, strlen(error_codes[i].code)) == 0)
			return i;
	return -1;
}

/* Returns the next step after the reply; RL_STEP_FAIL also if it is no error reply. */
RlNextStep
rl_reply_next_step(const RlReply *reply)
{
	int			code = find_code(reply);

	return code >= 0 ? error_codes[code].step : RL_STEP_FAIL;
}

/* Returns true if the reply says that the server runs no such call now: one that comes later may succeed. */
bool
rl_reply_may_pass(const RlReply *reply)
{
	return find_code(reply) >= 0;
}

/* Empties a buffer, all zero at first, that lives as long as the backend. */
void
rl_resp_reset(StringInfo out)
{
	if (out->data == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);

		initStringInfo(out);
		MemoryContextSwitchTo(old);
	}
	resetStringInfo(out);
}

/* Appends the start of a command: the number of its arguments, its name included. */
void
rl_resp_start(StringInfo out, int nargs)
{
	char		header[16];
	int			n;

	header[0] = '*';
	n = 1 + pg_ultoa_n(nargs, header + 1);
	header[n++] = '\r';
	header[n++] = '\n';
	appendBinaryStringInfo(out, header, n);
}
