/*
 * trigger_rule.c
 *		Parses the arguments of a trigger rl_enforce(key template, limits
 *		[, key template, limits ...] [, option ...]) to a rule, and applies the
 *		rule to rows.
 *
 * A cache (src/README.md): the rules, by the OIDs of their triggers.  A rule is used
 * only while the trigger has the arguments that it was made from, and until the
 * relcache entry of the table is invalidated; if it calls a function, until any
 * function or schema changes.  Without the cache an INSERT of many rows takes
 * twice as long (local store).
 */
#include "postgres.h"

#include "catalog/pg_trigger.h"
#include "catalog/pg_type.h"
#include "executor/tuptable.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "parser/parse_relation.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/syscache.h"

#include "algorithm/limits.h"
#include "error.h"
#include "several_keys.h"
#include "sql/arguments.h"
#include "sql/rule_column.h"
#include "sql/trigger_rule.h"

typedef struct RuleEntry
{
	Oid			trigger;		/* hash key */
	Oid			relation;
	bool		stale;			/* the relcache entry was invalidated */
	Rule	   *rule;			/* NULL: its arguments are wrong */
} RuleEntry;

static HTAB *rules = NULL;
static List *retired = NIL;		/* rules without an entry that were in use */

/*
 * Parsing
 */

/* Returns true if a trigger for each statement has the transition table that rl_enforce reads. */
static bool
sees_statement(const Trigger *trigger)
{
	return TRIGGER_FOR_DELETE(trigger->tgtype) ? trigger->tgoldtable != NULL : trigger->tgnewtable != NULL;
}

/* Sets the error of a template with a brace that has no partner, and returns false. */
static bool
unmatched_brace(char brace, const char *template, RlError *error)
{
	rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE,
				 "unmatched \"%c\" in rate-limit key \"%s\"", brace, template);
	return rl_error_detail(error, "A literal brace is written twice.");
}

/* Prepares the values of a piece.  Returns false with the error set if their type is not accepted. */
static bool
set_type(Piece *piece, Oid type, const char *what, MemoryContext context, RlError *error)
{
	if (rl_key_part_init(&piece->value, type, context))
		return true;
	rl_error_set(error, ERRCODE_FEATURE_NOT_SUPPORTED, "%s of type %s cannot be part of a rate-limit key",
				 what, format_type_be(type));
	error->hint = "Write a function of the column that returns text or bigint, so that its text does not depend on settings.";
	return rl_error_detail(error, "It must be an integer, numeric, text, citext, varchar, char, name, uuid, boolean, inet, cidr, an enum, or a domain over one of them.");
}

/* Sets the networks that stand for a column's addresses.  Returns false with the error set. */
static bool
set_network(Piece *piece, const char *column, const char *bits, RlError *error)
{
	if (piece->value.type != INETOID && piece->value.type != CIDROID)
	{
		rl_error_set(error, ERRCODE_DATATYPE_MISMATCH, "column \"%s\" of type %s is not an address",
					 column, format_type_be(piece->value.type));
		return rl_error_detail(error, "It must be inet, cidr, or a domain over one of them.");
	}
	if (rl_key_part_network(&piece->value, bits))
		return true;
	rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE, "invalid network \"/%s\" of column \"%s\"", bits,
				 column);
	return rl_error_detail(error, "Write {column/64}, with at most 128 bits of IPv6, or {column/24,56}, with at most 32 bits of IPv4 before them.");
}

static void
add_column(Pair *pair, AttrNumber attnum, MemoryContext context)
{
	MemoryContext old = MemoryContextSwitchTo(context);

	pair->columns = bms_add_member(pair->columns, attnum);
	MemoryContextSwitchTo(old);
}

/*
 * Ends the text of a piece with the call at *text, and moves *text to the brace after it.
 * Returns false with the error set.
 */
