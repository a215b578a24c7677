/*
 * trigger_call.c
 *		Calls of functions of a row in the arguments of a trigger: schema.function({column}, ...).
 *
 * The parser resolves the function by its name and the types of the columns when
 * the trigger's arguments are parsed.  trigger_rule.c parses them again after
 * any function or schema has changed.
 *
 * As for a column's default, a role that writes needs no privilege on the schema,
 * and EXECUTE on the function.  The executor checks EXECUTE when it prepares the
 * call, which is done once for each role and transaction, and again after a change of catalogs.
 *
 * The function runs as the role that writes.  A search_path of this role would choose the
 * tables and operators of a function that does not qualify them, so it does not apply.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "nodes/nodeFuncs.h"
#include "nodes/value.h"
#include "optimizer/optimizer.h"
#include "parser/parse_collate.h"
#include "parser/parse_func.h"
#include "parser/parse_node.h"
#include "storage/proc.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rls.h"
#include "utils/syscache.h"
#include "utils/varlena.h"

#include "error.h"
#include "sql/rule_column.h"
#include "sql/trigger_call.h"

#if PG_VERSION_NUM < 170000
#define vxid_lxid(proc) ((proc)->lxid)
#else
#define vxid_lxid(proc) ((proc)->vxid.lxid)
#endif

#define SAFE_PATH			"pg_catalog, pg_temp"

/*
 * The state with which a call is run.  Before PostgreSQL 18, a function in SQL keeps in
 * it the plans of its queries, which belong to one role, one transaction and one
 * row_security, and to the catalogs as they are.
 */
typedef struct CallState
{
	bool		row_security;
	ExprState  *expr;
	ExprContext *econtext;
	ParamListInfo params;
} CallState;

static uint64 changes = 0;		/* of catalogs that plans depend on */

/* Lets each call make its state again, because a catalog has changed.  Does not throw. */
void
rl_calls_outdate(void)
{
	changes++;
}

/* Returns true if a text is a call, and not limits, which never have a parenthesis. */
bool
rl_is_call(const char *text)
{
	return strchr(text, '(') != NULL;
}

/*
 * Parsing
 */

static bool
wrong_call(RlError *error, const char *text)
{
	rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE,
				 "invalid call of a function for rate limits: \"%s\"", text);
	return rl_error_detail(error, "Write schema.function({column}, ...).");
}

/*
 * Sets the names of the schema and the function from the text before the arguments,
 * and *args to the text after the parenthesis.  Returns false with the error set.
 */
static bool
parse_name(const char *text, List **names, const char **args, RlError *error)
{
	const char *p = text;
	bool		quoted = false;
	List	   *identifiers;
	ListCell   *cell;

	for (; *p != '\0' && (quoted || *p != '('); p++)
		quoted ^= *p == '"';
	*args = p + 1;
	if (*p == '\0' || !SplitIdentifierString(pnstrdup(text, p - text), '.', &identifiers) ||
		identifiers == NIL)
		return wrong_call(error, text);
	foreach(cell, identifiers)
		*names = lappend(*names, makeString(lfirst(cell)));
	if (list_length(*names) == 2)
		return true;
	return rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE,
						"the name of a function for rate limits must have its schema: \"%s\"", text);
}

static const char *
skip_space(const char *p)
{
	return p + strspn(p, " \t\n\r\f\v");
}

/* Appends the argument {column} to the call.  Returns false with the error set. */
static bool
add_argument(RowCall *call, List **params, Relation rel, const Trigger *trigger,
			 const char *name, int len, RlError *error)
{
	AttrNumber	attnum = rl_rule_column(rel, trigger, name, len, error);
	Form_pg_attribute attribute;
	Param	   *param;

	if (attnum == 0)
		return false;
	if (call->nargs == FUNC_MAX_ARGS)
		return rl_error_set(error, ERRCODE_TOO_MANY_ARGUMENTS,
							"cannot pass more than %d arguments to a function", FUNC_MAX_ARGS);
	attribute = TupleDescAttr(RelationGetDescr(rel), attnum - 1);
	call->args[call->nargs++] =
		(CallArgument) {attnum, attribute->atttypid, attribute->attbyval, attribute->attlen};
	param = makeNode(Param);
	param->paramkind = PARAM_EXTERN;
	param->paramid = call->nargs;
	param->paramtype = attribute->atttypid;
	param->paramtypmod = attribute->atttypmod;
	param->paramcollid = attribute->attcollation;
	param->location = -1;
	*params = lappend(*params, param);
	return true;
}

/*
 * Sets the arguments from *args, the text after the parenthesis, and moves *args to the
 * character end, which follows the call.  Returns false with the error set.
 */
