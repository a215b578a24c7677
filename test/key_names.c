/*
 * key_names.c
 *		Prints, for random texts with braces and escapes, the name in Redis that a key of this
 *		text has, and the key that src/redis/key_name.c reads in a name of this text, or "-".
 *		The arguments are a seed, the number of texts, and the prefix.
 */
#include "postgres.h"

#undef printf

#include "mb/pg_wchar.h"

#include "redis/redis.h"

char	   *rl_key_prefix;

/* The texts are ASCII. */
int
pg_encoding_verifymbstr(int encoding pg_attribute_unused(), const char *mbstr pg_attribute_unused(), int len)
{
	return len;
}

int
main(int argc, char **argv)
{
	static const char *const pieces[] = {"{", "{", "}", "}", "%", "%25", "%7B", "%7D", "%7b", "a", "7", ":"};
	uint64		state = strtoull(argv[1], NULL, 10);

	rl_key_prefix = argv[argc - 1];
	for (int i = atoi(argv[2]); i > 0; i--)
	{
		char		text[64] = "";
		char		name[RL_MAX_REDIS_KEY];
		char		read[RL_MAX_KEY];
		int			name_len;
		int			len;
		int			left;

		state = state * UINT64CONST(6364136223846793005) + UINT64CONST(1442695040888963407);
		left = 1 + (state >> 33) % 9;
		while (left-- > 0)
		{
			state = state * UINT64CONST(6364136223846793005) + UINT64CONST(1442695040888963407);
			strcat(text, pieces[(state >> 33) % lengthof(pieces)]);
		}
		name_len = rl_redis_key(&(RlKey) {.data = text,.len = strlen(text)}, name);
		if (!rl_redis_read_key(name + strlen(rl_key_prefix), name_len - strlen(rl_key_prefix), read, &len) ||
			len != (int) strlen(text) || memcmp(read, text, len) != 0)
			printf("not read back\t");
		printf("%s\t%.*s\t", text, name_len, name);
		if (rl_redis_read_key(text, strlen(text), read, &len))
			printf("%.*s\n", len, read);
		else
			printf("-\n");
	}
	return 0;
}
