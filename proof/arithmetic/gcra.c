/*
 * gcra.c
 *		The promises of src/algorithm/gcra.c, for Frama-C: a contract for each function.
 *
 * A time is at most that of the year 2160, and a clock can be set back. A state can be of a limit
 * with other numbers. Names of "ensures" are the promises.
 */
#include "postgres.h"

#include "algorithm/algorithm.h"
#include "algorithm/limits.h"
#include "error.h"

#define NOW			6000000000000000
#define SPAN		(RL_MAX_SPAN * 1000)
#define LATEST		(NOW * 1000 + SPAN)
#define IS_STATE(s)	(-1 <= (s)->start <= LATEST)
#define IS_VIEW(v)	(0 <= (v)->start <= LATEST)
#define ROOM		((limit->capacity - quota) * limit->interval_ns)

/*@ predicate is_complete(RlLimit *l) = 1 <= l->capacity <= RL_MAX_COUNT && 1 <= l->interval_ns &&
      l->capacity * l->interval_ns <= SPAN;
    predicate asks(RlLimit *l, integer quota) = is_complete(l) && 0 <= quota <= RL_MAX_COUNT; */

/*@ assigns *error; ensures !\result; */
extern bool rl_error_set(RlError *error, int sqlstate, const char *fmt,...);

/*@ assigns *error; ensures !\result; */
extern bool rl_limit_is_too_long(RlError *error);

/*@ requires 0 <= ns <= LATEST;
    assigns \nothing;
    ensures (\result - 1) * 1000 < ns <= \result * 1000; */
static int64 us_rounded_up(int64 ns);

/*@ requires is_complete(limit) && 0 <= quota && quota * limit->interval_ns <= RL_MAX_BACKLOG;
    assigns \nothing;
    ensures \result == quota * limit->interval_ns; */
static int64 cost(const RlLimit *limit, int64 quota);

/*@ requires asks(limit, quota);
    assigns \nothing;
    ensures 0 <= \result <= RL_MAX_BACKLOG;
    ensures exact: \result == quota * limit->interval_ns || \result == RL_MAX_BACKLOG && quota > RL_MAX_BACKLOG / limit->interval_ns; */
static int64 refund_of(const RlLimit *limit, int64 quota);

/*@ requires 1 <= limit->capacity <= RL_MAX_COUNT && 1 <= limit->count <= RL_MAX_COUNT;
    requires 1 <= limit->period <= RL_MAX_PERIOD;
    assigns limit->interval_ns, *error;
    ensures in_range: \result ==> is_complete(limit); */
static bool complete(RlLimit *limit, const char *count_name, RlError *error);

/*@ requires asks(limit, quota) && 0 <= backlog_ns <= LATEST;
    assigns *decision;
    ensures never_back: \result >= backlog_ns;
    ensures capacity_kept: decision->allowed ==> quota <= limit->capacity && \result <= limit->capacity * limit->interval_ns;
    ensures charged: \result == backlog_ns + (decision->allowed && charge ? quota * limit->interval_ns : 0);
    ensures exact: decision->allowed <==> quota <= limit->capacity && backlog_ns <= ROOM;
    ensures remaining: 0 <= decision->remaining <= limit->capacity;
    ensures wait: decision->retry_after >= 0 && backlog_ns - decision->retry_after * 1000 <= ROOM ||
      decision->retry_after == RL_NEVER && quota > limit->capacity;
    ensures wait_not_longer: decision->retry_after > 0 ==> backlog_ns - (decision->retry_after - 1) * 1000 > ROOM; */
static int64 act_on_backlog(const RlLimit *limit, int64 backlog_ns, int64 quota, bool charge, RlDecision *decision);

/*@ requires IS_STATE(state) && 0 <= now <= NOW;
    assigns *view;
    ensures view->start == \max(state->start - now * 1000, 0); */
static void load(const RlLimit *limit, const RlState *state, const RlPool *pool, int64 now, RlView *view);

/*@ requires asks(limit, quota) && quota <= limit->capacity && IS_VIEW(view);
    assigns \nothing;
    ensures exact: \result <==> view->start <= ROOM; */
