/*
 * key.c
 *		Makes keys from values, for rl_key and the trigger's {column}.
 *
 * A type is accepted only if no session setting can change its text, and equal
 * numbers have one text.  Otherwise a user could get a new key by changing a
 * setting, or by writing 1.0 as 1.00.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/numeric.h"

#include "sql/key.h"

/*
 * Prepares the part for values of a type; allocates its data in the context.
 * Returns false if the type is not accepted in keys.
 */
bool
rl_key_part_init(RlKeyPart *part, Oid type, MemoryContext context)
{
	Oid			output;
	bool		is_varlena;

	part->type = getBaseType(type);
	part->also = '\0';
	switch (part->type)
	{
		case INT2OID:
		case INT4OID:
		case INT8OID:
		case NUMERICOID:
		case TEXTOID:
		case VARCHAROID:
		case BPCHAROID:
		case NAMEOID:
		case UNKNOWNOID:
		case UUIDOID:
		case BOOLOID:
		case INETOID:
			break;
		default:
			if (!type_is_enum(part->type))
				return false;
	}
	getTypeOutputInfo(part->type, &output, &is_varlena);
	fmgr_info_cxt(output, &part->output, context);
	return true;
}

/* Appends the text of a value, with ':', '%' and part->also escaped. */
void
rl_key_part_append(StringInfo key, RlKeyPart *part, Datum value)
{
	char	   *text;
	size_t		len;

	if (part->type == NUMERICOID)
		text = numeric_normalize(DatumGetNumeric(value));
	else
		text = OutputFunctionCall(&part->output, value);

	len = strlen(text);
	if (part->type == BPCHAROID)
		while (len > 0 && text[len - 1] == ' ')
			len--;

	for (size_t i = 0; i < len; i++)
	{
		/* In server encodings an ASCII byte is always an ASCII character. */
		if (text[i] == ':' || text[i] == '%' || text[i] == part->also)
			appendStringInfo(key, "%%%02X", text[i]);
		else
			appendStringInfoChar(key, text[i]);
	}
	pfree(text);
}

static void
append_element(StringInfo key, RlKeyPart *part, Datum value, bool isnull, int i)
{
	if (isnull)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("element %d of a rate-limit key must not be null", i + 1)));
	if (i > 0)
		appendStringInfoChar(key, ':');
	rl_key_part_append(key, part, value);
}

/* Appends the elements of argument 0, an array, which part makes text of. */
static void
append_array(StringInfo key, FunctionCallInfo fcinfo, RlKeyPart *part)
{
	ArrayType  *array;
	Datum	   *values;
	bool	   *nulls;
	int			n;
	int16		len;
	bool		byval;
	char		align;

	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("a rate-limit key must not be null")));
	array = PG_GETARG_ARRAYTYPE_P(0);
	get_typlenbyvalalign(ARR_ELEMTYPE(array), &len, &byval, &align);
	deconstruct_array(array, ARR_ELEMTYPE(array), len, byval, align, &values, &nulls, &n);
	for (int i = 0; i < n; i++)
		append_element(key, part, values[i], nulls[i], i);
}

/*
 * Returns the parts of the call site: one for each argument, or one for the
 * elements of an array, whose type is given.
 */
static RlKeyPart *
key_parts(FunctionCallInfo fcinfo, int n, Oid element)
{
	FmgrInfo   *flinfo = fcinfo->flinfo;
	RlKeyPart  *parts = flinfo->fn_extra;

	if (parts != NULL)
		return parts;
	parts = MemoryContextAlloc(flinfo->fn_mcxt, n * sizeof(RlKeyPart));
	for (int i = 0; i < n; i++)
	{
		Oid			type = OidIsValid(element) ? element : get_fn_expr_argtype(flinfo, i);

		if (!OidIsValid(type))
			ereport(ERROR,
					(errcode(ERRCODE_INDETERMINATE_DATATYPE),
					 errmsg("could not determine the type of a rate-limit key's element")));
		if (!rl_key_part_init(&parts[i], type, flinfo->fn_mcxt))
			ereport(ERROR,
					(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
					 errmsg("type %s cannot be part of a rate-limit key", format_type_be(type)),
					 errhint("Cast the value to a type whose text does not depend on settings, such as text or bigint.")));
	}
	return flinfo->fn_extra = parts;
}

PG_FUNCTION_INFO_V1(rl_key);
Datum
rl_key(PG_FUNCTION_ARGS)
{
	StringInfoData key;

	initStringInfo(&key);
	if (get_fn_expr_variadic(fcinfo->flinfo))
		append_array(&key, fcinfo,
					 key_parts(fcinfo, 1, get_base_element_type(get_fn_expr_argtype(fcinfo->flinfo, 0))));
	else
	{
		RlKeyPart  *parts = key_parts(fcinfo, PG_NARGS(), InvalidOid);

		for (int i = 0; i < PG_NARGS(); i++)
			append_element(&key, &parts[i], PG_GETARG_DATUM(i), PG_ARGISNULL(i), i);
	}
	PG_RETURN_TEXT_P(cstring_to_text_with_len(key.data, key.len));
}

/* rl_key for drivers that send parameters without a type. */
PG_FUNCTION_INFO_V1(rl_key_text);
Datum
rl_key_text(PG_FUNCTION_ARGS)
{
	StringInfoData key;

	initStringInfo(&key);
	append_array(&key, fcinfo, key_parts(fcinfo, 1, TEXTOID));
	PG_RETURN_TEXT_P(cstring_to_text_with_len(key.data, key.len));
}