static bool
parse_arguments(RowCall *call, List **params, Relation rel, const Trigger *trigger,
				const char *text, const char **args, char end, RlError *error)
{
	const char *p = skip_space(*args);

	call->args = palloc(FUNC_MAX_ARGS * sizeof(CallArgument));
	if (*p != ')')
		for (;;)
		{
			const char *close = strchr(p, '}');

			if (*p != '{' || close == NULL)
				return wrong_call(error, text);
			if (!add_argument(call, params, rel, trigger, p + 1, close - p - 1, error))
				return false;
			p = skip_space(close + 1);
			if (*p != ',')
				break;
			p = skip_space(p + 1);
		}
	*args = *p == ')' ? skip_space(p + 1) : p;
	return (*p == ')' && **args == end) || wrong_call(error, text);
}

/*
 * Resolving
 */

/* Sets the error of a function that cannot be called, and returns false. */
static bool
wrong_function(RlError *error, FuncDetailCode code, const char *signature)
{
	switch (code)
	{
		case FUNCDETAIL_NORMAL:
			rl_error_set(error, ERRCODE_FEATURE_NOT_SUPPORTED,
						 "rl_enforce cannot call function %s", signature);
			return rl_error_detail(error, "It must not return a set, be VARIADIC, or have a default of a polymorphic type.");
		case FUNCDETAIL_MULTIPLE:
			return rl_error_set(error, ERRCODE_AMBIGUOUS_FUNCTION, "function %s is not unique", signature);
		case FUNCDETAIL_NOTFOUND:
		case FUNCDETAIL_COERCION:
			rl_error_set(error, ERRCODE_UNDEFINED_FUNCTION, "function %s does not exist", signature);
			return rl_error_detail(error, "The types of its arguments are those of the columns.");
		default:
			return rl_error_set(error, ERRCODE_WRONG_OBJECT_TYPE, "%s is not a function", signature);
	}
}

/* Returns false with the error set if the schema does not exist or is temporary. */
static bool
check_schema(const char *name, RlError *error)
{
	Oid			schema = get_namespace_oid(name, true);

	if (strcmp(name, "pg_temp") == 0 || (OidIsValid(schema) && isAnyTempNamespace(schema)))
		return rl_error_set(error, ERRCODE_FEATURE_NOT_SUPPORTED,
							"rl_enforce cannot call a temporary function");
	return OidIsValid(schema) ||
		rl_error_set(error, ERRCODE_UNDEFINED_SCHEMA, "schema \"%s\" does not exist", name);
}

/*
 * Sets the function that the parser chooses for the arguments.  Returns false with
 * the error set if there is none, or if it is not a function that returns one value.
 */
static bool
choose_function(List *names, List *params, const char *signature, RlError *error)
{
	int			nargs = list_length(params);
	Oid		   *types = palloc0((nargs + 1) * sizeof(Oid));
	FuncDetailCode code;
	Oid			function;
	Oid			result;
	Oid			variadic;
	Oid		   *declared;
	List	   *defaults;
	bool		returns_set;
	int			nvariadic;
#if PG_VERSION_NUM >= 190000
	int			flags;
#endif

	for (int i = 0; i < nargs; i++)
		types[i] = exprType(list_nth(params, i));
	code = func_get_detail(names, params, NIL, nargs, types, true, true, false,
#if PG_VERSION_NUM >= 190000
						   &flags,
#endif
						   &function, &result, &returns_set, &nvariadic, &variadic,
						   &declared, &defaults);
	if (code != FUNCDETAIL_NORMAL || returns_set || OidIsValid(get_func_variadictype(function)))
		return wrong_function(error, code, signature);
	/* The parser may raise an error for such a default. */
	for (int i = nargs; i < nargs + list_length(defaults); i++)
		if (IsPolymorphicType(declared[i]))
			return wrong_function(error, code, signature);
	return true;
}

/* Returns the name and the types of the arguments, for messages. */
static char *
signature_of(List *names, List *params)
{
	StringInfoData text;

	initStringInfo(&text);
	appendStringInfo(&text, "%s(",
					 quote_qualified_identifier(strVal(linitial(names)), strVal(lsecond(names))));
	for (int i = 0; i < list_length(params); i++)
		appendStringInfo(&text, "%s%s", i > 0 ? ", " : "", format_type_be(exprType(list_nth(params, i))));
	appendStringInfoChar(&text, ')');
	return text.data;
}

