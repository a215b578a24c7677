/*
 * trigger_statement.c
 *		rl_enforce() for each statement, with the rows that it has written.
 *
 * The rows' groups are asked together.  If a group is refused, or the statement ends in
 * an error while keys are asked, the charges of all other groups are refunded.  The
 * server's log says how many keys could not be refunded.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "utils/memutils.h"
#include "utils/tuplestore.h"
#include "utils/wait_event.h"

#include "algorithm/limits.h"
#include "decide.h"
#include "error.h"
#include "redis/redis.h"
#include "refusal.h"
#include "shared/known.h"
#include "shared/local_store.h"
#include "shared/shared.h"
#include "sql/trigger_charges.h"
#include "sql/trigger_groups.h"
#include "sql/trigger_statement.h"

#define PAUSE_US			50000	/* between two attempts to reach Redis for refunds */

typedef struct Statement
{
	RlOrigin	origins[RL_MAX_PAIRS];
	RowGroups  *groups;
	MemoryContext context;		/* of the answers */
	const RlAction *wanted;		/* the keys that are asked together */
	int			n;
	RlAnswer   *answers;		/* to wanted, until their charges are in "charged", or NULL */
	int			remembered;		/* answers whose charges are in "charged" */
	int64		asked;			/* keys so far */
	int64		refused;
	RlAction	first_refused;
	RlLimits	refused_limits; /* those of first_refused */
	RlAnswer	refusal;		/* the answer to first_refused */
	RlError		error;			/* why no store decided it */
	Tuplestorestate *charged;	/* the charges to be refunded then */
	TupleTableSlot *slot;
	int64		owed;			/* keys to be refunded, less those that were */
	int64		unanswered;		/* keys that were perhaps charged */
	bool		refunding;		/* a refund has begun, and is never begun again */
	bool		awaited;		/* Redis, after calls without an answer */
	struct Batch *batch;		/* the refunds under way, or NULL */
	RlError		why;			/* the reason why keys were not refunded */
} Statement;

/* The charges of one key, as they are in the tuplestore: these, then the name in Redis. */
typedef struct Charged
{
	int32		vl_len_;		/* a bytea */
	bool		local;
	RlKeyHash	key_hash;		/* only with shared memory */
	int			redis_key_len;
	int			n;
	struct
	{
		RlLimit		limit;
		RlCharge	charge;
	}			charges[FLEXIBLE_ARRAY_MEMBER];
} Charged;

typedef union ChargedRoom
{
	Charged		charged;
	char		bytes[offsetof(Charged, charges[RL_MAX_LIMITS]) + RL_MAX_REDIS_KEY];
} ChargedRoom;

/* Keys that are refunded together, by a call each. */
typedef struct Batch
{
	int			n;
	const Charged *charged[RL_MAX_MANY];
	RlRefundCall calls[RL_MAX_MANY];
} Batch;

static inline char *
redis_key(const Charged *charged)
{
	return (char *) &charged->charges[charged->n];
}

/*
 * Sets the charges of key i of those asked, except those that an error refunds
 * anyway.  Returns false if there are none.
 */
static bool
get_charged(const Statement *statement, int i, Charged *charged)
{
	const RlKey *key = &statement->wanted[i].key;
	const RlLimits *limits = statement->wanted[i].limits;
	const RlAnswer *answer = &statement->answers[i];

	charged->n = 0;
	for (int l = 0; answer->decision.allowed && l < limits->n; l++)
	{
		if (limits->limit[l].refund_on_abort || answer->charges[l].amount == 0)
			continue;
		charged->charges[charged->n].limit = limits->limit[l];
		charged->charges[charged->n++].charge = answer->charges[l];
	}
	if (charged->n == 0)
		return false;
	charged->local = answer->local;
	charged->key_hash = rl_shared_available() ? rl_key_hash(key) : (RlKeyHash) {0};
	charged->redis_key_len = rl_redis_key(key, redis_key(charged));
	SET_VARSIZE(charged, redis_key(charged) - (char *) charged + charged->redis_key_len);
	return true;
}

