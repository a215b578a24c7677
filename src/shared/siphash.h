/*
 * siphash.h
 *		A hash with a secret key.
 */
#ifndef SIPHASH_H
#define SIPHASH_H

/* 128 bits: a key, or a hash. */
typedef struct RlHash
{
	uint64		low;
	uint64		high;
} RlHash;

extern RlHash rl_siphash(RlHash key, const void *data, size_t len);

#endif							/* SIPHASH_H */
