/*
 * fuzz_redis.c
 *		Targets that read the replies of Redis: the protocol, the set-up of a connection, and
 *		each call of the store.
 *
 * The first bytes of an input select the call.  The rest are the replies (fuzz_server.c).
 */
#include "postgres.h"

#include "mb/pg_wchar.h"
#include "utils/memutils.h"

#include "algorithm/algorithm.h"
#include "algorithm/limits.h"
#include "fuzz.h"
#include "redis/call.h"
#include "redis/node.h"
#include "redis/redis.h"
#include "shared/shared.h"

#define MAX_ACTIONS			8

static const char *const limit_texts[] = {
	"5/10s",
	"token_bucket 5/10s burst 7",
	"fixed_window 5/10s",
	"fixed_window 10/month in Europe/Berlin",
	"sliding_window 5/10s",
	"sliding_log 5/10s",
	"concurrent 3/10s",
	"5/10s ban 1h after 3",
	"sliding_log 5/10s count_denied",
	"1000/s lease 100ms",
	"fixed_window 1000/day lease 100ms, 900/s lease 100ms",
	"5/10s, fixed_window 100/day in UTC, sliding_log 3/10s shadow, token_bucket 5/1h refund_on_abort",
	"5/1s, 5/2s, 5/3s, sliding_log 5/4s, sliding_window 5/5s, token_bucket 5/6s, concurrent 5/7s, fixed_window 5/8s ban 1d after 1",
	"throttle 1000000/s burst 1000000000000",
};

static const char *const urls[] = {
	"redis://host/1", "redis://user@a,b,c", "redis+sentinel://a,b/master/2", "unix://user@/socket"
};

/* The bytes of an input that select a call. */
typedef struct Selector
{
	uint8		call;
	uint8		limits;
	uint8		quota;
	uint8		server;
} Selector;

static const RlLimits *
limits_numbered(int number)
{
	static RlLimits *parsed[lengthof(limit_texts)];
	RlError		error;

	number %= lengthof(limit_texts);
	if (parsed[number] == NULL)
	{
		parsed[number] = MemoryContextAlloc(TopMemoryContext, sizeof(RlLimits));
		REQUIRE(rl_limits_parse(limit_texts[number], strlen(limit_texts[number]), parsed[number], &error));
	}
	return parsed[number];
}

/* Reads the selector and starts the server, which this backend has not talked to.  Returns false if the input is too short. */
static bool
start(const char *data, int len, Selector *selector)
{
	static char *passfile = NULL;
	static char *const tls_ca_files[] = {"", "unused"};
	static unsigned int inputs = 0;
	uint8		server;

	if (len < (int) sizeof(Selector))
		return false;
	memcpy(selector, data, sizeof(Selector));
	server = selector->server;
	if (passfile == NULL)
		passfile = rl_redis_passfile;
	rl_redis_url = unconstify(char *, urls[server % lengthof(urls)]);
	rl_redis_passfile = (server & 4) || (server % lengthof(urls)) == 1 || (server % lengthof(urls)) == 3 ? passfile : "";
	rl_debug_now = (server & 8) ? "1700000000000000" : "";
	/* A changed setting drops all nodes. */
	rl_tls_ca_file = tls_ca_files[inputs++ % 2];
	rl_settings_version++;
	rl_nodes_refresh();
	fuzz_server_start(data + sizeof(Selector), len - sizeof(Selector), (server & 16) ? 1 : 65536);
	return true;
}

/*
 * The protocol
 */

static void
describe(StringInfo text, const RlReply *reply)
{
	appendStringInfo(text, "kind %d array %d ", reply->kind, reply->is_array);
	for (int i = 0; i < reply->nvalues; i++)
		appendStringInfo(text, "%lld ", (long long) reply->values[i]);
	if (reply->kind == RL_REPLY_ERROR || reply->kind == RL_REPLY_STATUS || reply->kind == RL_REPLY_ADDRESS)
	{
		REQUIRE(rl_is_printable(reply->text, strlen(reply->text)));
		appendStringInfo(text, "%s step %d ", reply->text, rl_reply_next_step(reply));
	}
	if (reply->kind == RL_REPLY_HELLO)
		appendStringInfo(text, "%d %d ", reply->replica, reply->cluster);
	if (reply->kind == RL_REPLY_TEXT || reply->kind == RL_REPLY_MIXED)
		appendBinaryStringInfo(text, reply->data, reply->len);
}

