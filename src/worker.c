/*
 * worker.c
 *		The background worker that sends overdue refunds (shared/overdue.c) to one Redis.
 *
 * Each round is a transaction: its end makes overdue again what was not sent.  So the worker and
 * the sessions share one way of sending and of failing.  It ends when nothing has waited for a
 * while; the next overdue refund starts another.
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "utils/guc.h"
#include "utils/wait_event.h"

#include "error.h"
#include "ledger.h"
#include "shared/overdue.h"

#define MOST				4096	/* refunds of a round */
#define LONGEST_TIMEOUT		1000	/* milliseconds: a shutdown waits for it */
#define SHORTEST_PAUSE		100		/* milliseconds after a failure */
#define LONGEST_PAUSE		500
#define IDLE				10000	/* milliseconds without refunds, after which it ends */
#define LOG_INTERVAL		(60 * RL_SECOND)

PGDLLEXPORT void rl_refunds_main(Datum arg);

static void
limit_timeout(const char *name, int now)
{
	char		text[16];

	snprintf(text, sizeof(text), "%d", Min(now, LONGEST_TIMEOUT));
	SetConfigOption(name, text, PGC_SUSET, PGC_S_OVERRIDE);
}

/* Logs why refunds wait, at most once a minute. */
static void
log_failure(const RlError *error)
{
	static int64 log_after = 0;
	int64		now = rl_monotonic_now();

	if (now < log_after)
		return;
	log_after = now + LOG_INTERVAL;
	ereport(LOG,
			(errcode(error->sqlstate),
			 errmsg("rate-limit refunds wait for Redis"),
			 errdetail_internal("%s", rl_error_text(error))));
}

/* Sends refunds.  Returns the pause until the next round, in milliseconds; 0: there may be more now. */
static int
run_round(void)
{
	RlError		error = {0};
	bool		done = true;

	StartTransactionCommand();
	if (rl_overdue_waits() && rl_refunds_take_overdue(NULL, MOST) > 0)
	{
		while (done && rl_refunds_pending())
			done = rl_refunds_flush(NULL, &error);
		if (!done)
			log_failure(&error);
	}
	CommitTransactionCommand();
	return done ? 0 : Max(Min(error.retry_after / 1000, LONGEST_PAUSE), SHORTEST_PAUSE);
}

/* As run_round, and does not throw: an error ends the round. */
static int
try_round(void)
{
	MemoryContext context = CurrentMemoryContext;
	volatile int pause = LONGEST_PAUSE;

	PG_TRY();
	{
		pause = run_round();
	}
	PG_CATCH();
	{
		ErrorData  *data;
		RlError		error;

		HOLD_INTERRUPTS();
		MemoryContextSwitchTo(context);
		data = CopyErrorData();
		FlushErrorState();
		AbortCurrentTransaction();
		rl_error_set(&error, data->sqlerrcode, "%s", data->message);
		log_failure(&error);
		FreeErrorData(data);
		RESUME_INTERRUPTS();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	return pause;
}

/*
 * Waits.  Ends early at a request to shut down; with for_refunds also when there are some, or
 * another target needs a worker.
 */
static void
wait_for(int ms, bool for_refunds)
{
	int64		until = rl_monotonic_now() + ms * INT64CONST(1000);

	while (!ShutdownRequestPending &&
		   !(for_refunds && (rl_overdue_pause_left() > 0 || rl_overdue_waits() || rl_overdue_seat_wanted())))
	{
		int64		left = until - rl_monotonic_now();

		if (left <= 0)
			return;
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, (left + 999) / 1000, PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}
}

/* The main function; the argument is the number of the target. */
void
rl_refunds_main(Datum arg)
{
	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, SignalHandlerForShutdownRequest);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);
	rl_shared_start();
	if (!rl_shared_available() || !rl_overdue_serve(DatumGetInt32(arg)))
		proc_exit(0);
	limit_timeout("ratelimit.connect_timeout", rl_connect_timeout);
	limit_timeout("ratelimit.command_timeout", rl_command_timeout);
	do
	{
		int			pause;

		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
		}
		pause = Max(try_round(), (rl_overdue_pause_left() + 999) / 1000);
		if (pause > 0)
			wait_for(pause, false);
		else
		{
			wait_for(IDLE, true);
			if (!rl_overdue_waits() && !ShutdownRequestPending && rl_overdue_leave(false))
				proc_exit(0);
		}
	} while (!ShutdownRequestPending);
	/* Sessions that end now may have left some. */
	(void) try_round();
	proc_exit(0);
}
