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
#include "catalog/pg_constraint.h"
#include "catalog/pg_depend.h"
#include "catalog/pg_index.h"
#include "catalog/pg_inherits.h"
#include "catalog/pg_operator.h"
#include "catalog/pg_rewrite.h"
#include "catalog/pg_trigger.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "nodes/nodeFuncs.h"
#include "nodes/parsenodes.h"
#include "optimizer/optimizer.h"
#include "parser/parse_relation.h"
#include "parser/parsetree.h"
#include "rewrite/rewriteHandler.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/lsyscache.h"
#include "utils/syscache.h"
#include "utils/typcache.h"

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

/*
 * Returns the name of a view WITH CHECK OPTION that writes to the relation, perhaps by other views, or NULL.
 */
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

/*
 * What makes a limit useless
 */

/* Returns true if an index makes rows unique by these columns. */
static bool
is_unique(Oid index, const Bitmapset *columns)
{
	HeapTuple	row = SearchSysCache1(INDEXRELID, ObjectIdGetDatum(index));
	Form_pg_index form;
	bool		unique;

	if (!HeapTupleIsValid(row))
		return false;
	form = (Form_pg_index) GETSTRUCT(row);
	unique = form->indisunique && form->indisvalid && heap_attisnull(row, Anum_pg_index_indpred, NULL);
	/* The number of an expression is 0. */
	for (int i = 0; i < form->indnkeyatts; i++)
		unique &= form->indkey.values[i] > 0 && bms_is_member(form->indkey.values[i], columns);
	ReleaseSysCache(row);
	return unique;
}

/* Returns true if no two rows have the same key. */
static bool
key_is_unique(Relation rel, const Pair *pair)
{
	Bitmapset  *columns = NULL;
	ListCell   *cell;

	for (const Piece *piece = pair->pieces; piece->value.type != InvalidOid; piece++)
		if (piece->attnum > 0 && !piece->value.network)
			columns = bms_add_member(columns, piece->attnum);
	foreach(cell, RelationGetIndexList(rel))
		if (columns != NULL && is_unique(lfirst_oid(cell), columns))
			return true;
	return false;
}

/* Replaces a value of a domain, and a column of one, by the column with its base type. */
static Node *
replace_value(Node *node, void *var)
{
	if (node == NULL)
		return NULL;
	if (IsA(node, CoerceToDomainValue) ||
		(IsA(node, Var) && ((Var *) node)->varattno == ((Var *) var)->varattno))
		return copyObject((Node *) var);
	if (IsA(node, RelabelType))
	{
		Node	   *arg = replace_value((Node *) ((RelabelType *) node)->arg, var);

		if (equal(arg, var))
			return arg;
	}
	return expression_tree_mutator(node, replace_value, var);
}

/* Returns the type over which a domain is made. */
static Oid
domain_base(Oid domain)
{
	HeapTuple	row = SearchSysCache1(TYPEOID, ObjectIdGetDatum(domain));
	Oid			base = HeapTupleIsValid(row) ? ((Form_pg_type) GETSTRUCT(row))->typbasetype : InvalidOid;

	if (HeapTupleIsValid(row))
		ReleaseSysCache(row);
	return base;
}

/*
 * Returns the CHECK constraints of a column's domains, and of the table.  New rows are checked by those NOT
 * VALID too.
 */
static List *
checks_of(Relation rel, Oid type)
{
	const TupleConstr *constraints = RelationGetDescr(rel)->constr;
	Relation	catalog = table_open(ConstraintRelationId, AccessShareLock);
	List	   *checks = NIL;

	for (int i = 0; constraints != NULL && i < constraints->num_check; i++)
		checks = lappend(checks, stringToNode(constraints->check[i].ccbin));
	for (; get_typtype(type) == TYPTYPE_DOMAIN; type = domain_base(type))
	{
		ScanKeyData key;
		SysScanDesc scan;
		HeapTuple	row;

		ScanKeyInit(&key, Anum_pg_constraint_contypid, BTEqualStrategyNumber, F_OIDEQ,
					ObjectIdGetDatum(type));
		scan = systable_beginscan(catalog, ConstraintTypidIndexId, true, NULL, 1, &key);
		while (HeapTupleIsValid(row = systable_getnext(scan)))
		{
			bool		isnull;
			Datum		check =
				heap_getattr(row, Anum_pg_constraint_conbin, RelationGetDescr(catalog), &isnull);

			if (!isnull)
				checks = lappend(checks, stringToNode(TextDatumGetCString(check)));
		}
		systable_endscan(scan);
	}
	table_close(catalog, AccessShareLock);
	return checks;
}

