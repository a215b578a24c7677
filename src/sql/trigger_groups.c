/*
 * trigger_groups.c
 *		Groups the rows of a statement: the rows of a group have the same key, and
 *		the same arguments of the function that returns their limits.
 *
 * The quotas of the rows are summed by group: in a table, or by sorting if there
 * are more than MAX_GROUPS groups, or if they take more memory than a hash table of the
 * executor may.  After the last row, the limits of all groups are set before the first
 * group is returned.
 *
 * A group is found by its id: the key, a zero byte, the number of its pair as a
 * byte, and if the pair calls a function, the bytes of the arguments.
 */
#include "postgres.h"

#include "catalog/pg_operator.h"
#include "catalog/pg_type.h"
#include "common/hashfn.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/tuplesort.h"
#include "utils/tuplestore.h"

#include "algorithm/limits.h"
#include "decide.h"
#include "sql/trigger_groups.h"

#define MIN_GROUPS			64	/* for which there is room at first */
#define MAX_GROUPS			16384	/* in memory */
#define MAX_COLUMNS			3	/* of a group that is put aside: id, quota, limits */

/* The id of a group, as the hash key. */
typedef struct GroupId
{
	const char *data;
	int			len;
} GroupId;

typedef struct GroupEntry
{
	GroupId		id;				/* hash key */
	int			i;				/* index into actions */
} GroupEntry;

struct RowGroups
{
	Rule	   *rule;
	const RlOrigin *origins;	/* of each pair */
	MemoryContext context;		/* of the groups in memory */
	MemoryContext row_context;
	HTAB	   *by_id;
	RlAction   *actions;		/* of the groups in memory */
	int			n;
	int			room;			/* for actions */
	bool		full;			/* no group can be added */
	bool		returned;		/* rl_groups_next was called */
	bool		blocked;		/* the limits of a group are blocked */
	Tuplesortstate *sort;		/* ids and quotas put aside, or NULL */
	TupleTableSlot *sort_slot;
	Tuplestorestate *merged;	/* ids, quotas and limits, after sorting, or NULL */
	TupleTableSlot *merged_slot;
};

static uint32
hash_id(const void *key, Size size pg_attribute_unused())
{
	const GroupId *id = key;

	return hash_bytes((const unsigned char *) id->data, id->len);
}

static bool
same_id(const GroupId *a, const GroupId *b)
{
	return a->len == b->len && memcmp(a->data, b->data, a->len) == 0;
}

static int
match_id(const void *a, const void *b, Size size pg_attribute_unused())
{
	return same_id(a, b) ? 0 : 1;
}

/* Empties the memory of groups. */
static void
start(RowGroups *groups)
{
	HASHCTL		ctl = {.keysize = sizeof(GroupId),.entrysize = sizeof(GroupEntry),
	.hash = hash_id,.match = match_id};

	MemoryContextReset(groups->context);
	ctl.hcxt = groups->context;
	groups->by_id = hash_create("rate-limit groups", 256, &ctl,
								HASH_ELEM | HASH_FUNCTION | HASH_COMPARE | HASH_CONTEXT);
	groups->room = MIN_GROUPS;
	groups->actions = MemoryContextAlloc(groups->context, groups->room * sizeof(RlAction));
	groups->n = 0;
	groups->full = false;
}

/*
 * Returns groups without rows, in the current memory context.  origins are those of the
 * rule's pairs, and must stay.
 */
RowGroups *
rl_groups_make(Rule *rule, const RlOrigin *origins)
{
	RowGroups  *groups = palloc0(sizeof(RowGroups));

	groups->rule = rule;
	groups->origins = origins;
	groups->context = AllocSetContextCreate(CurrentMemoryContext, "rate-limit groups",
											ALLOCSET_DEFAULT_SIZES);
	/* The first block has room for the two StringInfos of three pairs, so that most rows need no other. */
	groups->row_context = AllocSetContextCreate(CurrentMemoryContext, "rate-limit row",
												ALLOCSET_DEFAULT_SIZES);
	start(groups);
	return groups;
}

