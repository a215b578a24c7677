/*
 * clock.h
 *		Clocks, and sleeping and waiting by them.  All files may include it.
 */
#ifndef CLOCK_H
#define CLOCK_H

extern int64 rl_monotonic_now(void);
extern int64 rl_boottime_now(void);
extern int64 rl_wall_now(void);
extern uint32 rl_wait_event(void);
extern void rl_sleep_until(int64 until, uint32 wait_event);

#endif							/* CLOCK_H */
