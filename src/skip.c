/*
 * skip.c
 *		Rows that on_deny=skip must not leave out, because data would be lost.
 *
 * An UPDATE that moves a row to another partition deletes the row, and then fires
 * the BEFORE INSERT triggers of the other partition.  A trigger cannot see that it
 * fires for an UPDATE.  So a hook notes the queries that can move rows: at their
 * start, and by the memory context in which their triggers run.  Other queries only
 * compare the type of the command.
 */
#include "postgres.h"

#include "access/xact.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "replication/logicalworker.h"
#include "tcop/pquery.h"
#include "utils/memutils.h"
#include "utils/portal.h"
#include "utils/rel.h"

#include "skip.h"

static RlQuery *queries = NULL; /* those that were noted, the innermost first */
static ExecutorStart_hook_type next_start = NULL;
static TimestampTz loaded = 0;	/* start of the statement that loaded this library; 0: none */

/* Returns true if the plan updates rows of a table that has partitions. */
static bool
plan_moves_rows(const Plan *plan)
{
	const ModifyTable *modify = (const ModifyTable *) plan;
	ListCell   *actions;
	ListCell   *action;

	if (plan == NULL || !IsA(plan, ModifyTable) || modify->rootRelation == 0)
		return false;
	foreach(actions, modify->mergeActionLists)
		foreach(action, (List *) lfirst(actions))
			if (lfirst_node(MergeAction, action)->commandType == CMD_UPDATE)
				return true;
	return modify->operation == CMD_UPDATE;
}

static bool
statement_moves_rows(const PlannedStmt *statement)
{
	ListCell   *cell;

	if (statement->commandType != CMD_UPDATE && statement->commandType != CMD_MERGE && !statement->hasModifyingCTE)
		return false;
	foreach(cell, statement->subplans)
		if (plan_moves_rows(lfirst(cell)))
			return true;
	return plan_moves_rows(statement->planTree);
}

/* Forgets a query, whose context is being deleted. */
static void
forget_query(void *arg)
{
	RlQuery   **link = &queries;

	while (*link != arg)
		link = &(*link)->next;
	*link = (*link)->next;
}

/* Returns the query with this context, or NULL if it was not noted; with "note" notes it then. */
RlQuery *
rl_query(MemoryContext context, bool note)
{
	static uint64 last = 0;
	TimestampTz transaction = GetCurrentTransactionStartTimestamp();
	RlQuery    *query = queries;

	while (query != NULL && query->context != context)
		query = query->next;
	/* The deferred triggers of a COMMIT in a procedure run in the procedure's context. */
	if (query != NULL && query->transaction != transaction)
	{
		query->transaction = transaction;
		query->number = ++last;
	}
	if (query != NULL || !note || context == NULL)
		return query;
	query = MemoryContextAlloc(context, sizeof(RlQuery));
	*query = (RlQuery) {.context = context,.transaction = transaction,.number = ++last,.next = queries,
		.end = {.func = forget_query,.arg = query}};
	MemoryContextRegisterResetCallback(context, &query->end);
	return queries = query;
}

static void
note_mover(QueryDesc *query, int eflags)
{
	if (next_start)
		next_start(query, eflags);
	else
		standard_ExecutorStart(query, eflags);
	if (statement_moves_rows(query->plannedstmt))
		rl_query(query->estate->es_query_cxt, true)->moves_rows = true;
}

/* Installs the hook. */
void
rl_skip_init(void)
{
	/* Queries that are running now are not noted. */
	if (!process_shared_preload_libraries_in_progress)
		loaded = GetCurrentStatementStartTimestamp();
	next_start = ExecutorStart_hook;
	ExecutorStart_hook = note_mover;
}

/*
 * Returns true if the query that was started before this library was loaded, and has
 * this context, can move rows.  Only the client's own statement can be examined.
 */
static bool
unnoted_moves_rows(MemoryContext query)
{
	ListCell   *cell;

	if (loaded == 0 || loaded != GetCurrentStatementStartTimestamp())
		return false;
	if (ActivePortal == NULL || MemoryContextGetParent(query) != ActivePortal->portalContext)
		return true;
	foreach(cell, ActivePortal->stmts)
	{
		const PlannedStmt *statement = lfirst_node(PlannedStmt, cell);

		if (statement->utilityStmt ? !IsA(statement->utilityStmt, CopyStmt) : statement_moves_rows(statement))
			return true;
	}
	return false;
}

/* Returns true if the row that is inserted is perhaps moved from another partition. */
static bool
may_be_moved(const TriggerData *data)
{
	/* A BEFORE trigger is called in a context for each row, below that of the query. */
	MemoryContext context = MemoryContextGetParent(CurrentMemoryContext);
	const RlQuery *query = rl_query(context, false);

	return data->tg_relation->rd_rel->relispartition &&
		((query != NULL && query->moves_rows) || unnoted_moves_rows(context));
}

/*
 * Returns NULL if the row of a BEFORE trigger can be left out, otherwise the reason
 * against it, as a sentence.  It must be called in the memory context in which the
 * trigger was called.
 */
const char *
rl_skip_forbidden(const TriggerData *data)
{
	if (IsLogicalWorker())
		return "A row of a subscription is not left out.";
	if (TRIGGER_FIRED_BY_INSERT(data->tg_event))
		return may_be_moved(data) ? "A row that may be moved from another partition is not left out." : NULL;
	return InNoForceRLSOperation() ? "A row is not left out by a foreign key's query." : NULL;
}
