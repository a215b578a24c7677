/*
 * rule_column.c
 *		The columns that a trigger's arguments name.
 */
#include "postgres.h"

#include "catalog/pg_attribute.h"
#include "catalog/pg_trigger.h"
#include "parser/parse_relation.h"

#include "error.h"
#include "sql/rule_column.h"

/* Returns true if the trigger fires for rows that are not written yet. */
static bool
sees_unwritten_row(const Trigger *trigger)
{
	return TRIGGER_FOR_BEFORE(trigger->tgtype) &&
		(TRIGGER_FOR_INSERT(trigger->tgtype) || TRIGGER_FOR_UPDATE(trigger->tgtype));
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
		return 0;
	}
	generated = TupleDescAttr(RelationGetDescr(rel), attnum - 1)->attgenerated;
	if (generated != '\0' && (generated != ATTRIBUTE_GENERATED_STORED || sees_unwritten_row(trigger)))
	{
		rl_error_set(error, ERRCODE_FEATURE_NOT_SUPPORTED,
					 "generated column \"%.*s\" has no value yet when a rate limit is enforced",
					 len, name);
		return 0;
	}
	return attnum;
}
