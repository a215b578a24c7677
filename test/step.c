/*
 * step PID FILE OFFSET STEPS CHANGES
 *
 * Runs a backend one instruction at a time until the number at this offset of the file changes:
 * in an act of the local store, it counts images.  Then runs so many instructions more, or until the number
 * has changed so many times, or it is 0 again, and kills the backend.  Prints "ready" when
 * it runs the backend, and at the end the instructions.  If STEPS is 0, all this is about system calls, not
 * instructions, which is much faster.  After 60 seconds it kills the backend in any case.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile uint32_t *number;	/* the low half of an area's head, or the strikes */
static pid_t pid;

static void
give_up(int signal)
{
	static const char text[] = "nothing\n";

	kill(pid, SIGKILL);
	_exit(write(1, text, sizeof(text) - 1) > 0 ? 5 : 6);
}

int
main(int argc, char **argv)
{
	int			fd;
	char	   *file;
	long		offset;
	long		left;
	long		n = 0;
	long		changes;
	int			request;
	int			changed = 0;
	uint32_t	last;
	int			status;
	int			pass = 0;

	if (argc != 6 || (fd = open(argv[2], O_RDONLY)) < 0)
		return 2;
	pid = atoi(argv[1]);
	offset = atol(argv[3]);
	left = atol(argv[4]);
	changes = atol(argv[5]);
	request = left == 0 ? PTRACE_SYSCALL : PTRACE_SINGLESTEP;
	file = mmap(NULL, offset + sizeof(uint32_t), PROT_READ, MAP_SHARED, fd, 0);
	if (file == MAP_FAILED)
		return 2;
	number = (volatile uint32_t *) (file + offset);
	signal(SIGALRM, give_up);
	alarm(60);
	last = *number;
	if (ptrace(PTRACE_SEIZE, pid, NULL, NULL) != 0 || ptrace(PTRACE_INTERRUPT, pid, NULL, NULL) != 0)
		return 3;
	if (waitpid(pid, &status, 0) != pid || !WIFSTOPPED(status))
		return 3;
	puts("ready");
	fflush(stdout);
	for (;;)
	{
		if (ptrace(request, pid, NULL, pass) != 0 || waitpid(pid, &status, 0) != pid || !WIFSTOPPED(status))
			return 4;
		pass = WSTOPSIG(status) == SIGTRAP ? 0 : WSTOPSIG(status);
		if (*number != last)
		{
			last = *number;
			changed = 1;
			changes--;
		}
		if (!changed)
			continue;
		n++;
		if (--left == 0 || changes <= 0 || last == 0)
			break;
	}
	kill(pid, SIGKILL);
	printf("%ld %s\n", n, last > 0 ? "in the act" : "after it");
	return 0;
}
