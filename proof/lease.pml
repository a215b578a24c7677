/*
 * lease.pml
 *		Leases never allow one action more than the limit promises (DESIGN.md, 8a).
 *
 * Two servers share a key in Redis under a throttle with a lease.  Each has a backend that takes
 * quota, and server 0 has another one that resets the key.  A reply can be lost, and a backend
 * can be paused between any two of its steps.
 *
 * A tick is the time that replenishes one unit.  Times are relative, and saturate where they do
 * not matter any more, so there are finitely many states, and the runs have no end.  Two moments
 * that are less than LEASE apart are at most LEASE ticks apart.
 *
 * What the promise must not depend on is left open: any call may ask for a lot (there are no
 * counts of use, no renewal and no claims), and Redis grants any number of its free units.  A
 * server has one lot.  All clocks run alike; test/t/090 has clocks that drift.
 *
 * Promise: S <= CAPACITY + T/interval in every span T.  That is to say: a bucket that gets each
 * action, and that each tick takes a unit from, never has more than CAPACITY units.  A reset
 * empties the bucket, and what was charged before it does not count; but when rl_reset has
 * returned, its server uses nothing that was charged before.
 */
#define CAPACITY	5
#define LEASE		2

#ifdef MUTANT_NOT_REDUCED
#define REDUCED		CAPACITY
#else
#define REDUCED		(CAPACITY - LEASE)
#endif

#define MOST_GRANTED 2
#define OLD_AGE		MOST_GRANTED	/* when all units of a lot are replenished */

/* The units of one charge: a server's lot, a call's leftover, or what a call is granted. */
typedef Units {
	byte n;
	byte age;					/* ticks since the charge */
	byte left;					/* ticks in which they can be used, this one included */
	bool other_life;			/* the key was reset since the charge */
	bool repaired;				/* and this server's rl_reset has returned since then */
};

Units lot[2];
Units leftover[2];				/* of a server's call */
Units granted[2];
bool under_way[2];				/* the call */
byte asked[2];					/* ticks since it has asked */
bool stale[2];					/* the leases have another generation since then */

byte backlog = 0;				/* of the throttle in Redis */
byte bucket = 0;				/* of the promise */

inline copy(to, from) {
	to.n = from.n;
	to.age = from.age;
	to.left = from.left;
	to.other_life = from.other_life;
	to.repaired = from.repaired
}

inline clear(units) {
	units.n = 0;
	units.age = 0;
	units.left = 0;
	units.other_life = false;
	units.repaired = false
}

inline happens() {
	bucket++;
	assert(bucket <= CAPACITY)
}

/* take_leased */
inline take_leased() {
	assert(!lot[s].repaired);
	if
	:: !lot[s].other_life -> happens()
	:: else
	fi;
	lot[s].n--;
	if
	:: lot[s].n == 0 -> clear(lot[s])
	:: else
	fi
}

/* rl_known_ask */
inline ask() {
	under_way[s] = true;
	asked[s] = 0;
	stale[s] = false
}

/* ask_lease, take_leftover: a lot that has ended, or that is to be replaced */
inline take_leftover() {
	copy(leftover[s], lot[s]);
	leftover[s].left = 0;
	leftover[s].repaired = false;
	clear(lot[s])
}

/* rl_known_not_asked, if the place is still free */
inline return_leftover() {
	if
	:: lot[s].n == 0 -> copy(lot[s], leftover[s])
	:: else
	fi
}

/* lease.lua, refund_leftovers: less what was replenished since the charge */
#ifdef MUTANT_REFUND_ALL
#define UNITS_LEFT	leftover[s].n
#else
#define UNITS_LEFT	(leftover[s].n > leftover[s].age -> leftover[s].n - leftover[s].age : 0)
#endif
#ifdef MUTANT_OTHER_LIFE
#define REFUND		UNITS_LEFT
#else
#define REFUND		(leftover[s].other_life -> 0 : UNITS_LEFT)
#endif
#define BACKLOG		(backlog > REFUND -> backlog - REFUND : 0)

/* lease.lua: refunds the leftover.  Without a grant, the rest of the call does not matter. */
inline run_script(more) {
	backlog = BACKLOG + more;
#ifndef MUTANT_SENT_KEPT
	clear(leftover[s]);
#endif
	under_way[s] = granted[s].n > 0;
	asked[s] = (granted[s].n > 0 -> asked[s] : 0);
	stale[s] = stale[s] && granted[s].n > 0
}