/* Remembers the charges of the next of the keys asked. */
static void
remember_next(Statement *statement)
{
	ChargedRoom room;
	Datum		value;
	bool		isnull = false;

	if (!get_charged(statement, statement->remembered++, &room.charged))
		return;
	value = PointerGetDatum(&room);
	statement->owed++;
	if (statement->charged == NULL)
	{
		TupleDesc	desc = CreateTemplateTupleDesc(1);

		TupleDescInitEntry(desc, 1, "charged", BYTEAOID, -1, 0);
		TupleDescFinalize(desc);
		statement->charged = tuplestore_begin_heap(false, false, work_mem);
		statement->slot = MakeSingleTupleTableSlot(desc, &TTSOpsMinimalTuple);
	}
	tuplestore_putvalues(statement->charged, statement->slot->tts_tupleDescriptor, &value, &isnull);
}

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

/* Remembers the charges of the keys asked, before others are asked. */
static void
remember_all(Statement *statement)
{
	while (statement->answers != NULL && statement->remembered < statement->n)
		remember_next(statement);
	statement->answers = NULL;
	MemoryContextReset(statement->context);
}

/* Counts the keys to be refunded that are not remembered. */
static void
count_owed(Statement *statement)
{
	ChargedRoom room;

	for (int i = statement->remembered; statement->answers != NULL && i < statement->n; i++)
		statement->owed += get_charged(statement, i, &room.charged);
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
	statement->remembered = 0;
	for (int i = 0; i < statement->n; i += RL_MAX_MANY)
		rl_decide_many(&statement->wanted[i], Min(statement->n - i, RL_MAX_MANY), &answers[i],
					   &statement->unanswered);
	MemoryContextSwitchTo(old);
	for (int i = 0; i < statement->n; i++)
		if (!answers[i].decision.allowed)
			note_refusal(statement, &statement->wanted[i], &answers[i]);
	statement->asked += statement->n;
}

/* Refuses those of the next keys whose limits are blocked, and asks for no key. */
static void
refuse_blocked(Statement *statement)
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

/* Refunds a key that the local store has charged, or prepares the call that does. */
static void
refund_one(Statement *statement, Batch *batch, const Charged *charged, MemoryContext context)
{
	RlRefund   *refunds = MemoryContextAlloc(context, charged->n * sizeof(RlRefund));

	for (int i = 0; i < charged->n; i++)
		refunds[i] = (RlRefund) {&charged->charges[i].limit, &charged->charges[i].charge};
	if (rl_shared_available())
		rl_known_refunded(charged->key_hash);
	if (!charged->local)
	{
		batch->charged[batch->n] = charged;
		batch->calls[batch->n++] = (RlRefundCall) {.redis_key = redis_key(charged),.redis_key_len = charged->redis_key_len,
		.n = charged->n,.refunds = refunds};
		return;
	}
	for (int i = 0; i < charged->n; i++)
		rl_local_refund_charge(charged->key_hash, refunds[i].limit, refunds[i].charge);
	statement->owed--;
}

/* Returns the charges of the next key, allocated in the context, or NULL after the last one. */
static const Charged *
next_charged(Statement *statement, MemoryContext context)
{
	ChargedRoom room;
	Pointer		value = NULL;
	Charged    *copy;
	int			len;
	bool		isnull;

	while (value == NULL && statement->answers != NULL && statement->remembered < statement->n)
		if (get_charged(statement, statement->remembered++, &room.charged))
			value = (Pointer) &room;
	if (value == NULL)
	{
		if (statement->charged == NULL ||
			!tuplestore_gettupleslot(statement->charged, true, false, statement->slot))
			return NULL;
		value = DatumGetPointer(slot_getattr(statement->slot, 1, &isnull));
		Assert(!isnull);
	}
	/* The copy is aligned, and has a header of four bytes. */
	len = VARSIZE_ANY_EXHDR(value);
	copy = MemoryContextAlloc(context, VARHDRSZ + len);
	SET_VARSIZE(copy, VARHDRSZ + len);
	memcpy(VARDATA(copy), VARDATA_ANY(value), len);
	return copy;
}

/* Counts the keys that a batch has refunded, also one that was interrupted. */
static void
end_batch(Statement *statement)
{
	const Batch *batch = statement->batch;

	for (int i = 0; batch != NULL && i < batch->n; i++)
		statement->owed -= batch->calls[i].outcome == RL_REFUND_DONE;
	statement->batch = NULL;
}

/*
 * Waits until Redis answers, until the time at most.  Returns false with the error set if
 * it does not answer.
 */
