# shellcheck shell=bash
#
# Proves the numbers of throttle and token_bucket, for script/prove, which sources this file.
#
# Proved, of the C in src/algorithm/ and for all numbers in range (at most 10^15 units, 10 years,
# 100 years to become free, any quota, any time up to 2160, clocks that are set back, states of
# limits with other numbers): the contracts in gcra.c and token_bucket.c, by Frama-C/WP and z3.
# No sum, product or quotient overflows; "never_back": only a refund moves a TAT back, or a used
# bucket's anchor; and the other promises of the table.  CBMC, which could also find an action
# that breaks one, is not in Debian 12.
#
# Tested by borders.c and borders.lua, at small numbers and at the borders of the range: that
# after the wait for a bucket the action fits, and not a microsecond earlier (a proof needs products
# and quotients of three unknowns, of which z3 knows too little); the scripts for Redis against C,
# and that each of their numbers is below 2^53.  The same actions refute the mutants, because an
# unproved contract alone is no refutation.
#
# Not proved: refunds of single charges of a bucket, settlements in Lua, lists of limits, bans,
# and the other algorithms. 020_engines compares all of them.

FOLDER_OF_PROOF=$ROOT/proof/arithmetic
GCRA=us_rounded_up,cost,refund_of,complete,act_on_backlog,load,fits,keep_backlog,act,act_single,reduce_backlog,refund,left,refund_charge,owe
TOKEN_BUCKET=rl_divide_up,complete,lumps_since,less_lumps,load,next_free,keep,rl_units_fit,rl_units_act,rl_units_refund,rl_units_owe
SCRIPTS=(single_throttle single_token_bucket refund_charges)

row() { printf '%-13s %-20s %6s %8s  %s\n' "$@"; }

# timed COMMAND...: runs the command, and sets "seconds".
timed() {
	local start=$EPOCHREALTIME status=0
	"$@" || status=$?
	seconds=$(((${EPOCHREALTIME/./} - ${start/./}) / 100000))
	seconds=$((seconds / 10)).$((seconds % 10))
	return "$status"
}

# Makes direct.c, borders and the scripts for Redis of ./src.
compile() {
	local script
	{
		echo '#define MOST_OF_LOG 999999'
		echo bool
		sed -n '/^rl_units_fit/,/^\/\* For RlAlgorithm.end/p' src/algorithm/algorithm.c |
			sed -E 's/algorithm->(next_free|keep)\(/\1(/; s/algorithm->skip\(/no_skip(/; s/algorithm->skip != NULL/false/
				s/algorithm->skip == NULL/true/; s/algorithm->refills/true/; s/algorithm->has_logs/false/
				s/algorithm->most/RL_MAX_COUNT/; /= rl_algorithm\(limit\);/d; /^#define/d; $d'
	} >direct.c
	# The table names other algorithms, which are not called.
	gcc -w -O1 -fsanitize=signed-integer-overflow,integer-divide-by-zero -fno-sanitize-recover=all -no-pie -static-libubsan \
		-Wl,--unresolved-symbols=ignore-all,-z,lazy -Iinclude -I"$FOLDER_OF_PROOF" -Isrc -o borders \
		"$FOLDER_OF_PROOF/borders.c" src/algorithm/{gcra,token_bucket,algorithm}.c
	for script in "${SCRIPTS[@]}"; do
		awk -v parts="$(echo src/algorithm/*.lua src/redis/*.lua)" -v plain=1 -f src/parts.awk "src/redis/scripts/$script.lua" >"$script.lua"
	done
}

# wp FILE FUNCTIONS [OPTION...]: writes the goals to "out".
wp() {
	local file=$1 functions=$2
	shift 2
	frama-c -machdep gcc_x86_64 -c11 -cpp-extra-args="-Iinclude -I$FOLDER_OF_PROOF -I. -Isrc" "$FOLDER_OF_PROOF/$file.c" \
		-wp -wp-rte -wp-model Caveat -wp-prover z3 -wp-par 1 -wp-timeout 20 -wp-fct "$functions" "$@" >out 2>&1
}

# Prints the promise of each goal, and "Valid" if it is proved.
goals() {
	sed -nE 's/.*Goal typed_caveat_(\w+) : (\w+).*/\1 \2/p' out |
		sed -E 's/.*_rte_(signed_overflow|division_by_zero|mem_access|bool_value)\w*/\1/; s/.*_ensures_([a-z]\w*)/\1/; s/.*_(requires|assigns|ensures)\w*/\1/'
}

# Runs the scripts of all algorithms, or of this one.
run_lua() {
	./borders replies "$@" 2>said < <(./borders cases "$@" 2>&1 | lua5.1 "$FOLDER_OF_PROOF/borders.lua" "${SCRIPTS[@]/%/.lua}" 2>lua_said)
}

run_borders() { ./borders 2>said; }

