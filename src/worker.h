/*
 * worker.h
 *		What sends refunds when the server shuts down.
 */
#ifndef WORKER_H
#define WORKER_H

extern void rl_refunds_at_exit(void);

#endif							/* WORKER_H */
