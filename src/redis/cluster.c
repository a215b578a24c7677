/*
 * cluster.c
 *		The owner of each slot of a cluster, as far as this backend knows.
 *
 * An owner is a node's number; 0: not known.  There is no table until the first owner is
 * learned.
 */
#include "postgres.h"

#include "utils/memutils.h"

#include "redis/cluster.h"

static uint8 *owners = NULL;

/* Returns true if replies have told that the server is a cluster's. */
bool
rl_slots_known(void)
{
	return owners != NULL;
}

/* Returns the key's slot: the CRC16 (XMODEM) of the text in its first braces, or of all. */
int
rl_slot(const char *key, int len)
{
	const char *open = memchr(key, '{', len);
	const char *close = open ? memchr(open, '}', key + len - open) : NULL;
	uint16		crc = 0;

	if (close != NULL && close > open + 1)
	{
		key = open + 1;
		len = close - key;
	}
	for (int i = 0; i < len; i++)
	{
		/* This computes eight bits at once, for the polynomial x^16 + x^12 + x^5 + 1. */
		uint8		high = (crc >> 8) ^ (uint8) key[i];

		high ^= high >> 4;
		crc = (crc << 8) ^ (high << 12) ^ (high << 5) ^ high;
	}
	return crc % RL_SLOTS;
}

/*
 * Returns the slot's owner, or 0.  As nodes have ranges of slots, one whose owner is not known
 * likely has that of the nearest slot: *guess is true then.
 */
int
rl_slot_owner(int slot, bool *guess)
{
	*guess = owners == NULL || owners[slot] == 0;
	for (int distance = 0; owners != NULL && distance < RL_SLOTS; distance++)
	{
		if (slot - distance >= 0 && owners[slot - distance] != 0)
			return owners[slot - distance];
		if (slot + distance < RL_SLOTS && owners[slot + distance] != 0)
			return owners[slot + distance];
	}
	return 0;
}

/* Notes the slot's owner, if there is memory for it. */
void
rl_slot_learn(int slot, int owner)
{
	if (owners == NULL)
		owners = MemoryContextAllocExtended(TopMemoryContext, RL_SLOTS,
											MCXT_ALLOC_NO_OOM | MCXT_ALLOC_ZERO);
	if (owners != NULL)
		owners[slot] = owner;
}

/* Forgets the slots of an owner. */
void
rl_slots_forget(int owner)
{
	for (int i = 0; owners != NULL && i < RL_SLOTS; i++)
		if (owners[i] == owner)
			owners[i] = 0;
}

/* Forgets that there is a cluster. */
void
rl_slots_reset(void)
{
	if (owners != NULL)
		pfree(owners);
	owners = NULL;
}