/* Returns true if the function has a SET clause for search_path. */
static bool
sets_path(HeapTuple function)
{
	bool		isnull;
	Datum		settings = SysCacheGetAttr(PROCOID, function, Anum_pg_proc_proconfig, &isnull);
	Datum	   *values;
	int			n = 0;

	if (!isnull)
		deconstruct_array(DatumGetArrayTypeP(settings), TEXTOID, -1, false, TYPALIGN_INT, &values, NULL, &n);
	for (int i = 0; i < n; i++)
		if (strncmp(TextDatumGetCString(values[i]), "search_path=", strlen("search_path=")) == 0)
			return true;
	return false;
}

/* Sets the call with all its arguments, including the defaults of those that are not given. */
static void
make_call(RowCall *call, List *names, List *params)
{
	ParseState *state = make_parsestate(NULL);
	FuncCall   *parsed = makeFuncCall(names, NIL, COERCE_EXPLICIT_CALL, -1);
	Node	   *expr = ParseFuncOrColumn(state, names, params, NULL, parsed, false, -1);
	FuncExpr   *function = castNode(FuncExpr, expr);
	HeapTuple	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(function->funcid));

	assign_expr_collations(state, expr);
	free_parsestate(state);
	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for function %u", function->funcid);
	function->args = expand_function_arguments(function->args, false, function->funcresulttype, tuple);
	call->function = function;
	call->sets_path = sets_path(tuple);
	call->unsafe = ((Form_pg_proc) GETSTRUCT(tuple))->prosecdef && !call->sets_path &&
		heap_attisnull(tuple, Anum_pg_proc_prosqlbody, NULL);
	ReleaseSysCache(tuple);
}

/*
 * Resolves the function.  Returns false with the error set.  This runs as a superuser,
 * so that it finds the same function for every role that writes.  It runs no code of a
 * user.
 */
static bool
resolve(RowCall *call, List *names, List *params, RlError *error)
{
	Oid			user;
	int			context;
	bool		found;

	if (!check_schema(strVal(linitial(names)), error))
		return false;
	call->signature = signature_of(names, params);
	GetUserIdAndSecContext(&user, &context);
	SetUserIdAndSecContext(BOOTSTRAP_SUPERUSERID, context | SECURITY_LOCAL_USERID_CHANGE);
	found = choose_function(names, params, call->signature, error);
	if (found)
		make_call(call, names, params);
	SetUserIdAndSecContext(user, context);
	return found;
}

/*
 * Parses and resolves the call at *text, which is allocated in the context, and moves *text
 * to the character end, which follows the call.  Returns NULL with the error set if it is
 * not valid.
 */
RowCall *
rl_call_make(Relation rel, const Trigger *trigger, const char **text, char end, MemoryContext context,
			 RlError *error)
{
	RowCall *call = MemoryContextAllocZero(context, sizeof(RowCall));
	MemoryContext old;
	List	   *names = NIL;
	List	   *params = NIL;
	const char *args;

	if (!parse_name(*text, &names, &args, error) ||
		!parse_arguments(call, &params, rel, trigger, *text, &args, end, error) ||
		!resolve(call, names, params, error))
		return NULL;
	*text = args;
	old = MemoryContextSwitchTo(context);
	call->args =
		memcpy(palloc(call->nargs * sizeof(CallArgument)), call->args, call->nargs * sizeof(CallArgument));
	call->signature = pstrdup(call->signature);
	call->function = copyObject(call->function);
	call->context = AllocSetContextCreate(context, "rate-limit call", ALLOCSET_SMALL_SIZES);
	MemoryContextSwitchTo(old);
	return call;
}

/*
 * Running
 */

/*
 * Makes the state of a run in the current memory context.  Raises an error if the role
 * may not execute the function.
 */
static CallState *
make_state(const RowCall *call)
{
	CallState  *state = palloc(sizeof(CallState));
	FuncExpr   *function = copyObject(call->function);

	/* Only the arguments are planned: for an inlined function, the executor does not check EXECUTE. */
	function->args = (List *) expression_planner((Expr *) function->args);
	state->params = makeParamList(call->nargs);
	for (int i = 0; i < call->nargs; i++)
		state->params->params[i].ptype = call->args[i].type;
	state->expr = ExecInitExpr((Expr *) function, NULL);
	state->econtext = CreateStandaloneExprContext();
	state->econtext->ecxt_param_list_info = state->params;
	state->row_security = row_security;
	return state;
}

/* Returns true if the state of the last run is still valid. */
static bool
state_is_valid(const RowCall *call)
{
	return call->state != NULL && call->transaction == vxid_lxid(MyProc) && call->role == GetUserId() &&
		call->changes == changes && call->state->row_security == row_security;
}

/* Returns the state of the last run, or a new state. */
static CallState *
get_state(RowCall *call)
{
	MemoryContext old;

	if (state_is_valid(call))
		return call->state;
	call->state = NULL;
	call->changes = changes;
	MemoryContextReset(call->context);
	old = MemoryContextSwitchTo(call->context);
	call->state = make_state(call);
	call->transaction = vxid_lxid(MyProc);
	call->role = GetUserId();
	MemoryContextSwitchTo(old);
	return call->state;
}

