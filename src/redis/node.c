/*
 * node.c
 *		The servers that this backend has talked to, and its connections.
 *
 * All of it depends on the settings that say where and how to connect: if one of them has
 * changed when rl_settings_version has grown, all nodes are dropped.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/memutils.h"

#include "error.h"
#include "redis/cluster.h"
#include "redis/node.h"

RlTarget	rl_target;
RlNode	   *rl_current_node = NULL;

static RlNode nodes[RL_MAX_NODES];
static RlNode *last_answered = NULL;

static char *known_settings[RL_TARGET_SETTINGS];	/* as they were read */
static uint64 known_version = 0;	/* when they were compared last; 0: never */

/* Returns true if the settings are those that the nodes were made with. */
bool
rl_nodes_are_current(void)
{
	if (known_version == rl_settings_version)
		return true;
	for (int i = 0; i < RL_TARGET_SETTINGS; i++)
		if (known_settings[i] == NULL || strcmp(known_settings[i], *rl_target_settings[i].value) != 0)
			return false;
	known_version = rl_settings_version;
	return true;
}

/* Returns true if the nodes are those of the URL; other settings count only when a connection is opened. */
bool
rl_nodes_are_of_url(void)
{
	return known_settings[0] != NULL && strcmp(known_settings[0], rl_redis_url) == 0;
}

/* Returns the node's number: 1 to RL_MAX_NODES. */
int
rl_node_number(const RlNode *node)
{
	return node - nodes + 1;
}

/* Returns the node with the number; it may be free. */
RlNode *
rl_node_numbered(int number)
{
	return &nodes[number - 1];
}

static void
forget(RlNode *node)
{
	if (node->used != 0)
		rl_slots_forget(rl_node_number(node));
	rl_connection_close(&node->conn);
	memset(node, 0, sizeof(*node));
	if (rl_current_node == node)
		rl_current_node = NULL;
	if (last_answered == node)
		last_answered = NULL;
}

/*
 * If settings have changed, drops all nodes, reads the URL and returns true.  Raises an error if
 * a setting is wrong.
 */
bool
rl_nodes_refresh(void)
{
	RlError		error;

	if (rl_nodes_are_current())
		return false;
	known_version = 0;
	for (int i = 0; i < RL_TARGET_SETTINGS; i++)
	{
		if (known_settings[i])
			pfree(known_settings[i]);
		known_settings[i] = NULL;
	}
	rl_slots_reset();
	for (int i = 0; i < RL_MAX_NODES; i++)
		forget(&nodes[i]);

	if (!rl_target_parse(rl_redis_url, &rl_target, &error))
		rl_raise(&error);
	/* Backends do not all ask the first Sentinel. */
	if (rl_target.deployment == RL_SENTINELS)
		rl_target.first = MyProcPid % rl_target.n;
	if (rl_redis_passfile[0] == '\0' && rl_target.seeds[0].user[0] != '\0')
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("ratelimit.redis_url names a user, but ratelimit.redis_passfile is empty")));
	for (int i = 0; i < RL_TARGET_SETTINGS; i++)
		known_settings[i] = MemoryContextStrdup(TopMemoryContext, *rl_target_settings[i].value);
	return true;
}

/* Returns the node at the address, or NULL. */
RlNode *
rl_node_at(const RlAddress *address)
{
	for (RlNode *node = nodes; node < nodes + RL_MAX_NODES; node++)
		if (node->used != 0 && node->address.port == address->port &&
			node->address.is_path == address->is_path &&
			strcmp(node->address.host, address->host) == 0)
			return node;
	return NULL;
}

/* Returns the route's node at the address, made in place of the least used; NULL if the route uses all. */
RlNode *
rl_node_find(const RlAddress *address, uint64 route)
{
	RlNode	   *node = rl_node_at(address);

	if (node == NULL)
	{
		node = &nodes[0];
		for (int i = 1; i < RL_MAX_NODES; i++)
			if (nodes[i].used < node->used)
				node = &nodes[i];
		if (node->used >= route)
			return NULL;
		forget(node);
		node->address = *address;
	}
	node->used = route;
	return node;
}

/*
 * Returns the connected node that has the key with this name in Redis, or NULL.  Outside of a
 * cluster the current node has it, or the node that answered last.
 */
RlNode *
rl_node_that_has(const char *redis_key, int len)
{
	RlNode	   *node = rl_current_node;
	bool		guess = true;
	int			owner = rl_slots_known() ? rl_slot_owner(rl_slot(redis_key, len), &guess) : 0;

	/* After a failure no node may be current, but the connection may be alive. */
	if (!rl_slots_known() && node == NULL)
		node = last_answered;
	if (!guess)
		node = &nodes[owner - 1];
	return node != NULL && node->conn.ctx != NULL ? node : NULL;
}

/* Returns the node that answered last, or that is asked next; NULL: none yet. */
RlNode *
rl_node_in_use(void)
{
	return last_answered ? last_answered : rl_current_node;
}

/* Closes the connections not used for longest, but none of the route's, to make room for one. */
void
rl_nodes_make_room(uint64 route)
{
	while (!rl_descriptors_left(2))
	{
		RlNode	   *oldest = NULL;

		for (RlNode *node = nodes; node < nodes + RL_MAX_NODES; node++)
			if (node->conn.ctx != NULL && (oldest == NULL || node->used < oldest->used))
				oldest = node;
		if (oldest == NULL || oldest->used >= route)
			return;
		rl_connection_close(&oldest->conn);
	}
}

/* Notes that the node has answered. */
void
rl_node_answered(RlNode *node)
{
	last_answered = node;
}
