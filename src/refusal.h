/*
 * refusal.h
 *		The error of a refused action.
 */
#ifndef REFUSAL_H
#define REFUSAL_H

#include "ratelimit.h"

pg_noreturn extern void rl_raise_refused(const RlAction *action, const RlAnswer *answer,
										 const char *also);

#endif							/* REFUSAL_H */