/* Returns what was read as so many replies, and whether there was more. */
static StringInfoData
read_replies(const char *data, int len, int due, int most)
{
	StringInfoData text;
	StringInfoData out;
	RlAddress	address = {.host = "host",.port = 1};
	RlConnection conn = {0};
	RlStream	stream;
	RlStream   *streams = &stream;
	RlReply		reply;
	RlError		error;

	initStringInfo(&text);
	initStringInfo(&out);
	appendStringInfoString(&out, "command");
	fuzz_server_start(data, len, most);
	if (!rl_socket_open(&conn, &address, 0, &error))
		return text;
	rl_stream_begin(&stream, &conn, &out, &reply, 0, false);
	for (int i = 0; i < due; i++)
		rl_stream_appended(&stream);
	while (stream.due > 0)
	{
		if (!rl_stream_next(&stream, &error))
			break;
		if (stream.found)
		{
			describe(&text, &reply);
			continue;
		}
		REQUIRE(rl_stream_send(&stream, &error) == RL_DONE);
		rl_streams_wait(&streams, 1, stream.deadline);
		if (!rl_stream_receive(&stream, &error))
			break;
	}
	if (stream.due > 0)
	{
		fuzz_check_error(&error);
		appendStringInfo(&text, "%s: %s", error.message, error.detail);
	}
	else
		appendStringInfo(&text, "more %d", !rl_stream_end(&stream, &error) || !fuzz_server_is_silent(&conn));
	rl_connection_close(&conn);
	return text;
}

static void
check_same_text(StringInfoData a, StringInfoData b)
{
	REQUIRE(a.len == b.len && memcmp(a.data, b.data, a.len) == 0);
}

/* The same is read of bytes that come at once, in parts, or one by one. */
void
fuzz_resp(const char *data, int len)
{
	StringInfoData whole;
	StringInfoData parts;
	StringInfoData read;
	int			due;

	if (len == 0)
		return;
	due = 1 + (uint8) data[0] % 8;
	initStringInfo(&whole);
	initStringInfo(&parts);
	for (int i = 1; i < len; i++)
	{
		if ((uint8) data[i] != 0xff)
			appendStringInfoChar(&whole, data[i]);
		/* No part may be empty. */
		if ((uint8) data[i] != 0xff || (i > 1 && (uint8) data[i - 1] != 0xff))
			appendStringInfoChar(&parts, data[i]);
	}
	read = read_replies(whole.data, whole.len, due, 65536);
	check_same_text(read, read_replies(whole.data, whole.len, due, 1));
	if (whole.len > 0)
		check_same_text(read, read_replies(parts.data, parts.len, due, 65536));
}

/* A connection is set up, or there is an error. */
void
fuzz_connect(const char *data, int len)
{
	Selector	selector;
	char		version[64];
	RlError		error;

	if (!start(data, len, &selector))
		return;
	if (!rl_redis_version(version, sizeof(version), &error))
		fuzz_check_error(&error);
	else
		REQUIRE(strncmp(version, "Redis ", 6) == 0 || strncmp(version, "Valkey ", 7) == 0);
}

/*
 * Calls that take quota
 */

typedef struct Taken
{
	const RlAction *const *actions;
	int			n;
	bool		told[MAX_ACTIONS];
} Taken;

static void
check_decisions(const RlAction *action, const RlDecision *each, int64 at)
{
	REQUIRE(at >= 0);
	for (int i = 0; i < action->limits->n; i++)
	{
		const RlDecision *decision = &each[i];

		REQUIRE(decision->capacity == action->limits->limit[i].capacity);
		REQUIRE(decision->remaining >= 0 && decision->remaining <= decision->capacity);
		REQUIRE(decision->reset_after >= 0 && decision->reset_after <= RL_MAX_WAIT);
		REQUIRE(decision->retry_after == RL_NEVER || (decision->retry_after >= 0 && decision->retry_after <= RL_MAX_WAIT));
		/* A shadow limit that allows what it would refuse still has the wait. */
		REQUIRE(!decision->allowed || decision->retry_after == 0 || decision->source == RL_SHADOW);
		REQUIRE(decision->allowed || decision->retry_after != 0);
		REQUIRE(decision->ban_left >= 0 && decision->ban_left <= RL_MAX_WAIT);
		REQUIRE(decision->ban_left == 0 || decision->ban_rule == NULL || rl_is_printable(decision->ban_rule, strlen(decision->ban_rule)));
	}
}

