/*
 * calendar.c
 *		Windows of a calendar in a time zone, by PostgreSQL's zone code.
 *
 * A window starts at the first instant at which the local date reaches its first day.  If the
 * clock is then set back over midnight, the former window does not open again.
 *
 * A zone is loaded when the text of a limit is parsed, which may throw, and stays loaded until
 * the backend ends, so that the other functions neither throw nor allocate memory.
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "pgtime.h"
#include "utils/datetime.h"

#include "algorithm/calendar.h"

const char *const rl_calendar_names[] = {
	[RL_CALENDAR_DAY] = "day",
	[RL_CALENDAR_WEEK] = "week",
	[RL_CALENDAR_MONTH] = "month",
	[RL_CALENDAR_QUARTER] = "quarter",
	[RL_CALENDAR_YEAR] = "year",
	NULL
};

/* More than any zone's time differs from UTC, in seconds. */
#define MOST_OFFSET			(26 * SECS_PER_HOUR)

/*
 * Returns a time zone by its name, or NULL.  The colon keeps pg_tzset from reading a POSIX
 * string, such as "EST5EDT,M3.2.0,M11.1.0".  UTC is found also if the server has no zone files.
 * Throws if there is no memory.
 */
static pg_tz *
open_zone(const char *name)
{
	char		file[RL_MAX_ZONE + 1];

	if (pg_strcasecmp(name, "UTC") == 0)
		return pg_tzset("GMT");
	snprintf(file, sizeof(file), ":%s", name);
	return pg_tzset(file);
}

/* Returns true if the zone is of IANA's, and no copy, zone with leap seconds, or zone of the machine. */
static bool
is_of_iana(const char *name)
{
	return strncmp(name, "posix/", 6) != 0 && strncmp(name, "right/", 6) != 0 &&
		strcmp(name, "localtime") != 0 && strcmp(name, "posixrules") != 0;
}

static int64
zone_hash(const char *name)
{
	return (int64) hash_bytes_extended((const unsigned char *) name, strlen(name), 0);
}

/* Returns a time that is longer than any window. */
static int64
longest(RlCalendar calendar)
{
	static const int days[] = {
		[RL_CALENDAR_DAY] = 1,
		[RL_CALENDAR_WEEK] = 7,
		[RL_CALENDAR_MONTH] = 31,
		[RL_CALENDAR_QUARTER] = 92,
		[RL_CALENDAR_YEAR] = 366
	};

	return (days[calendar] + 1) * RL_DAY;
}

/* Sets the limit's calendar, and with it the period; the zone is set by itself. */
void
rl_calendar_set(RlLimit *limit, RlCalendar calendar)
{
	limit->calendar = calendar;
	limit->period = longest(calendar);
}

/*
 * Sets the limit's zone, with the name's canonical spelling.  Returns false if it is no IANA
 * name that this server has.  Throws if there is no memory to load the zone.
 */
bool
rl_calendar_set_zone(RlLimit *limit, const char *name, int len)
{
	char		given[RL_MAX_ZONE];
	const char *canonical;
	pg_tz	   *zone;

	if (len >= RL_MAX_ZONE)
		return false;
	memcpy(given, name, len);
	given[len] = '\0';
	zone = open_zone(given);
	if (zone == NULL || !pg_tz_acceptable(zone))
		return false;
	canonical = pg_strcasecmp(given, "UTC") == 0 ? "UTC" : pg_get_timezone_name(zone);
	if (strlen(canonical) >= RL_MAX_ZONE || !is_of_iana(canonical))
		return false;
	memset(limit->zone, 0, RL_MAX_ZONE);
	strcpy(limit->zone, canonical);
	limit->zone_hash = zone_hash(canonical);
	return true;
}

/* The months of a window that begins with one. */
static const int months_of[] = {[RL_CALENDAR_MONTH] = 1, [RL_CALENDAR_QUARTER] = 3, [RL_CALENDAR_YEAR] = 12};

