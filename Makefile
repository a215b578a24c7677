MODULE_big = ratelimit
OBJS = $(patsubst %,src/%.o,ratelimit error report decide take_all refusal skip headers transaction ledger \
	$(patsubst %,sql/%,functions inspect check_many check_all trigger trigger_statement trigger_charges trigger_groups trigger_rule trigger_limits trigger_warnings arguments key simulate status postgrest) \
	$(patsubst %,algorithm/%,limits limits_text calendar algorithm inspect gcra token_bucket fixed_window sliding log) \
	$(patsubst %,redis/%,store call key_name refunds scan scripts command pipeline route node cluster sentinel address connection stream socket tls resp) \
	$(patsubst %,shared/%,shared local_store local_inspect cells heap known counters breaker refusal_log siphash))

EXTENSION = ratelimit
DATA = $(patsubst $(srcdir)/%,%,$(wildcard $(srcdir)/sql/ratelimit--*.sql))
PGFILEDESC = "ratelimit - rate limits enforced in the database, counted in Redis"

REGRESS = setup type calendar lease throttle algorithms functions check_all headers inspect trigger simulate plans errors privileges settings teardown
REGRESS_OPTS = --inputdir=$(srcdir)/test --encoding=UTF8
ifneq ($(shell id -u),0)
TAP_TESTS = 1
endif
PROVE_TESTS = test/t/*.pl

# Each algorithm has a script for its limits.  Those in ALONE have another one, for
# one limit without options.  Those in ONE make it of parts of src/algorithm/<name>.lua.
# Those in MANY have a third script, for many keys, with the same body.
ALGORITHMS = throttle token_bucket fixed_window sliding_window sliding_log concurrent
ONE = token_bucket fixed_window sliding_window
ALONE = throttle $(ONE) sliding_log
MANY = throttle
SCRIPTS_H = $(patsubst %,src/redis/%.lua.h,alone many check check_mixed check_many check_all lease refund refund_charges reset ban bans masters inspect version)
ALGORITHMS_H = $(patsubst %,src/redis/%.lua.h,$(ALONE:%=alone_%) $(MANY:%=many_%) $(ALGORITHMS:%=check_%))
EXTRA_CLEAN = src/commit.h $(SCRIPTS_H) $(ALGORITHMS_H) $(OBJS:.o=.d)

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
$(OBJS) $(SCRIPTS_H) $(ALGORITHMS_H) src/commit.h: | $(FOLDERS)
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

# A script is these files, one after another, without PARTS.  A line "--@ name" stands for
# a part of one of all these files (see src/parts.awk).
lua = $(patsubst %,src/%.lua,$(1))
PARTS = $(call lua,redis/expiry)
STATE_LUA = $(call lua,redis/expiry redis/clock redis/state)

# The Lua files of an algorithm: the file of its name, unless a list is here.
throttle_lua = gcra
sliding_log_lua = log log_change sliding_log
concurrent_lua = $(sliding_log_lua) concurrent
algorithm_lua = $(call lua,$(addprefix algorithm/,$(or $($(1)_lua),$(1))))
ALGORITHMS_LUA = $(foreach a,$(ALGORITHMS),$(call algorithm_lua,$(a)))

# A list of limits.  The script for limits of one algorithm has only parts of the others.
CHECK_H = src/redis/check_mixed.lua.h $(ALGORITHMS:%=src/redis/check_%.lua.h)
PLAIN_PARTS = $(call lua,redis/plain_units algorithm/log_tail)
$(CHECK_H): PARTS += $(PLAIN_PARTS)
$(foreach a,$(ALGORITHMS),$(eval src/redis/check_$(a).lua.h: \
	PARTS += $(filter-out $(call algorithm_lua,$(a)),$(ALGORITHMS_LUA))))
$(CHECK_H): $(PLAIN_PARTS) $(call lua,redis/expiry redis/clock redis/plain redis/state) $(ALGORITHMS_LUA) \
	$(call lua,redis/act redis/check)

# One limit.
$(ALONE:%=src/redis/alone_%.lua.h): PARTS += $(call lua,redis/clock)
src/redis/alone_throttle.lua.h src/redis/many_throttle.lua.h: PARTS += $(call lua,algorithm/gcra)
src/redis/alone_throttle.lua.h: $(call lua,redis/expiry algorithm/gcra redis/clock redis/clock_alone redis/throttle_read algorithm/throttle)
src/redis/many_throttle.lua.h: $(call lua,redis/expiry algorithm/gcra redis/clock redis/many_begin algorithm/throttle redis/many)
src/redis/alone_sliding_log.lua.h: PARTS += $(call lua,algorithm/log_tail)
src/redis/alone_sliding_log.lua.h: $(call lua,redis/expiry algorithm/log_tail redis/clock redis/clock_alone algorithm/sliding_log_one redis/one \
	algorithm/sliding_log_list redis/state $(addprefix algorithm/,$(sliding_log_lua)) redis/act redis/check)
$(foreach a,$(ONE),$(eval src/redis/alone_$(a).lua.h: PARTS += $(call lua,algorithm/$(a))))
$(ONE:%=src/redis/alone_%.lua.h): src/redis/alone_%.lua.h: $(call lua,redis/expiry algorithm/% redis/clock redis/clock_alone redis/one_read redis/one)

src/redis/check_many.lua.h: $(STATE_LUA) $(ALGORITHMS_LUA) $(call lua,redis/act redis/check_many)
src/redis/check_all.lua.h: $(STATE_LUA) $(ALGORITHMS_LUA) $(call lua,redis/act redis/check_all)
src/redis/lease.lua.h: $(STATE_LUA) $(foreach a,throttle $(ONE),$(call algorithm_lua,$(a))) $(call lua,redis/act redis/lease)
src/redis/refund.lua.h: $(STATE_LUA) $(ALGORITHMS_LUA) $(call lua,redis/refund)
src/redis/refund_charges.lua.h: $(STATE_LUA) $(ALGORITHMS_LUA) $(call lua,algorithm/log_refund redis/refund_charges)
src/redis/reset.lua.h: $(STATE_LUA) $(call lua,algorithm/log redis/reset)
src/redis/ban.lua.h: $(STATE_LUA) $(call lua,redis/ban)
src/redis/bans.lua.h: $(call lua,redis/clock redis/bans)
src/redis/masters.lua.h: $(call lua,redis/masters)
src/redis/inspect.lua.h: $(STATE_LUA) $(ALGORITHMS_LUA) $(call lua,redis/inspect)
src/redis/version.lua.h: $(call lua,redis/version)

# The archive for PGXN: the last commit, without the files that .gitattributes names.
EXTVERSION = $(shell sed -n "s/^default_version = '\(.*\)'/\1/p" $(srcdir)/ratelimit.control)
.PHONY: dist
dist:
	mkdir -p dist
	git -C $(srcdir) archive --format=zip --prefix=ratelimit-$(EXTVERSION)/ HEAD >dist/ratelimit-$(EXTVERSION).zip

.DELETE_ON_ERROR:
$(ALGORITHMS_H) $(filter-out %/alone.lua.h %/many.lua.h %/check.lua.h,$(SCRIPTS_H)):
	awk -v parts='$^' -f $(srcdir)/src/parts.awk $(filter-out $(addprefix %,$(PARTS)),$^) > $@

# The scripts by algorithm, as an array's initializers.
src/redis/alone.lua.h: $(ALONE:%=src/redis/alone_%.lua.h)
src/redis/many.lua.h: $(MANY:%=src/redis/many_%.lua.h)
src/redis/check.lua.h: $(ALGORITHMS:%=src/redis/check_%.lua.h)
src/redis/alone.lua.h src/redis/many.lua.h src/redis/check.lua.h: src/redis/%.lua.h:
	for header in $(^F); do \
		name=$${header#$*_}; name=$${name%.lua.h}; \
		printf '[RL_%s] = {.source =\n#include "redis/%s"\n},\n' $$(echo $$name | tr a-z A-Z) $$header; \
	done > $@

# An object depends on the headers that it includes.
ifneq ($(autodepend),yes)
override CFLAGS += -MMD -MP
-include $(OBJS:.o=.d)
endif
$(OBJS:.o=.bc): %.bc: %.o
src/redis/scripts.o: $(SCRIPTS_H)
src/ratelimit.o src/sql/status.o: ratelimit.control

# The commit of a checkout, for rl_status.  The file changes only when the commit does.
RL_COMMIT ?= $(shell test ! -e $(srcdir)/.git || git -c safe.directory='*' -C $(srcdir) describe --tags --always --dirty)
src/sql/status.o: src/commit.h
src/commit.h: FORCE
	@line='#define RL_COMMIT "$(RL_COMMIT)"'; test "$$(cat $@ 2>/dev/null)" = "$$line" || echo "$$line" >$@
.PHONY: FORCE
