/*
 * store_file.c
 *		The file that keeps the local store's cells and chunks, and the undo of acts.
 *
 * With ratelimit.local_persistence, the postmaster makes a file of zeros at each start, and maps it
 * shared: the cells and chunks of this run are in it.  So they outlive each process.  The file of
 * the run before is still there.  The first backend that uses the store reads it into private
 * memory, undoes the acts in it that had not ended, inserts what it finds (recover.c), writes the new file
 * to the disk, and then gives it the name of the old one.  If it is killed before, the next run starts from
 * the same file again.
 *
 * An act is whole or undone: before its first change of a slot (a cell with its life, or a chunk),
 * it copies the slot to the undo area of its partition, and then counts the copy.  To store the
 * count 0 ends the act.  A killed process leaves a prefix of its stores in the file, because all
 * processes and the kernel see the same pages.  So only the compiler must keep their order.  If
 * the system has crashed, each 512 bytes of the file are as they were at some moment of the last
 * minute: no copy and no slot is larger, a copy counts only if it has the number of the act, and
 * recover.c checks all slots.
 *
 * Locks: the lock of the partition protects its area and its clock.  The first of the part's locks protects
 * FileState, and the second one the large area, which an act takes when its own is full.
 */
#include "postgres.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#ifdef __linux__
#include <sys/vfs.h>
#endif
#include <unistd.h>

#include "access/xlog.h"
#include "common/file_perm.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "portability/instr_time.h"
#include "storage/fd.h"
#include "utils/timestamp.h"

#include "error.h"
#include "shared/cells.h"
#include "shared/store_file.h"

#define NAME				PG_STAT_TMP_DIR "/ratelimit_local_store"
#define NEW_NAME			NAME ".new"
#define BROKEN_NAME			NAME ".broken"

/*
 * Increase it when a struct in the file, or the meaning of a member, changes: the counts of another
 * layout are lost.
 */
#define FILE_LAYOUT			1

#define MAX_STRIKES			2	/* recoveries of one file that did not end */
#define CLOCK_INTERVAL		(RL_SECOND / 10)
#define PAGE				4096
#define SECTOR				512 /* what a disk writes as a whole */
#define SLOT				128

typedef struct FileHeader
{
	char		magic[16];
	uint32		layout;
	uint32		cell_size;
	uint64		system_identifier;
	RlHash		secret;
	int64		run;			/* of the server with this file, from 1 */
	int64		npartitions;
	int64		ncells;
	int64		nchunks;
	RlHash		sum;			/* of the members before it */
	uint32		strikes;		/* recoveries of this file that have begun */
	uint32		complete;		/* the file has what was recovered from the one before */
} FileHeader;

/* The time of a partition's last act, but for CLOCK_INTERVAL.  Written in this order. */
typedef struct Clock
{
	int64		ahead;			/* the wall clock less the store's time */
	int64		now;			/* the store's time, or 0 */
} Clock;

/* A slot before its change. */
typedef struct Image
{
	uint32		slot;			/* a cell's number; or the number of the last cell, and a chunk's */
	uint32		act;
	int64		life;			/* of a cell */
	char		bytes[SLOT];
} Image;

#define SECTOR_IMAGES		((int) (SECTOR / sizeof(Image)))

typedef struct Sector
{
	Image		images[SECTOR_IMAGES];
	char		padding[SECTOR - SECTOR_IMAGES * sizeof(Image)];
} Sector;

#define AREA_SECTORS		21
#define AREA_IMAGES			(AREA_SECTORS * SECTOR_IMAGES)
#define AREA_GOES_ON		(AREA_IMAGES + 1)	/* count of an act that also has the large area */

/*
 * The most slots that an act changes: the chunks of the index, and the last chunk of each block, of the logs
 * of RL_MAX_SLIDING limits, and the cells of RL_MAX_KEYS keys.  An act on cells without number, of a key that
 * has had thousands of limits, may change more, which are not undone.
 */
#define LARGE_SECTORS		8192
#define LARGE_IMAGES		(LARGE_SECTORS * SECTOR_IMAGES)

typedef struct AreaHead
{
	volatile uint64 act;		/* its number << 32 | its images that count */
	int64		partition;		/* only of the large area: the act's */
	char		padding[SECTOR - 16];
} AreaHead;

typedef struct Area
{
	AreaHead	head;
	Sector		sectors[AREA_SECTORS];
} Area;