# The promises of a file
proves() {
	local promise result
	timed wp "$1" "$2" || { cat out; die "Frama-C fails"; }
	row "$1" 'all goals' "$(goals | wc -l)" "$seconds" ''
	for promise in $(goals | sed 's/ .*//' | sort -u); do
		result=proved
		if goals | grep "^$promise " | grep -qv Valid; then
			result="not proved: $(grep Goal out | grep -v Valid | grep -o 'typed_caveat_\w*' | sed 's/typed_caveat_//' | tr '\n' ' ')"
			failed=$((failed + 1))
		fi
		row "$1" "$promise" "$(goals | grep -c "^$promise ")" '' "$result"
	done
}

# tests NAME COMMAND...
tests() {
	local name=$1 result=holds
	shift
	if ! timed "$@"; then
		result=broken
		failed=$((failed + 1))
	fi
	row "$name" borders '' "$seconds" "$result: $(tail -n 1 said)"
}

# mutant FILE FUNCTION PROMISE SED: of ./src/algorithm/FILE.  Without a function, it is of Lua, and PROMISE is an algorithm.
mutant() {
	local result=refuted unproved='' run=(run_borders)
	rm -rf src
	cp -r "$ROOT/src" src
	sed -i -E "$4" "src/algorithm/$1"
	! cmp -s "src/algorithm/$1" "$ROOT/src/algorithm/$1" || die "a mutant of $1 changes nothing: $4"
	compile
	[[ -n $2 ]] || run=(run_lua "$3")
	if timed "${run[@]}"; then result='not refuted'; fi
	if [[ -z $2 ]]; then
		cat lua_said >>said
	else
		wp "$([[ $1 == gcra.c ]] && echo gcra || echo token_bucket)" "$2" -wp-timeout 3 || { cat out; die "Frama-C fails"; }
		unproved=$(goals | grep -v Valid | sed 's/ .*//' | sort -u | tr '\n' ' ')
		[[ " $unproved" == *" $3 "* ]] || result="proved, but unproved are: $unproved"
	fi
	[[ $result == refuted ]] || failed=$((failed + 1))
	row "$1" "${2:-$3}" '' "$seconds" "$result${2:+: $3}"
	printf '  %s\n' "$4"
	grep -m 1 -oE 'not .*|runtime error.*|action .*' said | sed 's/^/  /' || true
}

mkdir -p include/common
touch include/fmgr.h include/miscadmin.h include/common/int.h
export WHY3CONFIG=$T/why3.conf
why3 config detect >/dev/null 2>&1
cp -r "$ROOT/src" src
compile
row file promise goals seconds result
proves gcra "$GCRA"
proves token_bucket "$TOKEN_BUCKET"
tests C run_borders
tests Lua run_lua
sed 's/^/  /' lua_said
mutant gcra.c complete in_range 's/span <= RL_MAX_SPAN \* NS_PER_US/true/'
mutant gcra.c owe signed_overflow 's/view->start \+ Min\(refund_of.*\)/Max(view->start, Min(view->start + Min(refund_of(limit, quota), most), most)))/'
mutant gcra.c act_on_backlog never_back 's/backlog_ns \+= cost/backlog_ns -= cost/'
mutant gcra.c act_on_backlog capacity_kept 's/backlog_ns <= cost\(limit, limit->capacity - quota\)/backlog_ns <= cost(limit, limit->capacity)/'
mutant gcra.c act refused_unchanged 's/if \(!allowed \|\| act->how/if (act->how/'
mutant gcra.c act_on_backlog remaining 's/if \(room > 0\)/if (true)/'
mutant gcra.c us_rounded_up ensures 's/\(ns \+ NS_PER_US - 1\)/ns/'
mutant gcra.c reduce_backlog refund_at_most 's/view->start - ns\)/view->start - 2 * ns)/'
mutant token_bucket.c next_free signed_overflow 's/\(lumps > .* \? RL_MAX_SPAN : (.*)\);/\1;/'
mutant token_bucket.c load never_back 's/view->start = state->start \+ .*;/view->start = state->start;/'
mutant token_bucket.c less_lumps not_negative 's/lumps < rl_divide_up/lumps <= rl_divide_up/'
mutant algorithm.c rl_units_fit exact 's/\+ quota <= limit->capacity/<= limit->capacity/'
mutant algorithm.c rl_units_act refused_unchanged 's/allowed \? quota : 0/quota/'
mutant algorithm.c rl_units_act remaining 's/Max\(limit->capacity - used, 0\)/limit->capacity - used/'
mutant algorithm.c rl_units_refund refund_at_most 's/view->charged -= units/view->charged = 0/'
mutant throttle.lua '' throttle "s/if ns >= 1000 then/if ns > 1000 then/"
mutant throttle.lua '' throttle "s/local tat = .*/local tat = string.format('%.0f', (now + us) * 1000 + ns)/"
mutant token_bucket.lua '' token_bucket 's/math.ceil\(needed/math.floor(needed/'