static bool
set_call(Rule *rule, Pair *pair, Piece *piece, Relation rel, const Trigger *trigger, const char **text,
		 RlError *error)
{
	RowCall    *call = rl_call_make(rel, trigger, text, '}', rule->context, error);

	rule->calls = true;
	piece->call = call;
	if (call == NULL)
		return false;
	for (int i = 0; i < call->nargs; i++)
		add_column(pair, call->args[i].attnum, rule->context);
	return set_type(piece, call->function->funcresulttype, psprintf("result of function %s", call->signature),
					rule->context, error);
}

/*
 * Ends the text of a piece with the value that *text names: a column, perhaps with the bits
 * of its networks, or a call.  Moves *text to the brace after it.  Returns false with the
 * error set.
 */
static bool
set_value(Rule *rule, Pair *pair, Piece *piece, Relation rel, const Trigger *trigger, const char **text,
		  RlError *error)
{
	const char *close = strchr(*text, '}');
	char	   *name = pnstrdup(*text, close - *text);
	char	   *slash = NULL;

	/* A column's name can have any character. */
	if (attnameAttNum(rel, name, false) == InvalidAttrNumber)
	{
		if (rl_is_call(name))
			return set_call(rule, pair, piece, rel, trigger, text, error);
		slash = strrchr(name, '/');
		if (slash != NULL)
			*slash = '\0';
	}
	*text = close;
	piece->attnum = rl_rule_column(rel, trigger, name, strlen(name), error);
	if (piece->attnum == 0)
		return false;
	add_column(pair, piece->attnum, rule->context);
	return set_type(piece, attnumTypeId(rel, piece->attnum), psprintf("column \"%s\"", name), rule->context,
					error) &&
		(slash == NULL || set_network(piece, name, slash + 1, error));
}

/* Returns how many bytes each value of the piece has at least. */
static int
least_length(const Piece *piece)
{
	switch (piece->value.type)
	{
		case TEXTOID:
		case VARCHAROID:
		case BPCHAROID:
		case NAMEOID:
			return 0;
		default:
			return type_is_enum(piece->value.type) ? 0 : 1;
	}
}

/* Returns false with the error set if the text of a template and this many more bytes are too long. */
static bool
check_length(const char *text, int len, int more, RlError *error)
{
	/* In UTF-8, a character has at least one byte. */
	if (GetDatabaseEncoding() != PG_UTF8)
		len = pg_mbstrlen_with_len(text, len);
	if (len + more <= RL_MAX_KEY)
		return true;
	rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE, "key must not be longer than %d bytes", RL_MAX_KEY);
	return rl_error_detail(error, "By its template, it has at least %d bytes in UTF-8.", len + more);
}

/*
 * Lets the values of a piece escape a character of the text between them and the next
 * value, so that the end of the value is known.  Returns false if the text has no
 * such character: those of escapes, %3A, cannot be it.
 */
static bool
separate(Piece *piece, const Piece *next)
{
	const char *text = next->text;

	if (memchr(text, ':', next->len) != NULL || piece->value.type == UUIDOID || piece->value.type == BOOLOID)
		return true;
	for (int i = 0; i < next->len && piece->value.also == '\0'; i++)
		if (!IS_HIGHBIT_SET(text[i]) && strchr("%0123456789ABCDEF", text[i]) == NULL)
			piece->value.also = text[i];
	return piece->value.also != '\0';
}

/* Separates the values of a key.  Returns false with the error set. */
static bool
separate_values(const Pair *pair, RlError *error)
{
	for (Piece *piece = pair->pieces; piece->value.type != InvalidOid &&
		 piece[1].value.type != InvalidOid; piece++)
		if (!separate(piece, piece + 1))
		{
			rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE,
						 "two values of a rate-limit key must have a separator");
			return rl_error_detail(error, "Write \":\", or another ASCII character except %% and 0 to 9 and A to F, between them.");
		}
	return true;
}

