/*
 * functions.h
 *		What SQL functions that look or repair have in common.
 */
#ifndef FUNCTIONS_H
#define FUNCTIONS_H

#include "ratelimit.h"

extern const RlStore *rl_asked_store(void);

#endif							/* FUNCTIONS_H */
