# The files of monitoring/ with a real exporter and a real Prometheus, during a
# recorded run: a storm of refusals, a slow Redis, a full local store, too many scopes,
# shadow mode, an outage of Redis, an outage of PostgreSQL, and a server without shared
# memory.  Prometheus has the figures of the views, each alert fires and resolves, and
# each expression of the dashboard has a value.
#
# script/test --clients installs the programs and runs this.
#
# The run uses the alerts with short durations.  promtool checks the real ones with
# the series of test/alerts.yml.
#
# Runs alone: it measures rates, and alerts depend on them.
use RatelimitTest;
use DocPage;
use HTTP::Tiny;
use JSON::PP;
use Time::HiRes qw(sleep time);

foreach my $program (qw(prometheus-sql-exporter prometheus promtool))
{
	die "$program is not installed" unless has_program($program);
}

my $root = "$FindBin::RealBin/../..";
my $dir = PostgreSQL::Test::Utils::tempdir;
my $page = slurp_file("$root/docs/monitoring.md");
my $http = HTTP::Tiny->new(timeout => 30, no_proxy => ['127.0.0.1']);
my %server;
END { local ($?, $@); foreach (values %server) { $_->{run}->kill_kill if $_->{run} } }

#
# The files by themselves
#

foreach my $command ([ 'check', 'rules', "$root/monitoring/ratelimit-alerts.yml" ],
	[ 'check', 'config', "$root/monitoring/prometheus.yml" ], [ 'test', 'rules', "$root/test/alerts.yml" ])
{
	my $output = '';

	ok(IPC::Run::run([ 'promtool', @$command ], '>&', \$output), "promtool @$command[0, 1]") or diag $output;
}

#
# The servers
#

# Writes a copy of a file of monitoring/ in which the patterns are replaced; each must
# match.  Returns its path.
sub adapted
{
	my ($name, @replace) = @_;
	my $text = slurp_file("$root/monitoring/$name");

	while (my ($pattern, $new) = splice @replace, 0, 2)
	{
		$text =~ s/$pattern/$new/g or die "$name does not match $pattern";
	}
	append_to_file("$dir/$name", $text);
	return "$dir/$name";
}

# Starts a program, which writes its log to a file, and waits until it answers at the path.
sub start_program
{
	my ($name, $path, @command) = @_;
	my $program = $server{$name};

	$program->{log} = "$dir/$name.log";
	$program->{run} = IPC::Run::start(\@command, '<', \undef, '>', $program->{log}, '2>&1');
	await("$name to answer", sub {
		die "$name has ended: " . logs() unless still_runs($program->{run});
		return $http->get("http://127.0.0.1:$program->{port}$path")->{success};
	});
	return;
}

# Returns the logs of the programs.
sub logs { return join "\n", map { -f $_->{log} ? slurp_file($_->{log}) : () } values %server; }

# Returns what Prometheus's API returns, and fails if that is an error.
sub api
{
	my ($path, %parameters) = @_;
	my $url = "http://127.0.0.1:$server{prometheus}{port}/api/v1/$path?" . $http->www_form_urlencode(\%parameters);
	my $response = $http->get($url);
	my $answer = eval { decode_json($response->{content}) } || { status => 'error', error => $response->{content} };

	die "$path: $answer->{error}" unless $answer->{status} eq 'success';
	return $answer->{data};
}

my $redis = RedisServer->new->start;
my $node = shared_node($redis, 'shared_preload_libraries = ratelimit', 'ratelimit.local_persistence = on', 'ratelimit.local_max_keys = 100', "listen_addresses = '127.0.0.1'");
$server{$_} = { port => RedisServer::free_port() } foreach qw(exporter prometheus);

# The role logs in with its password, as the page says.
my ($role) = grep { /CREATE ROLE/ } map { $_->{text} } DocPage->new("$root/docs/monitoring.md")->commands;
$node->safe_psql('postgres', $role);
my $hba = $node->data_dir . '/pg_hba.conf';
my $lines = slurp_file($hba);
unlink $hba;
append_to_file($hba, "host all ratelimit_monitor 127.0.0.1/32 scram-sha-256\n$lines");
$node->reload;

my $collector = adapted('prometheus-sql-exporter.yml', qr/127\.0\.0\.1:5432\/shop/,
	'127.0.0.1:' . $node->port . '/postgres?sslmode=disable', qr/interval: 15s/, 'interval: 500ms');
