/*
 * take.c
 *		Calls that take quota: scripts and their arguments, and replies as decisions.
 */
#include "postgres.h"

#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "algorithm/calendar.h"
#include "algorithm/limits.h"
#include "redis/cluster.h"
#include "redis/pipeline.h"
#include "redis/redis.h"
#include "redis/scripts.h"
#include "redis/take.h"

/* Appends the limit's state tag. */
void
rl_append_tag(RlCommand *command, const RlLimit *limit)
{
	char		name[RL_MAX_STATE_NAME];

	rl_command_arg(command, name, rl_state_name(limit, name));
}

/*
 * How far Redis's clock is ahead of this server's, if they are so far apart that Redis's
 * time was in none of the windows around this server's time; otherwise 0.
 */
static int64 clock_ahead = 0;

/* Returns the time around which a script gets the windows of calendars. */
static int64
windows_time(void)
{
	if (rl_debug_now[0] != '\0')
		return strtoll(rl_debug_now, NULL, 10);
	return GetCurrentTimestamp() + RL_UNIX_EPOCH + clock_ahead;
}

/*
 * Returns true if the reply says that Redis's time is in none of the windows that the
 * script got: then nothing was changed.  The script can be called again, with windows
 * around that time.
 */
bool
rl_is_outside_windows(const RlReply *reply, const RlLimits *limits)
{
	bool		has_calendar = false;

	for (int i = 0; i < limits->n; i++)
		has_calendar |= limits->limit[i].calendar != RL_NO_CALENDAR;
	/* A decision has several numbers, and 1 is the reply of a refund. */
	if (!has_calendar || reply->kind != RL_REPLY_NUMBERS || reply->is_array || reply->nvalues != 1 ||
		reply->values[0] <= 1 || reply->values[0] >= RL_CALENDAR_END || rl_debug_now[0] != '\0')
		return false;
	clock_ahead = reply->values[0] - (GetCurrentTimestamp() + RL_UNIX_EPOCH);
	return true;
}

/* Appends the windows of the limit's calendar: the start and name of each, and the last end. */
static void
append_windows(RlCommand *command, const RlLimit *limit)
{
	const RlWindows *windows = rl_windows_at(limit, windows_time());
	char		text[256];
	int			n = 0;

	for (int i = 0; i < (int) lengthof(windows->name); i++)
		n += snprintf(text + n, sizeof(text) - n, "%lld %lld ", (long long) windows->start[i],
					  (long long) windows->name[i]);
	n += snprintf(text + n, sizeof(text) - n, "%lld", (long long) windows->start[lengthof(windows->name)]);
	rl_command_arg(command, text, n);
}

/*
 * Appends the LIMIT arguments of one limit, in the order in which load_limits
 * in state.lua unpacks them.  Without trace, a refusal is not counted, neither
 * as quota nor for a ban.  The quota may exceed the capacity: then no action
 * is allowed, and a refund has the whole quota.
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
		append_windows(command, limit);
		n++;
	}
	for (; n < RL_NUMBERS; n++)
		rl_command_arg(command, "", 0);
	rl_command_text(command, trace && possible && limit->count_denied ? "1" : "");
	rl_command_number(command, ban ? limit->ban : 0);
	if (ban)
	{
		char		text[32 + RL_MAX_WHY];
		int			len = pg_lltoa(limit->ban_after, text);

		text[len++] = ' ';
		len += rl_limit_why(limit, text + len);
		rl_command_arg(command, text, len);
	}
	else
		rl_command_number(command, 0);
}

/* Appends the CHARGE arguments of a charge, as refund_charges.lua reads them. */
void
rl_append_charge(RlCommand *command, const RlLimit *limit, const RlCharge *charge)
{
	int64		split = rl_algorithm(limit)->in_ns ? 1000 : 1;

	rl_command_number(command, charge->amount / split);
	rl_command_number(command, charge->amount % split);
	rl_command_number(command, charge->at);
	rl_command_number(command, charge->mark);
	rl_command_number(command, charge->life);
}

/*
 * Sets the decision of a limit from its reported numbers.  An allowed action may not fit
 * a shadow limit; "refused" is the verdict by which the script then acts on this limit.
 * Returns false if no action can have these numbers.
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
	decision->source = RL_FROM_REDIS;
	decision->ban_left = 0;
	if (limit->shadow)
		rl_allow_in_shadow(decision);
	return true;
}

/*
 * Sets a decision for each limit from the reported numbers; charged is false if a limit
 * of this or of another key has refused.  Returns false if no action can have these
 * numbers.
 */