/* Sets the pieces of the key.  Returns false with the error set. */
static bool
parse_template(Rule *rule, Pair *pair, Relation rel, const Trigger *trigger, const char *template,
			   RlError *error)
{
	char	   *text = MemoryContextAlloc(rule->context, strlen(template) + 1);
	char	   *end = text;
	Piece	   *piece;
	int			npieces = 1;
	int			more = 0;

	if (template[0] == '\0')
		return rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE, "key must not be empty");
	for (const char *p = template; *p; p++)
		npieces += *p == '{' && p[1] != '{';
	pair->pieces = piece = MemoryContextAllocZero(rule->context, npieces * sizeof(Piece));
	piece->text = end;
	for (const char *p = template; *p; p++)
	{
		if ((*p == '{' || *p == '}') && p[1] == *p)
			p++;
		else if (*p == '{' || *p == '}')
		{
			CHECK_FOR_INTERRUPTS();
			if (*p == '}' || strchr(p, '}') == NULL)
				return unmatched_brace(*p, template, error);
			p++;
			if (!set_value(rule, pair, piece, rel, trigger, &p, error))
				return false;
			more += least_length(piece);
			(++piece)->text = end;
			continue;
		}
		*end++ = *p;
		piece->len++;
	}
	return separate_values(pair, error) && check_length(text, end - text, more, error);
}

/* Rejects a quota above the capacity of fixed limits, which would refuse each write. */
static bool
check_quota_fits(const Rule *rule, RlError *error)
{
	for (int p = 0; p < rule->npairs; p++)
	{
		const RlLimits *limits = rule->pairs[p].limits;

		for (int i = 0; limits != NULL && i < limits->n; i++)
		{
			if (rule->quota <= limits->limit[i].capacity || limits->limit[i].shadow)
				continue;
			return rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE,
								"quota %lld is more than limit \"%s\" ever allows",
								(long long) rule->quota, rl_limit_text(limits, i));
		}
	}
	return true;
}

/* Sets the quota from "{column}" or a whole number.  Returns false with the error set. */
static bool
parse_quota(Rule *rule, Relation rel, const Trigger *trigger, const char *value, RlError *error)
{
	size_t		len = strlen(value);

	rule->quota_text = value;
	if (len > 2 && value[0] == '{' && value[len - 1] == '}')
	{
		rule->quota_attnum = rl_rule_column(rel, trigger, value + 1, len - 2, error);
		if (rule->quota_attnum == 0)
			return false;
		rule->quota_type = getBaseType(attnumTypeId(rel, rule->quota_attnum));
		if (rule->quota_type == INT2OID || rule->quota_type == INT4OID || rule->quota_type == INT8OID)
			return true;
		rl_error_set(error, ERRCODE_DATATYPE_MISMATCH,
					 "column \"%.*s\" of type %s cannot be a quota",
					 (int) len - 2, value + 1, format_type_be(rule->quota_type));
		return rl_error_detail(error, "A quota is a smallint, integer or bigint.");
	}
	if (len > 0 && len <= 16 && strspn(value, "0123456789") == len)
	{
		rule->quota = strtoll(value, NULL, 10);
		if (rule->quota <= RL_MAX_COUNT)
			return check_quota_fits(rule, error);
	}
	rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE,
				 "invalid quota \"%s\" of a rate-limit trigger", value);
	return rl_error_detail(error, "It must be {column}, or a whole number from 0 to %lld.",
						   (long long) RL_MAX_COUNT);
}

static bool
parse_option(Rule *rule, Relation rel, const Trigger *trigger, const char *option, RlError *error)
{
	if (strncmp(option, "quota=", 6) == 0 && rule->quota_text == NULL)
		return parse_quota(rule, rel, trigger, option + 6, error);
	rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE,
				 "invalid option \"%s\" of a rate-limit trigger", option);
	return rl_error_detail(error, "The option is quota={column} or quota=N, once.");
}

