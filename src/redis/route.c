/*
 * route.c
 *		Which server a call goes to, and whether it may go to another.
 *
 * If the URL names servers, one of them is the current node.  All calls go there until a reply
 * says that another server has the key's slot: then this is a cluster, and the owner of each
 * slot is remembered.  A call that no server can have run, because it was not sent or was
 * redirected, may look for another server; a call that was sent and not answered never does.
 *
 * A list of servers means one master, whichever it is: all sessions use the one that the
 * target's entry in shared memory names.  It is left if a new connection to it fails, or if it
 * says that it is no master.  Then the first of the list that says that it is a master is
 * taken.  An earlier server that comes back is not: after a fail-over it is the old master.
 *
 * If the URL names Sentinels, the current node is the master that they name.  They are asked
 * again when the connection to it is gone, or it is no master.
 *
 * If a server cannot run calls (resp.c), one backend at a time looks for the master: it connects
 * again by the name, asks the Sentinels, or goes through the list.  If its call succeeds, the
 * others do the same when they get such a reply.
 */
#include "postgres.h"

#include "error.h"
#include "redis/cluster.h"
#include "redis/route.h"
#include "shared/clock.h"

/* Microseconds between two times that a backend notes that its list is in use. */
#define TOUCH_EVERY			INT64CONST(10000000)

static int	list_in_use = 0;	/* number of the server that all sessions use, from 1 on; 0: not known */
static int64 list_touched = 0;
static int64 searched = 0;		/* when this backend left a server last; 0: a call has succeeded since */

static bool
is_list(void)
{
	return rl_target.deployment == RL_SERVERS && rl_target.n > 1 && !rl_slots_known();
}

/* Returns the name of the target's servers, in a static buffer. */
static const char *
target_name(void)
{
	static char name[RL_MAX_TARGET];

	rl_target_name(&rl_target, name);
	return name;
}

/* Returns the number of the list's server that is the node, or 0. */
static int
number_in_list(const RlNode *node)
{
	for (int i = 0; i < rl_target.n; i++)
		if (node != NULL && rl_node_at(&rl_target.seeds[i]) == node)
			return i + 1;
	return 0;
}

/*
 * Makes the server of the list that all sessions use the current node; the connection to another is retired.
 */
static void
follow_list(RlRoute *route)
{
	int64		now = rl_monotonic_now();
	RlNode	   *node;

	if (rl_current_node != NULL && !rl_list_has_changed() && now - list_touched < TOUCH_EVERY)
		return;
	list_touched = now;
	list_in_use = rl_list_in_use(target_name(), 0, number_in_list(rl_current_node));
	if (list_in_use == 0 || list_in_use > rl_target.n)
		return;
	node = rl_node_find(&rl_target.seeds[list_in_use - 1], route->number);
	if (node == NULL || node == rl_current_node)
		return;
	if (rl_current_node != NULL)
		rl_current_node->conn.retired = true;
	rl_current_node = node;
}

