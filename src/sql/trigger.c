/*
 * trigger.c
 *		The trigger function rl_enforce(), here FOR EACH ROW, and the function
 *		rl_trigger_rule() behind the view rl_triggers.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/relation.h"
#include "access/table.h"
#include "catalog/objectaddress.h"
#include "catalog/pg_trigger.h"
#include "commands/trigger.h"
#include "storage/lmgr.h"
#include "utils/fmgrprotos.h"

#include "algorithm/limits.h"
#include "decide.h"
#include "error.h"
#include "refusal.h"
#include "sql/arguments.h"
#include "sql/trigger_charges.h"
#include "sql/trigger_rule.h"
#include "sql/trigger_statement.h"
#include "sql/trigger_warnings.h"
#include "skip.h"

/* Sets the key and the limits of a row by a pair of the rule.  Limits of a function are written to room. */
static void
set_key_and_limits(RlAction *action, Rule *rule, Pair *pair, TupleTableSlot *row, RlLimits *room)
{
	NullableDatum values[FUNC_MAX_ARGS];

	action->key = rl_rule_key(action->origin, pair, row);
	action->limits = pair->limits;
	if (pair->call == NULL)
		return;
	rl_limits_call_read(pair->call, row, values);
	rl_limits_call_run(pair->call, action->origin, values, rule->users > 1, room);
	action->limits = room;
}

/* Decides the row's action on n keys.  Returns the index of the key that refused it, or -1. */
static int
decide_row(const RlAction *actions, int n, RlAnswer *answers)
{
	/* Only rl_decide uses the denial cache. */
	if (n == 1)
		rl_decide(actions, answers);
	else
		rl_decide_all(actions, n, answers);
	return rl_refused_key(answers, n);
}

/*
 * Takes the quota of a row.  Returns the row, or NULL to leave it out.  Raises an
 * error if the action is refused and on_deny is not "skip", or the row must not be left out.
 */
static Datum
enforce_row(TriggerData *data, Rule *rule)
{
	bool		updated = TRIGGER_FIRED_BY_UPDATE(data->tg_event);
	TupleTableSlot *row = updated ? data->tg_newslot : data->tg_trigslot;
	RlOrigin	origins[RL_MAX_PAIRS];
	RlLimits	room[RL_MAX_PAIRS];
	RlAction	actions[RL_MAX_PAIRS];
	RlAnswer	answers[RL_MAX_PAIRS];
	int			refused;

	for (int i = 0; i < rule->npairs; i++)
	{
		origins[i] = (RlOrigin) {data->tg_relation, data->tg_trigger, rule->pairs[i].columns};
		actions[i] = (RlAction) {.how = RL_TAKE,.origin = &origins[i]};
		actions[i].quota = i == 0 ? rl_rule_quota(origins, rule, row) : actions->quota;
		answers[i] = (RlAnswer) {0};
		set_key_and_limits(&actions[i], rule, &rule->pairs[i], row, &room[i]);
	}
	refused = decide_row(actions, rule->npairs, answers);
	for (int i = 0; i < rule->npairs && refused < 0 && !rule->skip; i++)
		rl_statement_note(&actions[i], &answers[i]);
	if (refused >= 0)
	{
		const char *also = NULL;

		/* A row that is skipped for a failure or for its size would be lost unnoticed. */
		if (rule->skip && rl_can_skip(&answers[refused].decision))
		{
			also = rl_skip_forbidden(data);
			if (also == NULL)
				return PointerGetDatum(NULL);
		}
		for (int i = 0; i < rule->npairs && also == NULL; i++)
			also = rl_statement_exceeds(&actions[i], &answers[i]);
		rl_raise_refused_all(actions, rule->npairs, answers, also);
	}
	return PointerGetDatum(updated ? data->tg_newtuple : data->tg_trigtuple);
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

/*
 * rl_trigger_rule
 */

/* Returns the table of a trigger, or InvalidOid if there is no such trigger. */
static Oid
trigger_relation(Oid trigger)
{
	Relation	catalog = table_open(TriggerRelationId, AccessShareLock);
	HeapTuple	tuple = get_catalog_object_by_oid(catalog, Anum_pg_trigger_oid, trigger);

	table_close(catalog, AccessShareLock);
	return HeapTupleIsValid(tuple) ? ((Form_pg_trigger) GETSTRUCT(tuple))->tgrelid : InvalidOid;
}

/* Returns the limits of a pair as canonical text; if they are wrong or a call, the trigger's argument. */
static const char *
pair_limits(const Rule *rule, int i)
{
	const RlLimits *limits = rule->pairs[i].limits;

	return limits != NULL ? rl_limits_text(limits) : rule->args[2 * i + 1];
}

/* Sets the columns of rl_trigger_rule for trigger n of the table. */
static void
describe_rule(Relation rel, const TriggerDesc *triggers, int n, Datum *values, bool *nulls)
{
	const Trigger *trigger = &triggers->triggers[n];
	bool		valid;
	RlError		error;
	Rule	   *rule = rl_rule_make(rel, trigger, &valid, &error);

	if (rule->nargs > 0)
	{
		StringInfoData keys;
		StringInfoData limits;

		initStringInfo(&keys);
		initStringInfo(&limits);
		for (int i = 0; i < Max(rule->npairs, 1); i++)
		{
			appendStringInfo(&keys, "%s%s", i > 0 ? "; " : "", rule->args[2 * i]);
			appendStringInfo(&limits, "%s%s", i > 0 ? "; " : "", pair_limits(rule, i));
		}
		rl_set_text(values, nulls, 0, keys.data);
		rl_set_text(values, nulls, 1, limits.data);
	}
	rl_set_text(values, nulls, 2, rule->quota_text ? rule->quota_text : "1");
	rl_set_text(values, nulls, 3, rule->skip ? "skip" : "error");
	values[4] = DirectFunctionCall2(pg_get_triggerdef_ext, ObjectIdGetDatum(trigger->tgoid), BoolGetDatum(true));
	nulls[4] = false;
	rl_set_text(values, nulls, 5, valid ? NULL : rl_error_text(&error));
	rl_set_text(values, nulls, 6, rl_trigger_warnings(rel, triggers, n, rule));
}

PG_FUNCTION_INFO_V1(rl_trigger_rule);
Datum
rl_trigger_rule(PG_FUNCTION_ARGS)
{
	Oid			oid = PG_GETARG_OID(0);
	Oid			relation = trigger_relation(oid);
	Relation	rel = NULL;
	Datum		values[7] = {0};
	bool		nulls[7] = {true, true, true, true, true, true, true};

	/* The view must not wait for a table that is being altered. */
	if (OidIsValid(relation))
	{
		if (ConditionalLockRelationOid(relation, AccessShareLock))
			rel = try_relation_open(relation, NoLock);
		else
			rl_set_text(values, nulls, 5, "the table is locked");
	}
	if (rel != NULL)
	{
		/* Another backend may replace triggers meanwhile; this lock allows it. */
		TriggerDesc *triggers = CopyTriggerDesc(rel->trigdesc);

		for (int i = 0; triggers && i < triggers->numtriggers; i++)
			if (triggers->triggers[i].tgoid == oid)
				describe_rule(rel, triggers, i, values, nulls);
		relation_close(rel, AccessShareLock);
	}
	return rl_row(fcinfo, values, nulls);
}
