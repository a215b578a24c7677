/*
 * statement.c
 *		rl_enforce() for each statement, with the rows that it has written.
 *
 * Its rows' quotas are summed by key, in a table or, past RL_MAX_MANY keys, by
 * sorting; then so many keys are asked at once.  If any is refused, what the
 * others were charged is given back.
 */
#include "postgres.h"

#include "catalog/pg_operator.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/tuplesort.h"
#include "utils/tuplestore.h"

#include "charges.h"
#include "rule.h"

typedef struct Statement
{
	Rule	   *rule;
	MemoryContext context;		/* of the keys that are asked together */
	MemoryContext row_context;
	HTAB	   *by_key;			/* index into wanted */
	RlWanted   *wanted;			/* in the order of the rows, or sorted */
	int			n;
	Tuplesortstate *sort;		/* keys and quotas put aside, or NULL */
	int64		asked;			/* keys so far */
	int64		refused;
	RlKey		refused_key;	/* the first one, and what was said to it */
	int64		refused_quota;
	RlAnswer	refusal;
	RlError		error;
	Tuplestorestate *charged;	/* what has to be given back then */
	TupleTableSlot *slot;
} Statement;

typedef struct KeyEntry
{
	char		key[RL_MAX_KEY];	/* hash key, padded with zeros */
	int			i;
} KeyEntry;

/* What one key was charged, as it lies in the tuplestore. */
typedef struct Charged
{
	int32		vl_len_;		/* a bytea */
	bool		local;
	RlName		name;			/* only with shared memory */
	RlCharge	charges[RL_MAX_LIMITS];
	int			place_len;
	char		place[RL_MAX_PLACE];
} Charged;

