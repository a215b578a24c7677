/*
 * trigger_statement.c
 *		rl_enforce() for each statement, with the rows that it has written.
 *
 * The quotas of its rows are summed by key: in a table, or by sorting if there are
 * more than RL_MAX_MANY keys, which are asked together.  If any is refused, or the
 * statement ends in an error while keys are asked, the charges of all others are
 * refunded.  The server's log says how many keys could not be refunded.
 */
#include "postgres.h"

#include "catalog/pg_operator.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/tuplesort.h"
#include "utils/tuplestore.h"

#include "decide.h"
#include "error.h"
#include "redis/redis.h"
#include "refusal.h"
#include "shared/denial_cache.h"
#include "shared/local_store.h"
#include "sql/arguments.h"
#include "sql/trigger_statement.h"

typedef struct Statement
{
	Rule	   *rule;
	RlOrigin	origin;
	MemoryContext context;		/* of the keys that are asked together */
	MemoryContext row_context;
	HTAB	   *by_key;			/* index into wanted */
	RlAction   *wanted;			/* in the order of the rows, or sorted */
	int			n;
	int64		total;			/* of all rows' quotas, or more than RL_MAX_COUNT */
	Tuplesortstate *sort;		/* keys and quotas put aside, or NULL */
	RlAnswer   *answers;		/* to wanted, while keys are asked, or NULL */
	int			remembered;		/* answers whose charges are in "charged" */
	int64		asked;			/* keys so far */
	int64		refused;
	RlAction	first_refused;
	RlAnswer	refusal;		/* the answer to first_refused */
	RlError		error;			/* why no store decided it */
	Tuplestorestate *charged;	/* the charges to be refunded then */
	TupleTableSlot *slot;
	int64		owed;			/* keys to be refunded, less those that were */
	int64		unanswered;		/* keys that were perhaps charged */
	bool		refunding;		/* a refund has begun, and is never begun again */
	struct Batch *batch;		/* the refunds under way, or NULL */
	RlError		why;			/* the reason why keys were not refunded */
} Statement;

typedef struct KeyEntry
{
	char		key[RL_MAX_KEY];	/* hash key, padded with zeros */
	int			i;
} KeyEntry;

/* The charges of one key, as they are in the tuplestore. */
typedef struct Charged
{
	int32		vl_len_;		/* a bytea */
	bool		local;
	RlKeyHash	key_hash;		/* only with shared memory */
	RlCharge	charges[RL_MAX_LIMITS];
	int			redis_key_len;
	char		redis_key[RL_MAX_REDIS_KEY];
} Charged;

/* Keys that are refunded together, by a call each. */
typedef struct Batch
{
	int			n;
	const Charged *charged[RL_MAX_MANY];
	RlRefundCall calls[RL_MAX_MANY];
} Batch;

