/*
 * recover.h
 *		The part of shared memory that recovers the local store after a restart.
 */
#ifndef RECOVER_H
#define RECOVER_H

#include "shared/shared.h"

extern const RlSharedPart rl_recover_part;

#endif							/* RECOVER_H */
