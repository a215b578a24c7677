/*
 * route.c
 *		Which server a call goes to, and this backend's connections: one to
 *		each server that it has talked to.
 *
 * The URL names seeds.  The one that answers is home: all calls go there until
 * a server answers that another has the key's slot, which tells that this is a
 * cluster; then each slot's owner is remembered.  A call that nobody can have
 * run, because it was not sent or was sent elsewhere, may look for another
 * server; one that was sent and not answered never does.  A server whose error
 * reply says that it cannot run calls (resp.c) is left for the next seed, and
 * its name is looked up again before the next call to it.
 *
 * Or it names Sentinels.  Then home is the master that they know, and they are
 * asked again whenever the connection to it is gone, or it is none any more.
 */
#include "postgres.h"

#include "utils/memutils.h"

#include "error.h"
#include "redis/cluster.h"
#include "redis/route.h"
#include "redis/sentinel.h"
#include "redis/socket.h"

#define FREE_TURNS			3	/* after which it pays to wait for a while */

static RlNode nodes[RL_MAX_NODES];
static RlNode *home = NULL;
static RlNode *in_use = NULL;	/* whose answer was the last */
static RlTarget target;
static int	first_seed = 0;		/* that is asked when there is no home */
static uint64 routes = 0;
static RlBreaker *service_breaker = NULL;	/* of a service that Sentinels know */

/* What says where and how to connect, and what it said when it was read. */
static char **const settings[] = {
	&rl_redis_url, &rl_redis_passfile, &rl_tls_ca_file, &rl_tls_cert_file, &rl_tls_key_file
};
static char *known_settings[lengthof(settings)];

/* True if the connections were made with the settings as they are. */
bool
rl_nodes_are_current(void)
{
	for (size_t i = 0; i < lengthof(settings); i++)
		if (known_settings[i] == NULL || strcmp(known_settings[i], *settings[i]) != 0)
			return false;
	return true;
}

/*
 * Nodes
 */

/* From 1 to RL_MAX_NODES. */
int
rl_node_number(const RlNode *node)
{
	return node - nodes + 1;
}

static void
forget(RlNode *node)
{
	if (node->used != 0)
		rl_slots_forget(rl_node_number(node));
	rl_connection_close(&node->conn);
	memset(node, 0, sizeof(*node));
	if (home == node)
		home = NULL;
	if (in_use == node)
		in_use = NULL;
}

/* Writes what people call what the URL names, or its first server. */
void
rl_target_name(const RlTarget *target, char *name, size_t size)
{
	rl_connection_name(&target->seeds[0], name, size);
	if (target->service[0] != '\0')
		snprintf(name + strlen(name), size - strlen(name), "/%s", target->service);
}

/* Drops all connections and reads the settings.  Raises an error if one is wrong. */
static void
read_settings(void)
{
	RlError		error;
	char		name[RL_MAX_SERVER + sizeof(target.service)];

	for (size_t i = 0; i < lengthof(settings); i++)
	{
		if (known_settings[i])
			pfree(known_settings[i]);
		known_settings[i] = NULL;
	}
	rl_slots_reset();
	for (int i = 0; i < RL_MAX_NODES; i++)
		forget(&nodes[i]);
	first_seed = 0;

	if (!rl_target_parse(rl_redis_url, &target, &error))
		rl_raise(&error);
	if (rl_redis_passfile[0] == '\0' && target.seeds[0].user[0] != '\0')
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("ratelimit.redis_url names a user, but ratelimit.redis_passfile is empty")));
	if (target.service[0] != '\0')
	{
		rl_target_name(&target, name, sizeof(name));
		service_breaker = rl_breaker_find(name);
	}
	for (size_t i = 0; i < lengthof(settings); i++)
		known_settings[i] = MemoryContextStrdup(TopMemoryContext, *settings[i]);
}

static bool
same_address(const RlAddress *a, const RlAddress *b)
{
	return a->port == b->port && a->is_path == b->is_path && strcmp(a->host, b->host) == 0;
}

/* The node at the address, or NULL. */
static RlNode *
node_at(const RlAddress *address)
{
	for (RlNode *node = nodes; node < nodes + RL_MAX_NODES; node++)
		if (node->used != 0 && same_address(&node->address, address))
			return node;
	return NULL;
}