/* Returns the number of the window that has this day: windows are numbered without a gap. */
static int
number_of(RlCalendar calendar, int year, int month, int day)
{
	if (calendar >= RL_CALENDAR_MONTH)
		return (year * 12 + month - 1) / months_of[calendar];
	/* Julian day 0 was a Monday. */
	return date2j(year, month, day) / (calendar == RL_CALENDAR_WEEK ? 7 : 1);
}

/* Returns the Julian day with which a window begins. */
static int
first_day(RlCalendar calendar, int number)
{
	int			month = number * months_of[calendar];

	if (calendar >= RL_CALENDAR_MONTH)
		return date2j(month / 12, month % 12 + 1, 1);
	return number * (calendar == RL_CALENDAR_WEEK ? 7 : 1);
}

/* Returns the name of a window: its first day as YYYYMMDD. */
static int64
name_of(RlCalendar calendar, int number)
{
	int			year;
	int			month;
	int			day;

	j2date(first_day(calendar, number), &year, &month, &day);
	return year * 10000 + month * 100 + day;
}

/*
 * Returns the start of a window.  Between two changes of the offset, the local time goes on
 * evenly; it reaches a midnight that is skipped with the change.
 */
static pg_time_t
start_of(RlCalendar calendar, const pg_tz *zone, int number)
{
	pg_time_t	midnight = ((pg_time_t) first_day(calendar, number) - UNIX_EPOCH_JDATE) * SECS_PER_DAY;
	pg_time_t	at = midnight - MOST_OFFSET;

	for (;;)
	{
		pg_time_t	next = 0;
		pg_time_t	reached;
		long int	offset = 0;
		long int	next_offset;
		int			is_dst;
		int			found = pg_next_dst_boundary(&at, &offset, &is_dst, &next, &next_offset, &is_dst, zone);

		reached = Max(midnight - offset, at);
		if (found <= 0 || reached < next)
			return reached;
		at = next;
	}
}

/* Returns the number of the latest window that has started at this second. */
static int
number_at(RlCalendar calendar, const pg_tz *zone, pg_time_t second)
{
	struct pg_tm *local = pg_localtime(&second, zone);
	int			number = number_of(calendar, local->tm_year + 1900, local->tm_mon + 1, local->tm_mday);

	/* After a step back over midnight, the local date is before the window's. */
	while (start_of(calendar, zone, number + 1) <= second)
		number++;
	return number;
}

/*
 * A cache (src/README.md): for calendars and zones the windows around a time, which are those
 * of each time in the current window.  Without it a call takes 2 us longer.
 */
typedef struct Cached
{
	uint8		calendar;		/* RL_NO_CALENDAR: free */
	char		zone[RL_MAX_ZONE];
	RlWindows	windows;
} Cached;

#define CACHED				16

/* Returns the place of the limit's windows; sets *valid to whether they are there. */
static Cached *
find_cached(const RlLimit *limit, bool *valid)
{
	static Cached cache[CACHED];
	Cached	   *cached = &cache[(limit->zone_hash ^ limit->calendar) & (CACHED - 1)];

	*valid = cached->calendar == limit->calendar && memcmp(cached->zone, limit->zone, RL_MAX_ZONE) == 0;
	return cached;
}

/* Returns the windows around a time from 1970 to RL_CALENDAR_END, in memory that the next call reuses. */
const RlWindows *
rl_windows_at(const RlLimit *limit, int64 now)
{
	bool		valid;
	Cached	   *cached = find_cached(limit, &valid);
	RlWindows  *windows = &cached->windows;
	pg_tz	   *zone;
	int			number;

	if (valid && now >= windows->start[RL_CURRENT] && now < windows->start[RL_CURRENT + 1])
		return windows;
	zone = open_zone(limit->zone);
	number = number_at(limit->calendar, zone, now / RL_SECOND) - RL_CURRENT;
	for (int i = 0; i < (int) lengthof(windows->start); i++)
		windows->start[i] = start_of(limit->calendar, zone, number + i) * RL_SECOND;
	for (int i = 0; i < (int) lengthof(windows->name); i++)
		windows->name[i] = name_of(limit->calendar, number + i);
	cached->calendar = limit->calendar;
	memcpy(cached->zone, limit->zone, RL_MAX_ZONE);
	return windows;
}

