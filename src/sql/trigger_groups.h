/*
 * trigger_groups.h
 *		The rows of a statement, in groups of one key.
 */
#ifndef TRIGGER_GROUPS_H
#define TRIGGER_GROUPS_H

#include "sql/trigger_rule.h"

typedef struct RowGroups RowGroups;

extern RowGroups *rl_groups_make(Rule *rule, const RlOrigin *origins);
extern void rl_groups_add(RowGroups *groups, struct TupleTableSlot *row);
extern bool rl_groups_finish(RowGroups *groups);
extern bool rl_groups_left(const RowGroups *groups);
extern int	rl_groups_next(RowGroups *groups, RlAction **actions);
extern void rl_groups_free(RowGroups *groups);

#endif							/* TRIGGER_GROUPS_H */
