/*
 * trigger_charges.c
 *		What a statement has charged in its triggers, by key and limits.
 *
 * If these charges leave no room for the next row, the statement would be refused again,
 * however long the client waits.  So its error is PT413, and not PT429.
 *
 * A statement that a function or a trigger runs has charges of its own.  All deferred
 * triggers of a commit count as one statement.
 *
 * The table has a fixed size.  If it is full, the entry with the fewest units is
 * overwritten; a refusal of its key can then be PT429 again.
 */
#include "postgres.h"

#include "access/xact.h"
#include "common/hashfn.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "algorithm/algorithm.h"
#include "shared/shared.h"
#include "sql/trigger_charges.h"
#include "transaction.h"

#define SETS				64
#define WAYS				4

/* A statement that fires such triggers. */
typedef struct Statement
{
	MemoryContext context;		/* of the query, of which the context of a trigger is a child */
	TimestampTz transaction;	/* its start: the context of deferred triggers can last longer */
	uint64		number;			/* never used again */
	struct Statement *next;
	MemoryContextCallback end;
} Statement;

typedef struct Charged
{
	uint64		hash;			/* of the key and the limits */
	uint64		statement;		/* its number; 0: free */
	int64		units;
	RlTimes		since;			/* before the first charge */
} Charged;

static Charged table[SETS][WAYS];
static Statement *statements = NULL;	/* those that have charged, the innermost first */

/* Forgets a statement, whose context is being deleted. */
static void
forget_statement(void *arg)
{
	Statement **link = &statements;

	while (*link != arg)
		link = &(*link)->next;
	*link = (*link)->next;
}

/*
 * Returns the number of the statement whose trigger is running, or 0 if it has charged nothing; with "add"
 * never 0.
 */
static uint64
statement_number(bool add)
{
	static uint64 last = 0;
	MemoryContext context = MemoryContextGetParent(CurrentMemoryContext);
	TimestampTz transaction = GetCurrentTransactionStartTimestamp();
	Statement  *statement = statements;

	while (statement != NULL && statement->context != context)
		statement = statement->next;
	if (statement == NULL)
	{
		if (!add)
			return 0;
		statement = MemoryContextAllocZero(context, sizeof(Statement));
		statement->context = context;
		statement->end = (MemoryContextCallback) {.func = forget_statement,.arg = statement};
		MemoryContextRegisterResetCallback(context, &statement->end);
		statement->next = statements;
		statements = statement;
	}
	/* The deferred triggers of a COMMIT in a procedure run in the procedure's context. */
	if (statement->transaction != transaction)
	{
		statement->transaction = transaction;
		statement->number = ++last;
	}
	return statement->number;
}

static RlTimes
times_now(void)
{
	RlTimes		now = {.wall = rl_wall_now()};

	now.store = rl_shared_available() ? rl_local_now() : now.wall;
	return now;
}

/* Returns the entry of the action's key and limits, or with add a new one, or NULL. */
static Charged *
find(const RlAction *action, bool add)
{
	uint64		statement = statement_number(add);
	uint64		hash =
		hash_bytes_extended((const unsigned char *) action->key.data, action->key.len, action->limits->hash);
	Charged    *set = table[hash % SETS];
	Charged    *least = set;

	for (Charged *entry = set; entry < set + WAYS; entry++)
	{
		if (entry->hash == hash && entry->statement == statement)
			return statement == 0 ? NULL : entry;
		if (least->statement == statement && (entry->statement != statement || entry->units < least->units))
			least = entry;
	}
	if (!add || statement == 0)
		return NULL;
	*least = (Charged) {hash, statement, 0, times_now()};
	return least;
}

/* Notes an action that was allowed: of a row, or of a group of rows. */
void
rl_statement_note(const RlAction *action, const RlAnswer *answer)
{
	RlSource	source = answer->decision.source;
	Charged    *entry;

	if (action->quota == 0 || (source != RL_FROM_REDIS && source != RL_FROM_LOCAL && source != RL_FROM_LEASE))
		return;
	entry = find(action, true);
	if (entry != NULL)
		entry->units = Min(entry->units + action->quota, RL_MAX_COUNT);
}

/*
 * Sets *before to what the statement, or under refund_on_abort the transaction, has
 * charged to one of the action's limits.  Returns how much of it still counts.
 */
static int64
still_charged(const RlAction *action, const RlLimit *limit, const RlAnswer *answer, int64 *before)
{
	const Charged *entry;
	RlCharge	charge;

	if (limit->refund_on_abort)
		return *before = rl_grants_held(&action->key, limit, answer->local,
									   rl_time_of(limit, answer->at.store > 0 ? answer->at : times_now()));
	entry = find(action, false);
	if (entry == NULL)
		return *before = 0;
	*before = entry->units;
	charge = rl_charge_first(limit, entry->units, rl_time_of(limit, entry->since));
	return rl_charge_left(limit, &charge, rl_time_of(limit, times_now()));
}

/*
 * If an action was refused because of what its own statement or transaction has charged,
 * changes the answer: no wait helps.  Returns a sentence for the error's detail, or NULL.
 */
const char *
rl_statement_exceeds(const RlAction *action, RlAnswer *answer)
{
	RlDecision *decision = &answer->decision;

	if (decision->allowed || answer->binding < 0 || decision->retry_after == RL_NEVER ||
		decision->ban_left > 0)
		return NULL;
	for (int i = 0; i < action->limits->n; i++)
	{
		const RlLimit *limit = &action->limits->limit[i];
		int64		before;

		if (limit->shadow || still_charged(action, limit, answer, &before) <= limit->capacity - action->quota)
			continue;
		answer->binding = i;
		decision->capacity = limit->capacity;
		decision->retry_after = RL_NEVER;
		return psprintf("The %s charged %lld before.", limit->refund_on_abort ? "transaction" : "statement",
						(long long) before);
	}
	return NULL;
}
