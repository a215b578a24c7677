/*
 * reservation.pml
 *		A reservation is charged once, settled once, and frees only its own unit (DESIGN.md, 8b).
 *
 * Two ids reserve, extend and settle under "fixed_window, concurrent 1" on one key.  Each call is
 * one script, so it is one step.  A call that is retried because its reply was lost, a call that
 * runs late, and a client that crashes and begins again, are calls in another order.  So any call
 * may come at any time, and so may a reset.  A reset of the limits begins another life of the states,
 * which no record has.
 *
 * The window does not end, so that only refunds and resets make quota free.  That a settlement
 * keeps the hold of at most an hour is left out: both times have the same length here.
 *
 * Promises, by what the page says and not by the record: an id is not charged again before its
 * hold, or the time after its settlement, has passed; the window has the quota of each reservation
 * that was not settled and the cost of each that was, no more and no less, and of one that was reset
 * what its cost is above the reservation; an id that holds the unit
 * has it until it settles or its hold ends, and no other id has it then.
 */
#define CAPACITY	6
#define QUOTA		2
#define COST(i)		((i) == 0 -> 1 : 3)		/* one settles below, one above */
#define MORE(i)		(COST(i) > QUOTA -> COST(i) - QUOTA : 0)
#define HOLD		2						/* ticks */

mtype = { absent, open, settled, lost };

/* The key in Redis */
byte used = 0;					/* of the window */
byte unit[2];					/* ticks in which the id has the concurrent unit */
mtype status[2] = absent;		/* of the record, which stays when it has ended */
byte left[2];					/* ticks until the record ends */
byte was[2];					/* the life then */
byte life = 0;					/* in "born" or "reset:<tag>" */

/* What the page says of an id's last reservation */
mtype is[2] = absent;			/* lost: open, but the states were reset */
byte ends[2];					/* ticks */
byte cost[2];
byte past = 0;					/* the costs of those before */

#define HOLDS(i)	(is[i] == open && ends[i] > 0)

inline check() {
	assert(used == cost[0] + cost[1] + past);
	assert(unit[0] == 0 || unit[1] == 0);
	assert((HOLDS(0) -> unit[0] > 0 : true) && (HOLDS(1) -> unit[1] > 0 : true))
}

/* The states were reset since the charge of the record. */
#define GONE(i)		(life != was[i])

#ifdef MUTANT_CHARGES_AGAIN
#define IS_RETRY	false
#else
#define IS_RETRY	(status[i] != absent && left[i] > 0)
#endif

/* reserve.lua */
inline reserve() {
	assert(ends[i] == 0);
	past = past + cost[i];
	is[i] = open;
	ends[i] = HOLD;
	cost[i] = QUOTA;

	used = used + QUOTA;
	unit[i] = HOLD;
	status[i] = open;
	left[i] = HOLD;
	was[i] = life
}

/* settle.lua without a quota: extend.  It refunds and takes the unit. */
inline extend() {
	if
	:: HOLDS(i) -> ends[i] = HOLD
	:: else
	fi;

#ifndef MUTANT_UNIT_NOT_EXTENDED
	unit[i] = HOLD;
#endif
	left[i] = HOLD
}

/* settle.lua with a quota: settle */
inline settle() {
	if
	:: ends[i] > 0 && is[i] == open -> cost[i] = COST(i); is[i] = settled; ends[i] = HOLD
	:: ends[i] > 0 && is[i] == lost -> cost[i] = MORE(i); is[i] = settled; ends[i] = HOLD
	:: else
	fi;

#ifdef MUTANT_SETTLES_AFTER_RESET
	used = (used + COST(i) > QUOTA -> used + COST(i) - QUOTA : 0);
#else
	used = (GONE(i) && COST(i) < QUOTA -> used : used + COST(i) - QUOTA);
#endif
	unit[i] = 0;
#ifndef MUTANT_NOT_WRITTEN
	status[i] = settled;
#ifdef MUTANT_FORGOTTEN
	left[i] = 0
#else
	left[i] = HOLD
#endif
#endif
}

#ifdef MUTANT_SETTLES_LATE
#define IS_OPEN		(status[i] == open)
#else
#define IS_OPEN		(status[i] == open && left[i] > 0)
#endif
#ifdef MUTANT_TAKES_BACK
#define HAS_UNIT	true
#else
#define HAS_UNIT	(unit[i] > 0)
#endif

proctype Calls(byte i) {
	do
	:: d_step { IS_RETRY -> check() }
	:: d_step { !IS_RETRY && used + QUOTA <= CAPACITY && unit[0] == 0 && unit[1] == 0 -> reserve(); check() }
	:: d_step { status[i] == open && left[i] > 0 && HAS_UNIT -> extend(); check() }
	:: d_step { IS_OPEN -> settle(); check() }
	od
}

proctype Resets() {
	byte i;

	do
	/* rl_reset(key) */
	:: d_step {
			used = 0;
			past = 0;
			for (i : 0 .. 1) {
				unit[i] = 0;
				status[i] = absent;
				left[i] = 0;
				was[i] = 0;
				is[i] = absent;
				ends[i] = 0;
				cost[i] = 0
			}
			life = 0;
			i = 0
		}
	/* rl_reset(key, limits): reset.lua writes "reset:<tag>" */
	:: d_step {
			used = 0;
			past = 0;
			for (i : 0 .. 1) {
				unit[i] = 0;
				is[i] = (is[i] == open -> lost : is[i]);
				cost[i] = 0
			}
			i = 0;
			do
			:: i == was[0] || i == was[1] || i == life -> i++
			:: else -> break
			od;
			life = i;
			i = 0
		}
	od
}

proctype Clock() {
	byte i;

	do
	:: d_step {
			for (i : 0 .. 1) {
				unit[i] = (unit[i] > 0 -> unit[i] - 1 : 0);
				left[i] = (left[i] > 0 -> left[i] - 1 : 0);
				ends[i] = (ends[i] > 0 -> ends[i] - 1 : 0)
			}
			i = 0
		}
	od
}

init {
	atomic {
		run Calls(0);
		run Calls(1);
		run Resets();
		run Clock()
	}
}
