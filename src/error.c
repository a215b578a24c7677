/*
 * error.c
 *		Errors as values, which the caller raises, returns, or treats as
 *		ratelimit.on_error says.
 */
#include "postgres.h"

#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"

#include "error.h"
#include "report.h"

/* If text fills its buffer, cuts it where a character ends. */
static void
clip(char *text, size_t size)
{
	if (strlen(text) == size - 1)
		text[pg_mbcliplen(text, size - 1, size - 2)] = '\0';
}

/*
 * Sets the error's SQLSTATE and message, and nothing else.  A message that is too long
 * is cut.  Does not throw.
 */
void
rl_error_set(RlError *error, int sqlstate, const char *fmt,...)
{
	va_list		args;

	error->sqlstate = sqlstate;
	error->unreachable = error->wrong_password = false;
	error->retry_after = 0;
	error->hint = NULL;
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

/*
 * Returns a part of a key, which is in UTF-8, as text for people.  Control
 * characters are escaped, so that a key can neither forge a line nor move a
 * cursor.  If the database's encoding may lack characters, all characters
 * beyond ASCII are escaped too.
 */
char *
rl_key_shown(const char *data, int len)
{
	StringInfoData text;

	initStringInfo(&text);
	for (int i = 0; i < len; i++)
	{
		unsigned char c = data[i];
		int			escaped = c < ' ' || c == 0x7f || (c > 0x7f && GetDatabaseEncoding() != PG_UTF8);

		/* The control characters from U+0080 to U+009F have two bytes. */
		if (c == 0xc2 && i + 1 < len && (unsigned char) data[i + 1] < 0xa0)
			escaped = 2;
		for (; escaped > 1; escaped--)
			appendStringInfo(&text, "\\x%02x", (unsigned char) data[i++]);
		if (escaped)
			appendStringInfo(&text, "\\x%02x", (unsigned char) data[i]);
		else
			appendStringInfoChar(&text, data[i]);
	}
	return text.data;
}

/* Raises the error. */
void
rl_raise(const RlError *error)
{
	rl_raise_for(error, NULL);
}
