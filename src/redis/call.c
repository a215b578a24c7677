/*
 * call.c
 *		Calls that take quota: of one key or of many, each decided by itself or all together.
 *
 * A call to Redis takes much longer than the script that it runs, so actions share calls, as far
 * as one server has their keys.  A call is a script with 1 to RL_MAX_TOGETHER keys.  One action
 * has a call of its own.  Of many actions, each decided by itself, a call has as many as fit, in
 * their order, if one server has all keys; in a known cluster each key has its own call.  A key
 * that fails in a call of many, and all keys of one that ends in an error reply (also because
 * they are in several slots), were not charged, and are asked again by a call each.  An error
 * reply to a call with one key fails this key only.  An action that asks for a lease has its own
 * call, before the others: of actions on one key, the first asks.
 *
 * An action on several keys is one call; or a call for each key if the keys are in several slots
 * of a cluster, or on two nodes because their slot is moving.
 */
#include "postgres.h"

#include "utils/builtins.h"

#include "algorithm/calendar.h"
#include "algorithm/limits.h"
#include "error.h"
#include "redis/call.h"
#include "redis/cluster.h"
#include "redis/pipeline.h"
#include "redis/redis.h"
#include "redis/scripts.h"

#define MAX_KEY_BYTES		16384	/* of a call's keys */
/* Numbers that many_throttle.lua and check_many.lua send in place of a key's */
#define SINGLE_FAILED		PG_INT64_MIN
#define SINGLE_BANNED		(PG_INT64_MIN + 1)
#define LISTED_FAILED		(-2)

#define SINGLE_NUMBERS		4	/* at most, of a script for one limit without options */

StaticAssertDecl(RL_MAX_VALUES >= RL_MAX_KEYS * (3 + (RL_REPORTED + 1) * RL_MAX_LIMITS),
				 "check_all.lua has too long a reply");

/* The arguments and the reply of a call's script */
typedef enum Form
{
	SINGLE,						/* single_*.lua, or many_throttle.lua: one limit without options */
	LISTED,						/* check.lua, or check_many.lua */
	LEASED,						/* lease.lua, for one key */
	TOGETHER,					/* check_all.lua, which decides all keys together */
	RESERVED					/* reserve.lua, which also makes a record */
} Form;

/* Actions, and the calls that decide them. */
typedef struct Taking
{
	const RlAction *const *actions;
	RlTook		took;			/* is told the answers */
	void	   *arg;
	RlScript   *script;			/* of all calls */
	Form		form;
	bool		many;			/* each call decides many keys, each by itself */
	bool		parts;			/* each call charges a part of one action */
	int			ncalls;
	int		   *order;			/* indexes of the actions, call by call */
	int		   *first;			/* of each call, in order */
	int		   *keys;			/* how many each call has */
	bool	   *left;			/* of many actions: it is not asked yet, or is to be asked by a call of its
								 * own */
	bool		failed;			/* an error reply has failed a key */
	RlError    *error;			/* the first one */
} Taking;

/* The reply about one key.  It must not be copied. */
typedef struct KeyReply
{
	bool		failed;			/* the key was not charged, and nothing else is set */
	int64		verdict;		/* 0: allowed, -1: refused, else the rest of a ban */
	int64		ban;			/* length of the ban that this refusal starts, or 0 */
	int64		at;				/* the store's time, or 0: not known */
	const int64 *reported;		/* the numbers of all limits */
	int			nreported;
	int64		single[RL_REPORTED];	/* "reported" of one limit without options */
	const char *why;			/* of a ban in force: "limit " and the limit that set it */
	int			why_len;		/* 0: not known */
	int64		record;			/* of reserve.lua, the same for all keys: the reservation was there, 1: open,
								 * 2: settled */
	const int64 *lives;			/* of the limits' states, if the charge may be refunded; or NULL */
	const int64 *grant;			/* of a lease: units, how long they can be used, the key's life; or NULL */
} KeyReply;

/*
 * Arguments
 */

/* Appends the limit's state tag. */
void
rl_append_tag(RlCommand *command, const RlLimit *limit)
{
	char		name[RL_MAX_STATE_NAME];

	rl_command_arg(command, name, rl_state_name(limit, name));
}

/* Appends the windows of the limit's calendar: the start and name of each, and the last end. */
void
rl_append_windows(RlCommand *command, const RlLimit *limit)
{
	const RlWindows *windows = rl_windows_at(limit, rl_redis_time());
	char		text[256];
	int			n = 0;

	for (int i = 0; i < (int) lengthof(windows->name); i++)
		n += snprintf(text + n, sizeof(text) - n, "%lld %lld ", (long long) windows->start[i],
					  (long long) windows->name[i]);
	n += snprintf(text + n, sizeof(text) - n, "%lld", (long long) windows->start[lengthof(windows->name)]);
	rl_command_arg(command, text, n);
}

