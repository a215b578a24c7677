/*
 * check_triggers.c
 *		rl_check_triggers(): finds mistakes in a trigger's arguments when it is created, or
 *		when its table is changed.
 *
 * The event trigger ratelimit_check_triggers calls it after each command of the database
 * that can create triggers or change tables.  So it needs no privilege of the role, runs
 * no code of a user, and waits for no lock: the command has locked the tables that it has
 * changed, and only these are opened.
 */
#include "postgres.h"

#include "access/relation.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/objectaddress.h"
#include "catalog/pg_class.h"
#include "catalog/pg_inherits.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_trigger.h"
#include "commands/event_trigger.h"
#include "commands/trigger.h"
#include "executor/executor.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "nodes/execnodes.h"
#include "storage/lock.h"
#include "tcop/cmdtag.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/resowner.h"
#include "utils/syscache.h"
#include "utils/tuplestore.h"

#include "error.h"
#include "sql/trigger_rule.h"

/* What is checked: triggers of rl_enforce on a table. */
typedef struct Check
{
	Oid			table;
	Oid			trigger;		/* only this one, or 0 */
	Oid			enforce;		/* the function rl_enforce() */
	int			level;			/* of the reports */
	bool		clones;			/* also triggers that are those of a parent */
} Check;

/* Returns true if this transaction has locked the table. */
static bool
is_locked(Oid table)
{
	LOCKTAG		tag;

	SET_LOCKTAG_RELATION(tag, MyDatabaseId, table);
#if PG_VERSION_NUM >= 170000
	return LockHeldByMe(&tag, AccessShareLock, true);
#else
	for (LOCKMODE mode = AccessShareLock; mode <= MaxLockMode; mode++)
		if (LockHeldByMe(&tag, mode))
			return true;
	return false;
#endif
}

/* Returns true if the table has or had triggers. */
static bool
has_triggers(Oid table)
{
	HeapTuple	row = SearchSysCache1(RELOID, ObjectIdGetDatum(table));
	bool		has = HeapTupleIsValid(row) && ((Form_pg_class) GETSTRUCT(row))->relhastriggers;

	if (HeapTupleIsValid(row))
		ReleaseSysCache(row);
	return has;
}

/* Reports what is wrong with a trigger: as an error that a write would get, or as a warning. */
static void
report_problem(int level, Relation rel, const Trigger *trigger, const RlError *error)
{
	bool		missing = error->sqlstate == ERRCODE_UNDEFINED_FUNCTION ||
		error->sqlstate == ERRCODE_UNDEFINED_SCHEMA;

	if (level == ERROR)
		ereport(ERROR,
				(errcode(error->sqlstate),
				 errmsg_internal("%s", error->message),
				 error->detail[0] ? errdetail_internal("%s", error->detail) : 0,
				 missing ? errhint("Create the function before the trigger, or set check_function_bodies to off.") :
				 error->hint != NULL ? errhint("%s", error->hint) : 0,
				 errcontext("rate-limit trigger \"%s\" on table \"%s\"", trigger->tgname,
							RelationGetRelationName(rel)),
				 errtableconstraint(rel, trigger->tgname)));
	ereport(WARNING,
			(errcode(error->sqlstate),
			 errmsg("rate-limit trigger \"%s\" makes writes to table \"%s\" fail", trigger->tgname,
					RelationGetRelationName(rel)),
			 errdetail_internal("%s", rl_error_text(error)),
			 errtableconstraint(rel, trigger->tgname)));
}

/* Checks the triggers of a table. */
static void
check_table(const Check *check)
{
	Relation	rel = try_relation_open(check->table, NoLock);
	const TriggerDesc *triggers = rel != NULL && rel->trigdesc != NULL ? CopyTriggerDesc(rel->trigdesc) :
		NULL;

	for (int i = 0; triggers != NULL && i < triggers->numtriggers; i++)
	{
		const Trigger *trigger = &triggers->triggers[i];
		bool		valid;
		RlError		error;

		if (trigger->tgfoid != check->enforce || (check->trigger != 0 && trigger->tgoid != check->trigger) ||
			(trigger->tgisclone && !check->clones))
			continue;
		MemoryContextDelete(rl_rule_make(rel, trigger, &valid, &error)->context);
		if (!valid)
			report_problem(check->level, rel, trigger, &error);
	}
	if (rel != NULL)
		relation_close(rel, NoLock);
}

