/*
 * trigger_warnings.h
 *		The dangers of triggers, for rl_triggers.
 */
#ifndef TRIGGER_WARNINGS_H
#define TRIGGER_WARNINGS_H

#include "sql/trigger_rule.h"

extern const char *rl_trigger_warnings(Relation rel, const TriggerDesc *triggers, int n, const Rule *rule);

#endif							/* TRIGGER_WARNINGS_H */