static void
start_keys(Statement *statement)
{
	HASHCTL		ctl = {.keysize = RL_MAX_KEY,.entrysize = sizeof(KeyEntry)};

	MemoryContextReset(statement->context);
	ctl.hcxt = statement->context;
	statement->by_key = hash_create("rate-limit keys", 256, &ctl, HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	statement->wanted = MemoryContextAlloc(statement->context, RL_MAX_MANY * sizeof(RlWanted));
	statement->n = 0;
}

/* Remembers what the key was charged, but for what an error gives back anyway. */
static void
remember(Statement *statement, const RlKey *key, const RlAnswer *answer)
{
	Charged		charged;
	Datum		value;
	bool		isnull = false;
	bool		any = false;

	for (int i = 0; i < statement->rule->limits.n; i++)
	{
		charged.charges[i] = answer->charges[i];
		if (statement->rule->limits.limit[i].refund_on_abort)
			charged.charges[i].amount = 0;
		any |= charged.charges[i].amount > 0;
	}
	if (!any)
		return;
	charged.local = answer->local;
	if (rl_shared_available())
		charged.name = rl_name(key);
	charged.place_len = rl_redis_place(key, charged.place);
	SET_VARSIZE(&charged, offsetof(Charged, place) + charged.place_len);
	if (statement->charged == NULL)
	{
		TupleDesc	desc = CreateTemplateTupleDesc(1);

		TupleDescInitEntry(desc, 1, "charged", BYTEAOID, -1, 0);
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
	RlAnswer   *answers = palloc(statement->n * sizeof(RlAnswer));
	RlCharge   *charges = palloc(statement->n * nlimits * sizeof(RlCharge));

	for (int i = 0; i < statement->n; i++)
		answers[i].charges = charges + i * nlimits;
	rl_decide_many(&statement->rule->limits, statement->wanted, statement->n, answers, &statement->error);
	MemoryContextSwitchTo(old);
	for (int i = 0; i < statement->n; i++)
	{
		const RlWanted *wanted = &statement->wanted[i];

		if (answers[i].decision.allowed)
			remember(statement, &wanted->key, &answers[i]);
		else if (statement->refused++ == 0)
		{
			statement->refused_key.data = pnstrdup(wanted->key.data, wanted->key.len);
			statement->refused_key.len = wanted->key.len;
			statement->refused_quota = wanted->quota;
			statement->refusal = answers[i];
		}
	}
	statement->asked += statement->n;
	start_keys(statement);
}

/* A slot for a key and its quota, as they are sorted. */
static TupleTableSlot *
sort_slot(const TupleTableSlotOps *ops)
{
	TupleDesc	desc = CreateTemplateTupleDesc(2);

	TupleDescInitEntry(desc, 1, "key", BYTEAOID, -1, 0);
	TupleDescInitEntry(desc, 2, "quota", INT8OID, -1, 0);
	return MakeSingleTupleTableSlot(desc, ops);
}

/* Puts the keys gathered so far aside: sorted, a key's quotas will meet. */
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
											   work_mem, NULL, TUPLESORT_NONE);
	}
	for (int i = 0; i < statement->n; i++)
	{
		const RlWanted *wanted = &statement->wanted[i];

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

/* Asks for the keys that were put aside, summed. */
static void
ask_sorted(Statement *statement)
{
	TupleTableSlot *slot = sort_slot(&TTSOpsMinimalTuple);

	tuplesort_performsort(statement->sort);
	while (tuplesort_gettupleslot(statement->sort, true, false, slot, NULL))
	{
		bool		isnull;
		bytea	   *key = DatumGetByteaPP(slot_getattr(slot, 1, &isnull));
		int			len = VARSIZE_ANY_EXHDR(key);
		RlWanted   *wanted = statement->n > 0 ? &statement->wanted[statement->n - 1] : NULL;

		if (wanted == NULL || wanted->key.len != len ||
			memcmp(wanted->key.data, VARDATA_ANY(key), len) != 0)
		{
			if (statement->n == RL_MAX_MANY)
				ask_keys(statement);
			wanted = &statement->wanted[statement->n++];
			wanted->key.data = memcpy(MemoryContextAlloc(statement->context, len), VARDATA_ANY(key), len);
			wanted->key.len = len;
			wanted->quota = 0;
		}
		wanted->quota = rl_quota_checked(wanted->quota + DatumGetInt64(slot_getattr(slot, 2, &isnull)));
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
	RlWanted   *wanted;

	MemoryContextSwitchTo(old);
	if (statement->n == RL_MAX_MANY)
		put_aside(statement);
	memset(padded, 0, sizeof(padded));
	memcpy(padded, key.data, key.len);
	entry = hash_search(statement->by_key, padded, HASH_ENTER, &found);
	if (!found)
	{
		entry->i = statement->n++;
		statement->wanted[entry->i] = (RlWanted) {{entry->key, key.len}, 0};
	}
	wanted = &statement->wanted[entry->i];
	/* Neither is more than 10^15. */
	wanted->quota = rl_quota_checked(wanted->quota + quota);
	MemoryContextReset(statement->row_context);
}

/* Those of a batch that Redis has charged. */
typedef struct Batch
{
	const RlLimits *limits;
	int			n;
	const Charged *charged[RL_MAX_MANY];
	int64		lost;			/* of all batches: what was not given back */
	RlError		error;			/* why */
} Batch;

static int
next_of_batch(int i, const char **place, int *place_len, const RlLimit **limits,
			  const RlCharge **charges, void *arg)
{
	const Batch *batch = arg;
	const Charged *charged = batch->charged[i];
	int			n = 0;

	*place = charged->place;
	*place_len = charged->place_len;
	for (int l = 0; l < batch->limits->n; l++)
	{
		if (charged->charges[l].amount == 0)
			continue;
		limits[n] = &batch->limits->limit[l];
		charges[n++] = &charged->charges[l];
	}
	return n;
}

static void
done_of_batch(int i pg_attribute_unused(), const RlError *refusal, void *arg)
{
	Batch	   *batch = arg;

	if (refusal == NULL)
		return;
	batch->lost++;
	batch->error = *refusal;
}

/* Gives back what a key was charged, or puts it off into the batch. */
static void
give_back_one(Batch *batch, const Charged *charged)
{
	if (rl_shared_available())
		rl_denied_forget_name(charged->name);
	if (!charged->local)
	{
		batch->charged[batch->n++] = charged;
		return;
	}
	for (int l = 0; l < batch->limits->n; l++)
		if (charged->charges[l].amount > 0)
			rl_local_undo(charged->name, &batch->limits->limit[l], &charged->charges[l]);
}

/* What the slot holds, in the statement's context and aligned. */
static const Charged *
charged_copy(Statement *statement)
{
	bool		isnull;
	Pointer		value = DatumGetPointer(slot_getattr(statement->slot, 1, &isnull));
	Size		len = VARSIZE_ANY(value);

	Assert(!isnull && !VARATT_IS_SHORT(value));
	return memcpy(MemoryContextAlloc(statement->context, len), value, len);
}

/* Gives back what the keys were charged, as far as that is possible. */
static void
give_back(Statement *statement)
{
	Batch	   *batch = palloc(sizeof(Batch));
	bool		more = true;
	bool		failed = false;

	batch->limits = &statement->rule->limits;
	batch->lost = 0;
	while (more)
	{
		MemoryContextReset(statement->context);
		batch->n = 0;
		for (int i = 0; i < RL_MAX_MANY && more; i++)
		{
			more = tuplestore_gettupleslot(statement->charged, true, false, statement->slot);
			if (more)
				give_back_one(batch, charged_copy(statement));
		}
		if (batch->n == 0)
			continue;
		/* A store that has failed is not waited for again. */
		failed = failed || !rl_redis_undo(batch->n, next_of_batch, done_of_batch, false, batch, &batch->error);
		if (failed)
			batch->lost += batch->n;
		/* Again, for a refusal that was on its way. */
		for (int i = 0; i < batch->n && rl_shared_available(); i++)
			rl_denied_forget_name(batch->charged[i]->name);
	}
	/* The error to come is of more use than one about this. */
	if (batch->lost > 0)
		ereport(LOG,
				(errcode(batch->error.sqlstate),
				 errmsg("could not give back what up to %lld keys of a refused statement were charged",
						(long long) batch->lost),
				 errdetail_internal("%s", batch->error.message)));
}

/* Raises the error of a statement of which some keys were refused. */
static void
refuse_statement(Statement *statement)
{
	if (statement->charged != NULL)
		give_back(statement);
	rl_raise_refused(&statement->refused_key,
					 &statement->rule->limits.limit[statement->refusal.binding],
					 statement->refused_quota, &statement->refusal.decision, &statement->error,
					 statement->asked == 1 ? NULL :
					 psprintf("Keys of the statement that were refused: %lld of %lld.",
							  (long long) statement->refused, (long long) statement->asked));
}

/* Takes the quota of all rows that the statement has written, or raises an error. */
void
rl_enforce_statement(TriggerData *data, Rule *rule)
{
	Tuplestorestate *rows = TRIGGER_FIRED_BY_DELETE(data->tg_event) ? data->tg_oldtable : data->tg_newtable;
	TupleTableSlot *row = MakeSingleTupleTableSlot(RelationGetDescr(data->tg_relation),
												   &TTSOpsMinimalTuple);
	Statement	statement = {.rule = rule};
	int			pointer = tuplestore_alloc_read_pointer(rows, EXEC_FLAG_REWIND);

	statement.context = AllocSetContextCreate(CurrentMemoryContext, "rate-limit statement",
											  ALLOCSET_DEFAULT_SIZES);
	statement.row_context = AllocSetContextCreate(CurrentMemoryContext, "rate-limit row",
												  ALLOCSET_SMALL_SIZES);
	start_keys(&statement);
	/* Other triggers read the same rows. */
	tuplestore_select_read_pointer(rows, pointer);
	tuplestore_rescan(rows);
	while (tuplestore_gettupleslot(rows, true, false, row))
	{
		CHECK_FOR_INTERRUPTS();
		add_row(&statement, data->tg_relation, row);
		tuplestore_select_read_pointer(rows, pointer);
	}
	if (statement.sort != NULL)
	{
		put_aside(&statement);
		ask_sorted(&statement);
	}
	if (statement.n > 0)
		ask_keys(&statement);
	if (statement.refused > 0)
		refuse_statement(&statement);
	ExecDropSingleTupleTableSlot(row);
	if (statement.charged != NULL)
	{
		tuplestore_end(statement.charged);
		ExecDropSingleTupleTableSlot(statement.slot);
	}
	MemoryContextDelete(statement.row_context);
	MemoryContextDelete(statement.context);
}