/* Begins a call about the key, if that is not NULL.  Raises an error if a setting is wrong. */
void
rl_route_begin(RlRoute *route, const char *key, int len)
{
	static uint64 routes = 0;

	if (rl_nodes_refresh())
		list_in_use = searched = 0;
	*route = (RlRoute) {
		.number = ++routes,.slot = -1,.until = PG_INT64_MAX,
		.patience = (int64) rl_connect_timeout * 1000
	};
	if (key != NULL && rl_slots_known())
		route->slot = rl_slot(key, len);
	if (is_list())
	{
		RlNode	   *before = rl_current_node;

		follow_list(route);
		if (before != NULL && before != rl_current_node)
			rl_connection_close(&before->conn);
	}
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
	/* A failed call is no reason to leave the server of a list. */
	if (rl_target.deployment == RL_SENTINELS || (route->failed && is_list()))
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
 * the next seed of a cluster or the next Sentinel first, because the one that named the node may
 * be the last to learn of a new master.
 */
static void
lose_node(RlRoute *route, const RlError *error)
{
	RlNode	   *node = route->node;

	rl_slots_forget(rl_node_number(node));
	if (rl_target.deployment == RL_SENTINELS)
		rl_target.first = (rl_target.first + (rl_current_node == node)) % rl_target.n;
	else if (!is_list())
	{
		if (number_in_list(node) != 0)
			rl_target.first = number_in_list(node) % rl_target.n;
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

/*
 * Asks the Sentinels for the master, which is then the route's node.  The call's deadline moves
 * by the time that this takes; all searches of a call have one deadline.  Returns false with the
 * error set.
 */
static bool
ask_sentinels(RlRoute *route, RlError *error)
{
	char		password[RL_MAX_PASSWORD];
	int64		start = rl_monotonic_now();
	int64		us;
	bool		found;

	if (route->search_until == 0)
	{
		if (!rl_attempt_begin(&route->search, target_name(), true, &route->patience, start, error))
			return false;
		route->search_until = start + whole_time();
		route->until = route->search_until + whole_time();
	}
	/* The server that they named has been lost since, or they name others without end. */
	if (start < route->search_until &&
		(route->sentinel_master == NULL || !is_lost(route, route->sentinel_master)))
	{
		rl_nodes_make_room(route->number);
		/* A password file that is wrong is an error even if no Sentinel wants it. */
		rl_password_read(password);
		explicit_bzero(password, sizeof(password));
		found = rl_sentinels_ask(route->number, &route->patience, route->search_until,
								 &route->sentinel_master, error);
		us = rl_monotonic_now() - start;
		route->spent += us;
		if (route->deadline != 0)
			route->deadline += us;
		if (found)
		{
			rl_current_node = route->node = route->sentinel_master;
			return true;
		}
		if (route->sentinel_master == NULL)
		{
			rl_attempt_failed(&route->search, error->unreachable, error);
			return false;
		}
	}
	*error = route->first_error;
	rl_attempt_failed(&route->search, true, error);
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
 * Has all sessions use the route's node, which is a master of the list, or returns false: they use another.
 */
static bool
take_master(RlRoute *route)
{
	int			before = list_in_use;
	int			found = number_in_list(route->node);
	char		old[RL_MAX_SERVER];

	if (found == 0 || route->node->conn.cluster)
		return true;
	list_in_use = rl_list_in_use(target_name(), before, found);
	if (list_in_use != found)
		return false;
	if (before != 0 && before != found)
	{
		rl_address_name(&rl_target.seeds[before - 1], old);
		rl_log_no_throw((errmsg("the Redis server in use is now %s", route->node->conn.server),
						 errdetail("It is the first master of ratelimit.redis_url. %s is left, because it cannot be connected or is no master.",
								   old)));
	}
	rl_current_node = route->node;
	return true;
}

/*
 * Connects the route's node.  Returns false, with the error set, if that fails; *others as in
 * rl_route_try.
 */
static bool
connect_node(RlRoute *route, bool *others, RlError *error)
{
	RlNode	   *node = route->node;
	int64		start = rl_monotonic_now();
	bool		connected;

	rl_connection_close(&node->conn);
	rl_nodes_make_room(route->number);
	/* Where only one server can be meant, it is asked whatever it is. */
	node->conn.needs_master = rl_target.deployment == RL_SENTINELS || is_list();
	connected = rl_connection_open(&node->conn, &node->address, true, &route->patience,
								   &route->deadline, route->until, error);
	route->spent += rl_monotonic_now() - start;
	if (connected && (!is_list() || take_master(route)))
		return true;
	if (connected)
	{
		/* Another backend was faster; there may be no time for its server. */
		rl_connection_close(&node->conn);
		rl_error_set(error, ERRCODE_STORE_FAILED,
					 "could not connect to Redis: another server of the list is in use");
		error->unreachable = true;
		skip_node(route, error);
		rl_current_node = NULL;
		follow_list(route);
		return false;
	}
	*others = error->unreachable || error->replica;
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
	bool		ready = usable;

	*others = true;
	node->used = route->number;
	if (!usable && rl_target.deployment == RL_SENTINELS && route->sentinel_master != node)
	{
		rl_current_node = route->node = NULL;
		return false;
	}
	route->reused = usable;
	if (!usable)
		ready = connect_node(route, others, error);
	else if (route->deadline == 0)
		route->deadline = rl_monotonic_now() + (int64) rl_command_timeout * 1000;
	if (ready && !usable && route->sentinel_master == node)
		rl_attempt_succeeded(&route->search);
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

/* Notes that the call failed and may have run.  Closes the connection; the node is lost. */
void
rl_route_failed(RlRoute *route, const RlError *error)
{
	rl_connection_close(&route->node->conn);
	route->failed = true;
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

/*
 * Leaves the node, which cannot run calls now.  Returns true if the call may be sent again.
 * Unless this is a cluster, its name may have another address, the Sentinels name another server
 * or the list have another master: this backend looks for it if rl_may_search lets it.
 */
static bool
leave_node(RlRoute *route, const RlReply *reply)
{
	RlNode	   *node = route->node;
	bool		cluster = rl_slots_known() || node->conn.cluster;
	RlError		error;

	/* Calls that were under way together with the one that has left it. */
	if (node->conn.retired)
		return true;
	if (!is_lost(route, node))
	{
		if (!cluster && is_list())
			follow_list(route);
		if (!cluster && (!is_list() || rl_current_node == node))
		{
			if (route->left || !rl_may_search(target_name(), node->conn.made))
				return false;
			searched = rl_monotonic_now();
			route->left = !is_list();
			/* A server of a list stays in use unless another one is a master. */
			node->conn.retired = true;
		}
		(void) rl_error_reply(&node->conn, false, reply->text, &error);
		if (route->sentinel_master == node)
			route->sentinel_master = NULL;
		if (rl_target.deployment == RL_SERVERS && rl_target.n == 1 && !cluster)
			return true;
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
	if (searched != 0 && reply->kind != RL_REPLY_ERROR && route->node->conn.made >= searched)
	{
		searched = 0;
		rl_note_moved(target_name());
	}
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
		case RL_STEP_ASK_SENTINELS:
		case RL_STEP_LEAVE:
			if (step == RL_STEP_ASK_SENTINELS && rl_target.deployment != RL_SENTINELS)
				return false;
			if (!leave_node(route, reply))
				return false;
			route->node = NULL;
			route->asking = false;
			return true;
		case RL_STEP_WAIT:
			if (!rl_slots_known())
				rl_slot_learn(0, 0);
			if (route->several)
				return false;
			route->resends += RL_FREE_RESENDS;
			break;
		case RL_STEP_CONNECT:
			route->node->conn.retired = true;
			return false;
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