/*
 * The node at the address.  If it is new it takes the place of the one that
 * was not used for longest; NULL if the route uses all.
 */
static RlNode *
find_node(const RlAddress *address, const RlRoute *route)
{
	RlNode	   *node = node_at(address);
	RlNode	   *oldest = &nodes[0];
	char		name[RL_MAX_SERVER];

	if (node != NULL)
	{
		node->used = route->number;
		return node;
	}
	for (node = nodes; node < nodes + RL_MAX_NODES; node++)
		if (node->used < oldest->used)
			oldest = node;
	if (oldest->used >= route->number)
		return NULL;
	forget(oldest);
	oldest->address = *address;
	oldest->used = route->number;
	rl_connection_name(address, name, sizeof(name));
	oldest->breaker = target.service[0] ? service_breaker : rl_breaker_find(name);
	return oldest;
}

/* Closes the connections not used for longest until there is room for one more. */
static void
make_room(const RlRoute *route)
{
	while (!rl_connection_has_room())
	{
		RlNode	   *oldest = NULL;

		for (RlNode *node = nodes; node < nodes + RL_MAX_NODES; node++)
			if (node->conn.ctx != NULL && (oldest == NULL || node->used < oldest->used))
				oldest = node;
		if (oldest == NULL || oldest->used >= route->number)
			return;
		rl_connection_close(&oldest->conn);
	}
}

/* Connects.  Returns false with the error set; raises an error if a setting is wrong. */
static bool
connect_node(RlNode *node, RlRoute *route, RlError *error)
{
	char		password[RL_MAX_PASSWORD] = "";
	int64		start = rl_monotonic_now();
	bool		connected;

	rl_connection_close(&node->conn);
	make_room(route);
	PG_TRY();
	{
		if (rl_redis_passfile[0] != '\0')
			rl_password_read(password);
		connected = rl_connection_open(&node->conn, &node->address, password, &route->deadline,
									   PG_INT64_MAX, error);
	}
	PG_FINALLY();
	{
		explicit_bzero(password, sizeof(password));
	}
	PG_END_TRY();
	if (!connected)
		rl_connection_close(&node->conn);
	route->spent += rl_monotonic_now() - start;
	return connected;
}

/*
 * Routes
 */

/* Begins a call that is about the key, or about none.  Raises an error if a setting is wrong. */
void
rl_route_begin(RlRoute *route, const char *key, int len)
{
	if (!rl_nodes_are_current())
		read_settings();
	route->number = ++routes;
	route->slot = key != NULL && rl_slots_known() ? rl_slot(key, len) : -1;
	route->node = route->told = NULL;
	route->admitted = NULL;
	route->reused = route->asking = route->lost = false;
	route->turns = 0;
	route->deadline = 0;
	route->spent = 0;
}

/* The node to ask first, or after others were lost; NULL if none is left. */
static RlNode *
choose_node(const RlRoute *route)
{
	RlNode	   *node;
	bool		guess;
	int			owner = route->slot >= 0 ? rl_slot_owner(route->slot, &guess) : 0;

	if (owner != 0)
	{
		node = &nodes[owner - 1];
		/* A guess must not make the call wait for who has nothing to do with it. */
		if (node->lost != route->number && (!guess || node->conn.ctx != NULL))
			return node;
	}
	if (home != NULL && home->lost != route->number)
		return home;
	for (int i = 0; i < target.n && target.service[0] == '\0'; i++)
	{
		node = find_node(&target.seeds[(first_seed + i) % target.n], route);
		if (node != NULL && node->lost != route->number)
			return home = node;
	}
	for (node = nodes; rl_slots_known() && node < nodes + RL_MAX_NODES; node++)
		if (node->used != 0 && node->lost != route->number)
			return home = node;
	return NULL;
}

/*
 * The node is home no more, and of the seeds the one after it is asked first, or
 * the one after the Sentinel that named it, which may be the last to know.
 */
static void
leave(const RlNode *node)
{
	if (target.service[0] != '\0' && home == node)
		first_seed = (first_seed + 1) % target.n;
	for (int i = 0; i < target.n && target.service[0] == '\0'; i++)
		if (same_address(&node->address, &target.seeds[i]))
			first_seed = (i + 1) % target.n;
	if (home == node)
		home = NULL;
}

