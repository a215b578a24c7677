/*
 * token_bucket.c
 *		The promises of src/algorithm/token_bucket.c, and of the functions in algorithm.c that act
 *		on it, for Frama-C.  See gcra.c.
 *
 * WP does not follow pointers to functions: script/prove makes direct calls of those in
 * algorithm.c, and borders.c checks that the table has these functions.
 */
#include "postgres.h"

#include "algorithm/algorithm.h"
#include "algorithm/limits.h"

#define NOW			6000000000000000
#define IS_STATE(s)	(-1 <= (s)->start <= NOW && 0 <= (s)->charged <= RL_MAX_COUNT && \
	((s)->charged > 0 ==> (s)->start >= 0) && (s)->refused == 0)

/*@ predicate is_complete(RlLimit *l) = 1 <= l->capacity <= RL_MAX_COUNT && 1 <= l->count <= RL_MAX_COUNT &&
      1 <= l->period <= RL_MAX_PERIOD && !l->count_denied && ((l->capacity - 1) / l->count + 1) * l->period <= RL_MAX_SPAN;
  */

/*@ assigns *error; ensures !\result; */
extern bool rl_limit_is_too_long(RlError *error);

/*@ requires a >= 0 && b > 0;
    assigns \nothing;
    ensures \result * b - b < a <= \result * b;
    ensures 0 <= \result <= a; */
static inline int64 rl_divide_up(int64 a, int64 b);

/*@ requires 1 <= limit->capacity <= RL_MAX_COUNT && 1 <= limit->count <= RL_MAX_COUNT;
    requires 1 <= limit->period <= RL_MAX_PERIOD && !limit->count_denied;
    assigns *error;
    ensures in_range: \result ==> is_complete(limit); */
static bool complete(RlLimit *limit, const char *count_name, RlError *error);

/*@ requires limit->period >= 1 && -1 <= anchor <= NOW && 0 <= now <= NOW;
    assigns \nothing;
    ensures 0 <= \result <= NOW + 1;
    ensures \result * limit->period <= \max(now - anchor, 0) && (\result + 1) * limit->period > now - anchor; */
static int64 lumps_since(const RlLimit *limit, int64 anchor, int64 now);

/*@ requires limit->count >= 1 && 0 <= units <= RL_MAX_COUNT && 0 <= lumps;
    assigns \nothing;
    ensures not_negative: 0 <= \result;
    ensures not_more: \result <= units;
    ensures exact: \result == units - lumps * limit->count || \result == 0 && lumps * limit->count >= units; */
static int64 less_lumps(const RlLimit *limit, int64 units, int64 lumps);

/*@ requires is_complete(limit) && IS_STATE(state) && 0 <= now <= NOW;
    assigns *view;
    ensures in_range: IS_STATE(view) && view->charged <= state->charged && (view->charged == 0 ==> view->start == -1);
    ensures never_back: view->charged > 0 ==> view->start >= state->start && now < view->start + limit->period; */
static void load(const RlLimit *limit, const RlState *state, const RlPool *pool, int64 now, RlView *view);

/*@ requires is_complete(limit) && IS_STATE(view) && 0 <= now <= NOW && 0 <= n <= 2 * RL_MAX_COUNT;
    assigns \nothing;
    ensures in_range: \let start = view->start >= 0 ? view->start : now; start <= \result <= start + RL_MAX_SPAN;
    ensures n > 0 && view->start >= 0 ==> \result >= view->start + limit->period; */
static int64 next_free(const RlLimit *limit, const RlState *state, const RlPool *pool, const RlView *view, int64 now, int64 n);

/*@ requires IS_STATE(view) && 0 <= now <= NOW && 0 <= charged && view->charged + charged <= RL_MAX_COUNT && refused == 0;
    assigns state->charged, state->start;
    ensures state->charged == view->charged + charged;
    ensures never_back: state->charged > 0 ==> state->start == (view->start >= 0 ? view->start : now); */
static void keep(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view, int64 now, int64 charged, int64 refused);

/*@ requires is_complete(limit) && IS_STATE(view) && 0 <= quota <= limit->capacity;
    assigns \nothing;
    ensures exact: \result <==> view->charged + quota <= limit->capacity; */
extern bool rl_units_fit(const RlLimit *limit, const RlView *view, int64 quota);

/*@ requires is_complete(limit) && IS_STATE(view) && 0 <= act->quota <= RL_MAX_COUNT && 0 <= act->now <= NOW;
    requires view->charged == 0 ==> view->start == -1;
    requires view->charged > 0 ==> act->now < view->start + limit->period;
    requires act->verdict == RL_VERDICT_ALLOWED ==> view->charged + act->quota <= limit->capacity;
    assigns view->refused, state->charged, state->start, *decision;
    ensures capacity_kept: \result ==> state->charged <= limit->capacity;
    ensures charged: \result ==> state->charged == \old(view->charged) + act->quota;
    ensures refused_unchanged: act->verdict != RL_VERDICT_ALLOWED || !\result ==>
      state->charged == \old(state->charged) && state->start == \old(state->start);
    ensures remaining: 0 <= decision->remaining <= limit->capacity;
    ensures wait: decision->retry_after >= 0 || decision->retry_after == RL_NEVER && act->quota > limit->capacity; */
extern bool rl_units_act(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view, const RlAct *act, RlDecision *decision);

/*@ requires is_complete(limit) && IS_STATE(view) && 0 <= now <= NOW && 0 <= quota;
    assigns view->charged, state->charged, state->start;
    ensures refund_at_most: \result ==> state->charged == \max(\old(view->charged) - quota, 0); */
extern bool rl_units_refund(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view, int64 now, int64 quota);

/*@ requires is_complete(limit) && IS_STATE(view) && 0 <= now <= NOW && 0 <= quota <= RL_MAX_COUNT;
    assigns state->charged, state->start;
    ensures in_range: \old(view->charged) <= state->charged <= RL_MAX_COUNT; */
extern void rl_units_owe(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view, int64 now, int64 quota);

/*@ requires \false; assigns \nothing; */
extern void no_skip(const RlState *state, const RlPool *pool, RlView *view, int log, int64 units);

#include "algorithm/token_bucket.c"
#include "direct.c"
