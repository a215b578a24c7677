MODULE_big = ratelimit
OBJS = src/ratelimit.o src/limits.o src/log.o src/algorithm.o src/gcra.o src/token_bucket.o src/fixed_window.o src/sliding.o src/address.o src/resp.o src/tls.o \
	src/socket.o src/stream.o src/connection.o src/slots.o src/sentinel.o src/route.o src/redis.o src/pipeline.o src/redis_store.o \
	src/shared.o src/siphash.o src/cells.o src/local_store.o src/denied.o \
	src/breaker.o src/stat.o src/status.o src/key.o src/values.o src/decide.o src/functions.o src/many.o \
	src/charges.o src/simulate.o src/rule.o \
	src/statement.o src/enforce.o

EXTENSION = ratelimit
DATA = $(wildcard sql/ratelimit--*.sql)
PGFILEDESC = "ratelimit - rate limits enforced in the database, counted in Redis"

REGRESS = setup type throttle algorithms functions trigger simulate errors privileges settings
REGRESS_OPTS = --inputdir=test --encoding=UTF8
ifneq ($(shell id -u),0)
TAP_TESTS = 1
endif
PROVE_TESTS = test/t/*.pl

ALGORITHMS = throttle token_bucket fixed_window sliding_window sliding_log
SCRIPTS_H = $(patsubst %,src/%.lua.h,throttle $(ALGORITHMS:%=check_%) check_mixed refund undo reset ban version)
EXTRA_CLEAN = $(SCRIPTS_H)

SHLIB_LINK += -lhiredis

# With TLS where OpenSSL's headers are; "make with_tls=no" does without.
with_tls ?= $(shell $(CC) -E -include openssl/ssl.h -x c /dev/null >/dev/null 2>&1 && echo yes || echo no)
ifeq ($(with_tls),yes)
PG_CPPFLAGS += -DUSE_TLS
SHLIB_LINK += -lssl -lcrypto
endif

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)

# Our own functions and settings are called directly, not by way of a table.
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

# Below the include, which sets it anew.
PROVE_FLAGS += -I $(srcdir)/test/t

# A script is sent as it reads, with what it shares with others in front.
ALGORITHMS_LUA = $(patsubst %,src/%.lua,gcra token_bucket fixed_window sliding_window log log_change sliding_log)

src/throttle.lua.h: src/clock.lua src/throttle.lua
src/reset.lua.h: src/clock.lua src/state.lua src/log.lua src/reset.lua
src/ban.lua.h: src/clock.lua src/state.lua src/ban.lua
src/version.lua.h: src/version.lua
src/refund.lua.h: src/clock.lua src/state.lua $(ALGORITHMS_LUA) src/refund.lua
src/undo.lua.h: src/clock.lua src/state.lua $(ALGORITHMS_LUA) src/log_undo.lua src/undo.lua
src/check_mixed.lua.h: src/clock.lua src/state.lua $(ALGORITHMS_LUA) src/check.lua
src/check_throttle.lua.h: src/clock.lua src/state.lua src/gcra.lua src/check.lua
src/check_sliding_log.lua.h: src/clock.lua src/state.lua src/log.lua src/log_change.lua src/sliding_log.lua src/check.lua
$(patsubst %,src/check_%.lua.h,token_bucket fixed_window sliding_window): \
	src/check_%.lua.h: src/clock.lua src/state.lua src/%.lua src/check.lua

.DELETE_ON_ERROR:
%.lua.h:
	sed -e 's/\\/\\\\/g' -e 's/"/\\"/g' -e 's/^/"/' -e 's/$$/\\n"/' $^ > $@

$(OBJS): src/ratelimit.h src/redis.h src/callqueue.h src/route.h src/socket.h src/connection.h src/tls.h src/resp.h src/address.h \
	src/algorithm.h src/log.h src/shared.h src/siphash.h src/cells.h src/charges.h src/rule.h src/values.h
src/redis_store.o src/redis_store.bc: $(SCRIPTS_H)
