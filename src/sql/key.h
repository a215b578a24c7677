/*
 * key.h
 *		Makes keys from values.
 */
#ifndef KEY_H
#define KEY_H

#include "lib/stringinfo.h"
#include "ratelimit.h"

/* How values of one type become part of a key. */
typedef struct RlKeyPart
{
	Oid			type;			/* base type: some types are special */
	bool		fold;			/* to lower case, as citext compares; the type is then text */
	char		also;			/* an ASCII character that is escaped too, or 0 */
	bool		network;		/* addresses stand for their networks */
	uint8		v4;				/* bits of the networks of IPv4 */
	uint8		v6;
	FmgrInfo	output;
} RlKeyPart;

extern bool rl_key_part_init(RlKeyPart *part, Oid type, MemoryContext context);
extern bool rl_key_part_network(RlKeyPart *part, const char *bits);
extern void rl_key_part_append(StringInfo key, RlKeyPart *part, Datum value);

#endif							/* KEY_H */