/*
 * Appends the LIMIT arguments of one limit, in the order of load_limits in state.lua.  Without
 * trace, a refusal is not counted, neither as quota nor for a ban.  The quota may exceed the
 * capacity: then no action is allowed.
 */
void
rl_append_limit(RlCommand *command, const RlLimit *limit, int64 quota, bool trace)
{
	bool		possible = quota <= limit->capacity;
	bool		ban = trace && possible && limit->ban > 0;
	int64		numbers[RL_NUMBERS];
	int			n = rl_algorithm(limit)->numbers(limit, quota, numbers);

	rl_command_text(command, rl_algorithm(limit)->name);
	rl_append_tag(command, limit);
	rl_command_number(command, limit->period);
	for (int i = 0; i < n; i++)
		rl_command_number(command, numbers[i]);
	if (limit->calendar != RL_NO_CALENDAR)
	{
		rl_append_windows(command, limit);
		n++;
	}
	for (; n < RL_NUMBERS; n++)
		rl_command_arg(command, "", 0);
	rl_command_text(command, trace && possible && limit->count_denied ? "1" : "");
	rl_command_number(command, ban ? limit->ban : 0);
	if (ban)
	{
		char		text[64 + RL_MAX_WHY];
		int			len = pg_lltoa(limit->ban_after, text);

		text[len++] = ' ';
		if (limit->ban_to > 0)
		{
			len += pg_lltoa(limit->ban_to, text + len);
			text[len++] = ' ';
		}
		len += rl_limit_why(limit, text + len);
		rl_command_arg(command, text, len);
	}
	else
		rl_command_number(command, 0);
}

/* Appends the arguments of a charge, as refund_charges.lua reads them, but for its mark in Redis. */
void
rl_append_charge(RlCommand *command, const RlLimit *limit, const RlCharge *charge)
{
	int64		split = rl_algorithm(limit)->in_ns ? 1000 : 1;

	rl_command_number(command, charge->amount / split);
	rl_command_number(command, charge->amount % split);
	rl_command_number(command, charge->at);
	rl_command_number(command, charge->place);
	rl_command_number(command, charge->life);
}

/* Returns true if the action changes nothing.  Its script then sends a write, which a replica refuses. */
static bool
is_look(const RlAction *action)
{
	return action->how == RL_PEEK || action->quota == 0;
}

/*
 * Returns true if a script for one limit without options suffices.  Such scripts count no
 * refusals, and do without shadow limits, calendars and looks.  Only that for many keys reports
 * the time.
 */
static bool
is_single(const RlAction *action, bool many)
{
	const RlLimits *limits = action->limits;
	const RlLimit *limit = &limits->limit[0];

	return limits->n == 1 && limit->ban == 0 && !limit->count_denied && !limit->shadow &&
		limit->calendar == RL_NO_CALENDAR && !limits->refunds && (many || !action->timed) && !is_look(action);
}

/* Returns true if the call has something to ask for a lease, or to refund. */
static bool
asks_lease(const RlAction *action)
{
	return action->lease != NULL && (action->lease->want > 0 || action->lease->nleft > 0);
}

static void
set_form(Taking *taking, const RlAction *action, bool many)
{
	RlAlgorithmId algorithm = action->limits->limit[0].algorithm;

	taking->many = many;
	taking->form = SINGLE;
	taking->script = many ? rl_scripts[algorithm].many : rl_scripts[algorithm].single;
	if (!many && asks_lease(action))
	{
		taking->form = LEASED;
		taking->script = &rl_lease_script;
	}
	else if (!is_single(action, many) || taking->script == NULL)
	{
		taking->form = LISTED;
		taking->script = many ? &rl_check_many_script : &rl_check_script;
	}
}

/* Sets the numbers of a script for one limit without options, then zeros.  Returns how many it needs. */
static int
single_numbers(const RlAction *action, int64 *numbers)
{
	const RlLimit *limit = &action->limits->limit[0];
	int			n = 0;

	memset(numbers, 0, SINGLE_NUMBERS * sizeof(int64));
	if (!rl_algorithm(limit)->numbers_suffice)
	{
		numbers[n++] = action->quota;
		numbers[n++] = limit->period;
	}
	n += rl_algorithm(limit)->numbers(limit, action->quota, &numbers[n]);
	Assert(n <= SINGLE_NUMBERS);
	while (n > 0 && numbers[n - 1] == 0)
		n--;
	return n;
}