/* Notes that the route's node is of no use, so that others are asked for what it had. */
static void
lose(RlRoute *route, const RlError *error)
{
	RlNode	   *node = route->node;

	node->lost = route->number;
	rl_slots_forget(rl_node_number(node));
	leave(node);
	route->node = NULL;
	route->asking = false;
	if (!route->lost)
		route->why = *error;
	route->lost = true;
}

/* True if the breaker lets the call through; it is asked only once for a call. */
static bool
is_admitted(RlRoute *route, RlBreaker *breaker, RlError *error)
{
	if (breaker != route->admitted && !rl_breaker_admits(breaker, error))
		return false;
	route->admitted = breaker;
	return true;
}

/*
 * Asks the Sentinels for home, until one names a server that this call has not
 * left; the call's own time does not run meanwhile.  Returns false with the
 * error set.
 */
static bool
ask_sentinels(RlRoute *route, RlError *error)
{
	char		password[RL_MAX_PASSWORD] = "";
	RlSentinelSearch search;
	RlAddress	master;
	int			which;
	int64		start = rl_monotonic_now();
	int64		us;
	bool		found;

	/* They were asked since this one was found to be lost. */
	if (route->told != NULL && route->told->lost == route->number)
	{
		*error = route->why;
		return false;
	}
	if (!is_admitted(route, service_breaker, error))
		return false;
	make_room(route);
	PG_TRY();
	{
		if (rl_redis_passfile[0] != '\0')
			rl_password_read(password);
		rl_sentinel_begin(&search, &target, first_seed, password);
		do
		{
			found = rl_sentinel_next(&search, &master, &which, error);
			if (found)
			{
				first_seed = which;
				route->told = find_node(&master, route);
			}
		} while (found && route->told != NULL && route->told->lost == route->number);
	}
	PG_FINALLY();
	{
		explicit_bzero(password, sizeof(password));
	}
	PG_END_TRY();
	us = rl_monotonic_now() - start;
	route->spent += us;
	if (route->deadline != 0)
		route->deadline += us;
	if (!found)
	{
		if (route->told != NULL)
			*error = route->why;
		else if (error->unreachable)
			rl_breaker_failed(service_breaker, error);
		return false;
	}
	home = route->node = route->told;
	return true;
}

/*
 * Chooses the node for the call's next attempt, if a reply has not done so.
 * Returns false with the error set if that was lost, or none is left.
 */
bool
rl_route_choose(RlRoute *route, RlError *error)
{
	if (route->node == NULL)
		route->node = choose_node(route);
	if (route->node == NULL && target.service[0] != '\0' && !ask_sentinels(route, error))
		return false;
	if (route->node != NULL && route->node->lost != route->number)
		return true;
	rl_error_set(error, ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
				 "could not connect to Redis: too many nodes");
	if (route->lost)
		*error = route->why;
	return false;
}

/*
 * Sees to a connection to the node that was chosen.  Returns false with the
 * error set if there is none; *others tells whether another may be chosen.
 */
bool
rl_route_try(RlRoute *route, bool *others, RlError *error)
{
	RlNode	   *node = route->node;
	int64		left = route->deadline == 0 ? PG_INT64_MAX : route->deadline - rl_monotonic_now();

	*others = true;
	node->used = route->number;
	if (is_admitted(route, node->breaker, error))
	{
		route->reused = rl_connection_is_usable(&node->conn);
		if (!route->reused && target.service[0] != '\0' && route->told != node)
		{
			home = route->node = NULL;
			return false;
		}
		if (route->reused || connect_node(node, route, error))
		{
			if (route->deadline == 0)
				route->deadline = rl_monotonic_now() + (int64) rl_command_timeout * 1000;
			return true;
		}
		*others = error->unreachable;
		/* Who had little time is not to be left alone for it. */
		if (error->unreachable && left >= (int64) rl_command_timeout * 500)
			rl_breaker_failed(node->breaker, error);
	}
	lose(route, error);
	/* Who was sent here by one that knows need not ask another. */
	*others &= route->turns == 0;
	return false;
}

/* Both: sees to a connection to a node for the call's next attempt. */
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

/* The call was sent, at least in part, and failed. */
void
rl_route_broken(RlRoute *route, const RlError *error)
{
	rl_connection_close(&route->node->conn);
	if (error->unreachable)
		rl_breaker_failed(route->node->breaker, error);
	lose(route, error);
}