static bool
read_decisions(const RlAction *action, const RlTakeReply *take, bool charged, RlDecision *decisions)
{
	const RlLimits *limits = action->limits;
	RlVerdict	refused = action->how == RL_TRY ? RL_VERDICT_UNCOUNTED : RL_VERDICT_REFUSED;
	RlVerdict	verdict = charged ? RL_VERDICT_ALLOWED : take->verdict > 0 ? RL_VERDICT_BANNED : refused;
	int			next = 0;

	for (int i = 0; i < take->nreported; i++)
		if (take->reported[i] < 0)
			return false;
	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];
		const int64 *reported = &take->reported[next];

		next += rl_algorithm(limit)->nreported;
		if (next > take->nreported ||
			!read_decision(limit, action->quota, verdict, refused, reported, &decisions[i]))
			return false;
	}
	return next == take->nreported;
}

/* Returns true if a refusal can start a ban. */
static bool
may_ban(const RlAction *action)
{
	for (int i = 0; i < action->limits->n; i++)
		if (action->limits->limit[i].ban > 0)
			return action->how != RL_TRY;
	return false;
}

/*
 * Returns true if the faster script for one limit suffices: it counts no
 * refusals, does not report the time, and is not for shadow limits, calendars and rl_peek.
 */
bool
rl_take_is_alone(const RlAction *action)
{
	const RlLimits *limits = action->limits;
	const RlLimit *limit = &limits->limit[0];

	return limits->n == 1 && limit->ban == 0 && !limit->count_denied && !limit->shadow &&
		limit->calendar == RL_NO_CALENDAR && !limits->timed &&
		action->how != RL_PEEK && rl_alone_scripts[limit->algorithm].source != NULL;
}

/* Returns true if the call has something to ask for a lease, or to refund. */
bool
rl_take_asks_lease(const RlAction *action)
{
	return action->lease != NULL && (action->lease->want > 0 || action->lease->nleft > 0);
}

/* Returns true if there is a faster script for many keys under such limits. */
bool
rl_take_is_fast(const RlAction *action)
{
	const RlLimits *limits = action->limits;

	return limits->n == 1 && limits->limit[0].ban == 0 && !limits->limit[0].shadow &&
		rl_many_scripts[limits->limit[0].algorithm].source != NULL;
}

/* Returns the script for the action. */
RlScript *
rl_take_script(const RlAction *action)
{
	const RlLimits *limits = action->limits;

	if (rl_take_is_alone(action))
		return &rl_alone_scripts[limits->limit[0].algorithm];
	for (int i = 1; i < limits->n; i++)
		if (limits->limit[i].algorithm != limits->limit[0].algorithm)
			return &rl_check_mixed_script;
	return &rl_check_scripts[limits->limit[0].algorithm];
}

/*
 * Sets RL_FAST_NUMBERS numbers for the faster script for one limit.  Returns how many
 * it needs: those at the end may be left out if they are 0.
 */
int
rl_take_fast_numbers(const RlAction *action, int64 *numbers)
{
	const RlLimit *limit = &action->limits->limit[0];
	int			n = 0;

	memset(numbers, 0, RL_FAST_NUMBERS * sizeof(int64));
	if (!rl_algorithm(limit)->numbers_suffice)
	{
		numbers[n++] = action->quota;
		numbers[n++] = limit->period;
	}
	n += rl_algorithm(limit)->numbers(limit, action->quota, &numbers[n]);
	Assert(n <= RL_FAST_NUMBERS);
	while (n > 0 && numbers[n - 1] == 0)
		n--;
	return n;
}

/* Appends the tag, and the numbers that the faster script needs, at least "least". */
void
rl_take_append_fast(RlCommand *command, const RlAction *action, int least)
{
	int64		numbers[RL_FAST_NUMBERS];
	int			n = Max(rl_take_fast_numbers(action, numbers), least);

	rl_append_tag(command, &action->limits->limit[0]);
	for (int i = 0; i < n; i++)
		rl_command_number(command, numbers[i]);
}

