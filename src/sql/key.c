/*
 * key.c
 *		Makes keys from values, for rl_key and the trigger's {column}, and networks
 *		from addresses, for rl_network and the trigger's {column/64}.
 *
 * A type is accepted only if no session setting can change its text, and equal
 * numbers, and equal values of citext, have one text.  Otherwise a user could get a new key by
 * changing a setting, or by writing 1.0 as 1.00.  Braces of a value are escaped, so that it
 * neither begins nor ends the tag of a key (key_name.c).
 */
#include "postgres.h"

#include <sys/socket.h>

#include "catalog/dependency.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_type.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/formatting.h"
#include "utils/inet.h"
#include "utils/lsyscache.h"
#include "utils/numeric.h"

#include "sql/key.h"

#define V4_BITS				32
#define V6_BITS				128

/* Returns true if the type is citext, whose values can be equal though their texts differ. */
static bool
is_citext(Oid type)
{
	Oid			extension = getExtensionOfObject(TypeRelationId, type);
	char	   *name = OidIsValid(extension) ? get_extension_name(extension) : NULL;

	return name != NULL && strcmp(name, "citext") == 0 && !OidIsValid(get_element_type(type));
}

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
	part->fold = false;
	part->also = '\0';
	part->network = false;
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
		case CIDROID:
			break;
		default:
			if (type_is_enum(part->type))
				break;
			part->fold = is_citext(part->type);
			if (!part->fold)
				return false;
			part->type = TEXTOID;
	}
	getTypeOutputInfo(part->type, &output, &is_varlena);
	fmgr_info_cxt(output, &part->output, context);
	return true;
}

/* Reads a number of at most max, and moves *text to its end.  Returns false if there is none. */
static bool
read_bits(const char **text, int max, uint8 *bits)
{
	size_t		len = strspn(*text, "0123456789");
	int			number = len >= 1 && len <= 3 ? atoi(*text) : max + 1;

	*text += len;
	*bits = number;
	return number <= max;
}

/*
 * Lets the addresses of the part stand for their networks, whose bits are as in "64", of
 * IPv6, or as in "24,56", of IPv4 and IPv6.  Returns false if the text is wrong.
 */
bool
rl_key_part_network(RlKeyPart *part, const char *bits)
{
	part->network = true;
	part->v4 = V4_BITS;
	if (strchr(bits, ',') != NULL && !(read_bits(&bits, V4_BITS, &part->v4) && *bits++ == ','))
		return false;
	return read_bits(&bits, V6_BITS, &part->v6) && *bits == '\0';
}

/*
 * Returns the network of an address.  The netmask of the address does not matter: a user
 * could choose it.  IPv4 in the notation of IPv6 is IPv4.
 */
static inet *
network_of(const inet *address, int v4, int v6)
{
	static const unsigned char mapped[] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF};
	const unsigned char *bytes = ip_addr(address);
	inet	   *network = palloc0(sizeof(inet));
	bool		is_v6 = ip_family(address) == PGSQL_AF_INET6;
	int			bits;

	if (is_v6 && memcmp(bytes, mapped, sizeof(mapped)) == 0)
	{
		is_v6 = false;
		bytes += sizeof(mapped);
	}
	bits = is_v6 ? v6 : v4;
	ip_family(network) = is_v6 ? PGSQL_AF_INET6 : PGSQL_AF_INET;
	ip_bits(network) = bits;
	memcpy(ip_addr(network), bytes, (bits + 7) / 8);
	if (bits % 8 != 0)
		ip_addr(network)[bits / 8] &= 0xFF << (8 - bits % 8);
	SET_INET_VARSIZE(network);
	return network;
}

/* Returns the text of a value of citext as citext compares it. */
static char *
citext_folded(Datum value)
{
	const text *spelled = DatumGetTextPP(value);

	return str_tolower(VARDATA_ANY(spelled), VARSIZE_ANY_EXHDR(spelled), DEFAULT_COLLATION_OID);
}

/* Appends the text of a value, with ':', '%', braces and part->also escaped. */
void
rl_key_part_append(StringInfo key, RlKeyPart *part, Datum value)
{
	char	   *text;
	size_t		len;
	size_t		start = 0;		/* of the text that is not appended yet */

	if (part->type == NUMERICOID)
		text = numeric_normalize(DatumGetNumeric(value));
	else if (part->network)
		text = DatumGetCString(DirectFunctionCall1(inet_out,
												   InetPGetDatum(network_of(DatumGetInetPP(value), part->v4,
																			part->v6))));
	else if (part->fold)
		text = citext_folded(value);
	else
		text = OutputFunctionCall(&part->output, value);

	len = strlen(text);
	if (part->type == BPCHAROID)
		while (len > 0 && text[len - 1] == ' ')
			len--;

	for (size_t i = 0; i < len; i++)
	{
		char		c = text[i];

		/* In server encodings an ASCII byte is always an ASCII character. */
		if (c != ':' && c != '%' && c != '{' && c != '}' && c != part->also)
			continue;
		CHECK_FOR_INTERRUPTS();
		appendBinaryStringInfo(key, text + start, i - start);
		appendStringInfo(key, "%%%02X", c);
		start = i + 1;
	}
	appendBinaryStringInfo(key, text + start, len - start);
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
	{
		CHECK_FOR_INTERRUPTS();
		append_element(key, part, values[i], nulls[i], i);
	}
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

PG_FUNCTION_INFO_V1(rl_network);
Datum
rl_network(PG_FUNCTION_ARGS)
{
	int			v4 = PG_GETARG_INT32(1);
	int			v6 = PG_GETARG_INT32(2);

	if (v4 < 0 || v4 > V4_BITS)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("v4 must be between 0 and %d bits", V4_BITS)));
	if (v6 < 0 || v6 > V6_BITS)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("v6 must be between 0 and %d bits", V6_BITS)));
	PG_RETURN_INET_P(network_of(PG_GETARG_INET_PP(0), v4, v6));
}