static void
took(int i, const RlDecision *each, RlTimes at, bool charged pg_attribute_unused(), void *arg)
{
	Taken	   *taken = arg;

	REQUIRE(i >= 0 && i < taken->n && !taken->told[i]);
	taken->told[i] = true;
	check_decisions(taken->actions[i], each, at.store);
}

static void
take_one(RlAction *action, int call)
{
	RlDecision	each[RL_MAX_LIMITS];
	RlAnswer	answer = {0};
	RlLeaseCall lease = {.want = 10,.length = 100000,.nleft = call % 2,.left = {{.units = 3,.at = 1700000000000000,.life = 5}}};
	RlReserve	reserve = {{"id", 2}, RL_SECOND, 1};
	RlError		error;

	action->timed = call & 4;
	if (call & 16)
		action->reserve = &reserve;
	else if (action->limits->lease > 0)
		action->lease = &lease;
	else
		action->how = call % 3;
	if (!rl_redis_take(action, each, &answer, &error))
	{
		fuzz_check_error(&error);
		return;
	}
	check_decisions(action, each, answer.at.store);
	REQUIRE(lease.granted >= 0 && lease.granted <= lease.want && lease.valid >= 0 && lease.valid <= lease.length);
	REQUIRE(lease.granted == 0 || lease.life > 0);
}

/* A reply ends in decisions that make sense, or in an error. */
void
fuzz_call(const char *data, int len)
{
	Selector	selector;
	RlAction	actions[MAX_ACTIONS];
	const RlAction *pointers[MAX_ACTIONS];
	char		keys[MAX_ACTIONS][3];
	Taken		taken = {.actions = pointers};
	RlUsage		usage = {0};
	int64		unanswered = 0;
	bool		apart;
	RlError		error;
	bool		done;

	if (!start(data, len, &selector))
		return;
	taken.n = 1 + selector.quota / 32;
	for (int i = 0; i < taken.n; i++)
	{
		const RlLimits *limits = limits_numbered(selector.limits + ((selector.call & 128) ? i : 0));

		snprintf(keys[i], sizeof(keys[i]), "k%d", i);
		actions[i] = (RlAction) {.key = {keys[i], 2},.limits = limits,.quota = selector.quota % 8};
		pointers[i] = &actions[i];
	}
	switch (selector.call % 4)
	{
		case 0:
			take_one(&actions[0], selector.call / 4);
			return;
		case 1:
			done = rl_redis_take_many(pointers, taken.n, took, &taken, &unanswered, &usage, &error);
			break;
		case 2:
			done = rl_redis_take_parts(pointers, taken.n, took, &taken, &unanswered, &usage, &error);
			break;
		default:
			done = rl_redis_take_all(pointers, taken.n, took, &taken, &apart, &usage, &error);
			if (!done && apart)
				return;
	}
	REQUIRE(unanswered >= 0 && unanswered <= taken.n && usage.round_trips >= 0);
	if (!done)
		fuzz_check_error(&error);
	for (int i = 0; i < taken.n && done; i++)
		REQUIRE(taken.told[i]);
}

/*
 * Other calls
 */

