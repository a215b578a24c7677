/*
 * rule_column.h
 *		The columns that a trigger's arguments name.
 */
#ifndef RULE_COLUMN_H
#define RULE_COLUMN_H

#include "utils/rel.h"

#include "ratelimit.h"

extern AttrNumber rl_rule_column(Relation rel, const Trigger *trigger, const char *name, int len,
								 RlError *error);

#endif							/* RULE_COLUMN_H */
