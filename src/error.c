/*
 * error.c
 *		Errors as values, which the caller raises, returns, or treats as
 *		ratelimit.on_error says.
 */
#include "postgres.h"

#include "mb/pg_wchar.h"

#include "error.h"

/* If text fills its buffer, cuts it where a character ends. */
static void
clip(char *text, size_t size)
{
	if (strlen(text) == size - 1)
		text[pg_mbcliplen(text, size - 1, size - 2)] = '\0';
}

/*
 * Sets the error's SQLSTATE and message, and no detail.  A message that is too long
 * is cut.  Does not throw.
 */
void
rl_error_set(RlError *error, int sqlstate, const char *fmt,...)
{
	va_list		args;

	error->sqlstate = sqlstate;
	error->unreachable = false;
	error->detail[0] = '\0';
	va_start(args, fmt);
	vsnprintf(error->message, sizeof(error->message), fmt, args);
	va_end(args);
	clip(error->message, sizeof(error->message));
}

/* Sets the detail, a sentence, of an error that has a message.  Does not throw. */
void
rl_error_detail(RlError *error, const char *fmt,...)
{
	va_list		args;

	va_start(args, fmt);
	vsnprintf(error->detail, sizeof(error->detail), fmt, args);
	va_end(args);
	clip(error->detail, sizeof(error->detail));
}

/* Raises the error. */
void
rl_raise(const RlError *error)
{
	ereport(ERROR,
			(errcode(error->sqlstate),
			 errmsg_internal("%s", error->message),
			 error->detail[0] ? errdetail_internal("%s", error->detail) : 0));
}
