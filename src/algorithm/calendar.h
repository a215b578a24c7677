/*
 * calendar.h
 *		Windows of a calendar: days, weeks, months, quarters and years of a time zone.
 *
 * A window is named by its first day, as the number YYYYMMDD.  Servers whose zone
 * data differ name it alike, and so never open one window twice.
 */
#ifndef CALENDAR_H
#define CALENDAR_H

#include "ratelimit.h"

/*
 * Returns how long stores keep a state of the limit after its window: for another server a
 * calendar's window may not have ended yet.  The times of two zones differ by at most 26 hours.
 */
static inline int64
rl_calendar_slack(const RlLimit *limit)
{
	return limit->calendar != RL_NO_CALENDAR ? 2 * RL_DAY : 0;
}

/* Times at or after this are no times of a calendar: the year 10000. */
#define RL_CALENDAR_END		INT64CONST(253402300800000000)

/* The window before that of a time, the window itself, and the next. */
typedef struct RlWindows
{
	int64		name[3];
	int64		start[4];		/* in microseconds since 1970; the last is the end of the last window */
} RlWindows;

#define RL_CURRENT			1	/* index of the time's window */

extern const char *const rl_calendar_names[];

extern void rl_calendar_set(RlLimit *limit, RlCalendar calendar);
extern bool rl_calendar_set_zone(RlLimit *limit, const char *name, int len);
extern bool rl_calendar_of_name(const char *name, int len, RlLimit *limit);
extern bool rl_calendar_find_zone(RlLimit *limit);
extern const RlWindows *rl_windows_at(const RlLimit *limit, int64 now);
extern int64 rl_window_end(const RlLimit *limit, int64 name);

#endif							/* CALENDAR_H */
