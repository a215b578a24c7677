/*
 * clocks.c
 *		Preloaded into a server, gives it another clock and other time zone data.
 *
 * RATELIMIT_CLOCK names a file.  It has a number of microseconds that are added to the
 * wall clock, or after "=" the time at which the clock stands.  RATELIMIT_SUSPENDED names a file
 * with microseconds that are added to CLOCK_BOOTTIME.  RATELIMIT_ZONES names a file with
 * "zone=file": that file is opened in place of the data of the zone.  All are read at each
 * use.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

typedef int (*Open) (const char *, int,...);
typedef int (*Clock) (struct timeval *, void *);

/* Reads the file that a variable of the environment names; returns false if there is none. */
static int
read_setting(const char *variable, char *text, size_t size)
{
	const char *name = getenv(variable);
	Open		real_open = (Open) dlsym(RTLD_NEXT, "open");
	int			fd = name ? real_open(name, O_RDONLY) : -1;
	ssize_t		n;

	if (fd < 0)
		return 0;
	n = read(fd, text, size - 1);
	close(fd);
	if (n <= 0)
		return 0;
	text[n] = '\0';
	return 1;
}

/* Changes a time, in microseconds, as the file of a variable says. */
static long long
changed(const char *variable, long long us)
{
	char		text[64];

	if (!read_setting(variable, text, sizeof(text)))
		return us;
	return text[0] == '=' ? atoll(text + 1) : us + atoll(text);
}

int
gettimeofday(struct timeval *restrict now, void *restrict zone)
{
	long long	us;

	if (((Clock) dlsym(RTLD_NEXT, "gettimeofday")) (now, zone) != 0)
		return -1;
	us = changed("RATELIMIT_CLOCK", now->tv_sec * 1000000LL + now->tv_usec);
	now->tv_sec = us / 1000000;
	now->tv_usec = us % 1000000;
	return 0;
}

int
clock_gettime(clockid_t clock, struct timespec *now)
{
	long long	us;

	if (((int (*) (clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime")) (clock, now) != 0)
		return -1;
	if (clock != CLOCK_BOOTTIME && clock != CLOCK_REALTIME)
		return 0;
	us = changed(clock == CLOCK_BOOTTIME ? "RATELIMIT_SUSPENDED" : "RATELIMIT_CLOCK", now->tv_sec * 1000000LL + now->tv_nsec / 1000);
	now->tv_sec = us / 1000000;
	now->tv_nsec = us % 1000000 * 1000;
	return 0;
}

/* Returns the file to open in place of this one. */
static const char *
replaced(const char *path, char *text, size_t size)
{
	size_t		len = strlen(path);
	char	   *file;

	if (!read_setting("RATELIMIT_ZONES", text, size) ||
		(file = strchr(text, '=')) == NULL)
		return path;
	*file++ = '\0';
	return len > strlen(text) && strcmp(path + len - strlen(text), text) == 0 ? file : path;
}

static int
open_replaced(const char *function, const char *path, int flags, mode_t mode)
{
	char		text[512];

	return ((Open) dlsym(RTLD_NEXT, function)) (replaced(path, text, sizeof(text)), flags, mode);
}

#define DEFINE_OPEN(name) \
int \
name(const char *path, int flags,...) \
{ \
	mode_t		mode = 0; \
	va_list		args; \
 \
	if (flags & (O_CREAT | O_TMPFILE)) \
	{ \
		va_start(args, flags); \
		mode = va_arg(args, mode_t); \
		va_end(args); \
	} \
	return open_replaced(#name, path, flags, mode); \
}

DEFINE_OPEN(open)
DEFINE_OPEN(open64)