/* Frees the groups and the actions that they have returned. */
void
rl_groups_free(RowGroups *groups)
{
	if (groups->sort != NULL)
		tuplesort_end(groups->sort);
	if (groups->sort_slot != NULL)
		ExecDropSingleTupleTableSlot(groups->sort_slot);
	if (groups->merged != NULL)
	{
		tuplestore_end(groups->merged);
		ExecDropSingleTupleTableSlot(groups->merged_slot);
	}
	MemoryContextDelete(groups->row_context);
	MemoryContextDelete(groups->context);
	pfree(groups);
}

/* Adds a group with a quota of 0; copies the id. */
static RlAction *
add_group(RowGroups *groups, GroupId *id)
{
	RlAction   *action;
	int			pair;

	if (groups->n == groups->room)
	{
		groups->room *= 4;
		groups->actions = repalloc(groups->actions, groups->room * sizeof(RlAction));
	}
	action = &groups->actions[groups->n++];
	id->data = memcpy(MemoryContextAlloc(groups->context, id->len), id->data, id->len);
	action->key = (RlKey) {id->data, strlen(id->data)};
	pair = id->data[action->key.len + 1];
	groups->full = groups->n == MAX_GROUPS ||
		MemoryContextMemAllocated(groups->context, true) +
		(groups->rule->calls ? groups->n * sizeof(RlLimits) : 0) >
		get_hash_memory_limit();
	*action = (RlAction) {
		.key = action->key,.limits = groups->rule->pairs[pair].limits,.timed = true,
		.origin = &groups->origins[pair]
	};
	return action;
}

/* Returns a copy of limits of a group in memory, which may be unaligned. */
static RlLimits *
copy_limits(RowGroups *groups, const void *limits, Size size)
{
	return memcpy(MemoryContextAlloc(groups->context, size), limits, size);
}

/*
 * Putting aside
 */

/* Returns a slot for the first n columns of a group that is put aside. */
static TupleTableSlot *
make_slot(int n, const TupleTableSlotOps *ops)
{
	TupleDesc	desc = CreateTemplateTupleDesc(n);

	TupleDescInitEntry(desc, 1, "id", BYTEAOID, -1, 0);
	TupleDescInitEntry(desc, 2, "quota", INT8OID, -1, 0);
	if (n == MAX_COLUMNS)
		TupleDescInitEntry(desc, 3, "limits", BYTEAOID, -1, 0);
	TupleDescFinalize(desc);
	return MakeSingleTupleTableSlot(desc, ops);
}

/* Reads the id, in the slot's memory, and the quota. */
static int64
read_slot(TupleTableSlot *slot, GroupId *id)
{
	bool		isnull;
	bytea	   *data = DatumGetByteaPP(slot_getattr(slot, 1, &isnull));

	id->data = VARDATA_ANY(data);
	id->len = VARSIZE_ANY_EXHDR(data);
	return DatumGetInt64(slot_getattr(slot, 2, &isnull));
}

/* Moves the groups from memory to the sort, which brings the quotas of each group together. */
static void
put_aside(RowGroups *groups)
{
	TupleTableSlot *slot = make_slot(2, &TTSOpsVirtual);
	HASH_SEQ_STATUS seq;
	const GroupEntry *entry;

	if (groups->sort == NULL)
	{
		AttrNumber	column = 1;
		Oid			less = ByteaLessOperator;
		Oid			collation = InvalidOid;
		bool		nulls_first = false;

		groups->sort = tuplesort_begin_heap(slot->tts_tupleDescriptor, 1, &column, &less, &collation,
											&nulls_first, work_mem, NULL, TUPLESORT_NONE);
		groups->sort_slot = make_slot(2, &TTSOpsMinimalTuple);
	}
	hash_seq_init(&seq, groups->by_id);
	while ((entry = hash_seq_search(&seq)) != NULL)
	{
		ExecClearTuple(slot);
		slot->tts_values[0] = PointerGetDatum(cstring_to_text_with_len(entry->id.data, entry->id.len));
		slot->tts_values[1] = Int64GetDatum(groups->actions[entry->i].quota);
		slot->tts_isnull[0] = slot->tts_isnull[1] = false;
		ExecStoreVirtualTuple(slot);
		tuplesort_puttupleslot(groups->sort, slot);
		pfree(DatumGetPointer(slot->tts_values[0]));
	}
	ExecDropSingleTupleTableSlot(slot);
	start(groups);
}

