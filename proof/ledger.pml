/*
 * ledger.pml
 *		The end of a transaction refunds each charge once, or logs it (DESIGN.md, 9).
 *
 * A backend makes charges in a transaction, in savepoints and outside of them, under limits with
 * refund_on_abort and one concurrent limit.  Two nodes of a Cluster may have the slot of their
 * keys, and it moves at any time.  A connection can be lost at any time, with calls that the node
 * has not run yet; it may still run them.  Each command can be interrupted.
 *
 * Each key has a call of its own.  Ahead of a command the backend opens connections, at the end
 * of the transaction it does not, and follows no redirect: what was not run then is on the list of
 * overdue refunds, from which a worker, or another session, takes it.  Left out: marks, merging of charges, the time that is left, script
 * sources that are missing, and the local store.
 *
 * Promises: no charge is refunded twice, and none that is kept is refunded.  When the transaction
 * has ended and the list is empty, each charge of what was rolled back, and of the concurrent limit,
 * has been refunded, or the log has it as not refunded.
 */
#define CHARGES		2
#define CONCURRENT	0			/* this one is under the concurrent limit */
#define DEEPEST		3			/* nest level of savepoints */

mtype = { none, unsent, sent, done, later };	/* an entry without a call, or its outcome */
mtype = { nothing, asked, refunded, moved };	/* what is under way on a connection */

/* The ledger: rl_ledger_add, and the levels of transaction.c */
#define NO_ENTRY	9
#define QUEUED		0
byte level[CHARGES] = NO_ENTRY;
mtype outcome[CHARGES] = none;
bool unclosed = false;
byte nest = 1;					/* nest level of the transaction */
byte made = 0;					/* charges so far */
bool ended = false;
bool listed[CHARGES];			/* on the list of overdue refunds */
bool taken[CHARGES];			/* by the worker, whose call it is then */

/* The nodes */
bit owner = 0;					/* of the slot */
bool connected[2];
bit node[CHARGES];				/* that is asked about it */
mtype wire[CHARGES] = nothing;
bool orphan[CHARGES];			/* its connection was lost; the node may run it */

/* What has happened */
byte of_level[CHARGES];			/* of a charge that may still be rolled back; 0: none */
bool to_refund[CHARGES];
byte nrefunds[CHARGES];
bool logged[CHARGES];

#ifdef MUTANT_SENT_AGAIN
#define IS_LOST(all) false
#else
#define IS_LOST(all) (outcome[e] == sent)
#endif
#ifdef MUTANT_SENT_IS_OVERDUE
#define IS_OVERDUE(all) (all && (outcome[e] == sent || outcome[e] == unsent || outcome[e] == later))
#else
#define IS_OVERDUE(all) (all && (outcome[e] == unsent || outcome[e] == later))
#endif

/* close_calls, with KEEP or PASS_ALL */
inline close_calls(all) {
	for (e : 0 .. CHARGES - 1) {
		if
		:: outcome[e] == done || IS_LOST(all) || IS_OVERDUE(all) ->
			listed[e] = IS_OVERDUE(all);
			logged[e] = outcome[e] != done && !listed[e];
			level[e] = NO_ENTRY;
			node[e] = 0
		:: else
		fi;
		outcome[e] = none
	}
	e = 0;
	unclosed = false
}

/* To be called before the queue is changed */
inline close_interrupted() {
	if
	:: unclosed ->
#ifdef MUTANT_INTERRUPTED_KEPT
		for (e : 0 .. CHARGES - 1) {
			outcome[e] = none
		}
		e = 0;
		unclosed = false
#else
		close_calls(false)
#endif
	:: else
	fi
}

#define QUEUES(e, from, concurrent) \
	(level[e] != NO_ENTRY && level[e] >= from && (!concurrent || e == CONCURRENT))

/* rl_ledger_queue of the entries at this level or a higher one, or only of the concurrent limit */
inline queue(from, concurrent) {
	if
	:: QUEUES(0, from, concurrent) || QUEUES(1, from, concurrent) -> close_interrupted()
	:: else
	fi;
	for (e : 0 .. CHARGES - 1) {
		level[e] = (QUEUES(e, from, concurrent) -> QUEUED : level[e])
	}
	e = 0
}

