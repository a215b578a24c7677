MODULE_big = ratelimit
OBJS = \
	$(WIN32RES) \
	src/algorithm/algorithm.o \
	src/algorithm/calendar.o \
	src/algorithm/fixed_window.o \
	src/algorithm/gcra.o \
	src/algorithm/inspect.o \
	src/algorithm/limits.o \
	src/algorithm/limits_text.o \
	src/algorithm/log.o \
	src/algorithm/siphash.o \
	src/algorithm/sliding.o \
	src/algorithm/token_bucket.o \
	src/decide.o \
	src/decision.o \
	src/error.o \
	src/headers.o \
	src/key_text.o \
	src/ledger.o \
	src/ratelimit.o \
	src/redis/address.o \
	src/redis/call.o \
	src/redis/cluster.o \
	src/redis/command.o \
	src/redis/connection.o \
	src/redis/key_name.o \
	src/redis/node.o \
	src/redis/pipeline.o \
	src/redis/refunds.o \
	src/redis/resp.o \
	src/redis/route.o \
	src/redis/scan.o \
	src/redis/scripts.o \
	src/redis/sentinel.o \
	src/redis/socket.o \
	src/redis/store.o \
	src/redis/stream.o \
	src/redis/tls.o \
	src/refusal.o \
	src/report.o \
	src/settings.o \
	src/several_keys.o \
	src/shared/breaker.o \
	src/shared/cells.o \
	src/shared/clock.o \
	src/shared/counters.o \
	src/shared/heap.o \
	src/shared/known.o \
	src/shared/local_inspect.o \
	src/shared/local_store.o \
	src/shared/overdue.o \
	src/shared/recover.o \
	src/shared/refusal_log.o \
	src/shared/shared.o \
	src/shared/store_file.o \
	src/sql/arguments.o \
	src/sql/check_keys.o \
	src/sql/check_triggers.o \
	src/sql/functions.o \
	src/sql/inspect.o \
	src/sql/key.o \
	src/sql/limits_type.o \
	src/sql/postgrest.o \
	src/sql/reserve.o \
	src/sql/rule_column.o \
	src/sql/simulate.o \
	src/sql/status.o \
	src/sql/trigger.o \
	src/sql/trigger_call.o \
	src/sql/trigger_charges.o \
	src/sql/trigger_groups.o \
	src/sql/trigger_rule.o \
	src/sql/trigger_statement.o \
	src/sql/triggers.o \
	src/transaction.o \
	src/worker.o

EXTENSION = ratelimit
DATA = $(patsubst $(srcdir)/%,%,$(wildcard $(srcdir)/sql/ratelimit--*.sql))
PGFILEDESC = "ratelimit - rate limits enforced in the database, counted in Redis"

REGRESS = setup type calendar lease throttle algorithms functions reserve check_all headers inspect trigger simulate plans errors privileges settings teardown
REGRESS_OPTS = --inputdir=$(srcdir)/test --encoding=UTF8
ifneq ($(shell id -u),0)
TAP_TESTS = 1
endif
PROVE_TESTS = test/t/*.pl

EXTRA_CLEAN = src/commit.h src/redis/scripts.lua.h $(OBJS:.o=.d)

# The version is written in the control file only.
EXTVERSION = $(shell sed -n "s/^default_version *= *'\(.*\)'.*/\1/p" $(srcdir)/ratelimit.control)

PG_CPPFLAGS = -Isrc -I$(srcdir)/src -DRL_VERSION='"$(EXTVERSION)"'

SHLIB_LINK += -lhiredis

# TLS is built in if OpenSSL's headers are installed, unless with_tls=no is given.
ifndef with_tls
with_tls := $(shell $(CC) -E -include openssl/ssl.h -x c /dev/null >/dev/null 2>&1 && echo yes || echo no)
endif
ifeq ($(with_tls),yes)
PG_CPPFLAGS += -DUSE_TLS
SHLIB_LINK += -lssl -lcrypto
endif

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)

# The library uses its own functions and settings directly, not through a table.
ifeq ($(PORTNAME), linux)
SHLIB_LINK += -Wl,-Bsymbolic
endif

# The TAP tests start servers, which PostgreSQL does not do as root.
ifeq ($(shell id -u),0)
installcheck: say_without_tap
.PHONY: say_without_tap
say_without_tap:
	@echo "The TAP tests are left out, because PostgreSQL does not run as root." >&2
	@echo "To run them, run make installcheck as another user, or script/test." >&2
	@test -n "$(strip $(REGRESS))"
endif

# Without a Redis, each pg_regress test would fail.
ifneq ($(strip $(REGRESS)),)
installcheck: check_redis
.PHONY: check_redis
check_redis:
	@$(bindir)/psql -X -q -o /dev/null -v ON_ERROR_STOP=1 -d postgres -f $(srcdir)/test/redis.sql
endif

# This is below the include, because PGXS sets PROVE_FLAGS.  Tests run in $(srcdir).
PROVE_FLAGS += -I test/t

# A build in another folder needs the folders of the objects there.  pg_regress
# looks for expected/ in the folder where it runs.  The names are absolute, because
# make looks for relative names in $(srcdir) too.
ifneq ($(realpath $(srcdir)),$(realpath .))
FOLDERS = $(sort $(dir $(OBJS:%=$(CURDIR)/%)))
$(OBJS) src/redis/scripts.lua.h src/commit.h: | $(FOLDERS)
$(FOLDERS):
	mkdir -p $@

installcheck: $(CURDIR)/expected
$(CURDIR)/expected:
	ln -s $(abspath $(srcdir))/expected $@
clean: clean_link
.PHONY: clean_link
clean_link:
	test ! -L expected || rm expected
endif

# Each file in src/redis/scripts is a script, which names its parts (see src/parts.awk).
SCRIPTS = $(wildcard $(srcdir)/src/redis/scripts/*.lua)
PARTS = $(sort $(wildcard $(srcdir)/src/algorithm/*.lua $(srcdir)/src/redis/*.lua))
src/redis/scripts.lua.h: $(srcdir)/src/parts.awk $(SCRIPTS) $(PARTS)
	awk -v parts='$(PARTS)' -f $< $(SCRIPTS) >$@
src/redis/scripts.o: src/redis/scripts.lua.h

# The archive for PGXN: the last commit, without the files that .gitattributes names.
.PHONY: dist
dist:
	mkdir -p dist
	git -C $(srcdir) archive --format=zip --prefix=ratelimit-$(EXTVERSION)/ HEAD >dist/ratelimit-$(EXTVERSION).zip

.DELETE_ON_ERROR:

# An object depends on the headers that it includes.
ifneq ($(autodepend),yes)
override CFLAGS += -MMD -MP
-include $(OBJS:.o=.d)
endif
$(OBJS:.o=.bc): %.bc: %.o
src/ratelimit.o src/sql/status.o: ratelimit.control

# The commit of a checkout, for rl_status.  The file changes only when the commit does.
RL_COMMIT ?= $(shell test ! -e $(srcdir)/.git || git -c safe.directory='*' -C $(srcdir) describe --tags --always --dirty)
src/sql/status.o: src/commit.h
src/commit.h: FORCE
	@line='#define RL_COMMIT "$(RL_COMMIT)"'; test "$$(cat $@ 2>/dev/null)" = "$$line" || echo "$$line" >$@
.PHONY: FORCE
