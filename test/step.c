/*
 * step PID FILE OFFSET STEPS CHANGES
 *
 * Runs a backend one instruction at a time until the number at this offset of the file changes:
 * in an act of the local store, it counts images.  Then runs so many instructions more, or until the number
 * has changed so many times, or it is 0 again, and kills the backend.  Prints "ready" when
 * it runs the backend, and at the end the instructions.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

static int	fd;
static off_t offset;

static uint32_t
number(void)
{
	uint64_t	act;

	if (pread(fd, &act, sizeof(act), offset) != sizeof(act))
		exit(2);
	return (uint32_t) act;
}

int
main(int argc, char **argv)
{
	pid_t		pid = atoi(argv[1]);
	long		left = atol(argv[4]);
	long		n = 0;
	long		changes = argc == 6 ? atol(argv[5]) : 0;
	int			changed = 0;
	uint32_t	last;
	int			status;
	int			pass = 0;

	if (argc != 6 || (fd = open(argv[2], O_RDONLY)) < 0)
		return 2;
	offset = atol(argv[3]);
	last = number();
	if (ptrace(PTRACE_SEIZE, pid, NULL, NULL) != 0 || ptrace(PTRACE_INTERRUPT, pid, NULL, NULL) != 0)
		return 3;
	if (waitpid(pid, &status, 0) != pid || !WIFSTOPPED(status))
		return 3;
	puts("ready");
	fflush(stdout);
	for (;;)
	{
		if (ptrace(PTRACE_SINGLESTEP, pid, NULL, pass) != 0 || waitpid(pid, &status, 0) != pid || !WIFSTOPPED(status))
			return 4;
		pass = WSTOPSIG(status) == SIGTRAP ? 0 : WSTOPSIG(status);
		if (number() != last)
		{
			last = number();
			changed = 1;
			changes--;
		}
		if (!changed)
			continue;
		n++;
		if (--left <= 0 || changes <= 0 || last == 0)
			break;
	}
	kill(pid, SIGKILL);
	printf("%ld %s\n", n, last > 0 ? "in the act" : "after it");
	return 0;
}