/* prepare_calls */
inline prepare_calls() {
	close_interrupted();
	for (e : 0 .. CHARGES - 1) {
		if
		:: level[e] == QUEUED -> outcome[e] = unsent; unclosed = true
		:: else
		fi
	}
	e = 0
}

/* What was charged at this level or a higher one is to be refunded, or only the concurrent limit. */
inline note_end(from, concurrent) {
	for (e : 0 .. CHARGES - 1) {
		if
		:: of_level[e] >= from && (!concurrent || e == CONCURRENT) -> to_refund[e] = true
		:: else
		fi;
		of_level[e] = (of_level[e] >= from -> 0 : of_level[e])
	}
	e = 0
}

#define PENDING(e)	(outcome[e] == unsent || outcome[e] == sent)
#define ANY_PENDING	(PENDING(0) || PENDING(1))
#define ANY_QUEUED	(level[0] == QUEUED || level[1] == QUEUED)

/* append_keys: at the end only to a server that is connected */
inline write_call(c) {
	outcome[c] = sent;
	wire[c] = asked
}

/* read_keys; or a redirect */
inline read_reply(c) {
	if
	:: wire[c] == refunded -> outcome[c] = done
	:: wire[c] == moved ->
		node[c] = 1 - node[c];
		outcome[c] = unsent
	fi;
	wire[c] = nothing
}

/* The same at the end, where no redirect is followed */
inline read_last(c) {
	if
	:: wire[c] == refunded -> outcome[c] = done
#ifdef MUTANT_REDIRECT_IS_DONE
	:: wire[c] == moved -> outcome[c] = done
#else
	:: wire[c] == moved -> outcome[c] = later
#endif
	fi;
	wire[c] = nothing
}

/* The connections carry nothing more: the next call drops one that is in flight. */
inline drop_replies() {
	for (e : 0 .. CHARGES - 1) {
		orphan[e] = orphan[e] || wire[e] == asked;
		wire[e] = nothing
	}
	e = 0
}

inline lose_connection(n) {
	connected[n] = false;
	for (o : 0 .. CHARGES - 1) {
		if
		:: node[o] == n ->
			orphan[o] = orphan[o] || wire[o] == asked;
			wire[o] = nothing
		:: else
		fi
	}
	o = 0
}

#define LOST(c)		(outcome[c] == sent && wire[c] == nothing)
#define CAN_WRITE(c) (outcome[c] == unsent && connected[node[c]])
#define CAN_READ(c)	(wire[c] == refunded || wire[c] == moved)
#define IS_CUT(c)	(outcome[c] == unsent && !connected[node[c]])

proctype Backend() {
	byte e;

	do
	/* rl_grants_note, after an answer; a call without one is not in the ledger */
	:: d_step { !ANY_QUEUED && made < CHARGES ->
			level[made] = nest;
			of_level[made] = nest;
			made++
		}
	:: nest < DEEPEST -> nest++
	/* subtransaction_ends */
	:: d_step { nest > 1 ->
			for (e : 0 .. CHARGES - 1) {
				of_level[e] = (of_level[e] == nest -> nest - 1 : of_level[e]);
#ifndef MUTANT_RELEASE_STAYS
				level[e] = (level[e] == nest -> nest - 1 : level[e])
#endif
			}
			e = 0;
			nest--
		}
	:: d_step { nest > 1 -> note_end(nest, false); queue(nest, false); nest-- }
	/* rl_refunds_flush, ahead of a command */
	:: d_step { ANY_QUEUED -> prepare_calls() };
		do
		:: d_step { CAN_WRITE(0) -> write_call(0) }
		:: d_step { CAN_WRITE(1) -> write_call(1) }
		:: d_step { CAN_READ(0) -> read_reply(0) }
		:: d_step { CAN_READ(1) -> read_reply(1) }
		:: IS_CUT(0) -> connected[node[0]] = true
		:: IS_CUT(1) -> connected[node[1]] = true
		/* Connecting fails, or a connection was lost with calls under way. */
		:: d_step { IS_CUT(0) || IS_CUT(1) || LOST(0) || LOST(1) ->
				drop_replies();
				close_calls(false)
			}; break
		:: d_step { !ANY_PENDING -> close_calls(false) }; break
		/* An interrupt.  The error is caught in a level above, or ends the transaction. */
		:: d_step { nest > 1 -> drop_replies() };
			d_step { note_end(nest, false); queue(nest, false); nest-- }; break
		:: d_step { drop_replies() }; goto aborts
		od
	/* transaction_ends */
	:: d_step { nest == 1 ->
			note_end(1, true);
#ifdef MUTANT_COMMIT_REFUNDS
			queue(1, false)
#else
			queue(1, true)
#endif
		}; goto end_of_queue
	:: goto aborts
	od;
aborts:
	atomic { note_end(1, false); queue(1, false) };
end_of_queue:
	/* rl_refunds_end */
	atomic { prepare_calls() };
	do
	:: d_step { CAN_WRITE(0) -> write_call(0) }
	:: d_step { CAN_WRITE(1) -> write_call(1) }
	:: d_step { CAN_READ(0) -> read_last(0) }
	:: d_step { CAN_READ(1) -> read_last(1) }
	:: !connected[0] && !connected[1] -> break
	:: !ANY_PENDING -> break
	:: true -> break			/* the time has passed */
	od;
	atomic { drop_replies(); close_calls(true); ended = true }
}