/* Appends the arguments of check.lua, or with alone of the faster script for one limit. */
void
rl_take_append(RlCommand *command, const RlAction *action, bool alone)
{
	const RlLimits *limits = action->limits;
	int64		quota = action->quota;
	RlTake		how = action->how;

	if (alone)
	{
		bool		debug = rl_debug_now[0] != '\0';

		rl_command_one_key(command, &action->key);
		rl_take_append_fast(command, action, debug ? RL_FAST_NUMBERS : 0);
		if (debug)
			rl_command_text(command, rl_debug_now);
		return;
	}
	rl_command_hash(command, &action->key);
	rl_command_text(command, how == RL_PEEK ? "0" : "1");
	rl_command_number(command, quota);
	for (int i = 0; i < limits->n; i++)
		rl_append_limit(command, &limits->limit[i], quota, how != RL_TRY);
}

/* Appends the arguments of lease.lua, for an action that asks for a lease. */
void
rl_take_append_lease(RlCommand *command, const RlAction *action)
{
	const RlLeaseCall *lease = action->lease;
	const RlLimits *limits = action->limits;

	rl_command_hash(command, &action->key);
	rl_command_number(command, lease->want);
	rl_command_number(command, action->quota);
	rl_command_number(command, lease->length);
	rl_command_number(command, lease->nleft);
	for (int i = 0; i < limits->n; i++)
	{
		const RlLimit *limit = &limits->limit[i];

		rl_append_limit(command, limit, action->quota, action->how != RL_TRY);
		rl_command_number(command, limit->interval_ns / 1000);
		rl_command_number(command, limit->interval_ns % 1000);
		for (int j = 0; j < lease->nleft; j++)
		{
			const RlLeftover *left = &lease->left[j];
			RlCharge	charge = rl_algorithm(limit)->charge(limit, left->units, left->at, 0);

			charge.mark = left->mark[i];
			charge.life = left->life;
			rl_append_charge(command, limit, &charge);
		}
	}
}

/*
 * Reads the numbers of a key from the reply of check.lua or a script for several keys,
 * from *at on, and sets *at to the next key's.  Returns false if they are no such
 * numbers.
 */
bool
rl_take_read_check(const RlAction *action, const RlReply *reply, int *at, RlTakeReply *take)
{
	const int64 *values = &reply->values[*at];

	*take = (RlTakeReply) {.reported = &values[3]};
	for (int i = 0; i < action->limits->n; i++)
		take->nreported += rl_algorithm(&action->limits->limit[i])->nreported;
	*at += 3 + take->nreported;
	if (reply->kind != RL_REPLY_NUMBERS || !reply->is_array || reply->nvalues < *at)
		return false;
	take->verdict = values[0];
	take->ban = values[1];
	take->at = values[2];
	return take->verdict >= -1 && take->ban >= 0 && take->at >= 0 && take->at < RL_CALENDAR_END &&
		(take->ban == 0 || (take->verdict == -1 && may_ban(action)));
}

/*
 * Sets the reply from the n numbers that the faster script reports for a key.  Returns
 * false if no such script can send them.  The result must not be copied.
 */
bool
rl_take_set_fast(const RlAction *action, const int64 *values, int n, RlTakeReply *take)
{
	const RlLimit *limit = &action->limits->limit[0];
	const RlAlgorithm *algorithm = rl_algorithm(limit);

	*take = (RlTakeReply) {.reported = take->alone,.nreported = algorithm->nreported};
	return algorithm->read_alone(limit, action->quota, values, n, &take->verdict, take->alone);
}

/*
 * Reads the reply of a script for one limit.  It can also be the reply of check.lua: a
 * script may go on like that one.
 */
static bool
read_alone(const RlAction *action, const RlReply *reply, RlTakeReply *take)
{
	int			n = 0;

	if (reply->kind != RL_REPLY_NUMBERS || reply->is_array != (reply->nvalues > 1))
		return false;
	if (rl_algorithm(&action->limits->limit[0])->has_logs && reply->nvalues > RL_REPORTED)
		return rl_take_read_check(action, reply, &n, take) && n == reply->nvalues;
	return rl_take_set_fast(action, reply->values, reply->nvalues, take);
}

/*
 * Sets the decisions of a key; charged is false if a limit of this or of another key has
 * refused.  Returns false if they contradict the verdict.
 */
bool
rl_take_decide(const RlAction *action, const RlTakeReply *take, bool charged, RlDecision *decisions)
{
	const RlLimits *limits = action->limits;
	bool		allowed = true;

	if (!read_decisions(action, take, charged, decisions))
		return false;
	/* The figures must agree with the verdict, by which the script charged the action or not. */
	for (int i = 0; i < limits->n; i++)
		allowed &= decisions[i].allowed;
	if (take->verdict > 0 ? rl_all_shadow(limits) : allowed != (take->verdict == 0))
		return false;

	if (take->verdict > 0)
		rl_apply_ban(limits, decisions, Min(take->verdict, RL_MAX_WAIT), true);
	else if (take->ban > 0)
		rl_apply_ban(limits, decisions, Min(take->ban, RL_MAX_WAIT), false);
	return true;
}

