# docs/coming-from.md with the limiters themselves, as far as Debian and npm have them: they and
# the limit of the page give the same answers to the same history, by a clock of the test's own.
# script/test --clients installs them and runs this.
#
# RATELIMIT_SEED repeats a run.
use RatelimitTest;
use Engines qw(seed below);

my $programs = "$FindBin::RealBin/others";
my $dir = PostgreSQL::Test::Utils::tempdir;
my $page = slurp_file("$FindBin::RealBin/../../docs/coming-from.md");
my $guava = '/usr/share/java/guava.jar';
my $seed = seed();
my ($redis, $node, $session) = start_servers(\&shared_node);

# Returns the times of a history, in milliseconds.  No two differ by a whole number of seconds,
# so that none is at the border of a window.
sub history
{
	my ($pause) = @_;
	my $time = 1_800_000_000_000;
	my %used = (0 => 1);

	return map { $time += 1 + below(2 * $pause); $time++ while $used{ $time % 1000 }++; $time } 1 .. 300;
}

# PAGE is the history of an example of the page.
my %history = (SHORT => [ history(150) ], LONG => [ history(6_000) ], PAGE => [ map { 1_767_225_600_000 + 150 * $_ } 0 .. 25 ]);

# Runs a program and returns its answers by name.
sub answers
{
	my (@command) = @_;
	my $output = '';
	local %ENV = (%ENV, REDIS_SOCKET => $redis->url =~ s{^unix://}{}r, map { ($_ => "@{ $history{$_} }") } keys %history);

	ok(eval { IPC::Run::run(\@command, '<', \'', '>&', \$output, IPC::Run::timeout(120)) }, "$command[-1] runs") or diag $output, $@;
	return $output =~ /^([\w ]+)\t([\d ]+)$/mg;
}

my $compiled = '';
IPC::Run::run([ 'javac', '-cp', $guava, '-d', $dir, "$programs/Guava.java" ], '>&', \$compiled) or diag $compiled;
my %answer = (answers('node', "$programs/node.js"), answers('/usr/bin/python3', "$programs/flask_.py"), answers('ruby', "$programs/rack_attack.rb"),
	answers('java', '-Xmx64m', '-XX:+UseSerialGC', '-cp', "$guava:$dir", 'com.google.common.util.concurrent.Guava'));

# Returns the answers of limits to a history: 1 for each action that is allowed.
sub ours
{
	my ($limits, $history, $quota, $allowed, $between) = @_;

	return $session->ask(sprintf q{SELECT string_agg(%s, '%s' ORDER BY n) FROM (SELECT n, rl_simulate('%s', to_timestamp(ms / 1000.0), %s) OVER (ORDER BY n) AS d
		FROM unnest('{%s}'::bigint[]) WITH ORDINALITY AS history (ms, i), LATERAL (SELECT i - 1) AS number (n)) AS replay},
		$allowed // '(d).allowed::int::text', $between // '', $limits, $quota // 1, join(',', @{ $history{$history} }));
}

foreach my $case (
	[ flexible => 'fixed_window 5/1s from_first', 'SHORT' ],
	[ 'flexible blocks' => 'fixed_window 2/1s from_first ban 2s after 1', 'SHORT' ],
	[ 'flexible costs' => 'fixed_window 5/1s from_first count_denied', 'SHORT', '1 + n % 3' ],
	[ express => 'fixed_window 5/1s from_first', 'SHORT' ],
	[ 'upstash fixed' => 'fixed_window 5/1s', 'SHORT' ],
	[ 'upstash bucket' => 'token_bucket 2/1s burst 5', 'SHORT' ],
	[ 'flask fixed' => 'fixed_window 10/min from_first', 'LONG' ],
	[ 'flask moving' => 'sliding_log 10/min', 'LONG' ],
	[ 'rack throttle' => 'fixed_window 6/60s', 'LONG' ],
	[ 'rack fail' => 'fixed_window 2/60s ban 2min after 1', 'LONG', '(n % 3 = 0)::int', '((d).allowed AND n % 3 > 0)::int::text' ])
{
	my ($name, $limits, @how) = @$case;
	my $expected = $answer{$name} // '';

	is(ours($limits, @how), $expected, "$name: $limits") or diag "repeat with RATELIMIT_SEED=$seed";
	cmp_ok(scalar(() = $expected =~ /$_/g), '>', 20, "$name: answers $_") foreach 0, 1;
}

# The examples of the page
foreach my $case (
	[ 'flexible page' => 'fixed_window 5/1s from_first' ],
	[ 'express page' => 'fixed_window 5/1s from_first' ],
	[ 'flexible page blocks' => 'fixed_window 2/1s from_first ban 1s after 1' ])
{
	my ($name, $limits) = @$case;

	is($answer{$name}, ($page =~ /^ \Q$limits\E +\| ([01]+)$/m)[0], "$name: as the page shows");
}
is($answer{'rack page'}, ($page =~ /fail2ban.*?^ string_agg\n-+\n ([01]+)$/ms)[0], 'rack page: as the page shows');

# What consume returns, and the calls beside it
is(ours('fixed_window 5/1s from_first', 'SHORT', 1, q{concat_ws(' ', (d).allowed::int, (d).remaining,
	round(1000 * CASE WHEN (d).allowed THEN (d).reset_after ELSE (d).retry_after END), (d).capacity - (d).remaining)}, ' '),
	$answer{'flexible results'}, 'flexible: results of consume');

my ($second, $calls) = (0, '');
foreach my $call ('penalty 3', 'consume 1', 'consume 2', 'delete', 'consume 4', 'reward 3', 'consume 4', 'consume 1',
	'delete', 'consume 1', 'block 10', 'consume 1', 'sleep 9', 'consume 1', 'sleep 2', 'consume 1')
{
	my ($name, $n) = (split(' ', $call), 0);
	my $k = "'calls', 'fixed_window 5/60s from_first'";
	my %sql = (penalty => "rl_allow($k, $n)", consume => "rl_allow($k, $n)::int", delete => q{rl_reset('calls')},
		reward => "rl_refund($k, $n)", block => "rl_ban('calls', $n)", sleep => '1');

	$second += $n if $name eq 'sleep';
	my $got = $session->ask(sprintf q{SET ratelimit.debug_now = '%d'; SELECT %s}, 1e6 * (1_800_000_000 + $second), $sql{$name});
	$calls .= $got if $name eq 'consume';
}
is($calls, $answer{'flexible calls'}, 'flexible: penalty, delete, reward, block');

# Returns the most actions that are allowed in a second.
sub most
{
	my ($bits) = @_;
	my @at = map { substr($bits, $_, 1) ? $history{SHORT}[$_] : () } 0 .. length($bits) - 1;

	return max(map { my $from = $_; scalar grep { $_ >= $from && $_ < $from + 1000 } @at } @at);
}

is(most(ours('sliding_window 5/1s', 'SHORT')), 5, 'sliding_window: never more');
cmp_ok(most($answer{'upstash sliding'}), '>', 5, "Upstash's sliding window is an estimate");
is($answer{'rack allow'}, '111000000', 'Allow2Ban: the third action is allowed and bans');
is($answer{'guava busy'}, '0 100 100 100 100', 'Guava: a permit at a time');
is($answer{'guava lends'}, '0 10000', 'Guava lends permits');
is($answer{'guava after a pause'}, '0 0 0 0 0 0 0 0 0 0 0 100', 'Guava, after a pause: 11 permits without a wait');

foreach my $limits ('fixed_window 5/60s from_first', 'fixed_window 6/60s', 'fixed_window 10/min from_first', 'sliding_log 10/min', '10/1s burst 1')
{
	like($page, qr/[`']\Q$limits\E[`',]/, "the page names $limits");
}

done_testing();
