/*
 * What the algorithms need of PostgreSQL's headers, which Frama-C cannot read.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int32_t int32;
typedef int64_t int64;
typedef uint8_t uint8;
typedef uint32_t uint32;
typedef uint64_t uint64;
typedef size_t Size;

#define INT64CONST(x)	INT64_C(x)
#define PG_INT64_MAX	INT64_MAX
#define Max(x, y)		((x) > (y) ? (x) : (y))
#define Min(x, y)		((x) < (y) ? (x) : (y))
#define StaticAssertDecl(condition, message) _Static_assert(condition, message)
#define pg_attribute_unused()
#define pg_attribute_noreturn() __attribute__((noreturn))
#define PG_VERSION_NUM	150000
#define ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE 1

#ifdef __FRAMAC__
/*@ assigns *result;
    ensures \result != 0 <==> !(-0x7fffffffffffffff - 1 <= a * b <= 0x7fffffffffffffff);
    ensures \result == 0 ==> *result == a * b; */
extern bool pg_mul_s64_overflow(int64 a, int64 b, int64 *result);
#else
#define pg_mul_s64_overflow(a, b, result) __builtin_mul_overflow(a, b, result)
#endif
