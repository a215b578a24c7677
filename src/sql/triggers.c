/*
 * triggers.c
 *		rl_trigger_rule(): the rule of a trigger and its dangers, for the view rl_triggers.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/relation.h"
#include "access/table.h"
#include "catalog/objectaddress.h"
#include "catalog/partition.h"
#include "catalog/pg_class.h"
#include "catalog/pg_depend.h"
#include "catalog/pg_rewrite.h"
#include "catalog/pg_trigger.h"
#include "commands/trigger.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "optimizer/optimizer.h"
#include "parser/parsetree.h"
#include "rewrite/rewriteHandler.h"
#include "storage/lmgr.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/syscache.h"

#include "algorithm/limits.h"
#include "error.h"
#include "sql/arguments.h"
#include "sql/trigger_rule.h"

static void
warn(StringInfo text, const char *line)
{
	appendStringInfo(text, "%s%s", text->len > 0 ? "\n" : "", line);
}

/* Returns a row of a catalog as it is now, or NULL if there is none. */
static HeapTuple
catalog_row(Oid catalog, AttrNumber oid_column, Oid oid)
{
	Relation	rel = table_open(catalog, AccessShareLock);
	HeapTuple	row = get_catalog_object_by_oid(rel, oid_column, oid);

	table_close(rel, AccessShareLock);
	return row;
}

/*
 * What rejects a row after its BEFORE triggers, depending on the user
 */

static bool
has_row_security(Oid table)
{
	HeapTuple	tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(table));
	bool		secured;

	if (!HeapTupleIsValid(tuple))
		return false;
	secured = ((Form_pg_class) GETSTRUCT(tuple))->relrowsecurity;
	ReleaseSysCache(tuple);
	return secured;
}

/* Returns the views whose query names the relation. */
static List *
views_of(Oid relation)
{
	Relation	catalog = table_open(DependRelationId, AccessShareLock);
	List	   *views = NIL;
	ScanKeyData keys[2];
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&keys[0], Anum_pg_depend_refclassid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(RelationRelationId));
	ScanKeyInit(&keys[1], Anum_pg_depend_refobjid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(relation));
	scan = systable_beginscan(catalog, DependReferenceIndexId, true, NULL, 2, keys);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Form_pg_depend depend = (Form_pg_depend) GETSTRUCT(tuple);
		HeapTuple	rule = depend->classid != RewriteRelationId ? NULL :
			catalog_row(RewriteRelationId, Anum_pg_rewrite_oid, depend->objid);

		if (rule != NULL)
			views = list_append_unique_oid(views, ((Form_pg_rewrite) GETSTRUCT(rule))->ev_class);
	}
	systable_endscan(scan);
	table_close(catalog, AccessShareLock);
	return views;
}

/* Returns true if a write to the view is a write to the relation. */
static bool
writes_to(Relation view, Oid relation)
{
	Query	   *query = get_view_query(view);
	List	   *from = query->jointree->fromlist;
	RangeTblEntry *entry;

	if (list_length(from) != 1 || !IsA(linitial(from), RangeTblRef))
		return false;
	entry = rt_fetch(linitial_node(RangeTblRef, from)->rtindex, query->rtable);
	return entry->rtekind == RTE_RELATION && entry->relid == relation;
}

/* Returns the name of a view WITH CHECK OPTION that writes to the relation, perhaps by other views, or NULL. */
static const char *
checked_view(Oid relation)
{
	const char *found = NULL;
	ListCell   *cell;

	check_stack_depth();
	foreach(cell, views_of(relation))
	{
		Relation	view = NULL;

		/* A view that is being altered is left out: rl_triggers does not wait. */
		if (lfirst_oid(cell) != relation && ConditionalLockRelationOid(lfirst_oid(cell), AccessShareLock))
			view = try_relation_open(lfirst_oid(cell), NoLock);
		if (view == NULL)
			continue;
		if (view->rd_rel->relkind == RELKIND_VIEW && writes_to(view, relation))
			found = RelationHasCheckOption(view) ? pstrdup(RelationGetRelationName(view)) :
				checked_view(RelationGetRelid(view));
		relation_close(view, AccessShareLock);
		if (found != NULL)
			break;
	}
	return found;
}

/* Returns the name of a CHECK constraint that depends on more than the row, such as the user, or NULL. */
static const char *
mutable_check(Relation rel)
{
	const TupleConstr *constraints = RelationGetDescr(rel)->constr;

	for (int i = 0; constraints != NULL && i < constraints->num_check; i++)
		if (contain_mutable_functions(stringToNode(constraints->check[i].ccbin)))
			return constraints->check[i].ccname;
	return NULL;
}

/*
 * Returns what rejects a row after its BEFORE triggers, or NULL.  A row that is
 * inserted in a partitioned table is routed to a partition before the other is checked.
 */
