/*
 * connection.h
 *		A connection to a Redis server: opening it, and its state.
 */
#ifndef CONNECTION_H
#define CONNECTION_H

#include "redis/stream.h"

extern bool rl_connection_open(RlConnection *conn, const RlAddress *address, bool with_password,
							   bool check, int64 *deadline, int64 until, RlError *error);
extern bool rl_connection_is_usable(RlConnection *conn);
extern bool rl_connection_settle(RlConnection *conn, int64 deadline, RlError *error);

#endif							/* CONNECTION_H */