/*
 * Reads "slot host:port".  Returns the node there, or NULL: where Sentinels say
 * whom to ask, nobody else does.
 */
static RlNode *
read_redirect(const char *text, RlRoute *route)
{
	RlAddress	address = route->node->address;
	char	   *end;
	long		slot = strtol(text, &end, 10);

	if (target.service[0] != '\0' || end == text || *end != ' ' || slot < 0 || slot >= RL_SLOTS ||
		!rl_address_redirect(end + 1, &address))
		return NULL;
	route->slot = slot;
	return find_node(&address, route);
}

/* The node has answered. */
void
rl_node_answers(RlNode *node)
{
	in_use = node;
	rl_breaker_succeeded(node->breaker);
}

/* True if there is a server that this call has not lost, or the Sentinels may name one. */
static bool
has_others(const RlRoute *route)
{
	if (target.service[0] != '\0')
		return route->told == NULL || route->told->lost != route->number;
	for (int i = 0; i < target.n; i++)
	{
		const RlNode *node = node_at(&target.seeds[i]);

		if (node == NULL || node->lost != route->number)
			return true;
	}
	for (int i = 0; rl_slots_known() && i < RL_MAX_NODES; i++)
		if (nodes[i].used != 0 && nodes[i].lost != route->number)
			return true;
	return false;
}

/*
 * The route's node cannot run calls now.  Returns true if another server may
 * run this one.  By the next call the node's name may lead to another server,
 * so there it is connected to again, but for a cluster's.
 */
static bool
leave_for_another(RlRoute *route, const RlReply *reply)
{
	RlNode	   *node = route->node;
	RlError		error;

	if (node->lost != route->number)
	{
		(void) rl_connection_refused(&node->conn, false, reply->text, &error);
		node->conn.retired = !rl_slots_known();
		/* Another Sentinel may know better than the one that named it. */
		if (route->told == node)
			route->told = NULL;
		lose(route, &error);
	}
	return has_others(route);
}

/*
 * The call was answered.  Returns true if it may be sent again: it was not
 * run, because another server has the key's slot, or none has all of it yet,
 * or another one may be able to.
 */
bool
rl_route_answered(RlRoute *route, const RlReply *reply)
{
	RlNode	   *next = NULL;
	RlNextStep	step = rl_reply_next_step(reply);

	rl_node_answers(route->node);
	if (reply->kind != RL_REPLY_ERROR && route->slot >= 0 && !route->asking)
		rl_slot_learn(route->slot, rl_node_number(in_use));
	switch (step)
	{
		case RL_STEP_MOVED:
		case RL_STEP_ASK:
			next = read_redirect(strchr(reply->text, ' ') + 1, route);
			if (next == NULL)
				return false;
			/* The replica of a lost node may own the slot by the next call. */
			if (step == RL_STEP_MOVED && next->lost != route->number)
				rl_slot_learn(route->slot, rl_node_number(next));
			break;
		case RL_STEP_LEAVE:
			if (!leave_for_another(route, reply))
				return false;
			route->node = NULL;
			route->asking = false;
			return true;
		case RL_STEP_WAIT:
			route->turns += FREE_TURNS;
			break;
		case RL_STEP_SEND_SOURCE:
		case RL_STEP_FAIL:
			return false;
	}
	route->turns++;
	route->node = next;
	route->asking = step == RL_STEP_ASK;
	return true;
}

/* True if it is better to wait for a moment before the next attempt. */
bool
rl_route_should_pause(const RlRoute *route)
{
	return route->turns > FREE_TURNS;
}

/*
 * For others
 */

/* The node that answered last, or that would be asked first; NULL: none yet. */
RlNode *
rl_node_in_use(void)
{
	return in_use ? in_use : home;
}

RlNode *
rl_node_numbered(int number)
{
	return &nodes[number - 1];
}

/*
 * The connected node that has the slot, or all if that is -1; NULL if there is
 * none.  What was asked before it was known that this is a cluster, home has.
 */
RlNode *
rl_node_that_has(int slot)
{
	RlNode	   *node = home;
	bool		guess = true;
	int			owner = slot < 0 ? 0 : rl_slot_owner(slot, &guess);

	if (!guess)
		node = &nodes[owner - 1];
	return node != NULL && node->conn.ctx != NULL ? node : NULL;
}