static void
append_single(RlCommand *command, const RlAction *action, int least)
{
	int64		numbers[SINGLE_NUMBERS];
	int			n = Max(single_numbers(action, numbers), least);

	rl_append_tag(command, &action->limits->limit[0]);
	for (int i = 0; i < n; i++)
		rl_command_number(command, numbers[i]);
}

/* Appends the limits, and of a lease what is refunded to each of them. */
static void
append_limits(RlCommand *command, const RlAction *action, const RlLeaseCall *lease)
{
	for (int i = 0; i < action->limits->n; i++)
	{
		const RlLimit *limit = &action->limits->limit[i];
		int64		quota = rl_quota_of(limit, action->reserve != NULL, action->quota);
		int64		numbers[RL_NUMBERS] = {limit->interval_ns / 1000, limit->interval_ns % 1000};

		rl_append_limit(command, limit, quota, action->how != RL_TRY);
		if (lease == NULL && action->reserve == NULL)
			continue;
		/* The cost of a unit; a record has the first two numbers of a limit whose units cost no time. */
		if (action->reserve != NULL && !rl_algorithm(limit)->in_ns)
			(void) rl_algorithm(limit)->numbers(limit, quota, numbers);
		rl_command_number(command, numbers[0]);
		rl_command_number(command, numbers[1]);
		if (action->reserve != NULL)
			rl_command_number(command, quota);
		for (int j = 0; lease != NULL && j < lease->nleft; j++)
		{
			const RlLeftover *left = &lease->left[j];
			RlCharge	charge = rl_charge_of(limit, left->units, left->at, left->place[i], left->life);

			rl_append_charge(command, limit, &charge);
		}
	}
}

/* Appends the number of a reservation's keys, and if it has several, their hash. */
void
rl_append_keys(RlCommand *command, const RlReserve *reserve)
{
	char		text[16 + 2 * RL_DIGEST];
	int			n = snprintf(text, sizeof(text), "%d", reserve->nkeys);

	if (reserve->nkeys > 1)
	{
		text[n++] = ':';
		n += hex_encode((const char *) reserve->keys, RL_DIGEST, text + n);
	}
	rl_command_arg(command, text, n);
}

/*
 * Appends what reserve.lua gets before the keys' arguments.  An action on one key needs no hash: these have
 * its quota and the hash of its limits.
 */
static void
append_reserve(RlCommand *command, const RlReserve *reserve)
{
	char		action[2 * RL_DIGEST];
	int			len = 0;

	rl_command_arg(command, reserve->id.data, reserve->id.len);
	rl_command_number(command, reserve->hold);
	if (reserve->nkeys > 1)
		len = hex_encode((const char *) reserve->action, RL_DIGEST, action);
	rl_command_arg(command, action, len);
	rl_append_keys(command, reserve);
}

/* Returns the end of the run that begins with key i: keys with the same limits and quota. */
static int
run_end(const RlAction *const *actions, const int *order, int i, int n)
{
	const RlAction *action = actions[order[i]];

	do
		i++;
	while (i < n && action->by_mark == 0 && actions[order[i]]->limits == action->limits &&
		   actions[order[i]]->quota == action->quota);
	return i;
}

/* Returns true if the script tells the lives of the states that the action charges. */
static bool
tells_lives(const Taking *taking, const RlAction *action)
{
	return rl_may_refund(action) && !is_look(action) &&
		(taking->form == LISTED || taking->form == TOGETHER);
}

/*
 * Appends the number of limits, negative if the script tells lives; of a call for one key instead
 * 0 for a look, 1, or 2 if it tells lives.  Then it may have a mark.
 */
static void
append_how(RlCommand *command, const Taking *taking, const RlAction *action)
{
	bool		lives = tells_lives(taking, action);
	char		text[32];
	int			how;

	if (taking->many || taking->form == TOGETHER)
		how = lives ? -action->limits->n : action->limits->n;
	else
		how = is_look(action) ? 0 : lives ? 2 : 1;
	if (!lives || action->by_mark == 0)
	{
		rl_command_number(command, how);
		return;
	}
	rl_command_arg(command, text,
				   snprintf(text, sizeof(text), "%d %016llx", how, (unsigned long long) action->by_mark));
}

