/*
 * breaker.pml
 *		Connecting, and looking for a master that has moved (DESIGN.md, 7, "Breaker").
 *
 * Backends with the same settings call the master behind a name again and again.  Until it is
 * calm, the world breaks single connections, makes the server silent or has it refuse
 * connections, makes the master a replica and another server the master, and the name move
 * there.  A backend can be interrupted, and can be stopped for ever at each of its steps.
 *
 * A time is later, or it has come; it comes at any moment, but in the end.  Left out are other
 * settings, the length of pauses and timeouts, and a failure that does not count because it was
 * late or its attempt began before the last one.
 *
 * Promises: a call with a connection that works is never refused, and waits for no place.  No
 * more backends connect at a time than there are places, but those whose time has passed.  When
 * the move is known, no call fails because its connection is an old one.  When the world has
 * become calm, in the end no call fails, also if a backend has stopped for ever with a place:
 * no session stays behind.
 */
#define BACKENDS	2
#define PLACES		1

mtype = { none, works, broken };		/* a connection */
mtype = { answers, silent, refuses };	/* the server of the name */
mtype = { unset, later, due };			/* a time */
mtype = { connect, wait, refuse };		/* Admission */

mtype server = answers;
mtype connection[BACKENDS] = none;
bit to[BACKENDS];				/* the server of the connection */
bit master = 0;
bit name = 0;					/* the server to which new connections go */
bool calm = false;

/* BreakerEntry; its lock is held in each d_step */
bool failing = false;			/* pause > 0 */
mtype connect_at = unset;		/* failed + pause */
bool takes[BACKENDS];			/* has a place, whose time has not passed */
byte ntaken = 0;
mtype turn = due;				/* searched + retry_interval */
bool moved = false;
bool old[BACKENDS];				/* the connection was made before that */

bool searching[BACKENDS];

#ifdef MUTANT_KEPT_ASKS
#define MUST_CONNECT	(connection[b] == none || failing)
#else
#define MUST_CONNECT	(connection[b] == none)
#endif

/* closed_until */
#define CLOSED			(failing && (connect_at == later || ntaken > 0))

#ifdef MUTANT_NO_PLACES
#define HAS_PLACE		true
#else
#define HAS_PLACE		(ntaken < PLACES)
#endif

/* give_place: after its time another backend may have it. */
inline give_place() {
	if
	:: takes[b] -> takes[b] = false; ntaken--
	:: else
	fi
}

inline attempt_succeeded() {
	connection[b] = works;
	to[b] = name;
	old[b] = false;
	failing = false;
	connect_at = unset;
	give_place()
}

inline attempt_failed() {
	failing = true;
	connect_at = later;
	give_place()
}

/* rl_may_search */
#ifdef MUTANT_MOVE_UNKNOWN
#define MAY_SEARCH		(turn == due)
#else
#define MAY_SEARCH		(turn == due || (moved && old[b]))
#endif

proctype Backend(byte b) {
	mtype admission;
	bool left = false;			/* this call has left a server */
	byte i;

ask:
	if
	:: !MUST_CONNECT -> goto call
	:: MUST_CONNECT
	fi;
	d_step {
		if
		:: CLOSED -> admission = refuse
		:: !CLOSED && HAS_PLACE -> admission = connect; takes[b] = true; ntaken++
		:: !CLOSED && !HAS_PLACE -> admission = wait
		fi
	};
	if
	:: admission == refuse -> goto refused
	:: admission == wait ->
		assert(connection[b] != works);
		/* rl_attempt_begin: until a place is free, all fail at once, or its time is over */
		if
		:: HAS_PLACE || CLOSED -> goto ask
		:: goto refused
		:: !calm -> goto interrupted
		:: goto stopped
		fi
	:: admission == connect
	fi;
	/* rl_connection_open */
	if
	:: d_step { server == answers -> attempt_succeeded() }
	:: d_step { server != answers -> attempt_failed() }; goto failed
	:: !calm -> goto interrupted
	:: goto stopped
	fi;
call:
	if
	:: connection[b] == works && server != silent && to[b] == master ->
		/* rl_route_answered */
		d_step {
			if
			:: searching[b] ->
				moved = true;
				i = 0;
				do
				:: i < BACKENDS -> old[i] = (i != b); i++
				:: i == BACKENDS -> break
				od;
				searching[b] = false
			:: else
			fi
		};
		left = false;
		goto ask
	:: connection[b] == works && server != silent && to[b] != master ->
		/* leave_node: READONLY */
		d_step {
			if
			:: !left && MAY_SEARCH ->
				if
				:: !(moved && old[b]) -> turn = later
				:: else
				fi;
				connection[b] = none;
				searching[b] = true;
				left = true
			:: else ->
				assert(left || !moved || !old[b]);
				left = false
			fi
		};
		if
		:: left -> goto ask
		:: !left -> goto behind
		fi
	:: connection[b] == broken || (connection[b] == works && server == silent) ->
		/* rl_route_failed */
		connection[b] = none;
		goto failed
	:: !calm -> goto interrupted
	:: goto stopped
	fi;
behind:	/* the call fails with READONLY */
	goto ask;
refused:
	assert(connection[b] != works);
	left = false;
	goto ask;
failed:
	left = false;
	goto ask;
interrupted:
	/* rl_breakers_release.  The next call drops the connection. */
	atomic { connection[b] = none; give_place(); left = false };
	goto ask;
stopped:
	skip
}

proctype World() {
	do
	:: server = answers
	:: server = silent
	:: server = refuses
	:: d_step { connection[0] == works -> connection[0] = broken }
	:: master = 1
	:: d_step { master == 1 -> name = 1 }
	:: d_step { server = answers; name = master; calm = true }; break
	od
}

proctype Clock() {
	byte i;
end:
	do
	:: connect_at == later -> connect_at = due
	:: turn == later -> turn = due
#ifndef MUTANT_PLACE_FOR_EVER
	:: d_step { takes[0] -> takes[0] = false; ntaken-- }
	:: d_step { takes[1] -> takes[1] = false; ntaken-- }
#endif
	od
}

/* No more connect than there are places. */
active proctype Monitor() {
	assert(ntaken <= PLACES)
}

init {
	atomic {
		run Backend(0);
		run Backend(1);
		run World();
		run Clock()
	}
}

#define FAILS(n)	(Backend[n]@refused || Backend[n]@failed || Backend[n]@behind)
ltl no_session_stays_behind { [] (calm -> <> [] !(FAILS(2) || FAILS(3))) }
