/*
 * error.h
 *		Errors as values: made, and raised.
 */
#ifndef ERROR_H
#define ERROR_H

#include "ratelimit.h"

/* Not pg_attribute_printf: of a server built by gcc, clang does not know it. */
#define rl_attribute_printf(f, a) __attribute__((format(printf, f, a)))

extern void rl_error_set(RlError *error, int sqlstate, const char *fmt,...) rl_attribute_printf(3, 4);
extern void rl_error_detail(RlError *error, const char *fmt,...) rl_attribute_printf(2, 3);
pg_noreturn extern void rl_raise(const RlError *error);

#endif							/* ERROR_H */