/* It charges the action, and units for a lot. */
inline charge(units) {
	granted[s].n = units;
	run_script(1 + units);
	happens()
}

/* rl_known_note, store_lot */
inline store_lot() {
	if
	:: granted[s].n > 0 ->
		copy(lot[s], granted[s]);
#if defined(MUTANT_NEVER_ENDS) || defined(MUTANT_FROM_REPLY)
		lot[s].left = LEASE + 1
#else
		lot[s].left = (asked[s] > LEASE -> 0 : LEASE + 1 - asked[s])
#endif
	:: else
	fi
}

inline end_call() {
	under_way[s] = false;
	asked[s] = 0;
	stale[s] = false;
	clear(leftover[s]);
	clear(granted[s])
}

proctype Backend(byte s) {
	do
	/* rl_known_answer */
	:: d_step { lot[s].n > 0 && lot[s].left > 0 -> take_leased() }
	/* rl_known_ask */
	:: if
		:: d_step { lot[s].n == 0 || lot[s].left > 0 -> ask() }
		:: d_step { lot[s].n > 0 && lot[s].left > 0 -> ask(); take_leftover() }
		:: d_step { lot[s].n > 0 && lot[s].left == 0 -> ask(); take_leftover() }
		fi;
		if
		/* It cannot be sent. */
		:: d_step { leftover[s].n > 0 -> return_leftover(); end_call() }
		/* lease.lua */
		:: if
			:: d_step { BACKLOG == REDUCED -> run_script(0) }
			:: d_step { BACKLOG + 1 <= REDUCED -> charge(0) }
			:: d_step { BACKLOG + 2 <= REDUCED -> charge(1) }
			:: d_step { BACKLOG + 3 <= REDUCED -> charge(2) }
			fi;
			if
			/* rl_known_note */
			:: d_step { !stale[s] -> store_lot(); end_call() }
#ifdef MUTANT_STALE_STORED
			:: d_step { stale[s] -> store_lot(); end_call() }
#else
			:: d_step { stale[s] -> store_lot(); lot[s].left = 0; end_call() }
#endif
			/* The reply is lost: note_failed. */
#ifdef MUTANT_SENT_KEPT
			:: d_step { return_leftover(); end_call() }
#else
			:: d_step { end_call() }
#endif
			fi
		fi
	od
}

/* rl_known_end with RL_RESET, end_leases */
inline end_leases() {
	clear(lot[0]);
	stale[0] = under_way[0]
}

/* Their age does not matter any more. */
inline in_other_life(units) {
	units.other_life = units.n > 0;
#ifndef MUTANT_OTHER_LIFE
	units.age = 0
#endif
}

/* UNLINK, or reset.lua, which deletes the field "lease" */
inline reset_key() {
	backlog = 0;
	bucket = 0;
	for (i : 0 .. 1) {
		in_other_life(lot[i]);
		in_other_life(leftover[i]);
		in_other_life(granted[i])
	}
	i = 0
}

/* rl_reset: begin_repair, run_repair, which calls forget_key again */
proctype Resets() {
	byte i;

	do
	:: d_step { end_leases() };
		d_step { reset_key() };
		d_step {
			end_leases();
			lot[0].repaired = lot[0].other_life;
			granted[0].repaired = granted[0].other_life
		}
	od
}

#ifdef MUTANT_OTHER_LIFE
#define HAS_AGE(units)	(units.n > 0)
#else
#define HAS_AGE(units)	(units.n > 0 && !units.other_life)
#endif

inline grow_old(units) {
	units.age = (HAS_AGE(units) && units.age < OLD_AGE -> units.age + 1 : units.age)
}

proctype Clock() {
	byte i;

	do
	:: d_step {
			backlog = (backlog > 0 -> backlog - 1 : 0);
			bucket = (bucket > 0 -> bucket - 1 : 0);
			for (i : 0 .. 1) {
				grow_old(lot[i]);
				grow_old(leftover[i]);
				grow_old(granted[i]);
				asked[i] = (under_way[i] && asked[i] <= LEASE -> asked[i] + 1 : asked[i]);
#ifndef MUTANT_NEVER_ENDS
				lot[i].left = (lot[i].left > 0 -> lot[i].left - 1 : 0)
#endif
			}
			i = 0
		}
	od
}

init {
	atomic {
		run Backend(0);
		run Backend(1);
		run Resets();
		run Clock()
	}
}
