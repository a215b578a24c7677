/*
 * rule_column.c
 *		The columns that a trigger's arguments name.
 */
#include "postgres.h"

#include "catalog/pg_attribute.h"
#include "catalog/pg_trigger.h"
#include "mb/pg_wchar.h"
#include "parser/parse_relation.h"
#include "utils/builtins.h"
#include "utils/varlena.h"

#include "error.h"
#include "sql/rule_column.h"

/* Returns true if the trigger fires for rows that are not written yet. */
static bool
sees_unwritten_row(const Trigger *trigger)
{
	return TRIGGER_FOR_BEFORE(trigger->tgtype) &&
		(TRIGGER_FOR_INSERT(trigger->tgtype) || TRIGGER_FOR_UPDATE(trigger->tgtype));
}

/* Returns the name of the column that is most like the text, or NULL if none is. */
static const char *
similar_column(Relation rel, const char *name, int len)
{
	TupleDesc	desc = RelationGetDescr(rel);
	int			most = Min(3, len / 2);
	const char *similar = NULL;

	if (len >= NAMEDATALEN)
		return NULL;
	for (int i = 0; i < desc->natts && most >= 0; i++)
	{
		const char *column = NameStr(TupleDescAttr(desc, i)->attname);
		int			distance = TupleDescAttr(desc, i)->attisdropped ? most + 1 :
			varstr_levenshtein_less_equal(name, len, column, strlen(column), 1, 1, 1, most, true);

		if (distance <= most)
		{
			similar = column;
			most = distance - 1;
		}
	}
	return similar;
}

/* Returns the hint about a name in braces that is no column's, or NULL. */
static const char *
column_hint(Relation rel, const char *name, int len)
{
	const char *similar;

	if (len > 1 && name[0] == '"')
		return "Write the column's exact name without quotation marks.";
	if (len > 4 && (pg_strncasecmp(name, "new.", 4) == 0 || pg_strncasecmp(name, "old.", 4) == 0))
		return psprintf("Write the column's name alone: {%.*s}.", len - 4, name + 4);
	for (int i = 0; i < len; i++)
		if (strchr("->:+|(' ", name[i]) != NULL)
			return "A key has columns and functions, and no expressions. Write a function of the column, as in {app.tenant({payload})}.";
	similar = similar_column(rel, name, len);
	return similar != NULL ? psprintf("Perhaps you meant {%s}.", similar) : NULL;
}

/* Returns the number of the column with that name, or 0 with the error set. */
AttrNumber
rl_rule_column(Relation rel, const Trigger *trigger, const char *name, int len, RlError *error)
{
	AttrNumber	attnum = attnameAttNum(rel, pnstrdup(name, len), false);
	char		generated;

	if (attnum == InvalidAttrNumber)
	{
		rl_error_set(error, ERRCODE_UNDEFINED_COLUMN,
					 "column \"%.*s\" of relation \"%s\" does not exist",
					 len, name, RelationGetRelationName(rel));
		error->hint = column_hint(rel, name, len);
		return 0;
	}
	generated = TupleDescAttr(RelationGetDescr(rel), attnum - 1)->attgenerated;
	if (generated != '\0' && (generated != ATTRIBUTE_GENERATED_STORED || sees_unwritten_row(trigger)))
	{
		rl_error_set(error, ERRCODE_FEATURE_NOT_SUPPORTED,
					 "generated column \"%.*s\" has no value yet when a rate limit is enforced",
					 len, name);
		if (generated == ATTRIBUTE_GENERATED_STORED)
			error->hint = "Use an AFTER trigger.";
		return 0;
	}
	return attnum;
}