/*
 * Sets the decisions from the reply, and the store's time.  Returns false with
 * the error set if no script can send this reply.
 */
bool
rl_take_read(const RlAction *action, bool alone, const RlReply *reply, RlDecision *decisions, int64 *at,
			 RlError *error)
{
	int			n = 0;
	RlTakeReply	take;

	if (!(alone ? read_alone(action, reply, &take) : rl_take_read_check(action, reply, &n, &take) && n == reply->nvalues) ||
		!rl_take_decide(action, &take, take.verdict == 0, decisions))
		return rl_wrong_reply(error);
	*at = take.at;
	return true;
}

/*
 * Does the same for a reply of lease.lua, and sets what is granted.  The figures are
 * those of an action that takes the grant too.
 */
bool
rl_take_read_lease(const RlAction *action, const RlReply *reply, RlDecision *decisions, int64 *at,
				   RlError *error)
{
	RlAction	whole = *action;
	RlLeaseCall *lease = action->lease;
	int64		granted;
	int64		valid;
	int64		life;
	int			n = 0;
	RlTakeReply take;

	if (!rl_take_read_check(action, reply, &n, &take) || n + 3 != reply->nvalues)
		return rl_wrong_reply(error);
	granted = reply->values[n];
	valid = reply->values[n + 1];
	life = reply->values[n + 2];
	if (granted < 0 || granted > (take.verdict == 0 ? lease->want : 0) || valid < 0 || valid > lease->length ||
		life < 0 || life >= RL_CALENDAR_END || (life == 0 && granted > 0))
		return rl_wrong_reply(error);
	whole.quota += granted;
	if (!rl_take_decide(&whole, &take, take.verdict == 0, decisions))
		return rl_wrong_reply(error);
	*at = take.at;
	lease->granted = granted;
	lease->valid = valid;
	lease->life = life;
	return true;
}

bool
rl_redis_take(const RlAction *action, RlDecision *decisions, RlAnswer *answer, RlError *error)
{
	bool		lease = rl_take_asks_lease(action);
	bool		alone = !lease && rl_take_is_alone(action);
	bool		again = false;
	RlReply		reply;

	do
	{
		RlCommand  *command = rl_command_start();

		command->usage = &answer->usage;
		if (lease)
			rl_take_append_lease(command, action);
		else
			rl_take_append(command, action, alone);
		if (!rl_redis_script(lease ? &rl_lease_script : rl_take_script(action), command, &reply, error))
			return false;
		again = !again && rl_is_outside_windows(&reply, action->limits);
	} while (again);
	return lease ? rl_take_read_lease(action, &reply, decisions, &answer->at, error) :
		rl_take_read(action, alone, &reply, decisions, &answer->at, error);
}

/*
 * One action on several keys.  A part of the action has the keys that one call charges:
 * all of them, or in a Cluster the keys of one slot.
 */

typedef struct Part
{
	int			slot;
	int			n;
	int			i[RL_MAX_KEYS]; /* indexes of actions */
} Part;

typedef struct Parts
{
	const RlAction *const *actions;
	RlTaken    *taken;
	RlTookPart	took;
	void	   *arg;
	int			n;
	Part		part[RL_MAX_KEYS];
	bool		again[RL_MAX_KEYS]; /* the part is to be taken again */
	int			nagain;
	bool		is_again;		/* those are taken */
} Parts;

/* Divides the actions into parts by the slots of their keys, or makes one part of them. */
static void
set_parts(Parts *parts, int n, bool by_slot)
{
	char		name[RL_MAX_REDIS_KEY];

	parts->n = 0;
	for (int i = 0; i < n; i++)
	{
		int			slot = by_slot ? rl_slot(name, rl_redis_key(&parts->actions[i]->key, name)) : 0;
		Part	   *part = parts->part;

		while (part < &parts->part[parts->n] && part->slot != slot)
			part++;
		if (part == &parts->part[parts->n])
			parts->part[parts->n++] = (Part) {.slot = slot};
		part->i[part->n++] = i;
	}
}