/* Appends the arguments that n keys share, of one limit without options at least "least" numbers. */
static void
append_run(RlCommand *command, const Taking *taking, const RlAction *action, int n, int least)
{
	const RlLeaseCall *lease = taking->form == LEASED ? action->lease : NULL;

	if (taking->many)
		rl_command_number(command, n);
	if (taking->form == SINGLE)
	{
		append_single(command, action, least);
		return;
	}
	if (lease != NULL)
		rl_command_number(command, lease->want);
	else if (taking->form != RESERVED)
		append_how(command, taking, action);
	rl_command_number(command, action->quota);
	if (lease != NULL)
	{
		rl_command_number(command, lease->length);
		rl_command_number(command, lease->nleft);
	}
	if (taking->form == RESERVED)
	{
		char		hash[17];

		snprintf(hash, sizeof(hash), "%016llx", (unsigned long long) action->limits->hash);
		rl_command_number(command, action->limits->n);
		rl_command_text(command, hash);
	}
	append_limits(command, action, lease);
}

/* Has the actions of a call, none of which was charged, asked by a call each. */
static void
ask_again(Taking *taking, int call)
{
	for (int i = 0; i < taking->keys[call]; i++)
		taking->left[taking->order[taking->first[call] + i]] = true;
}

/*
 * Returns true if what the action charges may have to be refunded, by its transaction, its statement, or its
 * other parts.
 */
static bool
may_be_refunded(const Taking *taking, const RlAction *action)
{
	return !is_look(action) &&
		(rl_may_refund(action) || action->timed || taking->parts);
}

/* Returns false if the call's keys are to be asked by a call each. */
static bool
append_call(RlCommand *command, int call, void *arg)
{
	Taking	   *taking = arg;
	const RlAction *const *actions = taking->actions;
	const int  *order = &taking->order[taking->first[call]];
	int			n = taking->keys[call];
	bool		one_key = taking->form == SINGLE && !taking->many;
	int			least = one_key && rl_debug_now[0] != '\0' ? SINGLE_NUMBERS : 0;
	int64		numbers[SINGLE_NUMBERS];
	int			next;

	/* Another call has shown that the server is a cluster's. */
	if (taking->many && rl_slots_known())
	{
		ask_again(taking, call);
		return false;
	}
	command->several = taking->form == TOGETHER;
	rl_command_number(command, n);
	for (int i = 0; i < n; i++)
	{
		char		name[RL_MAX_REDIS_KEY];

		rl_command_arg(command, name, rl_redis_key(&actions[order[i]]->key, name));
		command->reply_first |= may_be_refunded(taking, actions[order[i]]);
	}
	if (!one_key)
		rl_command_text(command, rl_debug_now);
	if (taking->form == RESERVED)
		append_reserve(command, actions[order[0]]->reserve);
	if (taking->form == SINGLE && taking->many)
	{
		for (int i = 0; i < n; i = run_end(actions, order, i, n))
			least = Max(least, single_numbers(actions[order[i]], numbers));
		rl_command_number(command, 1 + least);
	}
	for (int i = 0; i < n; i = next)
	{
		next = taking->many ? run_end(actions, order, i, n) : i + 1;
		append_run(command, taking, actions[order[i]], next - i, least);
	}
	if (one_key && least > 0)
		rl_command_text(command, rl_debug_now);
	return true;
}

/*
 * Replies
 */

/*
 * Sets the decision of a limit.  A shadow limit may lack room for an action that the list allows;
 * "refused" is the verdict by which the script then acts on it.  Returns false if no action can
 * have these numbers.
 */
static bool
read_decision(const RlLimit *limit, int64 quota, RlVerdict verdict, RlVerdict refused,
			  const int64 *reported, RlDecision *decision)
{
	const RlAlgorithm *algorithm = rl_algorithm(limit);

	if (!algorithm->decide(limit, quota, verdict, reported, decision) &&
		(!limit->shadow || verdict != RL_VERDICT_ALLOWED ||
		 !algorithm->decide(limit, quota, refused, reported, decision) || decision->allowed))
		return false;
	decision->fits = decision->allowed;
	decision->ban_started = false;
	decision->source = RL_FROM_REDIS;
	decision->ban_left = 0;
	if (limit->shadow)
		rl_allow_in_shadow(decision);
	return true;
}

static bool
may_ban(const RlAction *action)
{
	for (int i = 0; i < action->limits->n; i++)
		if (action->limits->limit[i].ban > 0)
			return action->how != RL_TRY;
	return false;
}

/*
 * Sets all decisions of a key; charged is false if any key is refused.  Returns false as
 * read_decision does, and if the decisions contradict the verdict.
 */
