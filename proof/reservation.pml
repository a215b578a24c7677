/*
 * reservation.pml
 *		A reservation is charged once, settled once, and frees only its own unit (DESIGN.md, 8b).
 *
 * Two ids reserve, extend and settle on two keys: under "fixed_window" on the first one, an organisation, and
 * under "fixed_window, concurrent 1" on the last one, which has the record.  Each call is one script, so it is
 * one step.  A call that is retried because its reply was lost, a call that
 * runs late, and a client that crashes and begins again, are calls in another order.  So any call
 * may come at any time, and so may a reset of each key.  A reset of the limits, or of the first key, begins another life
 * of the states there, which no record has.
 *
 * The windows do not end, so that only refunds and resets make quota free.  That a settlement
 * keeps the hold of at most an hour is left out: both times have the same length here.  So is a key with
 * 4,096 records, which forgets settled ones earlier.
 *
 * Promises, by what the page says and not by the record: an id is not charged again before its
 * hold, or the time after its settlement, has passed; each window has the quota of each reservation
 * that was not settled and the cost of each that was, no more and no less, and of one that was reset there
 * what its cost is above the reservation; an id that holds the unit
 * has it until it settles or its hold ends, and no other id has it then.
 */
#define CAPACITY	6
#define QUOTA		2
#define COST(i)		((i) == 0 -> 1 : 3)		/* one settles below, one above */
#define MORE(i)		(COST(i) > QUOTA -> COST(i) - QUOTA : 0)
#define HOLD		2						/* ticks */

mtype = { absent, open, settled };

/* The keys in Redis */
byte first = 0;					/* used of the window of the first key */
byte used = 0;					/* and of the last one */
byte unit[2];					/* ticks in which the id has the concurrent unit */
mtype status[2] = absent;		/* of the record, which stays when it has ended */
byte left[2];					/* ticks until the record ends */
byte was_first[2];				/* the life of the first key then */
byte was[2];					/* and of the last one */
byte life_first = 0;			/* in "born" or "reset:<tag>" */
byte life = 0;

/* What the page says of an id's last reservation */
mtype is[2] = absent;
bit lost_first[2];				/* the first key was reset since */
bit lost[2];					/* the last one's limits were reset since */
byte ends[2];					/* ticks */
byte cost_first[2];
byte cost[2];
byte past_first = 0;			/* the costs of those before */
byte past = 0;

#define HOLDS(i)	(is[i] == open && !lost[i] && ends[i] > 0)

inline check() {
	assert(first == cost_first[0] + cost_first[1] + past_first);
	assert(used == cost[0] + cost[1] + past);
	assert(unit[0] == 0 || unit[1] == 0);
	assert((HOLDS(0) -> unit[0] > 0 : true) && (HOLDS(1) -> unit[1] > 0 : true))
}

#ifdef MUTANT_CHARGES_AGAIN
#define IS_RETRY	false
#else
#define IS_RETRY	(status[i] != absent && left[i] > 0)
#endif

/* reserve.lua */
inline reserve() {
	assert(ends[i] == 0);
	past_first = past_first + cost_first[i];
	past = past + cost[i];
	is[i] = open;
	lost_first[i] = 0;
	lost[i] = 0;
	ends[i] = HOLD;
	cost_first[i] = QUOTA;
	cost[i] = QUOTA;

#ifndef MUTANT_FIRST_NOT_CHARGED
	first = first + QUOTA;
#endif
	used = used + QUOTA;
	unit[i] = HOLD;
	status[i] = open;
	left[i] = HOLD;
	was_first[i] = life_first;
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

/* A key's charge becomes the cost; in another life, nothing is refunded. */
#define SETTLED(used, gone)		((gone) && COST(i) < QUOTA -> used : used + COST(i) - QUOTA)

/* settle.lua with a quota: settle */
inline settle() {
	if
	:: ends[i] > 0 && is[i] == open ->
		cost_first[i] = (lost_first[i] -> MORE(i) : COST(i));
		cost[i] = (lost[i] -> MORE(i) : COST(i));
		is[i] = settled;
		ends[i] = HOLD
	:: else
	fi;

#ifndef MUTANT_FIRST_NOT_SETTLED
	first = SETTLED(first, life_first != was_first[i]);
#endif
#ifdef MUTANT_SETTLES_AFTER_RESET
	used = (used + COST(i) > QUOTA -> used + COST(i) - QUOTA : 0);
#else
	used = SETTLED(used, life != was[i]);
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
	:: d_step { !IS_RETRY && first + QUOTA <= CAPACITY && used + QUOTA <= CAPACITY && unit[0] == 0 && unit[1] == 0 -> reserve(); check() }
	:: d_step { status[i] == open && left[i] > 0 && HAS_UNIT -> extend(); check() }
	:: d_step { IS_OPEN -> settle(); check() }
	od
}

/* Sets a life to one that neither it nor a record has had. */
inline begin_life(life, a, b) {
	i = 0;
	do
	:: i == a || i == b || i == life -> i++
	:: else -> break
	od;
	life = i;
	i = 0
}

proctype Resets() {
	byte i;

	do
	/* rl_reset(key) of the last key, with the records: at the first one, the quota is the cost */
	:: d_step {
			used = 0;
			past = 0;
			for (i : 0 .. 1) {
				past_first = past_first + cost_first[i];
				cost_first[i] = 0;
				unit[i] = 0;
				status[i] = absent;
				left[i] = 0;
				was_first[i] = 0;
				was[i] = 0;
				is[i] = absent;
				lost_first[i] = 0;
				lost[i] = 0;
				ends[i] = 0;
				cost[i] = 0
			}
			life = 0;
			life_first = 0;
			i = 0
		}
	/* rl_reset(key, limits) of the last key: reset.lua writes "reset:<tag>" */
	:: d_step {
			used = 0;
			past = 0;
			for (i : 0 .. 1) {
				unit[i] = 0;
				lost[i] = (is[i] == open);
				cost[i] = 0
			}
			begin_life(life, was[0], was[1])
		}
	/* A reset of the first key */
	:: d_step {
			first = 0;
			past_first = 0;
			for (i : 0 .. 1) {
				lost_first[i] = (is[i] == open);
				cost_first[i] = 0
			}
			begin_life(life_first, was_first[0], was_first[1])
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