/* For the acts whose own areas are full, one at a time. */
typedef struct LargeArea
{
	AreaHead	head;
	Sector		sectors[LARGE_SECTORS];
} LargeArea;

StaticAssertDecl(sizeof(Image) == 144 && sizeof(Sector) == SECTOR && sizeof(AreaHead) == SECTOR,
				 "an image is in two sectors");
StaticAssertDecl(sizeof(RlCell) == SLOT && sizeof(RlChunk) == SLOT, "a slot has another size");

/* The parts of a file in memory. */
typedef struct StoreFile
{
	char	   *memory;
	Size		size;
	Clock	   *clocks;			/* of the partitions */
	Area	   *areas;			/* of the partitions */
	LargeArea  *large;
	RlSlots		slots;
} StoreFile;

/* In shared memory. */
typedef struct FileState
{
	bool		recovered;
	bool		kept;			/* the file keeps the counts */
	bool		found;			/* a file of an earlier run */
	char		problem[256];	/* why the counts are not kept, or the file of an earlier run was not used;
								 * or empty */
	RlRecovered result;
	int64		took;
	uint32		large_at[FLEXIBLE_ARRAY_MEMBER];	/* of each slot, its image in the large area, if that
													 * image has the slot's number; locked with that
													 * area */
} FileState;

bool		rl_keeps = false;

/* Set by the postmaster; backends inherit them. */
static bool wanted = false;
static bool old_found;			/* old is a header that can be used */
static bool strikes_out;
static FileHeader old;
static RlHash secret;
static int64 first_now;			/* the store's time */
static char old_problem[256];
static StoreFile file;
static FileState *state = NULL;
static LWLockPadded *locks;

/* The act of this process. */
static struct
{
	int			partition;
	int			n;				/* images in its area */
	int			large;			/* images in the large area, or -1 */
	uint32		slots[AREA_IMAGES];
#ifdef USE_ASSERT_CHECKING
	bool		checked;		/* by check_end; only under debug_now */
#endif
}			act = {.large = -1};

/*
 * The file
 */

/* Sets the addresses of a file's parts, and the size. */
static void
set_parts(StoreFile *f, char *memory)
{
	Size		at = PAGE;
	RlSlots    *slots = &f->slots;

	f->memory = memory;
	f->clocks = (Clock *) (memory + at);
	at += TYPEALIGN(PAGE, slots->npartitions * sizeof(Clock));
	f->areas = (Area *) (memory + at);
	at += TYPEALIGN(PAGE, slots->npartitions * sizeof(Area));
	f->large = (LargeArea *) (memory + at);
	at += TYPEALIGN(PAGE, sizeof(LargeArea));
	slots->cells = (RlCell *) (memory + at);
	at += TYPEALIGN(PAGE, (Size) slots->ncells * sizeof(RlCell));
	slots->lives = (int64 *) (memory + at);
	at += TYPEALIGN(PAGE, (Size) slots->ncells * sizeof(int64));
	slots->chunks = (RlChunk *) (memory + at);
	f->size = at + TYPEALIGN(PAGE, (Size) slots->nchunks * sizeof(RlChunk));
}

static int64
wall_clock(void)
{
	return GetCurrentTimestamp() + RL_UNIX_EPOCH;
}

static RlHash
sum_of(const FileHeader *header)
{
	return rl_siphash((RlHash) {0}, header, offsetof(FileHeader, sum));
}

/* Returns false with errno set, also at the end of the file. */
static bool
read_all(int fd, char *to, Size size, off_t at)
{
	while (size > 0)
	{
		ssize_t		n = pread(fd, to, Min(size, (Size) 1 << 30), at);

		if (n < 0 && errno == EINTR)
			continue;
		if (n == 0)
			errno = ENODATA;
		if (n <= 0)
			return false;
		to += n;
		at += n;
		size -= n;
	}
	return true;
}

/* Returns NULL, or why no file of this file system can keep counts. */
static const char *
refuse_file_system(int fd)
{
#if defined(__linux__) && !defined(EXEC_BACKEND)
	struct statfs fs;

	if (fstatfs(fd, &fs) != 0)
		return strerror(errno);
	/* Only of these it is known that a block that was written can be changed while the disk is full. */
	switch ((unsigned long) fs.f_type)
	{
		case 0xEF53:			/* ext4 */
		case 0x58465342:		/* xfs */
		case 0x01021994:		/* tmpfs */
			return NULL;
	}
	return "the file system is not ext4, xfs or tmpfs";
#else
	return "not supported on this platform";
#endif
}

