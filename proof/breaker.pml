/*
 * breaker.pml
 *		No session is cut off from a server that answers (DESIGN.md, 7, "Breaker").
 *
 * Backends call one Redis server again and again.  Until it is calm, the world breaks single
 * connections, and makes the server silent, or silent on new connections only, or refuse them.  A
 * backend can be interrupted, and can be stopped for ever at each of its steps.
 *
 * A time is later, or it has come; it comes at any moment, but in the end.  Left out are the
 * pause of a backend whose new connections get error replies (rl_node_may_connect), calls that
 * had less than half of their time, and the length of pauses and timeouts.  So each backend waits
 * as long as the others, and none may ask because it waits longer.
 *
 * Promises: a call with a connection that works is refused only if a call on a connection that had
 * worked got no answer: the server has been silent, or the network has lost the connection.
 * When the world has become calm, in the end no call is refused.
 */
#define BACKENDS	2

mtype = { none, works, broken, mute };			/* a connection; mute: it has never had an answer */
mtype = { answers, silent, queues, refuses };	/* the server; queues: new connections get no answer */
mtype = { unset, later, due };					/* a time */
mtype = { open, wait, check, admitted };		/* RlAdmission */

mtype server = answers;
mtype connection[BACKENDS] = none;
bool was_silent = false;		/* the server was silent at any time, or a connection that had worked */
bool calm = false;

/* BreakerEntry; its lock is held in each d_step */
bool entry = false;
mtype connect_at = unset;
mtype ask_at = unset;
bool unanswered = false;
bool silence = false;			/* connect_at is of a connection without an answer */
byte trying = BACKENDS;			/* the backend; BACKENDS: none */
bool too_long = false;			/* trying_until has passed */

bool tries[BACKENDS];			/* trying_until of a backend's own handle */

#define SUSPECT		(connect_at == unset && ask_at == unset)
#ifdef MUTANT_TRIES_FOR_EVER
#define HALF_OPEN	(connect_at != later && ask_at != later && trying == BACKENDS)
#else
#define HALF_OPEN	(connect_at != later && ask_at != later && (trying == BACKENDS || too_long))
#endif
#ifdef MUTANT_CONNECT_STOPS_ALL
#define GOES_ON		(ask_at == unset && connect_at == unset && connection[b] != none)
#else
#define GOES_ON		(ask_at == unset && connection[b] != none)
#endif

inline remove_entry() {
	entry = false;
	connect_at = unset;
	ask_at = unset;
	unanswered = false;
	silence = false;
	trying = BACKENDS;
	too_long = false
}

/* begin_trying: another backend may have been faster since the entry was read. */
inline begin_trying() {
	if
	:: entry && HALF_OPEN -> trying = b; too_long = false; tries[b] = true
	:: else
	fi
}

/* forget_failure; the entry is read before, without the lock that changes it. */
inline forget_failure(connected, answered) {
	tries[b] = false;
	if
	:: entry ->
		connect_at = ((silence -> answered && (connected || unanswered) : connected) -> unset : connect_at);
#ifndef MUTANT_NOT_CLOSED
		ask_at = (answered -> unset : ask_at);
		unanswered = unanswered && !answered;
#endif
		if
		:: SUSPECT -> remove_entry()
		:: else
		fi
	:: else
	fi
}

/* rl_breaker_failed */
inline connect_failed() {
	tries[b] = false;
	entry = true;
	ask_at = unset;
	connect_at = later;
	silence = false;
	trying = BACKENDS;
	too_long = false
}

#ifdef MUTANT_NEW_STOPS_ALL
#define STOPS_ALL	true
#else
#define STOPS_ALL	unanswered
#endif

inline is_silent() {
	tries[b] = false;
	entry = true;
	connect_at = (STOPS_ALL -> unset : later);
	ask_at = (STOPS_ALL -> later : unset);
	silence = true;
	trying = BACKENDS;
	too_long = false
}