/*
 * Rows
 */

/* Returns the id of a row's group by a pair, in the memory of the row. */
static GroupId
row_id(RowGroups *groups, int i, TupleTableSlot *row)
{
	MemoryContext old = MemoryContextSwitchTo(groups->row_context);
	Pair	   *pair = &groups->rule->pairs[i];
	RlKey		key = rl_rule_key(&groups->origins[i], groups->rule, pair, row);
	NullableDatum values[FUNC_MAX_ARGS];
	StringInfoData id;

	initStringInfo(&id);
	appendBinaryStringInfo(&id, key.data, key.len);
	appendStringInfoChar(&id, '\0');
	appendStringInfoChar(&id, i);
	if (pair->call != NULL)
	{
		rl_call_read(pair->call, row, values);
		rl_call_append(pair->call, values, &id);
	}
	MemoryContextSwitchTo(old);
	return (GroupId) {id.data, id.len};
}

/*
 * Adds a row's quota to its group of each pair.  Raises an error if its key or its quota
 * is not valid, or the group's sum is out of range.
 */
void
rl_groups_add(RowGroups *groups, TupleTableSlot *row)
{
	int64		quota = rl_rule_quota(groups->origins, groups->rule, row);

	for (int i = 0; i < groups->rule->npairs; i++)
	{
		GroupId		id = row_id(groups, i, row);
		GroupEntry *entry;
		bool		found;
		RlAction   *action;

		if (groups->full)
			put_aside(groups);
		entry = hash_search(groups->by_id, &id, HASH_ENTER, &found);
		if (!found)
		{
			entry->i = groups->n;
			add_group(groups, &entry->id);
		}
		action = &groups->actions[entry->i];
		/* Neither exceeds RL_MAX_COUNT, so that the sum does not overflow. */
		action->quota = rl_rule_check_quota(groups->origins, groups->rule, action->quota + quota);
	}
	MemoryContextReset(groups->row_context);
}

/*
 * Limits
 */

/*
 * Returns the limits of a group, by the end of its id: those of its pair, or in "room" those
 * that the pair's function returns for the arguments.
 */
static const RlLimits *
group_limits(RowGroups *groups, const char *id_end, RlLimits *room)
{
	int			i = *id_end;
	Pair	   *pair = &groups->rule->pairs[i];
	const RlLimits *limits = pair->limits;
	MemoryContext old = MemoryContextSwitchTo(groups->row_context);
	NullableDatum values[FUNC_MAX_ARGS];

	if (pair->call != NULL)
	{
		CHECK_FOR_INTERRUPTS();
		rl_call_restore(pair->call, id_end + 1, values);
		rl_rule_limits(&groups->origins[i], groups->rule, pair, values, room);
		limits = room;
		MemoryContextReset(groups->row_context);
	}
	MemoryContextSwitchTo(old);
	groups->blocked |= limits->kind == RL_BLOCKED;
	return limits;
}