static bool
decide_key(const RlAction *action, const KeyReply *key, bool charged, RlDecision *decisions)
{
	const RlLimits *limits = action->limits;
	int64		quota = action->quota + (key->grant != NULL ? key->grant[0] : 0);
	RlVerdict	refused = action->how == RL_TRY ? RL_VERDICT_UNCOUNTED : RL_VERDICT_REFUSED;
	RlVerdict	verdict = charged ? RL_VERDICT_ALLOWED : key->verdict > 0 ? RL_VERDICT_BANNED : refused;
	bool		allowed = true;
	int			next = 0;

	if (key->record > 0)
	{
		quota = 0;
		verdict = refused = RL_VERDICT_UNCOUNTED;
	}

	for (int i = 0; i < key->nreported; i++)
		if (key->reported[i] < 0)
			return false;
	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];
		const int64 *reported = &key->reported[next];
		int64		own = key->record > 0 ? 0 : rl_quota_of(limit, action->reserve != NULL, quota);

		next += rl_algorithm(limit)->nreported;
		if (next > key->nreported ||
			!read_decision(limit, own, verdict, refused, reported, &decisions[i]))
			return false;
		decisions[i].life = key->lives != NULL ? key->lives[i] : 0;
		if (key->record > 0)
			rl_set_reserved(&decisions[i], key->record == 2);
		allowed &= decisions[i].allowed;
	}
	/* The figures must agree with the verdict, by which the script charged the action or not. */
	if (next != key->nreported || (key->verdict > 0 ? rl_all_shadow(limits) : allowed != (key->verdict == 0)))
		return false;

	if (key->verdict > 0)
		rl_apply_ban(limits, decisions, Min(key->verdict, RL_MAX_WAIT), true,
					 rl_ban_rule(key->why, key->why_len));
	else if (key->ban > 0)
		rl_apply_ban(limits, decisions, Min(key->ban, RL_MAX_WAIT), false, NULL);
	return true;
}

/* A reply, and the part of it that is not read yet. */
typedef struct Reader
{
	const RlReply *reply;
	int			at;
	const char *rules;			/* the rest of its text: a line for each banned key */
	int			rules_len;
} Reader;

/*
 * Reads the next line of the reply's text.  Each banned key has one: RL_WHY_LIMIT and the limit that set
 * the ban, or nothing if rl_ban set it.  Returns false for a line that no script sends.
 */
static bool
read_rule(Reader *reader, KeyReply *key)
{
	int			word = strlen(RL_WHY_LIMIT);
	const char *end = reader->rules_len > 0 ? memchr(reader->rules, '\n', reader->rules_len) : NULL;
	int			len = end != NULL ? end - reader->rules : reader->rules_len;

	key->why = reader->rules;
	key->why_len = len;
	reader->rules += len + (end != NULL);
	reader->rules_len -= len + (end != NULL);
	return len == 0 ||
		(len > word && memcmp(key->why, RL_WHY_LIMIT, word) == 0 && rl_is_printable(key->why, len));
}

static bool
read_listed(const RlAction *action, bool lives, Reader *reader, KeyReply *key)
{
	const int64 *values = &reader->reply->values[reader->at];
	int			nlives = lives ? action->limits->n : 0;

	*key = (KeyReply) {.reported = &values[3]};
	for (int i = 0; i < action->limits->n; i++)
		key->nreported += rl_algorithm(&action->limits->limit[i])->nreported;
	reader->at += 3 + key->nreported + nlives;
	if (reader->at > reader->reply->nvalues)
		return false;
	if (lives)
		key->lives = &key->reported[key->nreported];
	for (int i = 0; i < nlives; i++)
		if (key->lives[i] < 0 || key->lives[i] >= RL_CALENDAR_END)
			return false;
	key->verdict = values[0];
	key->ban = values[1];
	key->at = values[2];
	return key->verdict >= -1 && key->ban >= 0 && key->at >= 0 && key->at < RL_CALENDAR_END &&
		(key->ban == 0 || (key->verdict == -1 && may_ban(action))) &&
		(key->verdict <= 0 || read_rule(reader, key));
}

static bool
read_single(const RlAction *action, Reader *reader, const int64 *values, int n, KeyReply *key)
{
	const RlLimit *limit = &action->limits->limit[0];
	const RlAlgorithm *algorithm = rl_algorithm(limit);

	*key = (KeyReply) {.reported = key->single,.nreported = algorithm->nreported};
	return algorithm->read_single(limit, action->quota, values, n, &key->verdict, key->single) &&
		(key->verdict <= 0 || read_rule(reader, key));
}

static bool
read_of_many(const RlAction *action, Reader *reader, KeyReply *key)
{
	const int64 *values = &reader->reply->values[reader->at];
	int			left = reader->reply->nvalues - reader->at;
	bool		banned = left > 0 && values[0] == SINGLE_BANNED;
	int			n = banned ? 2 : 1;

	reader->at += banned + n;
	if (left < banned + n || !read_single(action, reader, &values[banned], n, key))
		return false;
	key->at = reader->reply->values[0];
	return true;
}