inline call_failed(no_answer) {
	tries[b] = false;
	entry = true;
#ifdef MUTANT_CALL_STOPS_ALL
	ask_at = later
#else
	unanswered = unanswered || no_answer
#endif
}

/* rl_breakers_release: after too long another backend may be trying. */
inline release() {
	if
	:: tries[b] && entry && trying == b -> trying = BACKENDS
	:: else
	fi;
	tries[b] = false
}

proctype Backend(byte b) {
	mtype admission;
	bool heard;					/* an answer on a new connection */

ask:	/* rl_breaker_admits */
	if
	:: d_step { !tries[b] && (!entry || GOES_ON) -> admission = admitted }
	:: d_step { tries[b] -> admission = check }
	:: d_step { !tries[b] && entry && !GOES_ON && !HALF_OPEN ->
			admission = (SUSPECT -> wait : open)
		}
	:: d_step { !tries[b] && entry && !GOES_ON && HALF_OPEN -> skip };
		d_step { begin_trying() };
		goto ask
	fi;
	if
	:: admission == wait ->
		/* rl_breaker_wait */
		if
		:: trying == BACKENDS || too_long || !SUSPECT || !entry -> goto ask
		:: admission = open	/* its time has passed */
		fi
	:: else
	fi;
	if
	:: admission == open ->
refused:	assert(connection[b] != works || was_silent);
		goto ends
	:: admission == check || connection[b] == none ->
		/* connect_node: rl_connection_open, and PING if the server is to be checked */
		if
		:: d_step { server == refuses -> connection[b] = none }; d_step { connect_failed() }; goto ends
		:: d_step { (server == silent || server == queues) && admission == check -> connection[b] = none }; d_step { is_silent() }; goto ends
		:: d_step { (server == silent || server == queues) && admission != check -> connection[b] = mute; admission = admitted }
		:: d_step { server == answers -> connection[b] = works; heard = (admission == check); admission = admitted }
		:: !calm -> goto interrupted
		:: goto stopped
		fi;
		/* rl_breaker_connected */
		if
		:: d_step { !entry -> heard = false }
		:: d_step { entry -> forget_failure(true, heard); heard = false }
		fi
	:: else
	fi;
	/* send_command */
	if
	:: connection[b] == works && server != silent ->
		/* rl_breaker_answered */
		if
		:: d_step { !entry || (connect_at != unset && !unanswered) -> skip }
		:: d_step { entry && (connect_at == unset || unanswered) -> skip };
			d_step { forget_failure(false, true) }
		fi
	:: connection[b] == broken || connection[b] == mute ->
		/* rl_route_failed */
		connection[b] = none;
		d_step { call_failed(false) }
	:: (connection[b] == works && server == silent) || connection[b] == broken ->
		was_silent = true;
		connection[b] = none;
		d_step { call_failed(true) }
	:: !calm -> goto interrupted
	:: goto stopped
	fi;
ends:	atomic { release(); heard = false; admission = open };
	goto ask;
interrupted:
	/* transaction_ends.  The next call drops the connection. */
	atomic { connection[b] = none; release(); heard = false; admission = open };
	goto ask;
stopped:
	skip
}

proctype World() {
	do
	:: server = answers
	:: d_step { server = silent; was_silent = true }
	:: server = queues
	:: server = refuses
	:: d_step { connection[0] == works -> connection[0] = broken }
	:: d_step { connection[0] == works -> connection[0] = none }
	:: d_step { server = answers; calm = true }; break
	od
}

proctype Clock() {
end:
	do
	:: connect_at == later -> connect_at = due
	:: ask_at == later -> ask_at = due
	:: trying != BACKENDS && !too_long -> too_long = true
	od
}

init {
	atomic {
		run Backend(0);
		run Backend(1);
		run World();
		run Clock()
	}
}

ltl no_session_is_cut_off { [] (calm -> <> [] !(Backend[1]@refused || Backend[2]@refused)) }
