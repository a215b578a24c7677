/*
 * several_keys.c
 *		Takes quota for one action on several keys.
 *
 * If the store cannot decide all keys in one step, each key is charged by itself: a part of the
 * action.  If a part refuses or fails, or an error or the end of the backend interrupts it, the
 * charges of the other parts are refunded (ledger.c).  The server's log says how many charges
 * could not be refunded.
 */
#include "postgres.h"

#include "storage/ipc.h"

#include "algorithm/algorithm.h"
#include "error.h"
#include "ledger.h"
#include "report.h"
#include "several_keys.h"

/* Returns how many of the limits keep entries. */
int
rl_sliding_limits(const RlLimits *limits)
{
	int			n = 0;

	for (int i = 0; i < limits->n; i++)
		n += rl_algorithm(&limits->limit[i])->skip != NULL;
	return n;
}

/*
 * Sets the error of too many such limits: each may have many entries, and no call may occupy Redis for long.
 * Returns false.
 */
bool
rl_sliding_error(int n, RlError *error)
{
	rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE,
				 "the keys of an action must not have more than %d limits of sliding_window, sliding_log and concurrent",
				 RL_MAX_SLIDING);
	return rl_error_detail(error, "They have %d.", n);
}

/* Returns the index of an action whose key is that of an earlier action, and sets *earlier to it; or -1. */
int
rl_equal_key(const RlAction *actions, int n, int *earlier)
{
	for (int i = 1; i < n; i++)
		for (*earlier = 0; *earlier < i; ++*earlier)
			if (actions[i].key.len == actions[*earlier].key.len &&
				memcmp(actions[i].key.data, actions[*earlier].key.data, actions[i].key.len) == 0)
				return i;
	return -1;
}

/* Raises an error if two of the actions have the same key, or if there are too many sliding limits. */
void
rl_check_keys(const RlAction *actions, int n)
{
	const RlOrigin *origin = actions->origin;
	int			sliding = 0;
	int			earlier;
	int			equal;

	for (int i = 0; i < n; i++)
		sliding += rl_sliding_limits(actions[i].limits);
	if (sliding > RL_MAX_SLIDING)
	{
		RlError		error;

		rl_sliding_error(sliding, &error);
		rl_raise_for(&error, origin);
	}
	equal = rl_equal_key(actions, n, &earlier);
	if (equal >= 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("an action must not have the same key twice"),
				 errdetail("Key number %d is the same as key number %d.", equal + 1, earlier + 1)));
}

/* An answer about a key. */
typedef struct Part
{
	RlDecision	each[RL_MAX_LIMITS];
	RlTimes		at;
	bool		charged;
} Part;

typedef struct Parts
{
	const RlAction *const *actions;
	Part		part[RL_MAX_KEYS];
	RlOwner		owner;			/* until all parts have answered */
} Parts;

/* Keeps the answer about a key, and notes the charges if it was charged; an RlTook. */
static void
took_part(int i, const RlDecision *each, RlTimes at, bool charged, void *arg)
{
	Parts	   *parts = arg;
	const RlAction *action = parts->actions[i];
	Part	   *part = &parts->part[i];
	RlCharge	charges[RL_MAX_LIMITS];

	memcpy(part->each, each, action->limits->n * sizeof(RlDecision));
	part->at = at;
	part->charged = charged;
	if (!charged)
		return;
	rl_charges_set(action, at, each, charges);
	rl_owner_add(&parts->owner, &action->key, action->limits, charges, false, action->quota);
}

/* Ends an action that was interrupted. */
static void
fail_action(int code pg_attribute_unused(), Datum arg)
{
	rl_owner_queue((RlOwner *) DatumGetPointer(arg), false);
}

/* Sets the decisions of a key whose charge is refunded to those before the charge. */
static void
set_uncharged(const RlAction *action, Part *part)
{
	part->charged = false;
	for (int i = 0; i < action->limits->n; i++)
	{
		const RlLimit *limit = &action->limits->limit[i];
		RlDecision *d = &part->each[i];

		/* With count_denied, the refund counts the quota as refused, so it stays in use. */
		if (!limit->count_denied && d->fits)
			d->remaining = Min(d->remaining + action->quota, limit->capacity);
	}
}

static bool
all_charged(const Part *part, int n)
{
	for (int i = 0; i < n; i++)
		if (!part[i].charged)
			return false;
	return true;
}

static bool
take_parts(const RlStore *store, const RlAction *const *actions, int n, RlTook took, void *arg,
		   RlUsage *usage, RlError *error)
{
	Parts		parts = {.actions = actions};
	bool		done;
	RlError		refund_error;

	rl_ledger_open();
	rl_owner_begin(&parts.owner, RL_OF_ACTION);
	PG_ENSURE_ERROR_CLEANUP(fail_action, PointerGetDatum(&parts.owner));
	{
		done = store->take_parts(actions, n, took_part, &parts, &parts.owner.unanswered, usage, error);
	}
	PG_END_ENSURE_ERROR_CLEANUP(fail_action, PointerGetDatum(&parts.owner));
	if (done && all_charged(parts.part, n))
		rl_owner_keep(&parts.owner);
	else
	{
		rl_owner_queue(&parts.owner, done);
		for (int i = 0; i < n; i++)
			rl_refunds_advance(&actions[i]->key);
		/* Charges that cannot be refunded now are logged, or are refunded before the next command. */
		(void) rl_refunds_flush(usage, &refund_error);
		for (int i = 0; i < n && done; i++)
			if (parts.part[i].charged)
				set_uncharged(actions[i], &parts.part[i]);
	}
	for (int i = 0; i < n && done; i++)
		took(i, parts.part[i].each, parts.part[i].at, parts.part[i].charged, arg);
	return done;
}

/*
 * Decides n actions on different keys, RL_MAX_KEYS at most, as one: all of them are
 * charged or none.  Then calls took() for each, and "charged" is the same for all.  Returns false
 * with the error set if the store fails; then no key is charged, unless the server's log
 * says so, or one call for all keys was sent and not answered.  *in_parts is set once there is no
 * such call.  Raises an error if a setting is wrong, or at an interrupt.
 */
bool
rl_take_all(const RlStore *store, const RlAction *const *actions, int n, RlTook took, void *arg,
			volatile bool *in_parts, RlUsage *usage, RlError *error)
{
	bool		apart;

	*in_parts = false;
	if (store->take_all(actions, n, took, arg, &apart, usage, error))
		return true;
	*in_parts = apart;
	return apart && take_parts(store, actions, n, took, arg, usage, error);
}
