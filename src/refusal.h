/*
 * refusal.h
 *		The report to a refused client.
 */
#ifndef REFUSAL_H
#define REFUSAL_H

#include "report.h"

extern void rl_log_shadow(const RlAction *action, int limit, const char *why);
extern int	rl_refused_key(const RlAnswer *answers, int n);
pg_noreturn extern void rl_raise_refused(const RlAction *action, const RlAnswer *answer,
										 const char *also);
pg_noreturn extern void rl_raise_refused_all(const RlAction *actions, int n, const RlAnswer *answers,
											 const char *also);

#endif							/* REFUSAL_H */