/* Returns the end of a window by its name.  The limit's zone was set in this backend. */
int64
rl_window_end(const RlLimit *limit, int64 name)
{
	bool		valid;
	const RlWindows *windows = &find_cached(limit, &valid)->windows;
	int			number;

	for (int i = 0; valid && i < (int) lengthof(windows->name); i++)
		if (windows->name[i] == name)
			return windows->start[i + 1];
	number = number_of(limit->calendar, name / 10000, name / 100 % 100, name % 100);
	return start_of(limit->calendar, open_zone(limit->zone), number + 1) * RL_SECOND;
}

/*
 * Sets the limit to that with the state tag "fixed_window:<unit>:<zone>", perhaps with
 * ":shadow".  Returns false if it is no such tag, or, with limit->calendar set, if this server
 * lacks the zone.  Throws if there is no memory to load the zone.
 */
bool
rl_calendar_of_name(const char *name, int len, RlLimit *limit)
{
	static const char shadow[] = ":shadow";
	int			shadow_len = strlen(shadow);
	const char *at = name + strlen("fixed_window:");

	*limit = (RlLimit) {.algorithm = RL_FIXED_WINDOW};
	if (len > shadow_len && memcmp(name + len - shadow_len, shadow, shadow_len) == 0)
	{
		limit->shadow = true;
		len -= shadow_len;
	}
	if (len < at - name || memcmp(name, "fixed_window:", at - name) != 0)
		return false;
	for (RlCalendar unit = RL_CALENDAR_DAY; unit <= RL_CALENDAR_YEAR; unit++)
	{
		int			n = strlen(rl_calendar_names[unit]);

		if (name + len - at <= n || memcmp(at, rl_calendar_names[unit], n) != 0 || at[n] != ':')
			continue;
		rl_calendar_set(limit, unit);
		return rl_calendar_set_zone(limit, at + n + 1, name + len - at - n - 1);
	}
	return false;
}

/*
 * Completes a limit that has only the members of its state tag: sets calendar and zone, if it
 * has them.  If the zone is not cached, compares the hash with the names of all zone files,
 * which takes 50 ms.  Returns false if no zone has it.  Throws if the zone files cannot be read.
 */
bool
rl_calendar_find_zone(RlLimit *limit)
{
	const Cached *cached;
	pg_tzenum  *zones;
	pg_tz	   *zone;
	bool		valid;
	bool		found = false;

	if (limit->algorithm != RL_FIXED_WINDOW || limit->zone_hash == 0)
		return true;
	for (limit->calendar = RL_CALENDAR_DAY; limit->period != longest(limit->calendar); limit->calendar++)
		if (limit->calendar == RL_CALENDAR_YEAR)
			return false;
	cached = find_cached(limit, &valid);
	if (cached->calendar != RL_NO_CALENDAR && zone_hash(cached->zone) == limit->zone_hash)
		return rl_calendar_set_zone(limit, cached->zone, strlen(cached->zone));
	if (zone_hash("UTC") == limit->zone_hash)
		return rl_calendar_set_zone(limit, "UTC", 3);
	zones = pg_tzenumerate_start();
	while (!found && (zone = pg_tzenumerate_next(zones)) != NULL)
	{
		const char *name = pg_get_timezone_name(zone);

		if (zone_hash(name) == limit->zone_hash)
			found = rl_calendar_set_zone(limit, name, strlen(name));
	}
	pg_tzenumerate_end(zones);
	return found;
}
