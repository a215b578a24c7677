/*
 * route.c
 *		Which server a call goes to, and whether it may go to another.
 *
 * If the URL names servers, the first that answers is the current node.  All calls go there
 * until a reply says that another server has the key's slot: then this is a cluster, and the
 * owner of each slot is remembered.  A call that no server can have run, because it was not sent
 * or was redirected, may look for another server; a call that was sent and not answered never
 * does.  A new connection to a server of a list, or to a Sentinel's master, is used only if the
 * server is no replica, which may be stale.  A server that cannot run calls (resp.c) is left for
 * the next seed, and its name is looked up again before the next call to it.
 *
 * If the URL names Sentinels, the current node is the master that they name.  They are asked
 * again when the connection to it is gone, or it is no master.
 */
#include "postgres.h"

#include "error.h"
#include "redis/cluster.h"
#include "redis/route.h"
#include "shared/shared.h"

/* Begins a call about the key, if that is not NULL.  Raises an error if a setting is wrong. */
void
rl_route_begin(RlRoute *route, const char *key, int len)
{
	static uint64 routes = 0;

	rl_nodes_refresh();
	*route = (RlRoute) {.number = ++routes,.slot = -1,.until = PG_INT64_MAX};
	if (key != NULL && rl_slots_known())
		route->slot = rl_slot(key, len);
}

static bool
is_lost(const RlRoute *route, const RlNode *node)
{
	return node->lost == route->number;
}

/* Returns the node to ask; NULL if none is left. */
static RlNode *
choose_node(const RlRoute *route)
{
	bool		guess;
	int			owner = route->slot >= 0 ? rl_slot_owner(route->slot, &guess) : 0;

	if (owner != 0)
	{
		RlNode	   *node = rl_node_numbered(owner);

		/* For a guess the call must not wait until a server is connected. */
		if (!is_lost(route, node) && (!guess || node->conn.ctx != NULL))
			return node;
	}
	if (rl_current_node != NULL && !is_lost(route, rl_current_node))
		return rl_current_node;
	if (rl_target.deployment == RL_SENTINELS)
		return NULL;
	for (int i = 0; i < rl_target.n; i++)
	{
		RlNode	   *node = rl_node_find(&rl_target.seeds[(rl_target.first + i) % rl_target.n],
										route->number);

		if (node != NULL && !is_lost(route, node))
			return rl_current_node = node;
	}
	/* The replies of a cluster have named others. */
	for (int i = 1; rl_slots_known() && i <= RL_MAX_NODES; i++)
	{
		RlNode	   *node = rl_node_numbered(i);

		if (node->used != 0 && !is_lost(route, node))
			return rl_current_node = node;
	}
	return NULL;
}

static void
skip_node(RlRoute *route, const RlError *error)
{
	route->node->lost = route->number;
	route->node = NULL;
	route->asking = false;
	if (route->first_error.sqlstate == 0)
		route->first_error = *error;
}

/*
 * Notes that the route cannot use its node, and forgets the node's slots.  The next call asks
 * the next seed or Sentinel first, because the one that named the node may be the last to learn
 * of a new master.
 */
static void
lose_node(RlRoute *route, const RlError *error)
{
	RlNode	   *node = route->node;

	rl_slots_forget(rl_node_number(node));
	if (rl_target.deployment == RL_SENTINELS)
		rl_target.first = (rl_target.first + (rl_current_node == node)) % rl_target.n;
	else
	{
		for (int i = 0; i < rl_target.n; i++)
			if (rl_node_at(&rl_target.seeds[i]) == node)
				rl_target.first = (i + 1) % rl_target.n;
		if (rl_current_node == node)
			rl_current_node = NULL;
	}
	skip_node(route, error);
}

/* The time for a search at Sentinels, or for connecting and a call. */
static int64
whole_time(void)
{
	return ((int64) rl_connect_timeout + rl_command_timeout) * 1000;
}

static void
spend(RlRoute *route, int64 start)
{
	int64		us = rl_monotonic_now() - start;

	route->spent += us;
	if (route->deadline != 0)
		route->deadline += us;
}

/*
 * Asks the Sentinels for the master, which is then the route's node.  The call's deadline moves
 * by the time that this takes; all searches of a call have one deadline.  Returns false with the
 * error set.
 */