static const char *
late_check(Relation rel)
{
	List	   *tables = list_make1_oid(RelationGetRelid(rel));
	const char *name = mutable_check(rel);
	ListCell   *cell;

	if (rel->rd_rel->relispartition)
		tables = list_concat(tables, get_partition_ancestors(RelationGetRelid(rel)));
	foreach(cell, tables)
		if (has_row_security(lfirst_oid(cell)))
			return "row security";
	if (name != NULL)
		return psprintf("the constraint \"%s\"", name);
	foreach(cell, tables)
		if ((name = checked_view(lfirst_oid(cell))) != NULL)
			return psprintf("the view \"%s\" WITH CHECK OPTION", name);
	return NULL;
}

/* Returns true if a key, the quota, or an argument of a function for limits comes from a column. */
static bool
reads_columns(const Rule *rule)
{
	for (int i = 0; i < rule->npairs; i++)
		if (!bms_is_empty(rule->pairs[i].columns) || (rule->pairs[i].call && rule->pairs[i].call->nargs > 0))
			return true;
	return rule->quota_attnum != 0;
}

/* Returns the name of a trigger that can change a row after trigger n has read it, or NULL. */
static const char *
later_trigger(const TriggerDesc *triggers, int n)
{
	int16		events = triggers->triggers[n].tgtype & (TRIGGER_TYPE_INSERT | TRIGGER_TYPE_UPDATE);

	/* They are sorted in the order in which they fire. */
	for (int i = n + 1; i < triggers->numtriggers; i++)
	{
		const Trigger *later = &triggers->triggers[i];

		if (TRIGGER_FOR_BEFORE(later->tgtype) && TRIGGER_FOR_ROW(later->tgtype) && (later->tgtype & events) &&
			later->tgenabled != TRIGGER_DISABLED && later->tgfoid != triggers->triggers[n].tgfoid)
			return later->tgname;
	}
	return NULL;
}

/* Returns the warnings about trigger n of the table, a line each, or NULL. */
static const char *
warnings_of(Relation rel, const TriggerDesc *triggers, int n, const Rule *rule)
{
	const Trigger *trigger = &triggers->triggers[n];
	const char *name;
	StringInfoData text;

	initStringInfo(&text);
	/* A DELETE has no such check, and its row cannot be changed. */
	if (TRIGGER_FOR_BEFORE(trigger->tgtype) && TRIGGER_FOR_ROW(trigger->tgtype) &&
		(TRIGGER_FOR_INSERT(trigger->tgtype) || TRIGGER_FOR_UPDATE(trigger->tgtype)))
	{
		if ((name = late_check(rel)) != NULL)
			warn(&text, psprintf("the trigger charges a row before %s checks it, so a user can use up another user's quota; "
								 "an AFTER trigger charges only rows that pass", name));
		if (reads_columns(rule) && (name = later_trigger(triggers, n)) != NULL)
			warn(&text, psprintf("trigger \"%s\" fires after this one and can change the columns that it has read; "
								 "rename one of them, or use an AFTER trigger", name));
	}
#if PG_VERSION_NUM < 180000
	if (rule->calls && trigger->tgdeferrable)
		warn(&text, "if the trigger is deferred, it calls functions as the role that commits");
#endif
	if (trigger->tgenabled == TRIGGER_FIRES_ALWAYS || trigger->tgenabled == TRIGGER_FIRES_ON_REPLICA)
		warn(&text, "the trigger fires for rows of a subscription too: a row that the publisher has charged "
			 "is charged again");
	return text.len > 0 ? text.data : NULL;
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
	values[3] = DirectFunctionCall2(pg_get_triggerdef_ext, ObjectIdGetDatum(trigger->tgoid), BoolGetDatum(true));
	nulls[3] = false;
	rl_set_text(values, nulls, 4, valid ? NULL : rl_error_text(&error));
	rl_set_text(values, nulls, 5, warnings_of(rel, triggers, n, rule));
}

PG_FUNCTION_INFO_V1(rl_trigger_rule);
Datum
rl_trigger_rule(PG_FUNCTION_ARGS)
{
	Oid			oid = PG_GETARG_OID(0);
	HeapTuple	trigger = catalog_row(TriggerRelationId, Anum_pg_trigger_oid, oid);
	Relation	rel = NULL;
	Datum		values[6] = {0};
	bool		nulls[6] = {true, true, true, true, true, true};

	/* The view must not wait for a table that is being altered. */
	if (trigger != NULL)
	{
		Oid			relation = ((Form_pg_trigger) GETSTRUCT(trigger))->tgrelid;

		if (ConditionalLockRelationOid(relation, AccessShareLock))
			rel = try_relation_open(relation, NoLock);
		else
			rl_set_text(values, nulls, 4, "the table is locked");
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