/* Writes the file, all blocks.  Returns NULL, or why not. */
static const char *
write_file(int fd, const FileHeader *header, Size size)
{
	static char zeros[128 * 1024];
	const char *why = refuse_file_system(fd);

	for (Size at = 0; at < size && why == NULL;)
	{
		ssize_t		n = pwrite(fd, zeros, Min(size - at, sizeof(zeros)), at);

		if (n > 0)
			at += n;
		else if (n == 0 || errno != EINTR)
			why = n == 0 ? "the disk is full" : strerror(errno);
	}
	if (why == NULL && pwrite(fd, header, sizeof(*header), 0) != sizeof(*header))
		why = strerror(errno);
	return why;
}

/* Makes the file of this run, and maps it.  Returns NULL, or why not. */
static const char *
map_file(const FileHeader *header, char **memory)
{
	const char *why;
	int			fd;

	unlink(NEW_NAME);
	fd = BasicOpenFilePerm(NEW_NAME, O_RDWR | O_CREAT | O_EXCL | PG_BINARY, pg_file_create_mode);
	if (fd < 0)
		return strerror(errno);
	why = write_file(fd, header, file.size);
	if (why == NULL)
	{
		*memory = mmap(NULL, file.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		if (*memory == MAP_FAILED)
			why = strerror(errno);
	}
	close(fd);
	if (why != NULL)
		unlink(NEW_NAME);
	return why;
}

/* Tells the library that it is preloaded: without that there is no persistence. */
void
rl_file_request(void)
{
	wanted = rl_local_persistence;
}

bool
rl_file_is_wanted(void)
{
	return wanted;
}

/* Returns NULL, or why the file cannot be used.  Sets old. */
static const char *
read_header(int fd)
{
	struct stat st;
	StoreFile	f = {0};

	if (!read_all(fd, (char *) &old, sizeof(old), 0))
		return errno == ENODATA ? "it is too short" : strerror(errno);
	if (memcmp(old.magic, "ratelimit store", 16) != 0)
		return "it is damaged";
	if (old.layout != FILE_LAYOUT)
		return "another version has written it";
	if (!rl_same_key_hash(old.sum, sum_of(&old)) || old.cell_size != sizeof(RlCell))
		return "it is damaged";
	if (old.system_identifier != GetSystemIdentifier())
		return "another server has written it";
	f.slots = (RlSlots) {.npartitions = old.npartitions,.ncells = old.ncells,.nchunks = old.nchunks};
	set_parts(&f, NULL);
	if (fstat(fd, &st) != 0)
		return strerror(errno);
	if ((Size) st.st_size != f.size)
		return "it has another size";
	strikes_out = old.strikes >= MAX_STRIKES;
	return strikes_out ? "two recoveries of it have failed" : NULL;
}

/*
 * Returns the store's time by the clocks of the file, which goes on from its last act by the wall
 * clock; or 0.
 */
static int64
time_of_file(int fd)
{
	int64		wall = wall_clock();
	Clock		newest = {0};

	for (int i = 0; i < old.npartitions; i++)
	{
		Clock		clock;

		if (read_all(fd, (char *) &clock, sizeof(clock), PAGE + i * sizeof(Clock)) && clock.now > newest.now)
			newest = clock;
	}
	return newest.now == 0 ? 0 : Max(newest.now, wall - newest.ahead);
}

/* Opens the file of an earlier run.  Returns -1 with errno set if there is none. */
static int
open_old(void)
{
	FileHeader	header;
	int			fd = BasicOpenFile(NAME, O_RDONLY | PG_BINARY);

	if (fd >= 0 || errno != ENOENT || (fd = BasicOpenFile(NEW_NAME, O_RDONLY | PG_BINARY)) < 0)
		return fd;
	if (read_all(fd, (char *) &header, sizeof(header), 0) && header.complete == 1 &&
		rename(NEW_NAME, NAME) == 0)
		return fd;
	close(fd);
	errno = ENOENT;
	return -1;
}

/*
 * Looks for the file of an earlier run, and if there is one, replaces the secret and the store's time
 * by those of the file.  Without local_persistence, deletes it.  Called by the postmaster.
 */
void
rl_file_find(RlHash *my_secret, int64 *now)
{
	int			fd;
	const char *why = NULL;
	int64		then;

	old_found = strikes_out = false;
	old_problem[0] = '\0';
	if (!wanted)
	{
		unlink(NAME);
		unlink(NEW_NAME);
		return;
	}
	fd = open_old();
	if (fd < 0)
		why = errno == ENOENT ? NULL : strerror(errno);
	else
	{
		why = read_header(fd);
		if (why == NULL)
		{
			old_found = true;
			*my_secret = old.secret;
			then = time_of_file(fd);
			if (then != 0)
				*now = then;
		}
		close(fd);
	}
	if (strikes_out)
	{
		rename(NAME, BROKEN_NAME);
		unlink(NEW_NAME);
	}
	if (why != NULL)
	{
		snprintf(old_problem, sizeof(old_problem), "%s", why);
		ereport(WARNING,
				(errmsg("could not use the file \"%s\" of the counts of rate limits: %s", NAME, why),
				 strikes_out ? errdetail("It is \"%s\" now. Counts begin at zero, and are not kept until the next restart.", BROKEN_NAME) :
				 errdetail("Counts begin at zero.")));
	}
	secret = *my_secret;
	first_now = *now;
}

/* Returns a number from which this run numbers lives of cells, so that no run gives a number again. */
int64
rl_file_first_life(void)
{
	return wanted && old_found ? (old.run + 1) << 40 : 0;
}

/* Returns the size of the part in shared memory. */
Size
rl_file_state_size(const RlSlots *slots)
{
	return offsetof(FileState, large_at) + ((Size) slots->ncells + slots->nchunks) * sizeof(uint32);
}

/*
 * Makes the file of this run, and sets the slots in it.  If that fails, they are in memory only.
 * Called by the postmaster.
 */
void
rl_file_make(RlSlots *slots, void *my_state, LWLockPadded *my_locks)
{
	FileHeader	header = {
		.magic = "ratelimit store",.layout = FILE_LAYOUT,.cell_size = sizeof(RlCell),
		.system_identifier = GetSystemIdentifier(),.secret = secret,.run = old_found ? old.run + 1 : 1,
		.npartitions = slots->npartitions,.ncells = slots->ncells,.nchunks = slots->nchunks
	};
	const char *why;
	char	   *memory = NULL;

	if (file.memory != NULL)
		munmap(file.memory, file.size);
	state = my_state;
	locks = my_locks;
	file.slots = *slots;
	memset(state, 0, rl_file_state_size(slots));
	set_parts(&file, NULL);
	header.sum = sum_of(&header);
	why = strikes_out ? old_problem : map_file(&header, &memory);
	if (why != NULL)
	{
		snprintf(state->problem, sizeof(state->problem), "%s", why);
		if (!strikes_out)
			ereport(WARNING,
					(errmsg("could not create the file \"%s\", so counts of rate limits are not kept: %s",
							NEW_NAME, why)));
		memory = mmap(NULL, file.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		if (memory == MAP_FAILED)
			ereport(FATAL,
					(errcode(ERRCODE_OUT_OF_MEMORY),
					 errmsg("could not map memory for the counts of rate limits: %m")));
	}
	else
		strlcpy(state->problem, old_problem, sizeof(state->problem));
	state->kept = why == NULL;
	state->found = old_found;
	set_parts(&file, memory);
	file.clocks[0] = (Clock) {wall_clock() - first_now, first_now};
	*slots = file.slots;
}

/*
 * Recovery
 */

static void *
slot_at(const RlSlots *slots, uint32 slot)
{
	return slot <= slots->ncells ? (void *) &slots->cells[slot - 1] :
		(void *) &slots->chunks[slot - slots->ncells - 1];
}

#define IMAGE_AT(sectors, n)	(&(sectors)[(n) / SECTOR_IMAGES].images[(n) % SECTOR_IMAGES])

static bool
is_slot(const RlSlots *slots, uint32 slot)
{
	return slot >= 1 && slot <= (uint64) slots->ncells + slots->nchunks;
}

static void
undo_images(const RlSlots *slots, const Sector *sectors, uint32 number, uint32 n)
{
	for (uint32 i = 0; i < n; i++)
	{
		const Image *image = IMAGE_AT(sectors, i);

		/* Otherwise the system has crashed before it was written. */
		if (image->act != number || !is_slot(slots, image->slot))
			continue;
		memcpy(slot_at(slots, image->slot), image->bytes, SLOT);
		if (image->slot <= slots->ncells)
			slots->lives[image->slot - 1] = image->life;
	}
}

/* Undoes the acts that had not ended.  Returns how many. */
static int64
undo_acts(StoreFile *f)
{
	uint64		large = f->large->head.act;
	int64		undone = 0;

	for (int i = 0; i < f->slots.npartitions; i++)
	{
		uint64		head = f->areas[i].head.act;
		uint32		n = (uint32) head;

		if (n == 0 || n > AREA_GOES_ON)
			continue;
		undone++;
		undo_images(&f->slots, f->areas[i].sectors, head >> 32, Min(n, AREA_IMAGES));
		if (n == AREA_GOES_ON && f->large->head.partition == i)
			undo_images(&f->slots, f->large->sectors, large >> 32, Min((uint32) large, LARGE_IMAGES));
	}
	return undone;
}

/* Notes that a recovery of the old file has begun, and reads it into memory.  Returns NULL, or why not. */
static const char *
read_old(StoreFile *f)
{
	const char *why = NULL;
	uint32		strikes = old.strikes + 1;
	int			fd = BasicOpenFile(NAME, O_RDWR | PG_BINARY);

	if (fd < 0)
		return strerror(errno);
	f->slots = (RlSlots) {.npartitions = old.npartitions,.ncells = old.ncells,.nchunks = old.nchunks};
	set_parts(f, NULL);
	if (pwrite(fd, &strikes, sizeof(strikes), offsetof(FileHeader, strikes)) != sizeof(strikes))
		why = strerror(errno);
	else
	{
		char	   *memory = mmap(NULL, f->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (memory == MAP_FAILED)
			why = strerror(errno);
		else
		{
			set_parts(f, memory);
#ifdef MADV_HUGEPAGE
			/* Without it, the faults of small pages take a third of the time of a recovery. */
			(void) madvise(memory, f->size, MADV_HUGEPAGE);
#endif
			if (!read_all(fd, memory, f->size, 0))
				why = strerror(errno);
		}
	}
	close(fd);
	return why;
}

static void
set_problem(const char *what, const char *why, bool kept)
{
	snprintf(state->problem, sizeof(state->problem), "%s: %s", what, why);
	state->kept = kept;
	rl_log_no_throw((errmsg("%s: %s", what, why)));
}

/* Writes the file of this run to the disk.  If that fails, only the log says so. */
static void
flush_file(void)
{
	int			fd = BasicOpenFile(NEW_NAME, O_RDWR | PG_BINARY);
	int			error = fd < 0 || pg_fsync(fd) != 0 ? errno : 0;

	if (fd >= 0)
		close(fd);
	if (error != 0)
		rl_log_no_throw((errmsg("could not write the counts of rate limits to the disk: %s", strerror(error)),
						 errdetail("If the system crashes within the next minute, all may be lost.")));
}

static void
recover(void (*insert) (const RlSlots *found, RlRecovered *recovered))
{
	instr_time	began;
	instr_time	took;

	INSTR_TIME_SET_CURRENT(began);
	if (old_found)
	{
		StoreFile	f = {0};
		const char *why = read_old(&f);

		if (why == NULL)
		{
			state->result.undone = undo_acts(&f);
			insert(&f.slots, &state->result);
		}
		else
		{
			state->found = false;
			rename(NAME, BROKEN_NAME);
			set_problem("could not read the counts of rate limits, which begin at zero", why, state->kept);
		}
		if (f.memory != NULL)
			munmap(f.memory, f.size);
	}
	if (!state->kept)
		unlink(NAME);
	/*
	 * If this process is killed between unlink and rename, the next start finds the new file complete.
	 */
	else
	{
		((FileHeader *) file.memory)->complete = true;
		pg_compiler_barrier();
		/*
		 * Otherwise a loss of power within half a minute would leave an empty file, and none of the
		 * counts of days.
		 */
		if (state->found)
			flush_file();
		unlink(NAME);
		if (rename(NEW_NAME, NAME) != 0)
			set_problem("could not rename the file of the counts of rate limits, which are not kept",
						strerror(errno), false);
	}
	INSTR_TIME_SET_CURRENT(took);
	INSTR_TIME_SUBTRACT(took, began);
	state->took = INSTR_TIME_GET_MICROSEC(took);
	if (old_found && state->found)
		rl_log_no_throw((errmsg("recovered " INT64_FORMAT " states of rate limits in %.3f s",
								state->result.states, state->took / 1e6),
						 errdetail("Of these, " INT64_FORMAT " acts that had not ended were undone. "
								   "Dropped were " INT64_FORMAT " damaged states "
								   "and " INT64_FORMAT " for which there was no room.",
								   state->result.undone, state->result.damaged, state->result.no_room)));
}

/*
 * Recovers the counts of the run before, unless a backend has, and lets this process keep its own.
 * Does not throw.
 */
void
rl_file_recover(void (*insert) (const RlSlots *found, RlRecovered *recovered))
{
	if (state == NULL)
		return;
	LWLockAcquire(&locks[0].lock, LW_EXCLUSIVE);
	if (!state->recovered)
		recover(insert);
	state->recovered = true;
	LWLockRelease(&locks[0].lock);
	rl_keeps = state->kept;
}

/*
 * Returns whether counts are kept, or why not, and writes what the last recovery found.  The store
 * must be recovered.
 */
const char *
rl_file_status(char *recovery, Size size)
{
	recovery[0] = '\0';
	if (state == NULL)
		return !rl_local_persistence ? "off" : "off: ratelimit is not in shared_preload_libraries";
	if (state->found)
		snprintf(recovery, size, INT64_FORMAT " states in %.3f s, " INT64_FORMAT " acts undone, "
				 INT64_FORMAT " damaged, " INT64_FORMAT " without room",
				 state->result.states, state->took / 1e6, state->result.undone, state->result.damaged,
				 state->result.no_room);
	else
		snprintf(recovery, size, "%s", state->kept && state->problem[0] != '\0' ? state->problem : "no file");
	return state->kept ? "on" : psprintf("off: %s", state->problem);
}

/*
 * Undo
 */

#ifdef USE_ASSERT_CHECKING
/* The cells, lives and chunks at the beginning of the act. */
static char *before = NULL;

static void
check_begin(void)
{
	Size		size = file.memory + file.size - (char *) file.slots.cells;
	Size		used = (char *) &file.slots.chunks[file.slots.used_chunks()] - (char *) file.slots.cells;

	/* No act begins within another one. */
	Assert(!act.checked);
	act.checked = rl_debug_now[0] != '\0';
	if (!act.checked)
		return;
	if (before == NULL)
		before = malloc(size);
	Assert(before != NULL);
	memcpy(before, file.slots.cells, used);
}

static const Image *
find_image(uint32 slot)
{
	for (int i = 0; i < act.n; i++)
		if (act.slots[i] == slot)
			return IMAGE_AT(file.areas[act.partition].sectors, i);
	for (int i = 0; i < act.large; i++)
		if (IMAGE_AT(file.large->sectors, i)->slot == slot)
			return IMAGE_AT(file.large->sectors, i);
	return NULL;
}

/* Checks that an undo of the act would make the slot what it was before. */
static void
check_slot(const RlSlots *old, uint32 slot)
{
	const Image *image = find_image(slot);
	const void *undone = image != NULL ? (const void *) image->bytes : slot_at(&file.slots, slot);

	if (slot > old->ncells)
		Assert(memcmp(undone, slot_at(old, slot), SLOT) == 0);
	else if (!old->cells[slot - 1].used)
		Assert(!((const RlCell *) undone)->used);
	else
	{
		/* Recovery does not use the members from "next" to "heap". */
		Assert(memcmp(undone, slot_at(old, slot), offsetof(RlCell, next)) == 0 &&
			   ((const RlCell *) undone)->used);
		Assert((image != NULL ? image->life : file.slots.lives[slot - 1]) == old->lives[slot - 1]);
	}
}

/* Does the same for a list of chunks. */
static void
check_chunks(const RlSlots *old, uint32 first)
{
	for (uint32 c = first; c != RL_NO_CHUNK; c = old->chunks[c - 1].next)
		check_slot(old, old->ncells + c);
}

/*
 * Does the same for all states of the partitions that this process has locked.  Only under debug_now,
 * which tests use in one session at a time, because it takes long.
 */
static void
check_end(void)
{
	StoreFile	f = {.slots = file.slots};
	const RlSlots *old = &f.slots;

	if (!act.checked)
		return;
	act.checked = false;
	Assert(file.slots.holds((uint64) act.partition << 32));
	set_parts(&f, before - ((char *) file.slots.cells - file.memory));
	for (uint32 c = 1; c <= old->ncells; c++)
	{
		const RlCell *cell = &old->cells[c - 1];
		const RlCell *now = &file.slots.cells[c - 1];

		if ((cell->used && file.slots.holds(cell->key_hash.low)) ||
			(now->used && file.slots.holds(now->key_hash.low)))
			check_slot(old, c);
		if (!cell->used || !file.slots.holds(cell->key_hash.low) || cell->tag.algorithm >= RL_ALGORITHMS)
			continue;
		for (int i = 0; i < 2; i++)
		{
			check_chunks(old, cell->state.log[i].index_first);
			for (uint32 index = cell->state.log[i].index_first; index != RL_NO_CHUNK;
				 index = old->chunks[index - 1].next)
				for (uint32 b = 0; b < old->chunks[index - 1].n; b++)
					check_chunks(old, old->chunks[index - 1].block[b].first);
			check_chunks(old, cell->state.log[i].first);
		}
	}
}

bool
rl_keep_in_act(void)
{
	return act.checked;
}
#endif

/* Begins an act, whose area is that of the partition, which is locked exclusively. */
void
rl_keep_begin(int partition)
{
	volatile uint64 *head = &file.areas[partition].head.act;

	act.partition = partition;
	act.n = 0;
	act.large = -1;
	/* A session failed within its act here.  Its changes stay. */
	if ((uint32) *head != 0)
		*head = ((*head >> 32) + 1) << 32;
#ifdef USE_ASSERT_CHECKING
	check_begin();
#endif
}

static void
write_image(Sector *sectors, uint32 slot, volatile uint64 *head, int n)
{
	Image	   *image = IMAGE_AT(sectors, n);
	uint64		number = *head >> 32;

	image->slot = slot;
	image->act = number;
	if (slot <= file.slots.ncells)
		image->life = file.slots.lives[slot - 1];
	memcpy(image->bytes, slot_at(&file.slots, slot), SLOT);
	pg_compiler_barrier();
	*head = number << 32 | (uint32) (n + 1);
	pg_compiler_barrier();
}

/* Keeps a slot in the large area, which the act gets when its own area is full. */
static void
keep_in_large(uint32 slot)
{
	LargeArea  *large = file.large;
	uint32		at;

	if (act.large < 0)
	{
		volatile uint64 *head = &file.areas[act.partition].head.act;

		LWLockAcquire(&locks[1].lock, LW_EXCLUSIVE);
		large->head.act = ((large->head.act >> 32) + 1) << 32;
		large->head.partition = act.partition;
		act.large = 0;
		pg_compiler_barrier();
		/* Only from here on, the large area counts. */
		*head = (*head >> 32) << 32 | AREA_GOES_ON;
		pg_compiler_barrier();
	}
	at = state->large_at[slot - 1];
	if (at < (uint32) act.large && IMAGE_AT(large->sectors, at)->slot == slot)
		return;
	if (act.large == LARGE_IMAGES)
		return;
	write_image(large->sectors, slot, &large->head.act, act.large);
	state->large_at[slot - 1] = act.large++;
}

static void
keep(uint32 slot)
{
	Area	   *area = &file.areas[act.partition];

	for (int i = act.n - 1; i >= 0; i--)
		if (act.slots[i] == slot)
			return;
	if (act.n == AREA_IMAGES)
	{
		keep_in_large(slot);
		return;
	}
	write_image(area->sectors, slot, &area->head.act, act.n);
	act.slots[act.n++] = slot;
}

/* Keeps a cell, which the act may change then. */
void
rl_keep_cell(uint32 c)
{
	keep(c);
}

/* Does the same for a chunk. */
void
rl_keep_chunk(uint32 number)
{
	keep(file.slots.ncells + number);
}

/* Ends the act, at the store's time "now".  Its partitions must still be locked. */
void
rl_keep_end(int64 now)
{
	volatile uint64 *head = &file.areas[act.partition].head.act;
	volatile Clock *clock = &file.clocks[act.partition];

#ifdef USE_ASSERT_CHECKING
	check_end();
#endif
	if (act.n == 0)
		return;
	if (rl_debug_now[0] == '\0' && now - clock->now >= CLOCK_INTERVAL)
	{
		clock->ahead = wall_clock() - now;
		clock->now = now;
	}
	pg_compiler_barrier();
	*head = ((*head >> 32) + 1) << 32;
	pg_compiler_barrier();
	act.n = 0;
	if (act.large >= 0)
	{
		act.large = -1;
		LWLockRelease(&locks[1].lock);
	}
}
