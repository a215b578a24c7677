/*
 * siphash.h
 *		A hash that is made with a secret.
 */
#ifndef SIPHASH_H
#define SIPHASH_H

/* 128 bits: a hash, or the secret that it is made with. */
typedef struct RlHash
{
	uint64		low;
	uint64		high;
} RlHash;

extern RlHash rl_siphash(RlHash secret, const void *data, size_t len);

#endif							/* SIPHASH_H */