static bool
ask_sentinels(RlRoute *route, RlError *error)
{
	char		password[RL_MAX_PASSWORD];
	RlBreaker  *breaker = rl_target_breaker(&rl_target);
	int64		start = rl_monotonic_now();
	bool		first = route->search_until == 0;
	bool		found;

	if (first)
	{
		route->search_until = start + whole_time();
		route->until = route->search_until + whole_time();
	}
	/* The server that they named has been lost since, or they name others without end. */
	if (start < route->search_until &&
		(route->sentinel_master == NULL || !is_lost(route, route->sentinel_master)))
	{
		if (rl_breaker_admits(breaker, false, error) == RL_OPEN)
			return false;
		rl_nodes_make_room(route->number);
		/* A password file that is wrong is an error even if no Sentinel wants it. */
		rl_password_read(password);
		explicit_bzero(password, sizeof(password));
		found = rl_sentinels_ask(route->number, route->search_until, &route->sentinel_master, error);
		spend(route, start);
		if (found)
		{
			rl_current_node = route->node = route->sentinel_master;
			return true;
		}
		if (route->sentinel_master == NULL)
		{
			if (error->unreachable && first)
				rl_breaker_failed(breaker, RL_CONNECT_FAILED, (int64) rl_retry_interval * 1000, error);
			return false;
		}
	}
	/* Search again when the master that they name is tried again. */
	*error = route->first_error;
	if (error->retry_after > 0 && !error->answered)
		rl_breaker_failed(breaker, RL_CONNECT_FAILED, error->retry_after, error);
	return false;
}

/* Chooses a node unless a reply has.  Returns false with the error set if it is lost, or none is left. */
bool
rl_route_choose(RlRoute *route, RlError *error)
{
	if (route->node == NULL)
		route->node = choose_node(route);
	if (route->node == NULL && rl_target.deployment == RL_SENTINELS && !ask_sentinels(route, error))
		return false;
	if (route->node != NULL && !is_lost(route, route->node))
		return true;
	if (route->first_error.sqlstate != 0)
		*error = route->first_error;
	else
		rl_error_set(error, ERRCODE_STORE_FAILED,
					 "could not connect to Redis: too many nodes");
	return false;
}

/*
 * Asks the node's breaker whether it may be called, and waits while another backend checks the
 * server.  *until is then the end of the time for connecting.  Returns no RL_WAIT; with RL_OPEN
 * the error is set.
 */
static RlAdmission
ask_breaker(RlRoute *route, bool usable, int64 *until, RlError *error)
{
	RlBreaker  *breaker = rl_node_breaker(route->node);

	for (;;)
	{
		RlAdmission admission = rl_breaker_admits(breaker, usable, error);
		int64		start;
		bool		in_time;

		if (admission != RL_WAIT)
			return admission;
		start = rl_monotonic_now();
		*until = Min(*until, start + whole_time());
		in_time = rl_breaker_wait(breaker, *until);
		spend(route, start);
		if (!in_time)
			return RL_OPEN;
	}
}

/* Connects the route's node.  Returns false, with the error set, if that fails; *others as in rl_route_try. */
static bool
connect_node(RlRoute *route, bool check, int64 until, bool *others, RlError *error)
{
	RlNode	   *node = route->node;
	int64		start = rl_monotonic_now();
	int64		given = Min(route->deadline == 0 ? PG_INT64_MAX : route->deadline - start,
							until - start - (int64) rl_connect_timeout * 1000);
	bool		connected;

	rl_connection_close(&node->conn);
	rl_nodes_make_room(route->number);
	/* Where only one server can be meant, it is asked whatever it is. */
	node->conn.needs_master = rl_target.deployment == RL_SENTINELS ||
		(rl_target.n > 1 && !rl_slots_known());
	connected = rl_connection_open(&node->conn, &node->address, true, check, &route->deadline,
								   until, error);
	route->spent += rl_monotonic_now() - start;
	if (node->failed && (connected || error->answered))
		node->reconnected = start;
	if (connected)
	{
		rl_node_connected(node);
		return true;
	}
	*others = error->unreachable || error->replica;
	rl_node_failed(node, error->timed_out ? RL_SILENT : RL_CONNECT_FAILED, given, error);
	lose_node(route, error);
	return false;
}

/*
 * Connects the chosen node if necessary.  Returns false if it is not connected; *others is true
 * then if another node may be chosen, otherwise the error is set.  Raises an error if a setting
 * is wrong, or at an interrupt.
 */
bool
rl_route_try(RlRoute *route, bool *others, RlError *error)
{
	RlNode	   *node = route->node;
	bool		usable = rl_connection_is_usable(&node->conn);
	bool		ready;
	int64		until = route->until;
	RlAdmission admission;

	*others = true;
	node->used = route->number;
	if (!usable && !rl_node_may_connect(node, error))
	{
		/* That is no reason to search at Sentinels. */
		*others = rl_target.deployment != RL_SENTINELS && route->resends == 0 && !route->pinned;
		skip_node(route, error);
		return false;
	}
	if (!usable && rl_target.deployment == RL_SENTINELS && route->sentinel_master != node)
	{
		rl_current_node = route->node = NULL;
		return false;
	}
	admission = ask_breaker(route, usable, &until, error);
	route->reused = ready = usable && admission == RL_ADMITTED;
	if (ready && route->deadline == 0)
		route->deadline = rl_monotonic_now() + (int64) rl_command_timeout * 1000;
	else if (admission == RL_OPEN)
		skip_node(route, error);
	else if (!ready)
		ready = connect_node(route, admission == RL_CHECK, until, others, error);
	if (ready && route->sentinel_master == node)
		rl_breaker_connected(rl_target_breaker(&rl_target), true);
	/* After a redirect, or if the call is pinned, no other node may run it. */
	*others &= route->resends == 0 && !route->pinned;
	return ready;
}