static bool
await_redis(int64 until, RlError *error)
{
	char		version[64];

	while (!rl_redis_version(version, sizeof(version), error))
	{
		if (rl_monotonic_now() >= until)
			return false;
		/* An open breaker lets no call through earlier, but it may close. */
		rl_sleep_until(rl_monotonic_now() + Max(Min(error->retry_after, PAUSE_US), PAUSE_US / 10),
					   PG_WAIT_EXTENSION);
	}
	return true;
}

/* Moves the calls of a batch that were not sent to its end.  Returns where they begin. */
static int
sort_unsent(Batch *batch)
{
	int			sent = 0;

	for (int i = 0; i < batch->n; i++)
	{
		RlRefundCall call = batch->calls[i];
		const Charged *charged = batch->charged[i];

		if (call.outcome == RL_REFUND_UNSENT)
			continue;
		batch->calls[i] = batch->calls[sent];
		batch->charged[i] = batch->charged[sent];
		batch->calls[sent] = call;
		batch->charged[sent++] = charged;
	}
	return sent;
}

/*
 * Sends the calls of a batch; those that Redis cannot have run, again.  It gives up
 * when no call was answered for patience microseconds: 0 to send each only once.
 * Returns false then.
 */
static bool
send_refunds(Statement *statement, Batch *batch, int64 patience, bool no_throw)
{
	int64		progress = rl_monotonic_now();
	int			first = 0;

	for (;;)
	{
		int			before = first;
		bool		done = no_throw ?
			rl_redis_refund_no_throw(&batch->calls[first], batch->n - first, &statement->why, &statement->why) :
			rl_redis_refund_until(&batch->calls[first], batch->n - first, PG_INT64_MAX, NULL,
								  &statement->why, &statement->why);

		if (done || patience == 0)
			return done;
		first = sort_unsent(batch);
		if (first == batch->n)
			return true;
		for (int i = before; i < first; i++)
			if (batch->calls[i].outcome != RL_REFUND_SENT)
				progress = rl_monotonic_now();
		if (!await_redis(progress + patience, &statement->why) || rl_monotonic_now() >= progress + patience)
			return false;
	}
}

/*
 * Refunds the keys' charges, as far as that is possible: waits for a Redis that has just
 * failed, but not longer than a second and ratelimit.command_timeout without an answer.
 * Throws when it is interrupted.  With no_throw, which is for the end of the backend, it
 * does not wait so, no call to Redis throws, and none begins after
 * ratelimit.command_timeout; it then needs rl_redis_reserve_refunds.
 */
static void
refund(Statement *statement, bool no_throw)
{
	MemoryContext context = AllocSetContextCreate(statement->context, "rate-limit refund",
												  ALLOCSET_DEFAULT_SIZES);
	int64		end = rl_monotonic_now() + (int64) rl_command_timeout * 1000;
	int64		patience = no_throw ? 0 : (int64) (Min(rl_retry_interval, 1000) + rl_command_timeout) * 1000;
	Batch	   *batch = MemoryContextAlloc(statement->context, sizeof(Batch));
	const Charged *charged;
	bool		failed = false;

	statement->refunding = true;
	do
	{
		MemoryContextReset(context);
		batch->n = 0;
		charged = NULL;
		for (int i = 0; i < RL_MAX_MANY && (charged = next_charged(statement, context)) != NULL; i++)
			refund_one(statement, batch, charged, context);
		if (batch->n == 0)
			continue;
		if (no_throw && !failed && rl_monotonic_now() >= end)
		{
			failed = true;
			rl_error_set(&statement->why, ERRCODE_STORE_FAILED, "there was no time left");
		}
		/* Calls to a Redis that is still silent would be lost. */
		if (!no_throw && !failed && !statement->awaited && statement->unanswered > 0)
			failed = !await_redis(rl_monotonic_now() + patience, &statement->why);
		statement->awaited = true;
		statement->batch = batch;
		/* A store that has failed is not waited for again. */
		failed = failed || !send_refunds(statement, batch, patience, no_throw);
		end_batch(statement);
		/* Again, for a refusal that Redis sent before. */
		for (int i = 0; i < batch->n && rl_shared_available(); i++)
			rl_known_refunded(batch->charged[i]->key_hash);
	} while (charged != NULL);
	pfree(batch);
	MemoryContextDelete(context);
}