/* Returns true if a row can have a quota of 0: no constraint on its column alone forbids it. */
static bool
may_cost_nothing(Relation rel, const Rule *rule)
{
	Oid			type = rule->quota_type;
	Var		   *column;
	Node	   *zero;
	List	   *checks;

	if (rule->quota_attnum == 0)
		return rule->quota == 0;
	column = makeVar(1, rule->quota_attnum, type, -1, InvalidOid, 0);
	zero = (Node *) make_opclause(lookup_type_cache(type, TYPECACHE_EQ_OPR)->eq_opr, BOOLOID, false,
								  (Expr *) column,
								  (Expr *) makeConst(type, -1, InvalidOid, get_typlen(type),
													 type == INT8OID ? Int64GetDatum(0) :
													 Int32GetDatum(0), false, true),
								  InvalidOid, InvalidOid);
	checks = (List *) replace_value((Node *) checks_of(rel, attnumTypeId(rel, rule->quota_attnum)), column);
	/* Constants are not folded, because that could run functions of users. */
	checks = make_ands_implicit(make_ands_explicit(checks));
	return !predicate_refuted_by(list_make1(zero), checks, false);
}

/*
 * Returns the signature of a function of the rule that is SECURITY DEFINER and has no search_path of its own,
 * or NULL.
 */
static const char *
unsafe_function(const Rule *rule)
{
	for (int i = 0; i < rule->npairs; i++)
	{
		const Piece *piece = rule->pairs[i].pieces;

		if (rule->pairs[i].call && rule->pairs[i].call->unsafe)
			return rule->pairs[i].call->signature;
		for (; piece->value.type != InvalidOid; piece++)
			if (piece->call && piece->call->unsafe)
				return piece->call->signature;
	}
	return NULL;
}

/* Appends the warnings about limits that do less than they seem to. */
static void
warn_of_limits(StringInfo text, Relation rel, const Trigger *trigger, const Rule *rule)
{
	const char *name = unsafe_function(rule);

	for (int i = 0; i < rule->npairs; i++)
	{
		const Pair *pair = &rule->pairs[i];

		if (bms_is_empty(pair->columns))
			warn(text, psprintf("key \"%s\" has no column, so all rows share one limit", pair->template));
		else if (!TRIGGER_FOR_UPDATE(trigger->tgtype) && key_is_unique(rel, pair))
			warn(text,
				 psprintf("key \"%s\" is unique, so no row meets the limit of another row", pair->template));
	}
	if (may_cost_nothing(rel, rule))
		warn(text, "a row with quota 0 passes without being counted; a CHECK constraint can forbid it");
	if (name != NULL)
		warn(text, psprintf("function %s is SECURITY DEFINER without SET search_path", name));
	if (rel->rd_rel->relkind == RELKIND_RELATION &&
		find_inheritance_children(RelationGetRelid(rel), NoLock) != NIL)
		warn(text, "rows of tables that inherit from this one are not charged");
}

/* Returns the warnings about trigger n of the table, a line each, or NULL. */
static const char *
warnings_of(Relation rel, const TriggerDesc *triggers, int n, const Rule *rule, bool valid)
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
			warn(&text,
				 psprintf("trigger \"%s\" fires after this one and can change the columns that it has read; "
								 "rename one of them, or use an AFTER trigger", name));
	}
	if (valid)
		warn_of_limits(&text, rel, trigger, rule);
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
	values[3] =
		DirectFunctionCall2(pg_get_triggerdef_ext, ObjectIdGetDatum(trigger->tgoid), BoolGetDatum(true));
	nulls[3] = false;
	rl_set_text(values, nulls, 4, valid ? NULL : rl_error_text(&error));
	rl_set_text(values, nulls, 5, warnings_of(rel, triggers, n, rule, valid));
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
