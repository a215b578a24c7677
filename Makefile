MODULE_big = ratelimit
OBJS = src/ratelimit.o src/limits.o src/algorithm.o src/address.o src/redis.o \
	src/redis_store.o src/key.o src/decide.o src/enforce.o

EXTENSION = ratelimit
DATA = $(wildcard sql/ratelimit--*.sql)
PGFILEDESC = "ratelimit - rate limits enforced in the database, counted in Redis"

REGRESS = setup type throttle functions trigger errors privileges settings
REGRESS_OPTS = --inputdir=test --encoding=UTF8
TAP_TESTS = 1
PROVE_TESTS = test/t/*.pl
PROVE_FLAGS += -I test/t

SCRIPTS_H = $(patsubst %,src/%.lua.h,throttle check refund ban)
EXTRA_CLEAN = $(SCRIPTS_H)

SHLIB_LINK += -lhiredis

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)

# A script is sent as it reads, with what it shares with others in front.
src/throttle.lua.h: src/clock.lua src/throttle.lua
src/check.lua.h src/refund.lua.h src/ban.lua.h: src/%.lua.h: src/clock.lua src/state.lua src/%.lua

src/%.lua.h:
	sed -e 's/\\/\\\\/g' -e 's/"/\\"/g' -e 's/^/"/' -e 's/$$/\\n"/' $^ > $@

$(OBJS): src/ratelimit.h src/redis.h src/address.h
src/redis_store.o src/redis_store.bc: $(SCRIPTS_H)
