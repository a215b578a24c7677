/*
 * fuzz.h
 *		Targets of libFuzzer, which script/fuzz runs in a backend.
 */
#ifndef FUZZ_H
#define FUZZ_H

#include "redis/stream.h"

/* Runs one input, which is followed by a zero byte if the target reads a string. */
typedef void (*FuzzRun) (const char *data, int len);

/* Ends the process with the message if the condition is false; libFuzzer then writes the input to a file. */
#define REQUIRE(condition) \
	((condition) ? (void) 0 : fuzz_failed(#condition, __FILE__, __LINE__))

/* fuzz.c */
pg_noreturn extern void fuzz_failed(const char *condition, const char *file, int line);
extern void fuzz_check_error(const RlError *error);

/* fuzz_text.c */
extern void fuzz_limits(const char *data, int len);
extern void fuzz_url(const char *data, int len);
extern void fuzz_template(const char *data, int len);

/* fuzz_server.c */
extern void fuzz_server_start(const char *replies, int len, int most_bytes);
extern bool fuzz_server_is_silent(RlConnection *conn);

/* fuzz_redis.c */
extern void fuzz_resp(const char *data, int len);
extern void fuzz_connect(const char *data, int len);
extern void fuzz_call(const char *data, int len);
extern void fuzz_store(const char *data, int len);
extern void fuzz_scan(const char *data, int len);

/* fuzz_log.c */
extern void fuzz_log(const char *data, int len);

/* fuzz_recover.c */
extern void fuzz_recover(const char *data, int len);

#endif							/* FUZZ_H */
