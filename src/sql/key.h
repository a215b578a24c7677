/*
 * key.h
 *		Values to keys.
 */
#ifndef KEY_H
#define KEY_H

#include "lib/stringinfo.h"
#include "ratelimit.h"

typedef struct RlKeyPart
{
	Oid			type;			/* its base type, for the exceptions */
	FmgrInfo	output;
} RlKeyPart;

extern bool rl_key_part_init(RlKeyPart *part, Oid type, MemoryContext context);
extern void rl_key_part_append(StringInfo key, RlKeyPart *part, Datum value);

#endif							/* KEY_H */