/* Sets the call that returns the limits of a pair.  Returns false with the error set. */
static bool
parse_limits_call(Rule *rule, Pair *pair, Relation rel, const Trigger *trigger, const char *text,
				  RlError *error)
{
	Oid			wanted = GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid, CStringGetDatum("rl_limits"),
										 ObjectIdGetDatum(get_func_namespace(trigger->tgfoid)));
	Oid			type;

	rule->calls = true;
	pair->call = rl_call_make(rel, trigger, &text, '\0', rule->context, error);
	if (pair->call == NULL)
		return false;
	type = pair->call->function->funcresulttype;
	if (getBaseType(type) == wanted && OidIsValid(wanted))
		return true;
	rl_error_set(error, ERRCODE_DATATYPE_MISMATCH, "function %s must return type rl_limits",
				 pair->call->signature);
	return rl_error_detail(error, "It returns type %s.", format_type_be(type));
}

/* Parses a key and its limits.  Returns false with the error set. */
static bool
parse_pair(Rule *rule, Relation rel, const Trigger *trigger, const char *key, const char *limits,
		   RlError *error)
{
	Pair	   *pair = &rule->pairs[rule->npairs];
	RlLimits	parsed;

	pair->template = key;
	if (rl_is_call(limits))
	{
		if (!parse_limits_call(rule, pair, rel, trigger, limits, error))
			return false;
	}
	else if (rl_limits_parse(limits, strlen(limits), &parsed, error))
	{
		pair->limits = MemoryContextAlloc(rule->context, rl_limits_size(&parsed));
		rl_limits_copy(pair->limits, &parsed);
	}
	else
	{
		if (strchr(limits, '{') != NULL)
			error->hint = "The arguments are the key, then its limits.";
		return false;
	}
	if (!parse_template(rule, pair, rel, trigger, key, error))
		return false;
	rule->npairs++;
	return true;
}

/*
 * Returns false with the error set if the pairs of a trigger for each row can charge no row
 * with different keys, because rl_check_keys raises an error for each one.
 */
static bool
check_pairs(const Rule *rule, RlError *error)
{
	int			sliding = 0;

	for (int i = 0; i < rule->npairs; i++)
		if (rule->pairs[i].limits != NULL)
			sliding += rl_sliding_limits(rule->pairs[i].limits);
	return rule->npairs == 1 || sliding <= RL_MAX_SLIDING || rl_sliding_error(sliding, error);
}

/* Returns true if the argument is not a key. */
static bool
is_option(const char *arg)
{
	return strncmp(arg, "quota=", 6) == 0;
}

/*
 * Fills the rule from the trigger's arguments.  Returns false with the error set; the
 * rule then has the parts that were parsed before.
 */
static bool
parse_rule(Rule *rule, Relation rel, const Trigger *trigger, RlError *error)
{
	int			i = 0;

	rule->quota = 1;
	if (!TRIGGER_FOR_BEFORE(trigger->tgtype) && !TRIGGER_FOR_AFTER(trigger->tgtype))
	{
		rl_error_set(error, ERRCODE_FEATURE_NOT_SUPPORTED,
					 "rl_enforce must be fired before or after the row is written");
		error->hint = "Create the trigger on the view's table.";
		return false;
	}
	if (!TRIGGER_FOR_ROW(trigger->tgtype) && !sees_statement(trigger))
	{
		rl_error_set(error, ERRCODE_FEATURE_NOT_SUPPORTED,
					 "rl_enforce must be fired for each row, or see the statement's rows");
		error->hint =
			"Write, for example, AFTER INSERT ON orders REFERENCING NEW TABLE AS added FOR EACH STATEMENT.";
		return rl_error_detail(error, "A trigger for each statement needs REFERENCING NEW TABLE, or for DELETE OLD TABLE.");
	}
	if (trigger->tgnargs < 2)
	{
		rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE, "rl_enforce takes a key and limits");
		error->hint = "Write, for example, rl_enforce('order:{customer}', '5/1min').";
		return false;
	}

	rule->args = MemoryContextAlloc(rule->context, trigger->tgnargs * sizeof(char *));
	while (rule->nargs < trigger->tgnargs)
	{
		rule->args[rule->nargs] = MemoryContextStrdup(rule->context, trigger->tgargs[rule->nargs]);
		rule->nargs++;
	}

	do
	{
		if (rule->npairs == RL_MAX_PAIRS)
			return rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE,
								"rl_enforce takes at most %d pairs of a key and limits", RL_MAX_PAIRS);
		if (!parse_pair(rule, rel, trigger, rule->args[i], rule->args[i + 1], error))
			return false;
		i += 2;
	} while (i + 1 < rule->nargs && !is_option(rule->args[i]) && !is_option(rule->args[i + 1]));
	if (TRIGGER_FOR_ROW(trigger->tgtype) && !check_pairs(rule, error))
		return false;
	for (; i < rule->nargs; i++)
		if (!parse_option(rule, rel, trigger, rule->args[i], error))
			return false;
	return true;
}

