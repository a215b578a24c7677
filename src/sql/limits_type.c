/*
 * limits_type.c
 *		The type rl_limits in SQL: reads it from text and from a client's message.
 */
#include "postgres.h"

#include "libpq/pqformat.h"
#include "utils/builtins.h"

#include "algorithm/limits.h"
#include "error.h"

PG_FUNCTION_INFO_V1(rl_limits_in);
Datum
rl_limits_in(PG_FUNCTION_ARGS)
{
	char	   *input = PG_GETARG_CSTRING(0);
	RlLimits	limits;
	RlError		error;

	if (!rl_limits_parse(input, strlen(input), &limits, &error))
	{
#if PG_VERSION_NUM >= 160000
		ereturn(fcinfo->context, (Datum) 0,
				(errcode(error.sqlstate),
				 errmsg_internal("%s", error.message),
				 error.detail[0] ? errdetail_internal("%s", error.detail) : 0,
				 error.hint ? errhint("%s", error.hint) : 0));
#else
		rl_raise(&error);
#endif
	}
	PG_RETURN_TEXT_P(cstring_to_text(rl_limits_text(&limits)));
}

PG_FUNCTION_INFO_V1(rl_limits_recv);
Datum
rl_limits_recv(PG_FUNCTION_ARGS)
{
	StringInfo	message = (StringInfo) PG_GETARG_POINTER(0);
	int			len;
	char	   *input = pq_getmsgtext(message, message->len - message->cursor, &len);
	RlLimits	limits;
	RlError		error;

	if (!rl_limits_parse(input, len, &limits, &error))
		rl_raise(&error);
	PG_RETURN_TEXT_P(cstring_to_text(rl_limits_text(&limits)));
}
