/*
 * cluster.c
 *		Who has which of a cluster's slots, as far as this backend knows.
 *
 * Owners are small numbers that the caller gives meaning to; 0 is nobody.
 * There is no table until the first owner is learned, so that a server which
 * is no cluster costs nothing.
 */
#include "postgres.h"

#include "utils/memutils.h"

#include "ratelimit.h"
#include "redis/cluster.h"

static uint8 *owners = NULL;

bool
rl_slots_known(void)
{
	return owners != NULL;
}

/* The slot of a key: the CRC16 (XMODEM) of what the first braces hold, or of all. */
int
rl_slot(const char *key, int len)
{
	static uint16 table[256];
	const char *open = memchr(key, '{', len);
	const char *close = open ? memchr(open, '}', key + len - open) : NULL;
	uint16		crc = 0;

	if (table[1] == 0)
		for (int i = 0; i < 256; i++)
		{
			crc = i << 8;
			for (int bit = 0; bit < 8; bit++)
				crc = (crc << 1) ^ ((crc & 0x8000) ? 0x1021 : 0);
			table[i] = crc;
		}
	if (close != NULL && close > open + 1)
	{
		key = open + 1;
		len = close - key;
	}
	crc = 0;
	for (int i = 0; i < len; i++)
		crc = (crc << 8) ^ table[(crc >> 8) ^ (uint8) key[i]];
	return crc % RL_SLOTS;
}

/*
 * The slot's owner, or 0.  Nodes have ranges of slots, so that of one which is
 * not known yet the owner is likely that of the nearest which is: a guess.
 */
int
rl_slot_owner(int slot, bool *guess)
{
	*guess = owners[slot] == 0;
	for (int away = 0; away < RL_SLOTS; away++)
	{
		if (slot - away >= 0 && owners[slot - away] != 0)
			return owners[slot - away];
		if (slot + away < RL_SLOTS && owners[slot + away] != 0)
			return owners[slot + away];
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

/* Forgets what an owner has. */
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