/* Sets the arguments' values, which point into the row's memory. */
void
rl_call_read(const RowCall *call, TupleTableSlot *row, NullableDatum *values)
{
	for (int i = 0; i < call->nargs; i++)
		values[i].value = slot_getattr(row, call->args[i].attnum, &values[i].isnull);
}

/* Appends bytes of the values, which are the same for rows with the same values. */
void
rl_call_append(const RowCall *call, const NullableDatum *values, StringInfo bytes)
{
	for (int i = 0; i < call->nargs; i++)
	{
		const CallArgument *arg = &call->args[i];
		Datum		value = values[i].value;
		char	   *at;

		/* The same value can have other bytes if it is compressed or has a short header. */
		if (arg->len == -1 && !values[i].isnull)
			value = PointerGetDatum(PG_DETOAST_DATUM(value));
		enlargeStringInfo(bytes, datumEstimateSpace(value, values[i].isnull, arg->byval, arg->len));
		at = bytes->data + bytes->len;
		datumSerialize(value, values[i].isnull, arg->byval, arg->len, &at);
		bytes->len = at - bytes->data;
	}
}

/* Sets the values from bytes that rl_call_append made, in the current memory context. */
void
rl_call_restore(const RowCall *call, const char *bytes, NullableDatum *values)
{
	char	   *at = unconstify(char *, bytes);

	for (int i = 0; i < call->nargs; i++)
		values[i].value = datumRestore(&at, &values[i].isnull);
}

/* Adds a hint to the error of a name that the function does not qualify; an error context callback. */
static void
add_path_hint(void *arg pg_attribute_unused())
{
	switch (geterrcode())
	{
		case ERRCODE_UNDEFINED_TABLE:
		case ERRCODE_UNDEFINED_FUNCTION:
		case ERRCODE_UNDEFINED_OBJECT:
			errhint("The function runs with search_path \"" SAFE_PATH "\". Qualify the names in it, or add a SET clause to it.");
	}
}

/* Evaluates the call with a search_path that the role which writes cannot choose. */
static Datum
evaluate_safely(const RowCall *call, CallState *state, bool *isnull)
{
	ErrorContextCallback hint = {error_context_stack, add_path_hint, NULL};
	int			level;
	Datum		result;

	if (call->sets_path)
		return ExecEvalExprSwitchContext(state->expr, state->econtext, isnull);
	/* After an error, the abort of the (sub)transaction ends the level. */
	level = NewGUCNestLevel();
	(void) set_config_option("search_path", SAFE_PATH, PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE, true, 0,
							 false);
	error_context_stack = &hint;
	result = ExecEvalExprSwitchContext(state->expr, state->econtext, isnull);
	error_context_stack = hint.previous;
	AtEOXact_GUC(true, level);
	return result;
}

/*
 * Evaluates the call.  Raises an error if the function has used a temporary table: such a table
 * is in each search_path, and the role that writes can have made it.  After any error the caller
 * restores the flag in MyXactFlags.
 */
static Datum
evaluate(const RowCall *call, CallState *state, bool *isnull)
{
	int			before = MyXactFlags & XACT_FLAGS_ACCESSEDTEMPNAMESPACE;
	Datum		result;

	MyXactFlags &= ~XACT_FLAGS_ACCESSEDTEMPNAMESPACE;
	result = evaluate_safely(call, state, isnull);
	if (MyXactFlags & XACT_FLAGS_ACCESSEDTEMPNAMESPACE)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("function %s must not use temporary tables", call->signature),
				 errhint("Qualify the names of tables in it.")));
	MyXactFlags |= before;
	return result;
}

/*
 * Calls the function, and returns its result, which is valid until the next run.  "nested"
 * says that the function has fired the trigger again, while it runs.  Raises an error if
 * the role may not execute the function, or if the function uses a temporary table; and the
 * function's own errors.
 */
Datum
rl_call_run(RowCall *call, const NullableDatum *values, bool nested, bool *isnull)
{
	CallState  *state = nested ? make_state(call) : get_state(call);
	Datum		result;

	for (int i = 0; i < call->nargs; i++)
	{
		state->params->params[i].value = values[i].value;
		state->params->params[i].isnull = values[i].isnull;
	}
	/* If the function raises an error, this state is not used again. */
	if (!nested)
		call->state = NULL;
	ResetExprContext(state->econtext);
	result = evaluate(call, state, isnull);
	if (!nested)
		call->state = state;
	return result;
}