static bool
read_grant(const RlLeaseCall *lease, Reader *reader, KeyReply *key)
{
	const int64 *grant = key->grant = &reader->reply->values[reader->at];

	reader->at += 3;
	return reader->at <= reader->reply->nvalues &&
		grant[0] >= 0 && grant[0] <= (key->verdict == 0 ? lease->want : 0) &&
		grant[1] >= 0 && grant[1] <= lease->length &&
		grant[2] >= 0 && grant[2] < RL_CALENDAR_END && (grant[2] > 0 || grant[0] == 0);
}

/* Reads for all keys whether reserve.lua has found the reservation.  Returns false if it cannot send that. */
static bool
read_record(Reader *reader, KeyReply *keys, int n)
{
	int64		record;

	if (reader->at >= reader->reply->nvalues)
		return false;
	record = reader->reply->values[reader->at++];
	for (int i = 0; i < n; i++)
	{
		keys[i].record = record;
		if (record > 0 && keys[i].verdict != 0)
			return false;
	}
	return record >= 0 && record <= 2;
}

static bool
read_key(const Taking *taking, const RlAction *action, Reader *reader, KeyReply *key)
{
	const RlReply *reply = reader->reply;

	if (taking->many && reader->at < reply->nvalues &&
		reply->values[reader->at] == (taking->form == SINGLE ? SINGLE_FAILED : LISTED_FAILED))
	{
		reader->at++;
		*key = (KeyReply) {.failed = true};
		return true;
	}
	if (taking->form == SINGLE && taking->many)
		return read_of_many(action, reader, key);
	/* The script for one limit may go on like check.lua, if a log is not only a tail. */
	if (taking->form == SINGLE &&
		(reply->nvalues <= RL_REPORTED || !rl_algorithm(&action->limits->limit[0])->has_logs))
	{
		reader->at = reply->nvalues;
		return reply->is_array == (reply->nvalues > 1) &&
			read_single(action, reader, reply->values, reply->nvalues, key);
	}
	return read_listed(action, tells_lives(taking, action), reader, key) &&
		(taking->form != LEASED || read_grant(action->lease, reader, key));
}

/* Returns true if the error reply says that the keys are in several slots, and so of a cluster. */
bool
rl_learn_slots(const RlReply *reply, const RlKey *key)
{
	char		name[RL_MAX_REDIS_KEY];

	if (reply->kind != RL_REPLY_ERROR || strncmp(reply->text, "CROSSSLOT", 9) != 0)
		return false;
	rl_slot_learn(rl_slot(name, rl_redis_key(key, name)), 0);
	return true;
}

static void
take_error(Taking *taking, int call, const RlReply *reply)
{
	RlError		failure;

	if (taking->many)
	{
		(void) rl_learn_slots(reply, &taking->actions[taking->order[taking->first[call]]]->key);
		ask_again(taking, call);
		return;
	}
	(void) rl_redis_check_reply(reply, &failure);
	if (!taking->failed)
		*taking->error = failure;
	taking->failed = true;
}

static void
answer(Taking *taking, int i, const KeyReply *key, const RlDecision *each, bool charged)
{
	const RlAction *action = taking->actions[i];

	if (key->grant != NULL)
	{
		action->lease->granted = key->grant[0];
		action->lease->valid = key->grant[1];
		action->lease->life = key->grant[2];
	}
	taking->took(i, each, (RlTimes) {key->at, key->at}, charged, taking->arg);
}

/*
 * Tells the answers of a call's actions, or has them asked again.  Returns false with the error
 * set, and without an answer, if no script can send this reply.
 */