/* Adds a group to the merged groups. */
static void
put_merged(RowGroups *groups, const GroupId *id, int64 quota)
{
	const char *pair = id->data + strlen(id->data) + 1;
	RlLimits	room;
	const RlLimits *limits = group_limits(groups, pair, &room);
	Datum		values[MAX_COLUMNS] = {0};
	bool		nulls[MAX_COLUMNS] = {false, false, limits != &room};
	MemoryContext old = MemoryContextSwitchTo(groups->row_context);

	/* The arguments are no longer needed. */
	values[0] = PointerGetDatum(cstring_to_text_with_len(id->data, pair + 1 - id->data));
	values[1] = Int64GetDatum(quota);
	if (limits == &room)
		values[2] = PointerGetDatum(cstring_to_text_with_len((char *) &room, rl_limits_size(&room)));
	MemoryContextSwitchTo(old);
	tuplestore_putvalues(groups->merged, groups->merged_slot->tts_tupleDescriptor, values, nulls);
	MemoryContextReset(groups->row_context);
}

/* Sorts the groups that were put aside, and merges those of one id. */
static void
merge(RowGroups *groups)
{
	TupleTableSlot *slot = groups->sort_slot;
	StringInfoData id;
	bool		more;

	initStringInfo(&id);
	groups->merged = tuplestore_begin_heap(false, false, work_mem);
	groups->merged_slot = make_slot(MAX_COLUMNS, &TTSOpsMinimalTuple);
	tuplesort_performsort(groups->sort);
	more = tuplesort_gettupleslot(groups->sort, true, false, slot, NULL);
	while (more)
	{
		GroupId		next;
		int64		sum = read_slot(slot, &next);

		CHECK_FOR_INTERRUPTS();
		resetStringInfo(&id);
		appendBinaryStringInfo(&id, next.data, next.len);
		while ((more = tuplesort_gettupleslot(groups->sort, true, false, slot, NULL)))
		{
			int64		quota = read_slot(slot, &next);

			if (!same_id(&next, &(GroupId) {id.data, id.len}))
				break;
			sum = rl_rule_check_quota(groups->origins, groups->rule, sum + quota);
		}
		put_merged(groups, &(GroupId) {id.data, id.len}, sum);
	}
	pfree(id.data);
}

/*
 * Calls the function of each group that has one, after the last row was added.  Returns
 * true if the limits of a group are blocked.  Raises an error if a function fails, or a
 * group's sum is out of range.
 */
bool
rl_groups_finish(RowGroups *groups)
{
	if (groups->sort != NULL)
	{
		put_aside(groups);
		merge(groups);
		return groups->blocked;
	}
	for (int i = 0; i < groups->n; i++)
	{
		RlAction   *action = &groups->actions[i];
		RlLimits	room;
		const RlLimits *limits = group_limits(groups, action->key.data + action->key.len + 1, &room);

		if (limits == &room)
			action->limits = copy_limits(groups, &room, rl_limits_size(&room));
	}
	return groups->blocked;
}

/* Returns false if rl_groups_next has returned all groups. */
bool
rl_groups_left(const RowGroups *groups)
{
	return groups->merged != NULL || !groups->returned;
}

/*
 * Returns the number of the next groups, which may be 0, and sets *actions to them.  The
 * actions are valid until the next call.
 */
int
rl_groups_next(RowGroups *groups, RlAction **actions)
{
	groups->returned = true;
	if (groups->merged == NULL)
	{
		*actions = groups->actions;
		return groups->n;
	}
	start(groups);
	while (groups->n < RL_MAX_MANY && !groups->full &&
		   tuplestore_gettupleslot(groups->merged, true, false, groups->merged_slot))
	{
		GroupId		id;
		int64		quota = read_slot(groups->merged_slot, &id);
		RlAction   *action = add_group(groups, &id);
		bool		isnull;
		Datum		limits = slot_getattr(groups->merged_slot, 3, &isnull);

		action->quota = quota;
		if (!isnull)
			action->limits = copy_limits(groups, VARDATA_ANY(DatumGetPointer(limits)),
										 VARSIZE_ANY_EXHDR(DatumGetPointer(limits)));
	}
	*actions = groups->actions;
	return groups->n;
}
