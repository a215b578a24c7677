/*
 * skip.h
 *		Rows that on_deny=skip must not leave out.
 */
#ifndef SKIP_H
#define SKIP_H

#include "commands/trigger.h"

extern void rl_skip_init(void);
extern const char *rl_skip_forbidden(const TriggerData *data);

#endif							/* SKIP_H */