static bool
read_call(int call, const RlReply *reply, void *arg, RlError *error)
{
	Taking	   *taking = arg;
	const int  *order = &taking->order[taking->first[call]];
	int			n = taking->keys[call];
	bool		together = taking->form >= TOGETHER;
	bool		charged = true;
	KeyReply	keys[RL_MAX_TOGETHER];
	RlDecision	decisions[RL_MAX_TOGETHER];
	RlDecision *next = decisions;
	Reader		reader = {.reply = reply,.rules = reply->data,.rules_len = reply->len};

	if (reply->kind == RL_REPLY_ERROR)
	{
		take_error(taking, call, reply);
		return true;
	}
	/* many_throttle.lua begins with the time. */
	reader.at = taking->form == SINGLE && taking->many;
	if ((reply->kind != RL_REPLY_NUMBERS && reply->kind != RL_REPLY_MIXED) ||
		(taking->many && !reply->is_array) ||
		reader.at > reply->nvalues || (reader.at > 0 && reply->values[0] < 0))
		return rl_wrong_reply(error);
	for (int i = 0; i < n; i++)
	{
		if (!read_key(taking, taking->actions[order[i]], &reader, &keys[i]))
			return rl_wrong_reply(error);
		charged &= keys[i].verdict == 0;
	}
	if (taking->form == RESERVED && !read_record(&reader, keys, n))
		return rl_wrong_reply(error);
	if (reader.at != reply->nvalues || reader.rules_len > 0)
		return rl_wrong_reply(error);
	/* A wrong number must not be found when some actions are answered already. */
	for (int i = 0; i < n; i++)
	{
		const RlAction *action = taking->actions[order[i]];

		if (!keys[i].failed && !decide_key(action, &keys[i], together ? charged : keys[i].verdict == 0, next))
			return rl_wrong_reply(error);
		next += action->limits->n;
	}
	next = decisions;
	for (int i = 0; i < n; i++)
	{
		if (keys[i].failed)
			taking->left[order[i]] = true;
		else
			answer(taking, order[i], &keys[i], next, together ? charged : keys[i].verdict == 0);
		next += taking->actions[order[i]]->limits->n;
	}
	return true;
}

/*
 * One action on one key
 */

/* Where the answer to one action goes */
typedef struct Single
{
	const RlAction *action;
	RlDecision *each;
	RlAnswer   *answer;
} Single;

/* Sets the answer; an RlTook. */
static void
took_single(int i pg_attribute_unused(), const RlDecision *each, RlTimes at,
			bool charged pg_attribute_unused(), void *arg)
{
	const Single *single = arg;

	memcpy(single->each, each, single->action->limits->n * sizeof(RlDecision));
	single->answer->at = at;
}

bool
rl_redis_take(const RlAction *action, RlDecision *each, RlAnswer *answer, RlError *error)
{
	int			none = 0;
	int			one = 1;
	Single		single = {action, each, answer};
	Taking		taking =
		{.actions = &action,.took = took_single,.arg = &single,.order = &none,.first = &none,.keys = &one};
	RlReply		reply;

	set_form(&taking, action, false);
	return rl_redis_call(taking.script, append_call, &taking, &answer->usage, &reply, error) &&
		read_call(0, &reply, &taking, error);
}

/*
 * Many actions, each decided by itself
 */

/* Divides n actions into calls of at most RL_MAX_VALUES numbers, and 5 ms in Redis, usually 1 ms. */
static void
set_calls(Taking *taking, int n)
{
	int			bytes = 0;
	int			share = 0;
	int			values = 0;

	taking->ncalls = 0;
	for (int i = 0; i < n; i++)
	{
		const RlAction *action = taking->actions[taking->order[i]];
		const RlLimits *limits = action->limits;
		int			action_share = 0;
		int			action_values = 3 + (limits->refunds ? limits->n : 0);

		for (int l = 0; l < limits->n; l++)
		{
			action_share += rl_algorithm(&limits->limit[l])->share;
			action_values += taking->form == SINGLE ? 0 : rl_algorithm(&limits->limit[l])->nreported;
		}
		/* So a call has RL_MAX_TOGETHER limits at most, for which read_call has room. */
		Assert(action_share >= limits->n);
		if (i == 0 || !taking->many || bytes + action->key.len > MAX_KEY_BYTES ||
			share + action_share > 100 ||
			values + action_values > RL_MAX_VALUES - 2)
		{
			taking->first[taking->ncalls] = i;
			taking->keys[taking->ncalls++] = 0;
			bytes = share = values = 0;
		}
		taking->keys[taking->ncalls - 1]++;
		bytes += action->key.len;
		share += action_share;
		values += action_values;
	}
}

/*
 * Asks for those of n actions that are left and ask for a lease, or do not, by a call each or
 * with many in a call.  Returns false with the error set if Redis fails.
 */
static bool
take_left(Taking *taking, int n, bool lease, bool many, int64 *unanswered, RlUsage *usage, RlError *error)
{
	const RlLimits *limits = NULL;
	RlScript   *script = NULL;
	bool		look = false;
	int			nasked = 0;

	for (int i = 0; i < n; i++)
	{
		const RlAction *action = taking->actions[i];

		if (!taking->left[i] || asks_lease(action) != lease)
			continue;
		if (action->limits != limits || is_look(action) != look)
			set_form(taking, action, many);
		/* One script is for all. */
		if (script != NULL && taking->script != script)
		{
			taking->script = many ? &rl_check_many_script : &rl_check_script;
			taking->form = LISTED;
		}
		limits = action->limits;
		look = is_look(action);
		script = taking->script;
		taking->left[i] = false;
		taking->order[nasked++] = i;
	}
	set_calls(taking, nasked);
	return nasked == 0 ||
		rl_redis_pipeline(script, taking->ncalls, taking->keys, RL_MAX_DUE, append_call, read_call, taking,
						  unanswered, usage, error);
}