/* Appends the arguments of check_all.lua. */
static bool
append_part(RlCommand *command, int number, void *arg)
{
	const Parts *parts = arg;
	const Part *part = &parts->part[number];
	char		name[RL_MAX_REDIS_KEY];

	rl_command_number(command, part->n);
	for (int i = 0; i < part->n; i++)
		rl_command_arg(command, name, rl_redis_key(&parts->actions[part->i[i]]->key, name));
	rl_command_text(command, rl_debug_now);
	for (int i = 0; i < part->n; i++)
	{
		const RlAction *action = parts->actions[part->i[i]];

		rl_command_number(command, action->limits->n);
		rl_command_number(command, action->quota);
		for (int l = 0; l < action->limits->n; l++)
			rl_append_limit(command, &action->limits->limit[l], action->quota, true);
	}
	return true;
}

/* Leaves only the parts that are to be taken again. */
static void
keep_again(Parts *parts)
{
	int			n = 0;

	for (int i = 0; i < parts->n; i++)
		if (parts->again[i])
			parts->part[n++] = parts->part[i];
	parts->n = n;
	parts->is_again = true;
}

/* Sets "taken" of a part's keys.  Returns false with the error set if no script can send this reply. */
static bool
read_part(int number, const RlReply *reply, void *arg, RlError *error)
{
	Parts	   *parts = arg;
	const Part *part = &parts->part[number];
	RlTakeReply	take[RL_MAX_KEYS];
	bool		charged = true;
	int			at = 0;

	for (int i = 0; i < part->n && !parts->is_again; i++)
		if (rl_is_outside_windows(reply, parts->actions[part->i[i]]->limits))
		{
			parts->again[number] = true;
			parts->nagain++;
			return true;
		}
	for (int i = 0; i < part->n; i++)
	{
		if (!rl_take_read_check(parts->actions[part->i[i]], reply, &at, &take[i]))
			return rl_wrong_reply(error);
		charged &= take[i].verdict == 0;
	}
	if (at != reply->nvalues)
		return rl_wrong_reply(error);
	for (int i = 0; i < part->n; i++)
	{
		RlTaken    *taken = &parts->taken[part->i[i]];

		if (!rl_take_decide(parts->actions[part->i[i]], &take[i], charged, taken->each))
			return rl_wrong_reply(error);
		taken->at = take[i].at;
		taken->charged = charged;
	}
	for (int i = 0; i < part->n && parts->took != NULL; i++)
		parts->took(part->i[i], parts->arg);
	return true;
}

bool
rl_redis_take_all(const RlAction *const *actions, int n, RlTaken *taken, bool *apart,
				  RlUsage *usage, RlError *error)
{
	Parts		parts = {.actions = actions,.taken = taken};
	RlReply		reply = {.kind = RL_REPLY_NIL};
	RlCommand  *command;

	*apart = false;
	if (rl_slots_known())
	{
		set_parts(&parts, n, true);
		*apart = parts.n > 1;
		if (*apart)
			return false;
	}
	set_parts(&parts, n, false);
	for (;;)
	{
		command = rl_command_start();
		command->usage = usage;
		append_part(command, 0, &parts);
		if (!rl_redis_script(&rl_check_all_script, command, &reply, error))
			break;
		if (!read_part(0, &reply, &parts, error))
			return false;
		if (parts.nagain == 0 || parts.is_again)
			return true;
		parts.is_again = true;
	}
	if (reply.kind == RL_REPLY_ERROR && strncmp(reply.text, "CROSSSLOT", 9) == 0)
	{
		set_parts(&parts, n, true);
		*apart = parts.n > 1;
		/* This reply shows that the server is a cluster's. */
		rl_slot_learn(parts.part[0].slot, 0);
	}
	return false;
}

bool
rl_redis_take_parts(const RlAction *const *actions, int n, RlTaken *taken, RlTookPart took, void *arg,
					int64 *unanswered, RlUsage *usage, RlError *error)
{
	Parts		parts = {.actions = actions,.taken = taken,.took = took,.arg = arg};

	set_parts(&parts, n, true);
	if (!rl_redis_pipeline(&rl_check_all_script, parts.n, NULL, append_part, read_part, &parts,
						   unanswered, usage, error))
		return false;
	if (parts.nagain == 0)
		return true;
	keep_again(&parts);
	return rl_redis_pipeline(&rl_check_all_script, parts.n, NULL, append_part, read_part, &parts,
							 unanswered, usage, error);
}