static void
start_keys(Statement *statement)
{
	HASHCTL		ctl = {.keysize = RL_MAX_KEY,.entrysize = sizeof(KeyEntry)};

	MemoryContextReset(statement->context);
	ctl.hcxt = statement->context;
	statement->by_key = hash_create("rate-limit keys", 256, &ctl, HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	statement->wanted = MemoryContextAlloc(statement->context, RL_MAX_MANY * sizeof(RlAction));
	statement->n = 0;
}

/* Adds a key, whose bytes must stay, with a quota of 0 to those that are asked together. */
static RlAction *
add_key(Statement *statement, RlKey key)
{
	RlAction   *wanted = &statement->wanted[statement->n++];

	*wanted = (RlAction) {key, &statement->rule->limits, 0, RL_TAKE, &statement->origin};
	return wanted;
}

/*
 * Sets the charges of key i of those asked, except those that an error refunds
 * anyway.  Returns false if there are none.
 */
static bool
get_charged(const Statement *statement, int i, Charged *charged)
{
	const RlKey *key = &statement->wanted[i].key;
	const RlAnswer *answer = &statement->answers[i];
	bool		any = false;

	if (!answer->decision.allowed)
		return false;
	for (int l = 0; l < statement->rule->limits.n; l++)
	{
		charged->charges[l] = answer->charges[l];
		if (statement->rule->limits.limit[l].refund_on_abort)
			charged->charges[l].amount = 0;
		any |= charged->charges[l].amount > 0;
	}
	if (!any)
		return false;
	charged->local = answer->local;
	charged->key_hash = rl_shared_available() ? rl_key_hash(key) : (RlKeyHash) {0};
	charged->redis_key_len = rl_redis_key(key, charged->redis_key);
	SET_VARSIZE(charged, offsetof(Charged, redis_key) + charged->redis_key_len);
	return true;
}

/* Remembers the charges of the next of the keys asked. */
static void
remember_next(Statement *statement)
{
	Charged		charged;
	Datum		value;
	bool		isnull = false;

	if (!get_charged(statement, statement->remembered++, &charged))
		return;
	statement->owed++;
	if (statement->charged == NULL)
	{
		TupleDesc	desc = CreateTemplateTupleDesc(1);

		TupleDescInitEntry(desc, 1, "charged", BYTEAOID, -1, 0);
		TupleDescFinalize(desc);
		statement->charged = tuplestore_begin_heap(false, false, work_mem);
		statement->slot = MakeSingleTupleTableSlot(desc, &TTSOpsMinimalTuple);
	}
	value = PointerGetDatum(&charged);
	tuplestore_putvalues(statement->charged, statement->slot->tts_tupleDescriptor, &value, &isnull);
}

/* Asks for the keys gathered so far. */
static void
ask_keys(Statement *statement)
{
	MemoryContext old = MemoryContextSwitchTo(statement->context);
	int			nlimits = statement->rule->limits.n;
	RlAnswer   *answers = palloc0(statement->n * sizeof(RlAnswer));
	RlCharge   *charges = palloc0(statement->n * nlimits * sizeof(RlCharge));

	for (int i = 0; i < statement->n; i++)
		answers[i].charges = charges + i * nlimits;
	statement->answers = answers;
	statement->remembered = 0;
	rl_decide_many(statement->wanted, statement->n, answers, &statement->unanswered);
	MemoryContextSwitchTo(old);
	for (int i = 0; i < statement->n; i++)
	{
		const RlAction *wanted = &statement->wanted[i];

		remember_next(statement);
		if (!answers[i].decision.allowed && statement->refused++ == 0)
		{
			statement->first_refused = *wanted;
			statement->first_refused.key.data = pnstrdup(wanted->key.data, wanted->key.len);
			statement->refusal = answers[i];
			if (answers[i].error != NULL)
			{
				statement->error = *answers[i].error;
				statement->refusal.error = &statement->error;
			}
		}
	}
	statement->asked += statement->n;
	statement->answers = NULL;
	start_keys(statement);
}

/* A slot for a key and its quota, as they are sorted. */
static TupleTableSlot *
sort_slot(const TupleTableSlotOps *ops)
{
	TupleDesc	desc = CreateTemplateTupleDesc(2);

	TupleDescInitEntry(desc, 1, "key", BYTEAOID, -1, 0);
	TupleDescInitEntry(desc, 2, "quota", INT8OID, -1, 0);
	TupleDescFinalize(desc);
	return MakeSingleTupleTableSlot(desc, ops);
}

/* Puts the keys gathered so far aside, to be sorted, so that a key's quotas meet. */
static void
put_aside(Statement *statement)
{
	TupleTableSlot *slot = sort_slot(&TTSOpsVirtual);

	if (statement->sort == NULL)
	{
		AttrNumber	column = 1;
		Oid			less = ByteaLessOperator;
		Oid			collation = InvalidOid;
		bool		nulls_first = false;

		statement->sort = tuplesort_begin_heap(slot->tts_tupleDescriptor, 1, &column, &less, &collation, &nulls_first,
											   work_mem, NULL, TUPLESORT_RANDOMACCESS);
	}
	for (int i = 0; i < statement->n; i++)
	{
		const RlAction *wanted = &statement->wanted[i];

		ExecClearTuple(slot);
		slot->tts_values[0] = PointerGetDatum(cstring_to_text_with_len(wanted->key.data, wanted->key.len));
		slot->tts_values[1] = Int64GetDatum(wanted->quota);
		slot->tts_isnull[0] = slot->tts_isnull[1] = false;
		ExecStoreVirtualTuple(slot);
		tuplesort_puttupleslot(statement->sort, slot);
		pfree(DatumGetPointer(slot->tts_values[0]));
	}
	ExecDropSingleTupleTableSlot(slot);
	start_keys(statement);
}

/* Sets row to the slot's key and quota, in the slot's memory. */
static void
read_sort_slot(TupleTableSlot *slot, RlAction *row)
{
	bool		isnull;
	bytea	   *key = DatumGetByteaPP(slot_getattr(slot, 1, &isnull));

	row->key.data = VARDATA_ANY(key);
	row->key.len = VARSIZE_ANY_EXHDR(key);
	row->quota = DatumGetInt64(slot_getattr(slot, 2, &isnull));
}

static bool
same_key(const RlKey *a, const RlKey *b)
{
	return a->len == b->len && memcmp(a->data, b->data, a->len) == 0;
}

/* Raises an error if a key's sum is not a valid quota, before any key is asked. */
static void
check_sums(Statement *statement, TupleTableSlot *slot)
{
	char		data[RL_MAX_KEY];
	RlAction	sum = {.key = {data, 0}};
	RlAction	row;

	if (statement->total <= RL_MAX_COUNT)
		return;
	while (tuplesort_gettupleslot(statement->sort, true, false, slot, NULL))
	{
		CHECK_FOR_INTERRUPTS();
		read_sort_slot(slot, &row);
		if (!same_key(&sum.key, &row.key))
		{
			memcpy(data, row.key.data, row.key.len);
			sum.key.len = row.key.len;
			sum.quota = 0;
		}
		sum.quota = rl_quota_checked(sum.quota + row.quota);
	}
	tuplesort_rescan(statement->sort);
}

/* Sorts the keys that were put aside, sums their quotas, and asks for them. */
static void
ask_sorted(Statement *statement)
{
	TupleTableSlot *slot = sort_slot(&TTSOpsMinimalTuple);
	RlAction	row;

	tuplesort_performsort(statement->sort);
	check_sums(statement, slot);
	while (tuplesort_gettupleslot(statement->sort, true, false, slot, NULL))
	{
		RlAction   *wanted = statement->n > 0 ? &statement->wanted[statement->n - 1] : NULL;

		read_sort_slot(slot, &row);
		if (wanted == NULL || !same_key(&wanted->key, &row.key))
		{
			if (statement->n == RL_MAX_MANY)
				ask_keys(statement);
			row.key.data = memcpy(MemoryContextAlloc(statement->context, row.key.len),
								  row.key.data, row.key.len);
			wanted = add_key(statement, row.key);
		}
		wanted->quota += row.quota;
	}
	ExecDropSingleTupleTableSlot(slot);
	tuplesort_end(statement->sort);
}

/* Adds a row's quota to its key's. */
static void
add_row(Statement *statement, Relation rel, TupleTableSlot *row)
{
	MemoryContext old = MemoryContextSwitchTo(statement->row_context);
	RlKey		key = rl_rule_key(statement->rule, rel, row);
	int64		quota = rl_rule_quota(statement->rule, rel, row);
	char		padded[RL_MAX_KEY];
	KeyEntry   *entry;
	bool		found;
	RlAction   *wanted;

	MemoryContextSwitchTo(old);
	if (statement->n == RL_MAX_MANY)
		put_aside(statement);
	memset(padded, 0, sizeof(padded));
	memcpy(padded, key.data, key.len);
	entry = hash_search(statement->by_key, padded, HASH_ENTER, &found);
	if (!found)
	{
		entry->i = statement->n;
		add_key(statement, (RlKey) {entry->key, key.len});
	}
	wanted = &statement->wanted[entry->i];
	/* Neither exceeds RL_MAX_COUNT, so that the sum does not overflow. */
	wanted->quota = rl_quota_checked(wanted->quota + quota);
	if (statement->total <= RL_MAX_COUNT)
		statement->total += quota;
	MemoryContextReset(statement->row_context);
}

/* Refunds a key that the local store has charged, or prepares the call that does. */
static void
refund_one(Statement *statement, Batch *batch, const Charged *charged, MemoryContext context)
{
	const RlLimits *limits = &statement->rule->limits;
	RlRefund   *refunds = MemoryContextAlloc(context, limits->n * sizeof(RlRefund));
	int			n = 0;

	for (int i = 0; i < limits->n; i++)
		if (charged->charges[i].amount > 0)
			refunds[n++] = (RlRefund) {&limits->limit[i], &charged->charges[i]};
	if (rl_shared_available())
		rl_denial_delete_hash(charged->key_hash);
	if (!charged->local)
	{
		batch->charged[batch->n] = charged;
		batch->calls[batch->n++] = (RlRefundCall) {charged->redis_key, charged->redis_key_len, n, refunds, RL_REFUND_UNSENT, 0};
		return;
	}
	for (int i = 0; i < n; i++)
		rl_local_refund_charge(charged->key_hash, refunds[i].limit, refunds[i].charge);
	statement->owed--;
}

/* Returns the charges of the next key, allocated in the context, or NULL after the last one. */
static const Charged *
next_charged(Statement *statement, MemoryContext context)
{
	Charged		charged;
	Pointer		value = NULL;
	bool		isnull;

	while (value == NULL && statement->answers != NULL && statement->remembered < statement->n)
		if (get_charged(statement, statement->remembered++, &charged))
			value = (Pointer) &charged;
	if (value == NULL)
	{
		if (statement->charged == NULL ||
			!tuplestore_gettupleslot(statement->charged, true, false, statement->slot))
			return NULL;
		value = DatumGetPointer(slot_getattr(statement->slot, 1, &isnull));
		/* A copy is aligned. */
		Assert(!isnull && !VARATT_IS_SHORT(value));
	}
	return memcpy(MemoryContextAlloc(context, VARSIZE_ANY(value)), value, VARSIZE_ANY(value));
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
 * Refunds the keys' charges, as far as that is possible.  Throws when it is
 * interrupted.  With no_throw, which is for the end of the backend, no call to Redis
 * throws, and all of them end within twice ratelimit.command_timeout; it then needs
 * rl_redis_reserve_refunds.
 */
static void
refund(Statement *statement, bool no_throw)
{
	MemoryContext context = AllocSetContextCreate(statement->context, "rate-limit refund",
												  ALLOCSET_DEFAULT_SIZES);
	int64		end = rl_monotonic_now() + (int64) rl_command_timeout * 1000;
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
		statement->batch = batch;
		/* A store that has failed is not waited for again. */
		failed = failed || !rl_redis_refund_charges(batch->calls, batch->n, no_throw, NULL, &statement->why,
													&statement->why);
		end_batch(statement);
		/* Again, for a refusal that Redis sent before. */
		for (int i = 0; i < batch->n && rl_shared_available(); i++)
			rl_denial_delete_hash(batch->charged[i]->key_hash);
	} while (charged != NULL);
	pfree(batch);
	MemoryContextDelete(context);
}

/* Logs how many keys could not be refunded; an error would hide the statement's own. */
static void
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
}