/*
 * Parses a trigger's arguments.  Returns a rule in a new memory context below
 * the current one.  If they are wrong, sets *valid to false and the error; the
 * rule then has the parts that were parsed before.
 */
Rule *
rl_rule_make(Relation rel, const Trigger *trigger, bool *valid, RlError *error)
{
	/* It does not round sizes up. */
	MemoryContext context = GenerationContextCreate(CurrentMemoryContext, "rate-limit rule",
													ALLOCSET_SMALL_SIZES);
	Rule	   *rule = MemoryContextAllocZero(context, sizeof(Rule));

	rule->context = context;
	rule->pairs = MemoryContextAllocZero(context, Max(trigger->tgnargs / 2, 1) * sizeof(Pair));
	*valid = parse_rule(rule, rel, trigger, error);
	return rule;
}

/*
 * The cache
 */

/* Marks the rules of a table, or with InvalidOid all rules.  They may be in use. */
static void
mark_stale(Datum arg pg_attribute_unused(), Oid relation)
{
	HASH_SEQ_STATUS seq;
	RuleEntry  *entry;

	rl_calls_outdate();
	hash_seq_init(&seq, rules);
	while ((entry = hash_seq_search(&seq)) != NULL)
		if (relation == InvalidOid || entry->relation == relation)
			entry->stale = true;
}

/*
 * Lets functions plan their queries again, and after a change of a function or a schema marks
 * the rules that call a function; a syscache callback.
 */
static void
outdate_calls(Datum arg pg_attribute_unused(), SysCacheIdentifier cache, uint32 hash pg_attribute_unused())
{
	HASH_SEQ_STATUS seq;
	RuleEntry  *entry;

	rl_calls_outdate();
	if (cache != PROCOID && cache != NAMESPACEOID)
		return;
	hash_seq_init(&seq, rules);
	while ((entry = hash_seq_search(&seq)) != NULL)
		entry->stale |= entry->rule == NULL || entry->rule->calls;
}

/* Frees the stale rules, those of dropped triggers included, as soon as they have no users. */
static void
sweep_rules(void)
{
	HASH_SEQ_STATUS seq;
	RuleEntry  *entry;
	ListCell   *cell;

	hash_seq_init(&seq, rules);
	while ((entry = hash_seq_search(&seq)) != NULL)
	{
		if (!entry->stale)
			continue;
		if (entry->rule != NULL)
		{
			MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);

			retired = lappend(retired, entry->rule);
			MemoryContextSwitchTo(old);
		}
		hash_search(rules, &entry->trigger, HASH_REMOVE, NULL);
	}
	foreach(cell, retired)
	{
		Rule	   *rule = lfirst(cell);

		if (rule->users > 0)
			continue;
		retired = foreach_delete_current(retired, cell);
		MemoryContextDelete(rule->context);
	}
}

