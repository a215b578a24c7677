/*
 * refusal_log.h
 *		Which refusals get into the server's log.
 */
#ifndef REFUSAL_LOG_H
#define REFUSAL_LOG_H

#include "shared/shared.h"

extern const RlSharedPart rl_refusal_log_part;

extern void rl_refusal_log_init(void);
extern const char *rl_refusal_domain(const RlKey *key);
extern bool rl_shadow_may_log(const RlKey *key, uint64 *left_out);
extern const char *rl_left_out_text(uint64 left_out);

#endif							/* REFUSAL_LOG_H */