static bool fits(const RlLimit *limit, const RlView *view, int64 quota);

/*@ requires 0 <= now <= NOW && now * 1000 + backlog_ns <= LATEST && -RL_MAX_BACKLOG <= backlog_ns;
    assigns state->start;
    ensures state->start == (backlog_ns > 0 ? now * 1000 + backlog_ns : -1); */
static void keep_backlog(RlState *state, int64 now, int64 backlog_ns);

/*@ requires asks(limit, act->quota) && 0 <= act->now <= NOW && IS_STATE(state);
    requires view->start == \max(state->start - act->now * 1000, 0);
    requires act->verdict == RL_VERDICT_ALLOWED ==>
      act->quota <= limit->capacity && view->start <= (limit->capacity - act->quota) * limit->interval_ns;
    assigns state->start, *decision;
    ensures in_range: IS_STATE(state);
    ensures never_back: state->start >= \old(state->start);
    ensures capacity_kept: \result ==> state->start <= act->now * 1000 + limit->capacity * limit->interval_ns;
    ensures refused_unchanged: act->verdict != RL_VERDICT_ALLOWED || !\result ==> state->start == \old(state->start); */
static bool act(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view, const RlAct *act, RlDecision *decision);

/*@ requires asks(limit, quota) && 0 <= now <= NOW && -1 <= *start <= LATEST;
    assigns *start, *decision;
    ensures in_range: -1 <= *start <= LATEST;
    ensures never_back: *start >= \old(*start);
    ensures capacity_kept: decision->allowed ==> *start <= now * 1000 + limit->capacity * limit->interval_ns;
    ensures refused_unchanged: !decision->allowed ==> *start == \max(\old(*start), now * 1000); */
static int64 act_single(const RlLimit *limit, int64 *start, int64 now, int64 quota, RlDecision *decision);

/* A refund moves the TAT back by its amount at most. */
#define REFUNDS(state, ns) (\old(state->start) - (ns) <= state->start <= \old(state->start) || \
	state->start == -1 && \old(state->start) - (ns) <= now * 1000)

/*@ requires IS_STATE(state) && 0 <= now <= NOW && 0 <= ns <= RL_MAX_BACKLOG;
    requires view->start == \max(state->start - now * 1000, 0);
    assigns state->start;
    ensures in_range: IS_STATE(state);
    ensures refund_at_most: REFUNDS(state, ns); */
static bool reduce_backlog(RlState *state, const RlView *view, int64 now, int64 ns);

/*@ requires asks(limit, quota) && IS_STATE(state) && 0 <= now <= NOW;
    requires view->start == \max(state->start - now * 1000, 0);
    assigns state->start;
    ensures refund_at_most: REFUNDS(state, quota * limit->interval_ns) ||
      quota > RL_MAX_BACKLOG / limit->interval_ns && REFUNDS(state, RL_MAX_BACKLOG); */
static bool refund(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view, int64 now, int64 quota);

/*@ requires 0 <= charge->amount <= RL_MAX_BACKLOG && 0 <= charge->at <= NOW && 0 <= later->at <= NOW;
    assigns \nothing;
    ensures 0 <= \result <= charge->amount; */
static int64 left(const RlLimit *limit, const RlCharge *charge, const RlCharge *later);

/*@ requires IS_STATE(state) && 0 <= now <= NOW && 0 <= charge->amount <= RL_MAX_BACKLOG && 0 <= charge->at <= NOW;
    requires view->start == \max(state->start - now * 1000, 0);
    assigns state->start;
    ensures refund_at_most: REFUNDS(state, charge->amount); */
static bool refund_charge(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view, int64 now, const RlCharge *charge);

/*@ requires asks(limit, quota) && 0 <= now <= NOW && IS_STATE(state);
    requires view->start == \max(state->start - now * 1000, 0);
    assigns state->start;
    ensures in_range: IS_STATE(state);
    ensures never_back: state->start >= \old(state->start) || state->start == -1 && \old(state->start) <= now * 1000; */
static void owe(const RlLimit *limit, RlState *state, RlPool *pool, RlView *view, int64 now, int64 quota);

#include "algorithm/gcra.c"
