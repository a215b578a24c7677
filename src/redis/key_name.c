/*
 * key_name.c
 *		The names of keys in Redis.
 */
#include "postgres.h"

#include "mb/pg_wchar.h"

#include "redis/redis.h"

/*
 * Writes the key's name in Redis, "<prefix>{<key>}" with the key's braces escaped, because
 * Redis Cluster reads them.  Returns its length, at most RL_MAX_REDIS_KEY.
 */
int
rl_redis_key(const RlKey *key, char *name)
{
	int			n = strnlen(rl_key_prefix, RL_MAX_PREFIX);

	memcpy(name, rl_key_prefix, n);
	name[n++] = '{';
	for (int i = 0; i < key->len; i++)
	{
		char		c = key->data[i];

		if (c == '%' || c == '{' || c == '}')
		{
			memcpy(name + n, c == '%' ? "%25" : c == '{' ? "%7B" : "%7D", 3);
			n += 3;
		}
		else
			name[n++] = c;
	}
	name[n++] = '}';
	return n;
}

/* Reads the key in a name into RL_MAX_KEY bytes.  Returns false if it is not the name of a key. */
bool
rl_redis_read_key(const char *name, int name_len, char *key, int *len)
{
	int			n = 0;

	for (int i = 0; i < name_len; i++)
	{
		char		c = name[i];

		if (n == RL_MAX_KEY || c == '{' || c == '}')
			return false;
		if (c == '%')
		{
			const char *code = name + i + 1;

			if (name_len - i < 3)
				return false;
			c = memcmp(code, "25", 2) == 0 ? '%' : memcmp(code, "7B", 2) == 0 ? '{' :
				memcmp(code, "7D", 2) == 0 ? '}' : '\0';
			if (c == '\0')
				return false;
			i += 2;
		}
		key[n++] = c;
	}
	*len = n;
	return n > 0 && pg_encoding_verifymbstr(PG_UTF8, key, n) == n;
}
