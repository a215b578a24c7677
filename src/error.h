/*
 * error.h
 *		Errors as values.
 */
#ifndef ERROR_H
#define ERROR_H

#include "miscadmin.h"

#include "ratelimit.h"

/* A server built by gcc has a pg_attribute_printf that clang does not know. */
#define rl_attribute_printf(f, a) __attribute__((format(printf, f, a)))

/*
 * Logs as ereport(LOG_SERVER_ONLY, ...) does, and does not throw: ereport serves interrupts at its
 * end, and a line for which there is no memory is left out.  Behind a commit, an error would stop
 * the server.  The error that is being handled, if there is one, must have been copied.
 */
#define rl_log_no_throw(...) \
	do \
	{ \
		MemoryContext context_before = CurrentMemoryContext; \
		uint32		held_before = InterruptHoldoffCount; \
		HOLD_INTERRUPTS(); \
		PG_TRY(); \
		{ \
			ereport(LOG_SERVER_ONLY, __VA_ARGS__); \
		} \
		PG_CATCH(); \
		{ \
			MemoryContextSwitchTo(context_before); \
			FlushErrorState(); \
		} \
		PG_END_TRY(); \
		InterruptHoldoffCount = held_before; \
	} while (0)

extern bool rl_error_set(RlError *error, int sqlstate, const char *fmt,...) rl_attribute_printf(3, 4);
extern bool rl_error_detail(RlError *error, const char *fmt,...) rl_attribute_printf(2, 3);
extern bool rl_error_is_own(const RlError *error);
extern bool rl_reserved_otherwise(int nkeys, RlError *error);
extern bool rl_too_many_reservations(RlError *error);
extern bool rl_reserved_apart(RlError *error);
extern const char *rl_error_text(const RlError *error);
extern void rl_log_failure(const RlError *error, const char *consequence);

/* report.c */
pg_noreturn extern void rl_raise(const RlError *error);

#endif							/* ERROR_H */