/*
 * Logs how many keys could not be refunded, and returns their number; an error would hide
 * the statement's own.
 */
static int64
log_lost(Statement *statement)
{
	int64		lost;

	end_batch(statement);
	lost = statement->owed + statement->unanswered;
	if (lost > 0)
		ereport(LOG_SERVER_ONLY,
				(errcode(statement->why.sqlstate),
				 errmsg("could not refund the charges of up to %lld keys of a failed statement",
						(long long) lost),
				 errdetail_internal("%s", statement->why.message)));
	return lost;
}

/* Refunds after an error that is being handled, and throws it again. */
pg_noreturn static void
refund_after_error(Statement *statement)
{
	ErrorData  *error;
	int64		lost;

	MemoryContextSwitchTo(statement->context);
	error = CopyErrorData();
	FlushErrorState();
	PG_TRY();
	{
		if (statement->owed > 0)
			refund(statement, false);
	}
	PG_CATCH();
	{
		ErrorData  *second;

		MemoryContextSwitchTo(statement->context);
		second = CopyErrorData();
		FlushErrorState();
		rl_error_set(&statement->why, second->sqlerrcode, "%s", second->message);
	}
	PG_END_TRY();
	lost = log_lost(statement);
	if (lost > 0 && error->sqlerrcode == ERRCODE_STORE_FAILED)
		error->detail = psprintf("%s%sKeys of the statement that may stay charged: %lld.",
								 error->detail ? error->detail : "", error->detail ? " " : "", (long long) lost);
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

	if (!statement->refunding)
	{
		count_owed(statement);
		if (statement->owed + statement->unanswered > 0 && !proc_exit_inprogress)
			refund_after_error(statement);
		else if (statement->owed > 0)
		{
			rl_redis_reserve_refunds();
			refund(statement, true);
		}
	}
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

/* Asks for all keys. */
static void
ask_groups(Statement *statement, bool blocked)
{
	while (rl_groups_left(statement->groups))
	{
		remember_all(statement);
		statement->n = rl_groups_next(statement->groups, &statement->wanted);
		if (statement->n == 0)
			break;
		if (blocked)
			refuse_blocked(statement);
		else
			ask_keys(statement);
	}
}

/* Raises the error of the first key that was refused. */
pg_noreturn static void
raise_refusal(Statement *statement)
{
	const char *before = rl_statement_exceeds(&statement->first_refused, &statement->refusal);
	const char *also = statement->asked == 1 ? NULL :
		psprintf("Keys of the statement that were refused: %lld of %lld.",
				 (long long) statement->refused, (long long) statement->asked);

	if (before != NULL && also != NULL)
		also = psprintf("%s %s", before, also);
	rl_raise_refused(&statement->first_refused, &statement->refusal, also != NULL ? also : before);
}

/* Takes the quota of all rows that the statement has written, or raises an error. */
void
rl_enforce_statement(TriggerData *data, Rule *rule)
{
	Statement	statement = {0};
	bool		blocked;

	rl_error_set(&statement.why, ERRCODE_STORE_FAILED, "there was no answer to some calls");
	for (int i = 0; i < rule->npairs; i++)
		statement.origins[i] = (RlOrigin) {data->tg_relation, data->tg_trigger, rule->pairs[i].columns};
	statement.groups = rl_groups_make(rule, statement.origins);
	statement.context = AllocSetContextCreate(CurrentMemoryContext, "rate-limit statement",
											  ALLOCSET_DEFAULT_SIZES);
	/* This calls functions of users, so not while this statement has a callback for the backend's end. */
	blocked = group_rows(&statement, data);
	PG_ENSURE_ERROR_CLEANUP(fail_statement, PointerGetDatum(&statement));
	{
		ask_groups(&statement, blocked);
		if (statement.refused > 0)
		{
			count_owed(&statement);
			refund(&statement, false);
			raise_refusal(&statement);
		}
	}
	PG_END_ENSURE_ERROR_CLEANUP(fail_statement, PointerGetDatum(&statement));
	if (statement.charged != NULL)
	{
		tuplestore_end(statement.charged);
		ExecDropSingleTupleTableSlot(statement.slot);
	}
	rl_groups_free(statement.groups);
	MemoryContextDelete(statement.context);
}
