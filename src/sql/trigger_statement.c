/*
 * trigger_statement.c
 *		rl_enforce() for each statement, with the rows that it has written; and for a
 *		row whose pairs have the same key, as for a statement that wrote this row.
 *
 * The rows' groups are asked together.  If a group is refused, or the statement ends in
 * an error while keys are asked, the charges of all other groups are refunded.  The
 * server's log says how many keys could not be refunded.
 */
#include "postgres.h"

#include "commands/trigger.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "utils/memutils.h"
#include "utils/tuplestore.h"

#include "algorithm/limits.h"
#include "decide.h"
#include "error.h"
#include "ledger.h"
#include "refusal.h"
#include "sql/trigger_charges.h"
#include "sql/trigger_groups.h"
#include "sql/trigger_statement.h"

#define SPILL_AFTER			1024	/* keys, so that few charges are entries in memory */

typedef struct Statement
{
	RlOrigin	origins[RL_MAX_PAIRS];
	RowGroups  *groups;			/* or NULL: the keys are those of a row */
	MemoryContext context;		/* of the answers */
	RlAction   *wanted;			/* the keys that are asked together */
	int			n;
	RlAnswer   *answers;		/* to wanted, until the owner has their charges, or NULL */
	int			noted;			/* answers whose charges the owner has */
	int64		asked;			/* keys so far */
	int64		refused;
	RlAction	first_refused;
	RlLimits	refused_limits; /* those of first_refused */
	RlAnswer	refusal;		/* the answer to first_refused */
	RlError		error;			/* why no store decided it */
	RlOwner		owner;			/* of the charges */
	bool		refunding;		/* a refund has begun, and is never begun again */
} Statement;

/* Notes a refusal.  The first refusal becomes the statement's error. */
static void
note_refusal(Statement *statement, const RlAction *wanted, const RlAnswer *answer)
{
	if (statement->refused++ > 0)
		return;
	rl_limits_copy(&statement->refused_limits, wanted->limits);
	statement->first_refused = *wanted;
	statement->first_refused.limits = &statement->refused_limits;
	statement->first_refused.key.data = pnstrdup(wanted->key.data, wanted->key.len);
	statement->refusal = *answer;
	if (answer->error != NULL)
	{
		statement->error = *answer->error;
		statement->refusal.error = &statement->error;
	}
}

/* Gives the owner the charges of the keys asked.  Throws if it may spill them and that fails. */
static void
note_charges(Statement *statement, bool spill)
{
	if (statement->answers == NULL)
		return;
	rl_ledger_open();
	while (statement->noted < statement->n)
	{
		const RlAction *wanted = &statement->wanted[statement->noted];
		const RlAnswer *answer = &statement->answers[statement->noted++];

		if (answer->decision.allowed)
			rl_owner_add(&statement->owner, &wanted->key, wanted->limits, answer->charges, answer->local, 0);
		if (spill && statement->noted % SPILL_AFTER == 0)
			rl_owner_spill(&statement->owner);
	}
	statement->answers = NULL;
	MemoryContextReset(statement->context);
}

/* Asks for the next keys. */
static void
ask_keys(Statement *statement)
{
	MemoryContext old = MemoryContextSwitchTo(statement->context);
	RlAnswer   *answers = palloc0(statement->n * sizeof(RlAnswer));
	RlCharge   *charges;
	int			ncharges = 0;

	for (int i = 0; i < statement->n; i++)
		ncharges += statement->wanted[i].limits->n;
	charges = palloc0(ncharges * sizeof(RlCharge));
	for (int i = 0; i < statement->n; i++)
	{
		answers[i].charges = charges;
		charges += statement->wanted[i].limits->n;
	}
	statement->answers = answers;
	statement->noted = 0;
	for (int i = 0; i < statement->n; i += RL_MAX_MANY)
		rl_decide_many(&statement->wanted[i], Min(statement->n - i, RL_MAX_MANY), &answers[i],
					   &statement->owner.unanswered);
	MemoryContextSwitchTo(old);
	for (int i = 0; i < statement->n; i++)
		if (!answers[i].decision.allowed)
			note_refusal(statement, &statement->wanted[i], &answers[i]);
		else
			/* Another group can have the same key and limits. */
			rl_statement_note(&statement->wanted[i], &answers[i]);
	statement->asked += statement->n;
}

/* Notes a refusal of each of the next keys whose limits are blocked, and asks for no key. */
static void
note_blocked(Statement *statement)
{
	for (int i = 0; i < statement->n; i++)
	{
		RlAnswer	answer = {0};

		if (statement->wanted[i].limits->kind != RL_BLOCKED)
			continue;
		rl_decide(&statement->wanted[i], &answer);
		note_refusal(statement, &statement->wanted[i], &answer);
	}
	statement->asked += statement->n;
}

/* Refunds the charges of all keys, as rl_owner_refund does; also when the owner cannot spill. */
static void
refund(Statement *statement, bool no_throw)
{
	statement->refunding = true;
	note_charges(statement, false);
	rl_owner_refund(&statement->owner, no_throw);
}

/* Logs how many keys may stay charged, and returns their number; an error would hide the statement's own. */
static int64
log_lost(Statement *statement)
{
	if (statement->answers != NULL)
		statement->owner.lost += statement->n - statement->noted;
	statement->answers = NULL;
	return rl_owner_lost(&statement->owner);
}