/* Refunds after an error that is being handled, and throws it again. */
pg_noreturn static void
refund_after_error(Statement *statement)
{
	ErrorData  *error;

	MemoryContextSwitchTo(statement->context);
	error = CopyErrorData();
	FlushErrorState();
	PG_TRY();
	{
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
	log_lost(statement);
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
	Charged		charged;

	if (!statement->refunding)
	{
		for (int i = statement->remembered; statement->answers != NULL && i < statement->n; i++)
			statement->owed += get_charged(statement, i, &charged);
		if (statement->owed > 0 && !proc_exit_inprogress)
			refund_after_error(statement);
		else if (statement->owed > 0)
		{
			rl_redis_reserve_refunds();
			refund(statement, true);
		}
	}
	log_lost(statement);
}

/* Sums the quotas of the rows that the statement has written, and asks for all keys. */
static void
ask_rows(Statement *statement, const TriggerData *data)
{
	Tuplestorestate *rows = TRIGGER_FIRED_BY_DELETE(data->tg_event) ? data->tg_oldtable : data->tg_newtable;
	TupleTableSlot *row = MakeSingleTupleTableSlot(RelationGetDescr(data->tg_relation),
												   &TTSOpsMinimalTuple);
	int			pointer = tuplestore_alloc_read_pointer(rows, EXEC_FLAG_REWIND);

	start_keys(statement);
	/* Other triggers read the same rows. */
	tuplestore_select_read_pointer(rows, pointer);
	tuplestore_rescan(rows);
	while (tuplestore_gettupleslot(rows, true, false, row))
	{
		CHECK_FOR_INTERRUPTS();
		add_row(statement, data->tg_relation, row);
		tuplestore_select_read_pointer(rows, pointer);
	}
	if (statement->sort != NULL)
	{
		put_aside(statement);
		ask_sorted(statement);
	}
	if (statement->n > 0)
		ask_keys(statement);
	ExecDropSingleTupleTableSlot(row);
}

/* Takes the quota of all rows that the statement has written, or raises an error. */
void
rl_enforce_statement(TriggerData *data, Rule *rule)
{
	Statement	statement = {
		.rule = rule,
		.origin = {data->tg_relation, data->tg_trigger->tgname, rule->columns}
	};

	rl_error_set(&statement.why, ERRCODE_STORE_FAILED, "there was no answer to some calls");
	statement.context = AllocSetContextCreate(CurrentMemoryContext, "rate-limit statement",
											  ALLOCSET_DEFAULT_SIZES);
	statement.row_context = AllocSetContextCreate(CurrentMemoryContext, "rate-limit row",
												  ALLOCSET_SMALL_SIZES);
	PG_ENSURE_ERROR_CLEANUP(fail_statement, PointerGetDatum(&statement));
	{
		ask_rows(&statement, data);
		if (statement.refused > 0)
		{
			refund(&statement, false);
			rl_raise_refused(&statement.first_refused, &statement.refusal,
							 statement.asked == 1 ? NULL :
							 psprintf("Keys of the statement that were refused: %lld of %lld.",
									  (long long) statement.refused, (long long) statement.asked));
		}
	}
	PG_END_ENSURE_ERROR_CLEANUP(fail_statement, PointerGetDatum(&statement));
	if (statement.charged != NULL)
	{
		tuplestore_end(statement.charged);
		ExecDropSingleTupleTableSlot(statement.slot);
	}
	MemoryContextDelete(statement.row_context);
	MemoryContextDelete(statement.context);
}
