/*
 * siphash.c
 *		Prints what src/algorithm/siphash.c makes of the published test vectors' inputs:
 *		the key 00 01 ... 0f, and 0 to 63 bytes 00 01 02 ...
 */
#include "postgres.h"

#undef printf

#include "algorithm/siphash.h"

static void
print_bytes(uint64 number)
{
	for (int i = 0; i < 8; i++)
		printf("%02x", (unsigned) (number >> (8 * i) & 0xff));
}

int
main(void)
{
	RlHash		key = {UINT64CONST(0x0706050403020100), UINT64CONST(0x0f0e0d0c0b0a0908)};
	unsigned char data[64];

	for (int i = 0; i < 64; i++)
	{
		RlHash		hash = rl_siphash(key, data, i);

		print_bytes(hash.low);
		print_bytes(hash.high);
		printf("\n");
		data[i] = i;
	}
	return 0;
}
