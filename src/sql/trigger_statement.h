/*
 * trigger_statement.h
 *		Triggers that fire once for a statement.
 */
#ifndef TRIGGER_STATEMENT_H
#define TRIGGER_STATEMENT_H

#include "sql/trigger_rule.h"

struct TriggerData;

extern void rl_enforce_apart(RlAction *actions, int n);
extern void rl_enforce_statement(struct TriggerData *data, Rule *rule);

#endif							/* TRIGGER_STATEMENT_H */
