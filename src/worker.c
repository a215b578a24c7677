/*
 * worker.c
 *		The background worker that sends overdue refunds (shared/overdue.c) to one Redis.
 *
 * Each round is a transaction: its end makes overdue again what was not sent.  So the worker and
 * the sessions share one way of sending and of failing.  It ends when nothing has waited for a
 * while; the next overdue refund starts another.
 *
 * The list ends with the server, and when that shuts down, no worker can be started.  Then a session
 * that ends takes a worker's place for a moment.
 */
#include "postgres.h"

#include <fcntl.h>
#include <unistd.h>

#include "access/xact.h"
#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "utils/guc.h"
#include "utils/pidfile.h"
#include "utils/wait_event.h"

#include "error.h"
#include "ledger.h"
#include "shared/overdue.h"
#include "worker.h"

#define MOST				4096	/* refunds of a round */
#define LONGEST_TIMEOUT		1000	/* milliseconds: a shutdown waits for it */
#define SHORTEST_PAUSE		100		/* milliseconds after a failure */
#define LONGEST_PAUSE		500
#define IDLE				10000	/* milliseconds without refunds, after which it ends */
/* When the server shuts down */
#define LAST_TIMEOUT		300		/* milliseconds */
#define LAST_TRIES			INT64CONST(800000)	/* microseconds for all tries */

PGDLLEXPORT void rl_refunds_main(Datum arg);

static bool silent = false;		/* Redis did not answer the last round */

static void
limit_timeout(const char *name, int now, int longest)
{
	char		text[16];

	snprintf(text, sizeof(text), "%d", Min(now, longest));
	SetConfigOption(name, text, PGC_SUSET, PGC_S_OVERRIDE);
}

static void
limit_timeouts(int longest)
{
	limit_timeout("ratelimit.connect_timeout", rl_connect_timeout, longest);
	limit_timeout("ratelimit.command_timeout", rl_command_timeout, longest);
}

/* Logs why refunds wait, at most once a minute. */
static void
log_failure(const RlError *error)
{
	if (!rl_overdue_may_log())
		return;
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
	silent = !done && error.timed_out;
	return done ? 0 : Max(Min((error.retry_after + 999) / 1000, LONGEST_PAUSE), SHORTEST_PAUSE);
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
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, (left + 999) / 1000,
						 PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}
}

/* Sends refunds until none wait, or Redis is silent, but only for a moment: the server shuts down. */
static void
send_last(void)
{
	int64		until = rl_monotonic_now() + LAST_TRIES;

	limit_timeouts(LAST_TIMEOUT);
	limit_timeout("ratelimit.retry_interval", rl_retry_interval, SHORTEST_PAUSE);
	while (!silent)
	{
		int64		pause = Max(try_round() * INT64CONST(1000), rl_overdue_pause_left());

		if ((pause == 0 && rl_overdue_leave(false)) || rl_monotonic_now() + pause >= until)
			return;
		pg_usleep(pause);
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
	if (!rl_shared_available() || !rl_overdue_serve(DatumGetInt32(arg), false))
		proc_exit(0);
	limit_timeouts(LONGEST_TIMEOUT);
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
	send_last();
	proc_exit(0);
}

/*
 * Returns true if the server shuts down.  No variable says so in a backend; the file is what pg_ctl
 * reads, and its last line is the state.
 */
static bool
server_stops(void)
{
	static const char stopping[] = PM_STATUS_STOPPING "\n";
	int			fd = open("postmaster.pid", O_RDONLY | PG_BINARY);
	char		end[sizeof(stopping) - 1];
	bool		stops;

	if (fd < 0)
		return false;
	stops = lseek(fd, -(off_t) sizeof(end), SEEK_END) >= 0 &&
		read(fd, end, sizeof(end)) == sizeof(end) && memcmp(end, stopping, sizeof(end)) == 0;
	close(fd);
	return stops;
}

static void
serve_last(int code pg_attribute_unused(), Datum arg)
{
	if (rl_overdue_serve(DatumGetInt32(arg), true))
		send_last();
}

/*
 * Lets this session, which ends, send refunds that wait without a worker, if the server shuts down.  To be
 * called at the end of its last transaction; a callback sends them, when the transaction's locks are free.
 */
void
rl_refunds_at_exit(void)
{
	static bool called = false;
	int			target = called ? -1 : rl_overdue_unserved();

	if (target < 0 || !server_stops())
		return;
	called = true;
	before_shmem_exit(serve_last, Int32GetDatum(target));
}