/* Chooses and connects a node for the call's next attempt, or returns false with the error set. */
bool
rl_route_connect(RlRoute *route, RlError *error)
{
	bool		others = true;

	while (others)
	{
		if (!rl_route_choose(route, error))
			return false;
		if (rl_route_try(route, &others, error))
			return true;
	}
	return false;
}

/* Notes that the call failed and may have run, in the time given.  Closes the connection; the node is lost. */
void
rl_route_failed(RlRoute *route, int64 given, RlError *error)
{
	RlFailure	failure = error->timed_out ? RL_CALL_FAILED : RL_CONNECT_FAILED;

	if (route->node->conn.heard)
		failure = error->timed_out ? RL_CALL_UNANSWERED : RL_CALL_FAILED;
	rl_connection_close(&route->node->conn);
	rl_node_failed(route->node, failure, given, error);
	lose_node(route, error);
}

/* Reads "slot host:port".  Returns false if the reply names no node; with Sentinels none is followed. */
static bool
read_redirect(const RlReply *reply, const RlNode *from, int *slot, RlAddress *address)
{
	const char *text = strchr(reply->text, ' ') + 1;
	char	   *end;
	long		number = strtol(text, &end, 10);

	*address = from->address;
	*slot = number;
	return rl_target.deployment != RL_SENTINELS && end != text && *end == ' ' &&
		number >= 0 && number < RL_SLOTS && rl_address_redirect(end + 1, address);
}

/* Returns the node of a redirect, or NULL: not known here, or no redirect.  Does not throw. */
RlNode *
rl_route_redirected(const RlNode *from, const RlReply *reply)
{
	RlNextStep	step = rl_reply_next_step(reply);
	RlAddress	address;
	RlNode	   *node;
	int			slot;

	if ((step != RL_STEP_MOVED && step != RL_STEP_ASK) || !read_redirect(reply, from, &slot, &address))
		return NULL;
	node = rl_node_at(&address);
	if (node != NULL && step == RL_STEP_MOVED)
		rl_slot_learn(slot, rl_node_number(node));
	return node;
}

/*
 * Leaves the node, which cannot run calls now.  Returns true if another server may run this one.
 * Unless this is a cluster, the name may have another address by the next call, so once in
 * ratelimit.retry_interval the connection is retired.
 */
static bool
leave_node(RlRoute *route, const RlReply *reply)
{
	RlNode	   *node = route->node;
	RlError		error;

	if (!is_lost(route, node))
	{
		bool		retire = rl_interval_left(node->retired) == 0;

		/* Another Sentinel may name another master. */
		if (rl_target.deployment == RL_SENTINELS && !retire)
			return false;
		(void) rl_error_reply(&node->conn, false, reply->text, &error);
		node->conn.retired |= retire && !rl_slots_known();
		if (retire)
			node->retired = rl_monotonic_now();
		if (route->sentinel_master == node)
			route->sentinel_master = NULL;
		lose_node(route, &error);
	}
	if (rl_target.deployment == RL_SENTINELS)
		return route->sentinel_master == NULL || !is_lost(route, route->sentinel_master);
	return choose_node(route) != NULL;
}

/* Notes an answer.  Returns true if the call was not run and may be sent again; a pinned one never. */
bool
rl_route_answered(RlRoute *route, const RlReply *reply)
{
	RlNode	   *next = NULL;
	RlNextStep	step = rl_reply_next_step(reply);
	RlAddress	address;
	int			slot;

	rl_node_answered(route->node);
	if (reply->kind != RL_REPLY_ERROR)
		route->node->reconnected = 0;
	if (route->pinned)
		return false;
	if (reply->kind != RL_REPLY_ERROR && route->slot >= 0 && !route->asking)
		rl_slot_learn(route->slot, rl_node_number(route->node));
	switch (step)
	{
		case RL_STEP_MOVED:
		case RL_STEP_ASK:
			if (!read_redirect(reply, route->node, &slot, &address))
				return false;
			route->slot = slot;
			next = rl_node_find(&address, route->number);
			if (next == NULL)
				return false;
			/* The replica of a lost node may own the slot by the next call. */
			if (step == RL_STEP_MOVED && !is_lost(route, next))
				rl_slot_learn(route->slot, rl_node_number(next));
			break;
		case RL_STEP_LEAVE:
			if (!leave_node(route, reply))
				return false;
			route->node = NULL;
			route->asking = false;
			return true;
		case RL_STEP_WAIT:
			route->resends += RL_FREE_RESENDS;
			break;
		case RL_STEP_SEND_SOURCE:
		case RL_STEP_SEND_WINDOWS:
		case RL_STEP_FAIL:
			return false;
	}
	route->resends++;
	route->node = next;
	route->asking = step == RL_STEP_ASK;
	return true;
}
