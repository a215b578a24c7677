/*
 * fuzz.c
 *		Runs libFuzzer in a backend, linked with all objects of the extension.
 *
 * Each input has a subtransaction and a memory context of its own.  An error with a SQLSTATE of
 * its own is a normal end.  An internal error, and a condition that is not met, end the process.
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "mb/pg_wchar.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/resowner.h"

#include "fuzz.h"

extern int	LLVMFuzzerRunDriver(int *argc, char ***argv, int (*callback) (const uint8 *data, size_t size));

static const struct
{
	const char *name;
	FuzzRun		run;
	bool		is_string;
}			targets[] = {
	{"limits", fuzz_limits, false},
	{"url", fuzz_url, true},
	{"template", fuzz_template, true},
	{"resp", fuzz_resp, false},
	{"connect", fuzz_connect, false},
	{"call", fuzz_call, false},
	{"store", fuzz_store, false},
	{"scan", fuzz_scan, false},
	{"log", fuzz_log, false},
	{"recover", fuzz_recover, false},
};

static FuzzRun run = NULL;
static bool is_string;

/* Ends the process as the sanitizers do. */
void
fuzz_failed(const char *condition, const char *file, int line)
{
	fprintf(stderr, "%s:%d: not met: %s\n", file, line, condition);
	abort();
}

/* Requires an error that a function has set to be one that can be raised. */
void
fuzz_check_error(const RlError *error)
{
	REQUIRE(error->sqlstate != 0 && error->sqlstate != ERRCODE_INTERNAL_ERROR);
	REQUIRE(error->message[0] != '\0');
	REQUIRE(pg_verifymbstr(error->message, strlen(error->message), true));
	REQUIRE(pg_verifymbstr(error->detail, strlen(error->detail), true));
}

/* Ends the process unless the error is one that a user can cause. */
static void
check_raised(const ErrorData *error)
{
	int			class = ERRCODE_TO_CATEGORY(error->sqlerrcode);

	if (class != ERRCODE_TO_CATEGORY(ERRCODE_INTERNAL_ERROR) && class != ERRCODE_TO_CATEGORY(ERRCODE_OUT_OF_MEMORY))
		return;
	fprintf(stderr, "%s %s\n", unpack_sql_state(error->sqlerrcode), error->message);
	abort();
}

static int
run_input(const uint8 *data, size_t size)
{
	static MemoryContext context = NULL;
	MemoryContext old = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	char	   *string = NULL;

	if (context == NULL)
		context = AllocSetContextCreate(TopMemoryContext, "fuzz", ALLOCSET_DEFAULT_SIZES);
	if (is_string)
	{
		/* AddressSanitizer knows the end of memory of malloc, and not that of palloc. */
		string = malloc(size + 1);
		memcpy(string, data, size);
		string[size] = '\0';
	}
	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		run(is_string ? string : (const char *) data, size);
		ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		check_raised(CopyErrorData());
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(old);
	CurrentResourceOwner = owner;
	MemoryContextReset(context);
	free(string);
	return 0;
}

/* fuzz(target, options of libFuzzer): does not return. */
PG_FUNCTION_INFO_V1(fuzz);
Datum
fuzz(PG_FUNCTION_ARGS)
{
	char	   *name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	Datum	   *options;
	int			n;
	int			argc = 1;
	char	  **argv;

	for (size_t i = 0; i < lengthof(targets); i++)
		if (strcmp(targets[i].name, name) == 0)
		{
			run = targets[i].run;
			is_string = targets[i].is_string;
		}
	if (run == NULL)
		elog(ERROR, "there is no target \"%s\"", name);
	deconstruct_array(PG_GETARG_ARRAYTYPE_P(1), TEXTOID, -1, false, TYPALIGN_INT, &options, NULL, &n);
	argv = palloc0((n + 2) * sizeof(char *));
	argv[0] = name;
	for (int i = 0; i < n; i++)
		argv[argc++] = TextDatumGetCString(options[i]);
	LLVMFuzzerRunDriver(&argc, &argv, run_input);
	PG_RETURN_VOID();
}
