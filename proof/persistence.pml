/*
 * persistence.pml
 *		Acts on the local store's file, and its recovery (DESIGN.md, 8c).
 *
 * Writers count for one key, once or twice, or for two keys of two partitions, and evict a cell of another key if
 * none is free.  Each store is a step, and at each step all processes can be killed.  Recovery then
 * undoes the acts that are counted in an area.
 *
 * Left out: chunks, which are kept as cells are; the large area; a crash of the system, after which
 * a file can be any mixture of old and new sectors; and recovery itself, which writes nothing to
 * the old file.
 *
 * Promise: after a recovery, each key has what the acts have counted that had ended, and each cell
 * belongs to at most one key.  So an act is whole or undone, and an answered one is whole.
 */
#define WRITERS		2
#define ACTS		2		/* of a writer */
#define KEYS		3
#define CELLS		2
#define NONE		CELLS
#define PARTITIONS	2
#define PARTITION(key)	((key) % PARTITIONS)

#define FREE		0		/* holder of a cell */
#define USED		1
#define SPARE		(2 + w)

typedef Cell {
	byte key;				/* its number + 1; 0: not used */
	byte count
}

typedef Area {
	byte n;					/* images that count */
	byte slot[CELLS];
	Cell image[CELLS]
}

/* The file */
Cell cell[CELLS];
Area area[PARTITIONS];

/* Shared memory, which recovery makes anew */
bit locked[PARTITIONS];
byte holder[CELLS];
byte at[KEYS] = NONE;		/* the hash chains */

byte counted[KEYS];			/* by acts that have ended */
bool killed = false;

inline lock(p) { atomic { locked[p] == 0 -> locked[p] = 1 } }

inline unlock(p) { locked[p] = 0 }

/* write_image, before the first change of a cell in an act whose area is a */
inline keep(a, c) {
	d_step {
		i = area[a].n;
		kept = (i > 0 && area[a].slot[0] == c) || (i > 1 && area[a].slot[1] == c)
	}
	if
	:: kept
	:: else ->
#ifdef MUTANT_COUNT_BEFORE_IMAGE
		area[a].n = i + 1;
#endif
		d_step {
			area[a].slot[i] = c;
			area[a].image[i].key = cell[c].key;
			area[a].image[i].count = cell[c].count
		}
#ifndef MUTANT_COUNT_BEFORE_IMAGE
		area[a].n = i + 1
#endif
	fi
}

#ifdef MUTANT_AREA_OF_EACH_KEY
#define AREA(key)		PARTITION(key)
#else
#define AREA(key)		PARTITION(first)
#endif

/* Counts for a key, in the act of the first key. */
inline charge(whose) {
	if
	:: at[whose] == NONE ->
		/* take_spare */
		d_step {
			c = 0;
			do
			:: holder[c] != SPARE -> c++
			:: else -> break
			od
		}
#ifndef MUTANT_NEW_CELL_NOT_KEPT
		keep(AREA(whose), c);
#endif
		cell[c].key = whose + 1;
		cell[c].count = 1;
		d_step { at[whose] = c; holder[c] = USED }
	:: else ->
		c = at[whose];
#ifdef MUTANT_IMAGE_AFTER_CHANGE
		cell[c].count = cell[c].count + 1;
		keep(AREA(whose), c)
#else
		keep(AREA(whose), c);
		cell[c].count = cell[c].count + 1
#endif
	fi
}

/* rl_cells_evict: an act of its own on a key of another writer's or nobody's act */
inline evict(whose) {
	lock(PARTITION(whose));
	if
	:: at[whose] == NONE
	:: else ->
		c = at[whose];
		keep(PARTITION(whose), c);
#ifndef MUTANT_REMOVED_NOT_ZEROED
		cell[c].key = 0;
		cell[c].count = 0;
#endif
#ifdef MUTANT_FREE_BEFORE_END
		d_step { at[whose] = NONE; holder[c] = FREE };
#else
		d_step { at[whose] = NONE; holder[c] = SPARE };
#endif
		d_step { area[PARTITION(whose)].n = 0; counted[whose] = 0 }
	fi;
	unlock(PARTITION(whose))
}