static bool
same_arguments(const Rule *rule, const Trigger *trigger)
{
	if (rule->nargs != trigger->tgnargs)
		return false;
	for (int i = 0; i < rule->nargs; i++)
		if (strcmp(rule->args[i], trigger->tgargs[i]) != 0)
			return false;
	return true;
}

/*
 * Returns the trigger's rule, which is valid until the next call, or while it has
 * users.  Raises an error if its arguments are wrong.
 */
Rule *
rl_rule_find(Relation rel, const Trigger *trigger)
{
	RuleEntry  *entry;
	Rule	   *rule;
	bool		found;
	bool		valid;
	RlError		error;

	if (rules == NULL)
	{
		/* Beside functions and schemas, those of core's cache of plans. */
		static const SysCacheIdentifier caches[] = {
			PROCOID, NAMESPACEOID, TYPEOID, OPEROID, AMOPOPID, FOREIGNSERVEROID, FOREIGNDATAWRAPPEROID
		};
		HASHCTL		ctl = {.keysize = sizeof(Oid),.entrysize = sizeof(RuleEntry)};

		rules = hash_create("rate-limit rules", 16, &ctl, HASH_ELEM | HASH_BLOBS);
		CacheRegisterRelcacheCallback(mark_stale, (Datum) 0);
		for (size_t i = 0; i < lengthof(caches); i++)
			CacheRegisterSyscacheCallback(caches[i], outdate_calls, (Datum) 0);
	}
	entry = hash_search(rules, &trigger->tgoid, HASH_FIND, NULL);
	if (entry != NULL && !entry->stale && entry->rule != NULL &&
		entry->relation == RelationGetRelid(rel) && same_arguments(entry->rule, trigger))
		return entry->rule;

	/* Enter the rule before it is parsed, so that an invalidation meanwhile marks it as stale. */
	if (entry != NULL)
		entry->stale = true;
	sweep_rules();
	entry = hash_search(rules, &trigger->tgoid, HASH_ENTER, &found);
	entry->relation = RelationGetRelid(rel);
	entry->stale = false;
	entry->rule = NULL;
	rule = rl_rule_make(rel, trigger, &valid, &error);
	if (!valid)
		rl_raise_for(&error, &(RlOrigin) {rel, trigger, NULL});
	MemoryContextSetParent(rule->context, TopMemoryContext);
	entry->rule = rule;
	return rule;
}

/*
 * Rows
 */

/* Sets the error's table, its column unless that is 0, and the trigger as its constraint. */
static int
errtrigger(const RlOrigin *origin, AttrNumber column)
{
	if (column != 0)
		errtablecol(origin->rel, column);
	else
		errtable(origin->rel);
	return err_generic_string(PG_DIAG_CONSTRAINT_NAME, origin->trigger->tgname);
}

/* Returns a column of the row.  Raises an error if it is NULL. */
static Datum
row_value(const RlOrigin *origin, TupleTableSlot *row, AttrNumber attnum, const char *use)
{
	bool		isnull;
	Datum		value = slot_getattr(row, attnum, &isnull);

	if (isnull)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("null value in column \"%s\" of relation \"%s\" cannot be %s",
						NameStr(*attnumAttName(origin->rel, attnum)),
						RelationGetRelationName(origin->rel), use),
				 TRIGGER_FOR_ROW(origin->trigger->tgtype) ?
				 errhint("Rows without a value need a condition of the trigger: WHEN (%s.%s IS NOT NULL).",
						 TRIGGER_FOR_DELETE(origin->trigger->tgtype) ? "OLD" : "NEW",
						 quote_identifier(NameStr(*attnumAttName(origin->rel, attnum)))) : 0,
				 errtrigger(origin, attnum)));
	return value;
}