bool
rl_redis_take_many(const RlAction *const *actions, int n, RlTook took, void *arg,
				   int64 *unanswered, RlUsage *usage, RlError *error)
{
	int		   *room = palloc(3 * n * sizeof(int));
	Taking		taking = {.actions = actions,.took = took,.arg = arg,.error = error,
	.order = room,.first = room + n,.keys = room + 2 * n,.left = palloc(n * sizeof(bool))};
	bool		done;

	memset(taking.left, true, n);
	/* After a failure, no more is sent to the server. */
	done = take_left(&taking, n, true, false, unanswered, usage, error) &&
		(n == 1 || rl_slots_known() || take_left(&taking, n, false, true, unanswered, usage, error)) &&
		take_left(&taking, n, false, false, unanswered, usage, error);
	pfree(room);
	pfree(taking.left);
	return done && !taking.failed;
}

/*
 * One action on several keys
 */

/* Makes a call for all n keys, or one for each; room is for their numbers. */
static void
set_together(Taking *taking, int *room, int n, bool each)
{
	bool		reserves = taking->actions[0]->reserve != NULL;

	taking->form = reserves ? RESERVED : TOGETHER;
	taking->script = reserves ? &rl_reserve_script : &rl_check_all_script;
	taking->order = room;
	taking->first = room + RL_MAX_KEYS;
	taking->keys = room + 2 * RL_MAX_KEYS;
	taking->ncalls = each ? n : 1;
	for (int i = 0; i < n; i++)
	{
		taking->order[i] = taking->first[i] = i;
		taking->keys[i] = each ? 1 : n;
	}
}

/* Returns true if the keys are in one slot, or no cluster is known. */
bool
rl_in_one_slot(const RlKey *keys, int n)
{
	int			first = -1;

	for (int i = 0; i < n && rl_slots_known(); i++)
	{
		char		name[RL_MAX_REDIS_KEY];
		int			slot = rl_slot(name, rl_redis_key(&keys[i], name));

		if (i > 0 && slot != first)
			return false;
		first = slot;
	}
	return true;
}

/* Reads the reply to a reservation that is not made.  Returns false with the error set. */
static bool
not_reserved(int64 reply, RlError *error)
{
	if (reply == 0)
		return rl_too_many_reservations(error);
	return reply < 0 && reply >= -RL_MAX_KEYS ? rl_reserved_otherwise(-reply, error) : rl_wrong_reply(error);
}

bool
rl_redis_take_all(const RlAction *const *actions, int n, RlTook took, void *arg, bool *apart,
				  RlUsage *usage, RlError *error)
{
	int			room[3 * RL_MAX_KEYS];
	RlKey		keys[RL_MAX_KEYS];
	Taking		taking = {.actions = actions,.took = took,.arg = arg};
	RlReply		reply;
	bool		reserves = actions[0]->reserve != NULL;

	reply.kind = RL_REPLY_NIL;
	for (int i = 0; i < n; i++)
		keys[i] = actions[i]->key;
	*apart = !rl_in_one_slot(keys, n);
	if (!*apart)
	{
		set_together(&taking, room, n, false);
		if (rl_redis_call(taking.script, append_call, &taking, usage, &reply, error))
			return reserves && reply.kind == RL_REPLY_NUMBERS && !reply.is_array ?
				not_reserved(reply.values[0], error) : read_call(0, &reply, &taking, error);
		*apart = (!reserves && rl_reply_next_step(&reply) == RL_STEP_WAIT) ||
			(rl_learn_slots(&reply, &actions[0]->key) && !rl_in_one_slot(keys, n));
	}
	if (*apart && reserves)
	{
		*apart = false;
		return rl_reserved_apart(error);
	}
	return false;
}

bool
rl_redis_take_parts(const RlAction *const *actions, int n, RlTook took, void *arg, int64 *unanswered,
					RlUsage *usage, RlError *error)
{
	int			room[3 * RL_MAX_KEYS];
	Taking		taking = {.actions = actions,.parts = true,.took = took,.arg = arg,.error = error};

	set_together(&taking, room, n, true);
	return rl_redis_pipeline(taking.script, taking.ncalls, NULL, RL_MAX_DUE, append_call, read_call, &taking,
							 unanswered, usage, error) && !taking.failed;
}
