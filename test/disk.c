/*
 * disk.c
 *		Preloaded into a server, makes calls on the local store's file fail.
 *
 * RATELIMIT_DISK names a file with "pread", "pwrite" or "fsync", the offset from which on that call fails, and
 * its errno.  It is read at each use.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int
fails(const char *call, int fd, off_t end)
{
	char		link[64];
	char		name[1024];
	char		wanted[16];
	long		offset;
	int			error = 0;
	ssize_t		n;
	FILE	   *in;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	n = readlink(link, name, sizeof(name) - 1);
	if (n <= 0)
		return 0;
	name[n] = '\0';
	if (strstr(name, "/ratelimit_local_store") == NULL || (in = fopen(getenv("RATELIMIT_DISK"), "r")) == NULL)
		return 0;
	if (fscanf(in, "%15s %ld %d", wanted, &offset, &error) != 3 || strcmp(wanted, call) != 0 || end <= offset)
		error = 0;
	fclose(in);
	errno = error;
	return error != 0;
}

ssize_t
pread(int fd, void *to, size_t size, off_t at)
{
	if (fails("pread", fd, at + size))
		return -1;
	return ((ssize_t (*) (int, void *, size_t, off_t)) dlsym(RTLD_NEXT, "pread")) (fd, to, size, at);
}

ssize_t
pwrite(int fd, const void *from, size_t size, off_t at)
{
	if (fails("pwrite", fd, at + size))
		return -1;
	return ((ssize_t (*) (int, const void *, size_t, off_t)) dlsym(RTLD_NEXT, "pwrite")) (fd, from, size, at);
}

int
fsync(int fd)
{
	if (fails("fsync", fd, 1))
		return -1;
	return ((int (*) (int)) dlsym(RTLD_NEXT, "fsync")) (fd);
}