adapted('ratelimit-alerts.yml', qr/for: \d+\w/, 'for: 1s', qr/\[5m\]/, '[3s]', qr/> 120\b/, '> 3');
my $config = adapted('prometheus.yml', qr/127\.0\.0\.1:9237/, "127.0.0.1:$server{exporter}{port}",
	qr/scrape_interval: 15s/, 'scrape_interval: 500ms', qr/evaluation_interval: 15s/, 'evaluation_interval: 500ms');
my $begin = time;
$ENV{LOGLEVEL} = 'WARN';
start_program('exporter', '/metrics', 'prometheus-sql-exporter', '-config.file', $collector,
	'-web.listen-address', "127.0.0.1:$server{exporter}{port}");
start_program('prometheus', '/-/ready', 'prometheus', "--config.file=$config", "--storage.tsdb.path=$dir/prometheus",
	"--web.listen-address=127.0.0.1:$server{prometheus}{port}", '--log.level=warn');

#
# What Prometheus has
#

# Returns a series as text: its name, and the labels of the queries that are not empty.
sub series
{
	my ($name, %label) = @_;

	return join ' ', $name, map { ($label{$_} // '') eq '' ? () : "$_=$label{$_}" }
	  qw(limits scope outcome store mode on_error);
}

# Returns the values of an expression by series.
sub values_of
{
	my ($expression) = @_;

	return { map { (series($_->{metric}{__name__} // '', %{ $_->{metric} }) => 0 + $_->{value}[1]) }
		  @{ api('query', query => $expression)->{result} } };
}

# The figures of the views: name, value, and then labels and their values.
my @outcomes = qw(allowed denied shadow_denied failed_open failed_closed errors);
my %total = (denial_cache_actions => 'from_cache', local_actions => 'from_local', lease_actions => 'from_lease',
	leased_units => 'leased', leased_unused_units => 'leased_unused',
	settlements => 'settled', settled_less_units => 'settled_less', settled_more_units => 'settled_more',
	redis_commands => 'round_trips', redis_seconds => 'redis_time');
my $by_limits = q{'limits', coalesce(limits, 'others'), 'scope', scope};
my $figures = join ' UNION ALL ',
  map({ "SELECT 'actions_total', ${_}::float8, $by_limits, 'outcome', '$_' FROM rl_stat" } @outcomes),
  map({ "SELECT '${_}_total', $total{$_}, $by_limits, '', '' FROM rl_stat" } sort keys %total),
  map({ "SELECT '$_->[0]', $_->[1], 'limits', limits, '', '', '', '' FROM rl_denied GROUP BY limits" }
	[ 'refused_keys', 'count(*)' ], [ 'banned_keys', 'count(*) FILTER (WHERE banned)' ]),
  map({ "SELECT '$_->[0]', $_->[1], 'store', $_->[2], 'mode', $_->[3], 'on_error', $_->[4] FROM rl_status()" }
	[ 'settings_info', 1, 'store', 'mode', 'on_error' ],
	map { [ @$_, "''", "''", "''" ] } [ 'shared_memory', 1 ], [ 'redis_up', '(version IS NOT NULL)::int' ],
	[ 'breaker_open', "(breaker <> 'closed')::int" ], [ 'two_masters', '(warning IS NOT NULL)::int' ], [ 'local_keys', 'local_keys' ], [ 'local_keys_max', 'local_max_keys' ],
	[ 'local_entries', 'local_entries' ], [ 'local_entries_max', 'local_max_entries' ],
	[ 'local_evictions_total', 'local_evicted' ], [ 'denial_evictions_total', 'denials_evicted' ],
	[ 'refunds_overdue', 'refunds_overdue' ], [ 'refunds_overdue_seconds', 'coalesce(refunds_overdue_for, 0)' ],
	[ 'local_persistence', "(local_persistence = 'on')::int" ],
	[ 'refunds_sent_late_total', 'refunds_sent_late' ], [ 'refunds_lost_total', 'refunds_lost' ],
	[ 'stat_start_time_seconds', 'extract(epoch FROM stat_since)' ]);

# Checks that Prometheus gets the figures that the session sees, and no others.
sub has_figures
{
	my ($session, $when) = @_;
	my ($there, $shown);

	eval {
		await('the same figures', sub {
			my @rows = map { [ split /\|/, $_, -1 ] } split /\n/, $session->ask($figures);

			$there = { map { my ($name, $value, @labels) = @$_; (series("ratelimit_$name", @labels) => 0 + $value) } @rows };
			sleep 0.1;
			$shown = values_of('{__name__=~"ratelimit_.+", __name__!="ratelimit_collected_time_seconds"}');
			return join(' ', map { "$_ $there->{$_}" } sort keys %$there) eq join(' ', map { "$_ $shown->{$_}" } sort keys %$shown);
		});
	};
	is_deeply($shown, $there, "$when: Prometheus has the figures of the views") or diag $@, logs();
	return;
}

# Returns the state of each alert.
sub states { return map { ($_->{name} => $_->{state}) } @{ api('rules', type => 'alert')->{groups}[0]{rules} }; }

# Calls the code until these alerts fire and no others.
sub alerts_are
{
	my ($what, $load, @names) = @_;
	my %state;

	eval {
		await($what, sub {
			$load->();
			sleep 0.1;
			%state = states();
			return join(' ', sort grep { $state{$_} eq 'firing' } keys %state) eq join(' ', sort @names);
		});
	};
	is($@, '', $what) or diag join "\n", (map { "$_ $state{$_}" } sort keys %state), logs();
	return;
}

#
# Limits and Redis
#

my $none = sub { };
my ($session, $watcher, $local) = map { session($node) } 1 .. 3;
$local->set(store => 'local');
$session->ask(q{SELECT rl_check('order:secret 1', '5/1h', 2) FROM generate_series(1, 3); SELECT rl_check('secret', '5/1h');
	SET ratelimit.mode = shadow; SELECT rl_check('order:secret 2', 'sliding_log 5/1h', 4) FROM generate_series(1, 2); RESET ratelimit.mode;
	SELECT rl_check('pay:secret', '1000000/1h'), rl_check('login:secret', 'sliding_log 1/1h'), rl_ban('login:secret banned', 3600);
	SELECT rl_check('login:secret banned', 'sliding_log 1/1h');});
$local->ask(q{SELECT rl_check('fill:secret', '1000/1h'), rl_check('log:secret', 'sliding_log 100/1h', 20)});
has_figures($watcher, 'before');
alerts_are('no alert fires when all is well', $none);
is_deeply([ sort map { $_->{health} } @{ api('rules')->{groups}[0]{rules} } ], [ ('ok') x keys %{ { states() } } ], 'Prometheus can evaluate all rules');

$node->safe_psql('postgres', 'ALTER DATABASE postgres SET ratelimit.mode = shadow');
alerts_are('alerts of limits and stores fire', sub {
	$redis->cli('CLIENT', 'PAUSE', 50);
	$session->ask(q{SELECT rl_check('pay:secret', '1000000/1h'); SELECT count(rl_check('login:secret', 'sliding_log 1/1h')) FROM generate_series(1, 20)});
	$local->ask(q{SELECT count(rl_check('fill:secret ' || n, '1000/1h')) FROM generate_series(1, 200) n;
		SELECT count(rl_check('many:secret', format('%s/1h', n)::rl_limits, 0)) FROM generate_series(1, 1300) n});
}, qw(RatelimitRefusalStorm RatelimitRedisSlow RatelimitLocalStoreFull RatelimitTooManyScopes RatelimitNotEnforced));
my ($storm) = grep { $_->{labels}{alertname} eq 'RatelimitRefusalStorm' } @{ api('alerts')->{alerts} };
is($storm->{annotations}{summary}, 'The limits sliding_log 1/1h refuse, or in shadow mode would refuse, more than half of the actions in scope "login"', 'the alert names the limits and the scope');
$watcher = session($node);
has_figures($watcher, 'after the storm');
$session->ask('SELECT rl_stat_reset()');
$node->safe_psql('postgres', 'ALTER DATABASE postgres RESET ratelimit.mode');
$watcher = session($node);

# The other alerts resolve meanwhile.
$redis->stop;
my %failing = map { ($_ => session($node)) } qw(error allow deny);
$failing{$_}->set(on_error => $_) foreach sort keys %failing;
alerts_are('alerts of an outage of Redis fire, and the others resolve', sub {
	$_->ask(q{SELECT rl_check('pay:secret', '1000000/1h')}) foreach values %failing;
}, qw(RatelimitRedisDown RatelimitStoreFails));
my %gauge = %{ values_of('{__name__=~"ratelimit_(redis_up|breaker_open)"}') };
is_deeply(\%gauge, { ratelimit_redis_up => 0, ratelimit_breaker_open => 1 }, 'Redis is down, and the breaker is open');
$redis->start;
alerts_are('they resolve when Redis is up', $none);
has_figures($watcher, 'after the outage of Redis');
ok(values_of(qq{sum(max_over_time(ratelimit_actions_total{outcome="$_"}[10m]))})->{''} > 0, "actions were counted as $_") foreach @outcomes;

#
# Labels
#

sub scraped { return $http->get("http://127.0.0.1:$server{exporter}{port}/metrics")->{content}; }

my $metrics = scraped();
like($metrics, qr/^sql_ratelimit_stat\{.*limits="throttle 1000000\/1h".*scope="pay"/m, 'the exporter shows limits and scopes');
unlike($metrics, qr/secret/, 'the exporter shows no key');
isnt($watcher->ask(q{SELECT count(*) FROM rl_denied WHERE key ~ 'secret'}), 0, 'rl_denied shows keys');
my %label = map { my $name = $_; map { ($_ => $name) } @{ api("label/$name/values") } } @{ api('labels') };
is_deeply([ grep { /secret/ } keys %label ], [], 'no label in Prometheus has a key');

#
# The dashboard, and the page
#

my $dashboard = decode_json(slurp_file("$root/monitoring/grafana-dashboard.json"));
my @empty;
my $expressions = 0;
foreach my $panel (@{ $dashboard->{panels} })
{
	foreach my $expression (map { $_->{expr} } @{ $panel->{targets} })
	{
		my $asked = $expression =~ s/\$__rate_interval/3s/gr =~ s/\$host\b/.*/gr;
		my $result = eval { api('query_range', query => $asked, start => $begin, end => time, step => 1)->{result} };

		$expressions++;
		push @empty, "$panel->{title}: $expression" . ($@ ? ": $@" : '')
		  if $asked =~ /\$/ || !grep { $_->[1] ne 'NaN' } map { @{ $_->{values} } } @{ $result || [] };
	}
}
is_deeply(\@empty, [], "each of the dashboard's $expressions expressions has a value");
my ($variable) = map { $_->{definition} // () } @{ $dashboard->{templating}{list} };
my ($metric, $label) = $variable =~ /^label_values\((\w+), (\w+)\)$/;
is_deeply(api("label/$label/values", 'match[]' => $metric), [ '127.0.0.1:' . $node->port ], "the dashboard's variable");

# Returns the names in the first column of the page's table with this header.
sub documented
{
	my ($header) = @_;
	my ($table) = $page =~ /^\| $header \|.*\n((?:\|.*\n)*)/m;

	return [ sort map { /^\| ([^|]*) \|/ ? $1 =~ /`(\w+)`/g : () } split /\n/, $table ];
}

is_deeply(documented('metric'), [ sort grep { /^ratelimit_/ } @{ api('label/__name__/values') } ], 'the page has all metrics');
my %rule = states();
is_deeply(documented('alert'), [ sort keys %rule ], 'the page has all alerts');

#
# PostgreSQL
#

restart_unshared($node);
alerts_are('the alert of missing shared memory fires', $none, 'RatelimitNoSharedMemory');
is_deeply(values_of('{__name__=~"ratelimit_(redis_up|shared_memory)"}'), { ratelimit_redis_up => 1, ratelimit_shared_memory => 0 }, 'Redis is up without shared memory');
unlike(scraped(), qr/metric="(?:local_keys|breaker_open)"/, 'the gauges of shared memory have no values');
$node->stop;
alerts_are('the alert of missing metrics fires', $none, qw(RatelimitNoSharedMemory RatelimitNotMonitored));

delete $node->{ratelimit_path};
$node->append_conf('postgresql.conf', join "\n", preload_setting(), 'ratelimit.local_max_keys = 100');
start_node($node);
$session = session($node);
$session->ask(q{SELECT rl_check('order:secret 3', '5/1h')});
alerts_are('the alerts resolve when PostgreSQL is up', $none);
has_figures($session, 'after a restart');

done_testing();
