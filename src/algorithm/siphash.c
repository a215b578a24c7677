/*
 * siphash.c
 *		SipHash-2-4 with 128 bits of output.
 *
 * Without the secret, inputs with the same hash cannot be constructed, as those of
 * hash_bytes_extended(), which is faster, can be without knowing the seed.
 */
#include "postgres.h"

#include "port/pg_bswap.h"

#include "algorithm/siphash.h"

#ifdef WORDS_BIGENDIAN
#define from_little_endian(x)	pg_bswap64(x)
#else
#define from_little_endian(x)	(x)
#endif

typedef struct State
{
	uint64		v0;
	uint64		v1;
	uint64		v2;
	uint64		v3;
} State;

static inline uint64
rotate_left(uint64 x, int n)
{
	return (x << n) | (x >> (64 - n));
}

static inline void
mix(State *s, int rounds)
{
	for (int i = 0; i < rounds; i++)
	{
		s->v0 += s->v1;
		s->v2 += s->v3;
		s->v1 = rotate_left(s->v1, 13) ^ s->v0;
		s->v3 = rotate_left(s->v3, 16) ^ s->v2;
		s->v0 = rotate_left(s->v0, 32);
		s->v2 += s->v1;
		s->v0 += s->v3;
		s->v1 = rotate_left(s->v1, 17) ^ s->v2;
		s->v3 = rotate_left(s->v3, 21) ^ s->v0;
		s->v2 = rotate_left(s->v2, 32);
	}
}

static inline void
add_word(State *s, uint64 word)
{
	s->v3 ^= word;
	mix(s, 2);
	s->v0 ^= word;
}

/* Returns the hash of the data, made with the secret. */
RlHash
rl_siphash(RlHash secret, const void *data, size_t len)
{
	State		s = {
		.v0 = UINT64CONST(0x736f6d6570736575) ^ secret.low,
		.v1 = UINT64CONST(0x646f72616e646f6d) ^ secret.high ^ 0xee,
		.v2 = UINT64CONST(0x6c7967656e657261) ^ secret.low,
		.v3 = UINT64CONST(0x7465646279746573) ^ secret.high
	};
	const char *p = data;
	size_t		left = len;
	uint64		word;
	RlHash		hash;

	for (; left >= sizeof(word); left -= sizeof(word), p += sizeof(word))
	{
		memcpy(&word, p, sizeof(word));
		add_word(&s, from_little_endian(word));
	}
	word = 0;
	memcpy(&word, p, left);
	/* The last word has the last bytes, and the length above them. */
	add_word(&s, from_little_endian(word) | (uint64) len << 56);

	s.v2 ^= 0xee;
	mix(&s, 4);
	hash.low = s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
	s.v1 ^= 0xdd;
	mix(&s, 4);
	hash.high = s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
	return hash;
}
