/*
 * trigger.c
 *		The trigger function rl_enforce(), here FOR EACH ROW.
 */
#include "postgres.h"

#include "access/xact.h"
#include "commands/trigger.h"

#include "decide.h"
#include "refusal.h"
#include "several_keys.h"
#include "sql/trigger_charges.h"
#include "sql/trigger_rule.h"
#include "sql/trigger_statement.h"

/* Sets the key and the limits of a row by a pair of the rule.  Limits of a function are written to room. */
static void
set_key_and_limits(RlAction *action, Rule *rule, Pair *pair, TupleTableSlot *row, RlLimits *room)
{
	NullableDatum values[FUNC_MAX_ARGS];

	action->key = rl_rule_key(action->origin, rule, pair, row);
	action->limits = pair->limits;
	if (pair->call == NULL)
		return;
	rl_call_read(pair->call, row, values);
	rl_rule_limits(action->origin, rule, pair, values, room);
	action->limits = room;
}

/* Decides the row's action on n keys.  Returns the index of the key that refused it, or -1. */
static int
decide_row(RlAction *actions, int n, RlAnswer *answers)
{
	/* Only rl_decide uses the denial cache. */
	if (n == 1)
		rl_decide(actions, answers);
	else
		rl_decide_all(actions, n, answers);
	return rl_refused_key(answers, n);
}

/* Returns the row, as a trigger does that does not change it. */
static Datum
written_row(const TriggerData *data)
{
	return PointerGetDatum(TRIGGER_FIRED_BY_UPDATE(data->tg_event) ? data->tg_newtuple : data->tg_trigtuple);
}

/*
 * Takes the quota of a row, and returns the row.  Raises an error if the action is refused.
 */
static Datum
enforce_row(TriggerData *data, Rule *rule)
{
	TupleTableSlot *row = TRIGGER_FIRED_BY_UPDATE(data->tg_event) ? data->tg_newslot : data->tg_trigslot;
	RlOrigin	origins[RL_MAX_PAIRS];
	RlLimits	room[RL_MAX_PAIRS];
	RlAction	actions[RL_MAX_PAIRS];
	RlAnswer	answers[RL_MAX_PAIRS];
	int			refused;
	int			earlier;

	for (int i = 0; i < rule->npairs; i++)
	{
		origins[i] = (RlOrigin) {data->tg_relation, data->tg_trigger, rule->pairs[i].columns};
		actions[i] = (RlAction) {.how = RL_TAKE,.origin = &origins[i]};
		actions[i].quota = i == 0 ? rl_rule_quota(origins, rule, row) : actions->quota;
		rl_answer_clear(&answers[i]);
		set_key_and_limits(&actions[i], rule, &rule->pairs[i], row, &room[i]);
	}
	if (rl_equal_key(actions, rule->npairs, &earlier) >= 0)
	{
		rl_enforce_apart(actions, rule->npairs);
		return written_row(data);
	}
	refused = decide_row(actions, rule->npairs, answers);
	for (int i = 0; i < rule->npairs && refused < 0; i++)
		rl_statement_note(&actions[i], &answers[i]);
	if (refused >= 0)
	{
		const char *also = NULL;

		for (int i = 0; i < rule->npairs && also == NULL; i++)
			also = rl_statement_exceeds(&actions[i], &answers[i]);
		rl_raise_refused_all(actions, rule->npairs, answers, also);
	}
	return written_row(data);
}

/* Enforces the rule, for a row or for a statement. */
static Datum
enforce(TriggerData *data, Rule *rule)
{
	if (TRIGGER_FIRED_FOR_ROW(data->tg_event))
		return enforce_row(data, rule);
	rl_enforce_statement(data, rule);
	return PointerGetDatum(NULL);
}

/* Adds the trigger to an error's context. */
static void
add_context(void *arg)
{
	const TriggerData *data = arg;

	errcontext("rate-limit trigger \"%s\" on table \"%s\"", data->tg_trigger->tgname,
			   RelationGetRelationName(data->tg_relation));
}

/* Enforces the trigger's rule. */
static Datum
enforce_trigger(TriggerData *data)
{
	Rule	   *rule = rl_rule_find(data->tg_relation, data->tg_trigger);
	int			flags = MyXactFlags;	/* rl_call_run changes one */
	Datum		result;

	if (!rule->calls)
		return enforce(data, rule);

	/* The function can fire this trigger again, or change it, while the rule is in use. */
	rule->users++;
	PG_TRY();
	{
		result = enforce(data, rule);
	}
	PG_FINALLY();
	{
		rule->users--;
		MyXactFlags |= flags;
	}
	PG_END_TRY();
	return result;
}

PG_FUNCTION_INFO_V1(rl_enforce_trigger);
Datum
rl_enforce_trigger(PG_FUNCTION_ARGS)
{
	ErrorContextCallback context = {error_context_stack, add_context, fcinfo->context};
	Datum		result;

	if (!CALLED_AS_TRIGGER(fcinfo))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("rl_enforce without arguments can only be called as a trigger")));
	error_context_stack = &context;
	result = enforce_trigger((TriggerData *) fcinfo->context);
	error_context_stack = context.previous;
	return result;
}
