# Leases: no quota is lost.  Four servers with equal demand, steady and in bursts, below
# the limit and at twice the limit, in virtual time.
#
# RATELIMIT_SECONDS is the length of the runs at twice the limit.
#
# Runs once: it plays servers in virtual time, and 047_lease takes leases in each row.
use RatelimitTest;
use LeaseServers;

my $seconds = steps(3, 'RATELIMIT_SECONDS', 3);
my $redis = RedisServer->new->start;
my $node = lease_node($redis);
my $session = session($node);

# Each server takes a burst of quota in each round, at a random time of its turn.  The
# first turn is that of another server in each round: otherwise, at twice the limit, a
# throttle would have a unit free in every second turn, always for the same servers, also
# without a lease.
$session->ask(q{
	CREATE FUNCTION demand(urls text[], k text, limits rl_limits, rate float8, burst int, seconds int,
		OUT asked bigint[], OUT allowed bigint[], OUT leased bigint[]) LANGUAGE plpgsql AS $$
	DECLARE
		n int := array_length(urls, 1);
		bursts bigint := seconds * rate / burst;
		now bigint;
		server int;
		first int;
		d rl_decision;
	BEGIN
		asked := array_fill(0, ARRAY[n]);
		allowed := asked;
		leased := asked;
		FOR b IN 0 .. bursts - 1 LOOP
			IF b % n = 0 THEN
				first := floor(random() * n);
			END IF;
			server := (first + b) % n + 1;
			now := 1700000000000000 + floor((b + random()) * burst / rate * 1e6)::bigint;
			PERFORM set_config('ratelimit.redis_url', urls[server], false), set_config('ratelimit.debug_now', now::text, false),
				set_config('ratelimit.debug_clock', now::text, false);
			FOR i IN 1 .. burst LOOP
				d := rl_check(k, limits);
				asked[server] := asked[server] + 1;
				allowed[server] := allowed[server] + d.allowed::int;
				leased[server] := leased[server] + (d.source = 'lease')::int;
			END LOOP;
		END LOOP;
	END $$});
my $urls = join ',', map { server_url($redis, $_) } 0 .. 3;

# Returns what the servers asked, what was allowed, and how much of it by leases; each an array.
sub demand
{
	my ($text, $share, $burst, $seconds) = @_;
	my $answer = $session->ask("SELECT setseed(0.5); SELECT * FROM demand('{$urls}', 'demand $text $share $burst', '$text', $share * 10000, $burst, $seconds)");

	die $session->error if $session->error;
	return map { [ /(\d+)/g ] } split /\|/, $answer =~ s/^\n//r;
}

sub sum { my $sum = 0; $sum += $_ foreach @_; return $sum; }

# In the everyday form, one limit has both kinds of demand, and shares of the limit are larger and shorter.
foreach my $text ('10000/1s lease 50ms', 'fixed_window 10000/1s lease 50ms', 'sliding_window 10000/1s lease 50ms')
{
	foreach my $burst (is_long() || $text =~ /^10000/ ? (1, 20) : $text =~ /^fixed/ ? 20 : 1)
	{
		my $how = $burst > 1 ? "in bursts of $burst" : 'steadily';

		foreach my $share (is_long() ? 0.5 : (), 0.8)
		{
			my ($asked, $allowed, $leased) = demand($text, $share, $burst, is_long() ? 2 : 1);

			is(sum(@$asked) - sum(@$allowed), 0, "$text: of $share of the limit, $how, nothing is refused");
			cmp_ok(sum(@$leased), '>', sum(@$asked) / 2, "leases decided " . sum(@$leased));
		}
		my ($asked, $allowed, $leased) = demand($text, 2, $burst, $seconds);
		my $passed = sum(@$allowed);
		my ($least) = sort { $a <=> $b } @$allowed;

		cmp_ok($passed, '>=', 0.97 * 10_000 * $seconds, "$text: of twice the limit, $how, $passed pass in $seconds s, leases " . sum(@$leased));
		cmp_ok($least, '>=', 0.15 * $passed, "$text: no server has less than 15 % of it: @$allowed");
	}
}

done_testing();
