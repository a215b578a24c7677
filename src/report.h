/*
 * report.h
 *		Errors to clients, in the format of ratelimit.error_format.
 */
#ifndef REPORT_H
#define REPORT_H

#include "lib/stringinfo.h"
#include "nodes/bitmapset.h"
#include "utils/rel.h"

#include "headers.h"

/* The trigger that requests an action. */
typedef struct RlOrigin
{
	Relation	rel;
	const Trigger *trigger;
	const Bitmapset *columns;	/* that the key is made of */
} RlOrigin;

/* An error to be raised.  Texts are in the server's encoding. */
typedef struct RlReport
{
	int			sqlstate;
	const char *message;
	const char *detail;			/* NULL: none */
	const char *detail_log;		/* for the server's log; NULL: the same */
	const char *hint;			/* NULL: none */
	const char *domain;			/* marks refusals; NULL: no refusal */
	const RlOrigin *origin;		/* NULL: no trigger */
	int			nheaders;
	RlHeader	headers[RL_MAX_HEADERS];
} RlReport;

extern void rl_append_member(StringInfo json, const char *name, const char *value);
extern void rl_report_add_detail(ErrorData *error, const char *sentence);
extern char *rl_retry_hint(int64 retry_after);
pg_noreturn extern void rl_raise_for(const RlError *error, const RlOrigin *origin);
pg_noreturn extern void rl_report(const RlReport *report);

#endif							/* REPORT_H */
