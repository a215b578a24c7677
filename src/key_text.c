/*
 * key_text.c
 *		A key, which is in UTF-8, as text of the database's encoding.
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/namespace.h"
#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"

#include "key_text.h"

/*
 * Returns text of UTF-8 in the database's encoding, or NULL if that lacks one of the
 * characters, or none can be converted in this state of the transaction.
 */
static char *
convert(const char *data, int len)
{
	Oid			function;
	int			size = len * MAX_CONVERSION_GROWTH + 1;
	char	   *text;

	if (!IsTransactionState())
		return NULL;
	function = FindDefaultConversionProc(PG_UTF8, GetDatabaseEncoding());
	if (!OidIsValid(function))
		return NULL;
	text = palloc(size);
	if (pg_do_encoding_conversion_buf(function, PG_UTF8, GetDatabaseEncoding(),
									  (unsigned char *) data, len, (unsigned char *) text, size,
									  true) != len)
		return NULL;
	return text;
}

/*
 * Returns a part of a key, which is in UTF-8, as text for people, palloc'd.  Control
 * characters are escaped, so that a key can neither forge a line nor move a cursor.
 * If the database's encoding lacks a character, all bytes beyond ASCII are escaped.
 */
char *
rl_key_shown(const char *data, int len)
{
	StringInfoData plain;
	char	   *text;
	bool		ascii = true;

	initStringInfo(&plain);
	for (int i = 0; i < len; i++)
	{
		unsigned char c = data[i];

		ascii &= c < 0x80;
		/* The control characters from U+0080 to U+009F have two bytes. */
		if (c == 0xc2 && i + 1 < len && (unsigned char) data[i + 1] < 0xa0)
			appendStringInfo(&plain, "\\xc2\\x%02x", (unsigned char) data[++i]);
		else if (c < ' ' || c == 0x7f)
			appendStringInfo(&plain, "\\x%02x", c);
		else
			appendStringInfoChar(&plain, c);
	}
	if (ascii || GetDatabaseEncoding() == PG_UTF8)
		return plain.data;
	text = convert(plain.data, plain.len);
	if (text != NULL)
		return text;
	text = plain.data;
	initStringInfo(&plain);
	for (; *text; text++)
		appendStringInfo(&plain, IS_HIGHBIT_SET(*text) ? "\\x%02x" : "%c", (unsigned char) *text);
	return plain.data;
}

/*
 * Returns a key, which is in UTF-8, in the database's encoding, palloc'd, to be compared with
 * a pattern.  A character that the encoding lacks is one character there too.
 */
char *
rl_key_matched(const char *data, int len)
{
	StringInfoData text;
	int			n;

	initStringInfo(&text);
	for (int i = 0; i < len; i += n)
	{
		const char *c;

		n = pg_utf_mblen((const unsigned char *) data + i);
		if (n == 1 || GetDatabaseEncoding() == PG_UTF8 || GetDatabaseEncoding() == PG_SQL_ASCII)
			appendBinaryStringInfo(&text, data + i, n);
		else
			appendStringInfoString(&text, (c = convert(data + i, n)) != NULL ? c : "\032");
	}
	return text.data;
}