static void
refund(const Selector *selector, bool no_throw)
{
	RlKeyRefunds calls[MAX_ACTIONS] = {0};
	RlRefund	refunds[MAX_ACTIONS];
	RlCharge	charge = {.amount = 1 + selector->quota % 8,.at = 1700000000000000,.place = 1700000000000000};
	char		names[MAX_ACTIONS][8];
	int			n = 1 + selector->quota / 32;
	RlUsage		usage = {0};
	RlError		why;
	RlError		error;
	bool		done;

	for (int i = 0; i < n; i++)
	{
		calls[i] = (RlKeyRefunds) {.redis_key = names[i],.refunds = &refunds[i],.n = 1,.refused = selector->call & 128};
		calls[i].redis_key_len = snprintf(names[i], sizeof(names[i]), "rl:{k%d}", i);
		refunds[i] = (RlRefund) {&limits_numbered(selector->limits)->limit[0], &charge};
	}
	if (no_throw)
	{
		char		version[64];

		/* It opens no connection itself. */
		rl_redis_prepare_refunds();
		if (!rl_redis_version(version, sizeof(version), &error))
			return;
		done = rl_redis_refund_no_throw(calls, n, &why, &error);
	}
	else
		done = rl_redis_refund_until(calls, n, PG_INT64_MAX, &usage, &why, &error);
	if (!done)
		fuzz_check_error(&error);
	for (int i = 0; i < n && done; i++)
		REQUIRE(calls[i].outcome >= RL_REFUND_DONE);
}

/* A reply ends in a result that makes sense, or in an error. */
void
fuzz_store(const char *data, int len)
{
	Selector	selector;
	RlKey		key = {"key", 3};
	RlKey		keys[2] = {key, {"key 2", 5}};
	RlReserve	reserve = {{"id", 2}};
	const RlLimits *limits;
	int64		quotas[2];
	RlSettled	settled;
	RlError		error;
	bool		found = false;
	bool		extends;
	bool		done;

	if (!start(data, len, &selector))
		return;
	limits = limits_numbered(selector.limits);
	extends = selector.quota % 8 == 0;
	switch (selector.call % 8)
	{
		case 0:
			refund(&selector, false);
			return;
		case 1:
			refund(&selector, true);
			return;
		case 2:
			done = rl_redis_store.refund(&key, limits, selector.quota % 8, &error);
			break;
		case 3:
			done = rl_redis_store.reset(&key, (selector.call & 128) ? limits : NULL, &found, &error);
			break;
		case 4:
			done = rl_redis_store.ban(&key, RL_SECOND, "reason x", &error);
			break;
		case 5:
			done = rl_redis_store.unban(&key, &found, &error);
			break;
		default:
			reserve.hold = (selector.call & 128) ? RL_SECOND : 0;
			reserve.nkeys = (selector.call & 64) ? 2 : 1;
			quotas[0] = quotas[1] = selector.quota % 8;
			done = rl_redis_store.settle(keys, &reserve, extends ? NULL : quotas, &settled, &error);
			for (int i = 0; i < reserve.nkeys; i++)
				REQUIRE(!done || (settled.quotas[i] >= 0 && settled.quotas[i] <= RL_MAX_COUNT));
			REQUIRE(!done || settled.how != RL_SETTLED_LONG_HOLD || extends);
	}
	if (!done)
		fuzz_check_error(&error);
}

static void
found(const RlKept *kept, void *arg)
{
	bool		of_key = *(bool *) arg;

	REQUIRE(kept->name_len >= 0 && kept->name_len < (of_key ? RL_MAX_KEPT_NAME : RL_MAX_KEY + 1));
	REQUIRE(pg_encoding_verifymbstr(PG_UTF8, kept->name, kept->name_len) == kept->name_len);
	if (of_key)
		REQUIRE(pg_encoding_verifymbstr(PG_UTF8, kept->raw, kept->raw_len) == kept->raw_len);
	else
		REQUIRE(kept->name_len > 0 && pg_encoding_verifymbstr(PG_UTF8, kept->why, kept->why_len) == kept->why_len);
	REQUIRE(kept->used >= RL_UNKNOWN && kept->until >= RL_UNKNOWN);
}

/* Only text that can be returned is found. */
void
fuzz_scan(const char *data, int len)
{
	Selector	selector;
	RlKey		key = {"key", 3};
	bool		of_key;
	RlError		error;

	if (!start(data, len, &selector))
		return;
	of_key = selector.call % 2;
	if (of_key ? !rl_redis_inspect(&key, found, &of_key, &error) : !rl_redis_bans(found, &of_key, &error))
		fuzz_check_error(&error);
}
