/*
 * inspect.c
 *		Describes states whose limits are not known.
 */
#include "postgres.h"

#include "utils/builtins.h"

#include "algorithm/calendar.h"
#include "algorithm/inspect.h"

/* Writes the state tag, a field's name, into RL_MAX_STATE_NAME bytes.  Returns its length. */
int
rl_state_name(const RlLimit *limit, char *name)
{
	int			n = strlen(rl_algorithm(limit)->name);

	memcpy(name, rl_algorithm(limit)->name, n);
	if (limit->calendar != RL_NO_CALENDAR)
		n += snprintf(name + n, RL_MAX_STATE_NAME - n, ":%s:%s", rl_calendar_names[limit->calendar],
					  limit->zone);
	else
	{
		name[n++] = ':';
		n += pg_lltoa(limit->period, name + n);
		if (limit->step > 0)
		{
			name[n++] = ':';
			n += pg_lltoa(limit->step, name + n);
		}
	}
	if (limit->from_first)
	{
		memcpy(name + n, ":first", 6);
		n += 6;
	}
	if (limit->shadow)
	{
		memcpy(name + n, ":shadow", 7);
		n += 7;
	}
	name[n] = '\0';
	return n;
}

/*
 * Sets the units in use and the end of a state.  The limit has only the members of the state
 * tag; a figure that needs others is RL_UNKNOWN.  Returns false if the state is as if it had
 * never been used.
 */
bool
rl_state_inspect(const RlLimit *limit, const RlState *state, const RlPool *pool, int64 now,
				 int64 *used, int64 *until)
{
	const RlAlgorithm *algorithm = rl_algorithm(limit);

	*used = *until = RL_UNKNOWN;
	if (rl_state_is_empty(algorithm, state))
		return false;
	if (algorithm->refills)
	{
		if (now < state->start + limit->period)
			*used = state->charged;
		return state->charged > 0;
	}
	*until = algorithm->has_calendar ? rl_period_end(limit, state->start) :
		algorithm->end(limit, state, pool);
	if (algorithm->next_free != NULL)
	{
		RlView		view;

		algorithm->load(limit, state, pool, now, &view);
		*used = view.charged + view.refused;
		if (algorithm->has_calendar && view.start < 0)
			return false;
	}
	return *until > now;
}
