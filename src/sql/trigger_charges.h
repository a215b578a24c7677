/*
 * trigger_charges.h
 *		What the rows of a statement have charged.
 */
#ifndef TRIGGER_CHARGES_H
#define TRIGGER_CHARGES_H

#include "ratelimit.h"

extern void rl_statement_note(const RlAction *action, const RlAnswer *answer);
extern const char *rl_statement_exceeds(const RlAction *action, RlAnswer *answer);

#endif							/* TRIGGER_CHARGES_H */