/* Refunds after an error that is being handled, and throws it again. */
pg_noreturn static void
refund_after_error(Statement *statement)
{
	MemoryContext context = CurrentMemoryContext;
	ErrorData  *error = CopyErrorData();
	int64		lost;

	FlushErrorState();
	PG_TRY();
	{
		refund(statement, false);
	}
	PG_CATCH();
	{
		ErrorData  *second;

		MemoryContextSwitchTo(context);
		second = CopyErrorData();
		FlushErrorState();
		rl_error_set(&statement->owner.why, second->sqlerrcode, "%s", second->message);
	}
	PG_END_TRY();
	lost = log_lost(statement);
	if (lost > 0)
		rl_report_add_detail(error,
							 psprintf("Keys of the statement that may stay charged: %lld.",
									  (long long) lost));
	ReThrowError(error);
}

/*
 * Ends a statement that has failed: refunds the keys' charges, if that was not tried
 * before, and logs how many keys could not be refunded.  It is called at the end of
 * the backend too, then with interrupts held off.
 */
static void
fail_statement(int code pg_attribute_unused(), Datum arg)
{
	Statement  *statement = (Statement *) DatumGetPointer(arg);

	MemoryContextSwitchTo(MemoryContextGetParent(statement->context));
	if (!statement->refunding && !proc_exit_inprogress)
		refund_after_error(statement);
	if (!statement->refunding)
		refund(statement, true);
	(void) log_lost(statement);
}

/* Groups the rows that the statement has written.  Returns true if all of them are refused unasked. */
static bool
group_rows(Statement *statement, const TriggerData *data)
{
	Tuplestorestate *rows = TRIGGER_FIRED_BY_DELETE(data->tg_event) ? data->tg_oldtable : data->tg_newtable;
	TupleTableSlot *row = MakeSingleTupleTableSlot(RelationGetDescr(data->tg_relation),
												   &TTSOpsMinimalTuple);
	int			pointer = tuplestore_alloc_read_pointer(rows, EXEC_FLAG_REWIND);

	/* Other triggers read the same rows. */
	tuplestore_select_read_pointer(rows, pointer);
	tuplestore_rescan(rows);
	while (tuplestore_gettupleslot(rows, true, false, row))
	{
		CHECK_FOR_INTERRUPTS();
		rl_groups_add(statement->groups, row);
		tuplestore_select_read_pointer(rows, pointer);
	}
	ExecDropSingleTupleTableSlot(row);
	return rl_groups_finish(statement->groups) && rl_mode == RL_MODE_ENFORCE;
}

/* Sets the keys that are asked next.  Returns false if there are none. */
static bool
next_keys(Statement *statement)
{
	if (statement->groups == NULL)
		return statement->asked == 0;
	if (!rl_groups_left(statement->groups))
		return false;
	note_charges(statement, true);
	statement->n = rl_groups_next(statement->groups, &statement->wanted);
	return statement->n > 0;
}

/* Raises the error of the first key that was refused. */
pg_noreturn static void
raise_refusal(Statement *statement)
{
	const char *before = rl_statement_exceeds(&statement->first_refused, &statement->refusal);
	const char *also = statement->asked == 1 || statement->groups == NULL ? NULL :
		psprintf("Keys of the statement that were refused: %lld of %lld.",
				 (long long) statement->refused, (long long) statement->asked);

	if (before != NULL && also != NULL)
		also = psprintf("%s %s", before, also);
	rl_raise_refused(&statement->first_refused, &statement->refusal, also != NULL ? also : before);
}

/* Takes the quota of all keys, or raises an error.  If "blocked", refuses them unasked. */
static void
take_keys(Statement *statement, bool blocked)
{
	PG_ENSURE_ERROR_CLEANUP(fail_statement, PointerGetDatum(statement));
	{
		while (next_keys(statement))
			if (blocked)
				note_blocked(statement);
			else
				ask_keys(statement);
		if (statement->refused > 0)
		{
			refund(statement, false);
			raise_refusal(statement);
		}
	}
	PG_END_ENSURE_ERROR_CLEANUP(fail_statement, PointerGetDatum(statement));
	rl_owner_keep(&statement->owner);
	MemoryContextDelete(statement->context);
}

/* Begins a statement. */
static void
begin(Statement *statement)
{
	rl_owner_begin(&statement->owner, RL_OF_STATEMENT);
	statement->context = AllocSetContextCreate(CurrentMemoryContext, "rate-limit statement",
											   ALLOCSET_DEFAULT_SIZES);
}

/*
 * Takes the quota of n actions of a row, one after the other, or raises an error, and then
 * refunds what was charged.
 */
void
rl_enforce_apart(RlAction *actions, int n)
{
	Statement	statement = {.wanted = actions,.n = n};
	bool		blocked = false;

	for (int i = 0; i < n; i++)
	{
		actions[i].timed = true;
		blocked |= actions[i].limits->kind == RL_BLOCKED;
	}
	begin(&statement);
	take_keys(&statement, blocked && rl_mode == RL_MODE_ENFORCE);
}

/* Takes the quota of all rows that the statement has written, or raises an error. */
void
rl_enforce_statement(TriggerData *data, Rule *rule)
{
	Statement	statement = {0};
	bool		blocked;

	begin(&statement);
	for (int i = 0; i < rule->npairs; i++)
		statement.origins[i] = (RlOrigin) {data->tg_relation, data->tg_trigger, rule->pairs[i].columns};
	statement.groups = rl_groups_make(rule, statement.origins);
	/* This calls functions of users, so not while this statement has a callback for the backend's end. */
	blocked = group_rows(&statement, data);
	take_keys(&statement, blocked);
	rl_groups_free(statement.groups);
}