proctype Writer(byte w) {
	byte acts;
	byte first;
	byte victim;
	byte wanted;
	byte times;
	byte c;
	byte i;
	bool two;
	bool kept;

	{
		do
		:: acts == ACTS -> break
		:: acts < ACTS ->
			acts++;
			if
			:: first = 0; two = true
			:: first = 0; two = false
			:: first = 1; two = false
			:: first = 2; two = false	/* and counts twice */
			fi;
again:
			lock(PARTITION(first));
			if
			:: two -> lock(PARTITION(1))
			:: else
			fi;
			/* rl_cells_set_aside */
			d_step {
				wanted = (at[first] == NONE) + (two && at[1] == NONE);
				c = 0;
				do
				:: c < CELLS ->
					if
					:: holder[c] == SPARE && wanted > 0 -> wanted--
					:: holder[c] == FREE && wanted > 0 -> holder[c] = SPARE; wanted--
					:: else
					fi;
					c++
				:: else -> break
				od
			}
			if
			:: wanted > 0 ->
				unlock(PARTITION(first));
				if
				:: two -> unlock(PARTITION(1))
				:: else
				fi;
				if
				:: first != 0 -> victim = 0
				:: first != 1 && !two -> victim = 1
				:: first != 2 -> victim = 2
				:: goto release		/* no cell is left for this act */
				fi;
				evict(victim);
				goto again
			:: else
			fi;
			times = 1 + (first == 2);
			do
			:: times > 0 -> charge(first); times--
			:: else -> break
			od;
			if
			:: two -> charge(1)
			:: else
			fi;
#ifdef MUTANT_UNLOCK_BEFORE_END
			unlock(PARTITION(first));
#endif
#ifdef MUTANT_AREA_OF_EACH_KEY
			if
			:: two -> area[PARTITION(1)].n = 0
			:: else
			fi;
#endif
			/* The act ends.  Its answer comes later. */
			d_step {
				area[PARTITION(first)].n = 0;
				counted[first]++;
				if
				:: two -> counted[1]++
				:: first == 2 -> counted[2]++
				:: else
				fi
			}
#ifndef MUTANT_UNLOCK_BEFORE_END
			unlock(PARTITION(first));
#endif
			if
			:: two -> unlock(PARTITION(1))
			:: else
			fi;
release:
			skip;
			/* rl_cells_release */
			d_step {
				c = 0;
				do
				:: c < CELLS ->
					if
					:: holder[c] == SPARE -> holder[c] = FREE
					:: else
					fi;
					c++
				:: else -> break
				od
			}
		od
	} unless { killed }
}

/* All processes are killed, and the next run of the server recovers. */
proctype Recovery() {
	byte p;
	byte i;
	byte key;
	byte found;

	d_step {
		killed = true;
#ifndef MUTANT_NO_UNDO
		p = 0;
		do
		:: p < PARTITIONS ->
			i = 0;
			do
			:: i < area[p].n ->
				cell[area[p].slot[i]].key = area[p].image[i].key;
				cell[area[p].slot[i]].count = area[p].image[i].count;
				i++
			:: else -> break
			od;
			p++
		:: else -> break
		od;
#endif
		key = 0;
		do
		:: key < KEYS ->
			found = 0;
			i = 0;
			do
			:: i < CELLS ->
				if
				:: cell[i].key == key + 1 -> assert(found == 0); found = cell[i].count
				:: else
				fi;
				i++
			:: else -> break
			od;
			assert(found == counted[key]);
			key++
		:: else -> break
		od
	}
}

init {
	byte w;

	atomic {
		w = 0;
		do
		:: w < WRITERS -> run Writer(w); w++
		:: else -> break
		od;
		run Recovery()
	}
}
