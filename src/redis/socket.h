/*
 * socket.h
 *		A connection's socket.
 */
#ifndef SOCKET_H
#define SOCKET_H

#include "storage/latch.h"
#include "utils/memutils.h"
#include "utils/wait_event.h"
#if PG_VERSION_NUM >= 180000
#include "storage/waiteventset.h"
#endif

#include "redis/connection.h"

#if PG_VERSION_NUM < 170000
#define CreateWaitEventSet(owner, n) CreateWaitEventSet(TopMemoryContext, (n))
#endif

#define RL_PAUSE_MS			5

/* Each of those that take an error returns false with it set. */
extern uint32 rl_wait_event(void);
extern bool rl_socket_wait(RlConnection *conn, uint32 what, int64 deadline);
extern bool rl_socket_send(RlConnection *conn, StringInfo out, int *sent, RlError *error);
extern bool rl_socket_receive(RlConnection *conn, RlError *error);
extern bool rl_cannot_connect(const RlConnection *conn, RlError *error, const char *why);
extern bool rl_lack_of(const RlConnection *conn, RlError *error, const char *why);
extern bool rl_connection_lost(const RlConnection *conn, RlError *error, const char *why);
extern bool rl_protocol_violation(const RlConnection *conn, RlError *error, const char *what);

extern void rl_pause(int64 deadline);
extern bool rl_connection_refused(const RlConnection *conn, bool set_up, const char *line,
								  RlError *error);

#endif							/* SOCKET_H */