#ifdef MUTANT_TAKEN_STAYS
#define TAKE(c) taken[c] = true
#else
#define TAKE(c) taken[c] = true; listed[c] = false
#endif
#define CAN_TAKE(c) (ended && listed[c] && !taken[c])
#define CAN_SEND(c) (taken[c] && wire[c] == nothing && !orphan[c])

inline take_answer(c) {
	if
	:: wire[c] == refunded -> taken[c] = false
	:: wire[c] == moved -> node[c] = 1 - node[c]
	fi;
	wire[c] = nothing
}

/* A worker, with connections of its own: rl_refunds_take_overdue, rl_refunds_flush, and the end of its transaction */
proctype Worker() {
end:
	do
	:: d_step { CAN_TAKE(0) -> TAKE(0) }
	:: d_step { CAN_TAKE(1) -> TAKE(1) }
	:: d_step { CAN_SEND(0) -> wire[0] = asked }
	:: d_step { CAN_SEND(1) -> wire[1] = asked }
	:: d_step { taken[0] && CAN_READ(0) -> take_answer(0) }
	:: d_step { taken[1] && CAN_READ(1) -> take_answer(1) }
	/* It cannot connect, and puts the refund back. */
	:: d_step { CAN_SEND(0) -> taken[0] = false; listed[0] = true }
	:: d_step { CAN_SEND(1) -> taken[1] = false; listed[1] = true }
	/* The connection is lost with the call under way. */
	:: d_step { taken[0] && wire[0] != nothing -> orphan[0] = wire[0] == asked; wire[0] = nothing; taken[0] = false; logged[0] = true }
	:: d_step { taken[1] && wire[1] != nothing -> orphan[1] = wire[1] == asked; wire[1] = nothing; taken[1] = false; logged[1] = true }
	od
}

/* A node runs refund_charges.lua, or redirects. */
inline run_call(c) {
	if
	:: owner == node[c] ->
		nrefunds[c]++;
		assert(nrefunds[c] == 1 && to_refund[c]);
		wire[c] = refunded
	:: else -> wire[c] = moved
	fi
}

inline run_orphan(c) {
	orphan[c] = false;
	nrefunds[c]++;
	assert(nrefunds[c] == 1 && to_refund[c])
}

proctype Nodes() {
	byte o;

end:
	do
	:: d_step { wire[0] == asked -> run_call(0) }
	:: d_step { wire[1] == asked -> run_call(1) }
	:: d_step { orphan[0] -> run_orphan(0) }
	:: d_step { orphan[1] -> run_orphan(1) }
	:: d_step { orphan[0] || orphan[1] -> orphan[0] = false; orphan[1] = false }
	:: owner = 1 - owner
	:: d_step { connected[0] && !ended -> lose_connection(0) }
	:: d_step { connected[1] && !ended -> lose_connection(1) }
	:: d_step { ended && !listed[0] && !listed[1] && !taken[0] && !taken[1] ->
			for (o : 0 .. CHARGES - 1) {
				assert(!to_refund[o] || nrefunds[o] == 1 || logged[o])
			}
			o = 0
		}; break
	od
}

init {
	atomic {
		run Backend();
		run Worker();
		run Nodes()
	}
}
