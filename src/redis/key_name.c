/*
 * key_name.c
 *		The names of keys in Redis.
 *
 * Redis Cluster chooses the slot by the text in a name's first braces.  That is the whole key,
 * "<prefix>{<key>}", unless the key begins with a tag and goes on: "{acme}user:7" has the name
 * "<prefix>{acme}user:7", so that all keys of a tag, and the key "acme", are in one slot.  Other
 * braces are escaped.  So only a name without a tag ends with a brace, and no two keys have
 * one name.
 */
#include "postgres.h"

#include "mb/pg_wchar.h"

#include "redis/redis.h"

/* Returns how long the tag at the key's start is, with its braces; 0: the key has none. */
static int
tag_length(const char *key, int len)
{
	const char *close = key[0] == '{' ? memchr(key, '}', len) : NULL;
	int			tag = close != NULL ? close + 1 - key : 0;

	return tag > 2 && tag < len ? tag : 0;
}

/* Writes bytes of a key, escaped, behind n bytes of the name.  Returns how many it has then. */
static int
write_escaped(char *name, int n, const char *data, int len)
{
	for (int i = 0; i < len; i++)
	{
		char		c = data[i];

		if (c == '%' || c == '{' || c == '}')
		{
			memcpy(name + n, c == '%' ? "%25" : c == '{' ? "%7B" : "%7D", 3);
			n += 3;
		}
		else
			name[n++] = c;
	}
	return n;
}

/* Writes the key's name in Redis.  Returns its length, at most RL_MAX_REDIS_KEY. */
int
rl_redis_key(const RlKey *key, char *name)
{
	int			tag = tag_length(key->data, key->len);
	int			n = strnlen(rl_key_prefix, RL_MAX_PREFIX);

	memcpy(name, rl_key_prefix, n);
	name[n++] = '{';
	if (tag > 0)
		n = write_escaped(name, n, key->data + 1, tag - 2);
	else
		n = write_escaped(name, n, key->data, key->len);
	name[n++] = '}';
	return tag > 0 ? write_escaped(name, n, key->data + tag, key->len - tag) : n;
}

/*
 * Reads the key in a name, which is given without the prefix, into RL_MAX_KEY bytes.  Returns
 * false if it is not the name of a key.
 */
bool
rl_redis_read_key(const char *name, int name_len, char *key, int *len)
{
	char		again[RL_MAX_REDIS_KEY];
	int			prefix = strnlen(rl_key_prefix, RL_MAX_PREFIX);
	bool		tagged = name_len > 0 && name[name_len - 1] != '}';
	int			end = tagged ? name_len : name_len - 1;
	int			n = 0;

	for (int i = tagged ? 0 : 1; i < end; i++)
	{
		char		c = name[i];

		if (n == RL_MAX_KEY)
			return false;
		if (c == '%' && end - i >= 3)
		{
			const char *code = name + i + 1;

			c = memcmp(code, "25", 2) == 0 ? '%' : memcmp(code, "7B", 2) == 0 ? '{' :
				memcmp(code, "7D", 2) == 0 ? '}' : '\0';
			i += 2;
		}
		key[n++] = c;
	}
	*len = n;
	/* Another program's name is not the one that its key would have, or has no valid key. */
	return n > 0 && pg_encoding_verifymbstr(PG_UTF8, key, n) == n &&
		rl_redis_key(&(RlKey) {.data = key,.len = n}, again) == prefix + name_len &&
		memcmp(again + prefix, name, name_len) == 0;
}
