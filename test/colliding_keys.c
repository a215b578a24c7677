/*
 * colliding_keys.c
 *		Prints pairs of keys, as a<TAB>b, that have the same hash more often than
 *		chance allows if hash_bytes_extended() computes it, whatever the seed is:
 *		about one pair of 80,000.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORDS			6

static const char alphabet[] =
	"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-@+/=,~!#$^&*()<>?[]|";

/* The difference of the keys of a pair: the last three words cancel the first three. */
static const uint32_t difference[WORDS] = {
	0xffffffc4, 0, 4, 0x0003fff8, 0x0007ffd4, 0x00440224
};

static uint32_t
random_number(void)
{
	static uint64_t state = UINT64_C(88172645463325252);

	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state >> 16;
}

/* Makes four characters that are printable, also after the difference is added. */
static void
make_word(char *a, char *b, uint32_t added)
{
	uint32_t	word;

	do
	{
		for (int i = 0; i < 4; i++)
			a[i] = alphabet[random_number() % (sizeof(alphabet) - 1)];
		memcpy(&word, a, sizeof(word));
		word += added;
		memcpy(b, &word, sizeof(word));
	} while (memchr(b, 0, 4) || strspn(b, alphabet) < 4);
}

int
main(int argc, char **argv)
{
	long		wanted = argc > 1 ? atol(argv[1]) : 0;

	for (; wanted > 0; wanted--)
	{
		char		a[4 * WORDS + 1] = "";
		char		b[4 * WORDS + 1] = "";

		for (int i = 0; i < WORDS; i++)
			make_word(a + 4 * i, b + 4 * i, difference[i]);
		printf("%s:0000042\t%s:0000042\n", a, b);
	}
	return 0;
}