/* Returns what a function returns, which must not be NULL.  Raises those errors of rl_call_run too. */
static Datum
call_value(const RlOrigin *origin, const Rule *rule, RowCall *call, const NullableDatum *values,
		   const char *use,
		   const char *hint)
{
	bool		isnull;
	Datum		value = rl_call_run(call, values, rule->users > 1, &isnull);

	if (isnull)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("function %s returned NULL instead of %s", call->signature, use),
				 hint != NULL ? errhint("%s", hint) : 0,
				 errtrigger(origin, 0)));
	return value;
}

/* Returns the value of a piece of the key. */
static Datum
piece_value(const RlOrigin *origin, const Rule *rule, const Piece *piece, TupleTableSlot *row)
{
	NullableDatum values[FUNC_MAX_ARGS];

	if (piece->call == NULL)
		return row_value(origin, row, piece->attnum, "part of a rate-limit key");
	rl_call_read(piece->call, row, values);
	return call_value(origin, rule, piece->call, values, "a part of a rate-limit key", NULL);
}

/*
 * Returns the row's key, in the current memory context.  Raises an error if a value is
 * NULL, or the key is empty or too long, and those of rl_call_run.
 */
RlKey
rl_rule_key(const RlOrigin *origin, const Rule *rule, Pair *pair, TupleTableSlot *row)
{
	StringInfoData text;
	RlKey		key;
	RlError		error;

	initStringInfo(&text);
	for (Piece *piece = pair->pieces;; piece++)
	{
		appendBinaryStringInfo(&text, piece->text, piece->len);
		if (piece->value.type == InvalidOid)
			break;
		rl_key_part_append(&text, &piece->value, piece_value(origin, rule, piece, row));
	}
	if (!rl_key_make(text.data, text.len, &key, &error))
		ereport(ERROR,
				(errcode(error.sqlstate),
				 errmsg_internal("%s", error.message),
				 errdetail("%s%sIts template is \"%s\".", error.detail, error.detail[0] ? " " :
						   "", pair->template),
				 errtrigger(origin,
							bms_membership(pair->columns) == BMS_SINGLETON ?
							bms_singleton_member(pair->columns) : 0)));
	return key;
}

/*
 * Sets the limits that the pair's function returns for the values of its arguments.
 * Raises an error if it returns NULL, and those of rl_call_run.
 */
void
rl_rule_limits(const RlOrigin *origin, const Rule *rule, Pair *pair, const NullableDatum *values,
			   RlLimits *limits)
{
	Datum		result =
		call_value(origin, rule, pair->call, values, "limits", "For no limit, return \"unlimited\".");

	rl_limits_copy(limits, rl_text_limits(DatumGetTextPP(result)));
}

/* Returns a quota of the rule, or raises an error if it is out of range. */
int64
rl_rule_check_quota(const RlOrigin *origin, const Rule *rule, int64 quota)
{
	if (quota < 0 || quota > RL_MAX_COUNT)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("quota must be between 0 and %lld", (long long) RL_MAX_COUNT),
				 rule->quota_attnum != 0 ?
				 errdetail("It comes from column \"%s\".",
						   NameStr(*attnumAttName(origin->rel, rule->quota_attnum))) : 0,
				 errtrigger(origin, rule->quota_attnum)));
	return quota;
}

/* Returns the row's quota.  Raises an error if it is NULL or out of range. */
int64
rl_rule_quota(const RlOrigin *origin, const Rule *rule, TupleTableSlot *row)
{
	Datum		value;

	if (rule->quota_attnum == 0)
		return rule->quota;
	value = row_value(origin, row, rule->quota_attnum, "a quota");
	switch (rule->quota_type)
	{
		case INT2OID:
			return rl_rule_check_quota(origin, rule, DatumGetInt16(value));
		case INT4OID:
			return rl_rule_check_quota(origin, rule, DatumGetInt32(value));
		default:
			return rl_rule_check_quota(origin, rule, DatumGetInt64(value));
	}
}