/* Checks the triggers of a table, and raises no error except at a cancel. */
static void
check_quietly(const Check *check)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		check_table(check);
		ReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(context);
		CurrentResourceOwner = owner;
	}
	PG_CATCH();
	{
		ErrorData  *error;

		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(context);
		CurrentResourceOwner = owner;
		if (error->sqlerrcode == ERRCODE_QUERY_CANCELED)
			ReThrowError(error);
		ereport(WARNING,
				(errcode(error->sqlerrcode),
				 errmsg("could not check the rate-limit triggers of table \"%s\"",
						get_rel_name(check->table)),
				 errdetail_internal("%s", error->message)));
	}
	PG_END_TRY();
}

/* Checks a trigger that was created. */
static void
check_created(Oid trigger, Oid enforce)
{
	Relation	catalog = table_open(TriggerRelationId, AccessShareLock);
	HeapTuple	row = get_catalog_object_by_oid(catalog, Anum_pg_trigger_oid, trigger);
	Check		check = {
		.trigger = trigger,.enforce = enforce,.level = check_function_bodies ? ERROR : WARNING,.clones = true
	};

	table_close(catalog, AccessShareLock);
	if (row == NULL || ((Form_pg_trigger) GETSTRUCT(row))->tgfoid != enforce)
		return;
	check.table = ((Form_pg_trigger) GETSTRUCT(row))->tgrelid;
	if (check.level == ERROR)
		check_table(&check);
	else
		check_quietly(&check);
}

/* Checks the triggers of a table that was altered, and of its partitions. */
static void
check_altered(Oid table, Oid enforce)
{
	ListCell   *cell;

	foreach(cell, find_all_inheritors(table, NoLock, NULL))
	{
		Check		check = {
			.table = lfirst_oid(cell),.enforce = enforce,.level = WARNING,.clones = lfirst_oid(cell) == table
		};

		CHECK_FOR_INTERRUPTS();
		if (is_locked(check.table) && has_triggers(check.table))
			check_quietly(&check);
	}
}

/* Returns the rows of pg_event_trigger_ddl_commands(): what the command has created or changed. */
static ReturnSetInfo *
command_objects(void)
{
	ReturnSetInfo *result = makeNode(ReturnSetInfo);
	FmgrInfo	function;
	LOCAL_FCINFO(call, 0);

	result->econtext = CreateStandaloneExprContext();
	result->allowedModes = SFRM_Materialize;
	fmgr_info(F_PG_EVENT_TRIGGER_DDL_COMMANDS, &function);
	InitFunctionCallInfoData(*call, &function, 0, InvalidOid, NULL, (Node *) result);
	(void) FunctionCallInvoke(call);
	return result;
}

PG_FUNCTION_INFO_V1(rl_check_triggers);
Datum
rl_check_triggers(PG_FUNCTION_ARGS)
{
	Oid			enforce;
	ReturnSetInfo *objects;
	TupleTableSlot *slot;

	if (!CALLED_AS_EVENT_TRIGGER(fcinfo))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_EVENT_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("rl_check_triggers can only be called as an event trigger")));
	enforce = GetSysCacheOid3(PROCNAMEARGSNSP, Anum_pg_proc_oid, CStringGetDatum("rl_enforce"),
							  PointerGetDatum(buildoidvector(NULL, 0)),
							  ObjectIdGetDatum(get_func_namespace(fcinfo->flinfo->fn_oid)));
	objects = command_objects();
	slot = MakeSingleTupleTableSlot(objects->setDesc, &TTSOpsMinimalTuple);
	while (OidIsValid(enforce) && tuplestore_gettupleslot(objects->setResult, true, false, slot))
	{
		bool		isnull;
		Oid			catalog = DatumGetObjectId(slot_getattr(slot, 1, &isnull));
		Oid			object = DatumGetObjectId(slot_getattr(slot, 2, &isnull));

		if (isnull)
			continue;
		if (catalog == TriggerRelationId)
			check_created(object, enforce);
		else if (catalog == RelationRelationId &&
				 ((EventTriggerData *) fcinfo->context)->tag == CMDTAG_ALTER_TABLE)
			check_altered(object, enforce);
	}
	ExecDropSingleTupleTableSlot(slot);
	tuplestore_end(objects->setResult);
	FreeExprContext(objects->econtext, true);
	PG_RETURN_NULL();
}
