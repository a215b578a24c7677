# docs/postgrest.md, and the HTTP answer to each kind of limit in each case.  The test
# plays PostgREST by its rules: a request is a transaction of the role authenticator,
# a GET is read-only, the SQLSTATEs PTxyz and PGRST become statuses, and
# response.headers is sent only if the transaction commits.  It reads JSON as strictly
# as PostgREST does.
#
# RATELIMIT_PAGES_TO names a folder to which the page is written with the answers.
#
# Runs once in a suite: PostgREST talks to PostgreSQL.
use RatelimitTest;
use DocPage;
use JSON::PP;

my $json = JSON::PP->new->allow_nonref;
my %reasons = (200 => 'OK', 201 => 'Created', 413 => 'Request Entity Too Large', 429 => 'Too Many Requests',
	500 => 'Internal Server Error', 504 => 'Gateway Timeout');
my %order = ('RateLimit-Policy' => 0, 'RateLimit' => 1, 'Retry-After' => 2);
my $redis = RedisServer->new->start;

# The time is fixed, so that seconds are exact.
my $node = shared_node($redis, "ratelimit.debug_now = '1800000000000000'");

$node->safe_psql('postgres', 'CREATE DATABASE shop');

# The sessions of the superuser and of PostgREST, which has a new backend for each request.
my %session;
sub in_shop
{
	my ($sql, $user) = @_;
	my $session = $session{ $user // '' } //= session($node, 'shop', $user);
	my $output = $session->ask($sql);

	die $session->error if !$user && $session->error =~ /ERROR:/;
	return ($output, $session->error);
}

# Returns true if the value is a string of JSON.
sub is_text { my ($value) = @_; return defined $value && !ref $value && $json->encode($value) =~ /^"/; }

# Returns true if PostgREST accepts message and detail of an error with SQLSTATE PGRST.
sub is_accepted
{
	my ($body, $answer) = @_;

	return ref $body eq 'HASH' && ref $answer eq 'HASH' && ref $answer->{headers} eq 'HASH'
	  && defined $answer->{status} && !is_text($answer->{status}) && $answer->{status} =~ /^\d{3}$/
	  && is_text($body->{code}) && is_text($body->{message})
	  && !grep({ defined $_ && !is_text($_) } @$body{qw(details hint)})
	  && !grep({ !is_text($_) } values %{ $answer->{headers} });
}

# Returns the answer to an error that psql shows with VERBOSITY verbose.
sub error_answer
{
	my ($text) = @_;
	my ($state, $message) = $text =~ /^(?:psql:\S+ )?ERROR:  (\w{5}): (.*)$/m or die "no error: $text";
	my ($details) = $text =~ /^DETAIL:  (.*)$/m;
	my ($hint) = $text =~ /^HINT:  (.*)$/m;

	return { status => $1, reason => $message, headers => {},
		body => { code => $state, message => $message, details => $details, hint => $hint } }
	  if $state =~ /^PT(\d{3})$/;
	my ($body, $answer) = map { scalar eval { $json->decode($_ // '') } } $message, $details;
	return { status => 500, reason => $reasons{500}, headers => {}, body => { code => $state, message => $message } }
	  if $state ne 'PGRST' || !is_accepted($body, $answer);
	is(join(' ', sort keys %$body), 'code details hint message', 'the body has its four members');
	return { status => $answer->{status}, reason => $reasons{ $answer->{status} }, headers => $answer->{headers}, body => $body };
}

# Returns the header fields of response.headers.
sub response_headers
{
	my ($text) = @_;
	my $list = $json->decode($text || '[]');

	is(scalar(grep { keys %$_ != 1 || !is_text(values %$_) } @$list), 0, 'each header is an object of one string');
	return { map { %$_ } @$list };
}

# Plays one request: POST or GET, a table or rpc/function, the row or the arguments, the
# claims of the token, and the client's address.  Returns status, reason, headers and body
# of the answer.
sub answer
{
	my ($request) = @_;
	my ($method, $path, $arguments, $claims, $address) = $request =~ m!^(GET|POST) /(\S+)(?: (\{.*?\}))?(?: as (\{.*\}))?(?: from (\S+))?$!
	  or die "no request: $request";
	my %row = %{ $json->decode($arguments // '{}') };
	my @names = sort keys %row;
	my ($function) = $path =~ m!^rpc/(\w+)$!;
	my $sql = $function ? "SELECT $function(" . join(', ', map { "$_ => '$row{$_}'" } @names) . ')'
	  : $method eq 'GET' ? "SELECT * FROM $path"
	  : "INSERT INTO $path (" . join(', ', @names) . ') VALUES (' . join(', ', map { "'$row{$_}'" } @names) . ')';
	my $mode = $method eq 'GET' ? 'READ ONLY' : 'READ WRITE';

	# The client wrote the first address itself, and the proxy added the last.
	my $headers = $json->encode($address ? { 'x-forwarded-for' => "192.0.2.1, $address" } : {});

	$claims //= '{}';
	my ($stdout, $stderr) = in_shop(<<"SQL", 'authenticator');
\\connect
SELECT coalesce(current_setting('pgrst.db_pre_request', true), '') AS gate \\gset
SELECT :'gate' <> '' AS has_gate \\gset
BEGIN TRANSACTION $mode;
SET LOCAL ROLE web_user;
SELECT set_config('request.method', '$method', true), set_config('request.jwt.claims', '$claims', true),
	set_config('request.headers', '$headers', true) \\g /dev/null
\\if :has_gate
SELECT :gate() \\g /dev/null
\\endif
$sql \\g /dev/null
SELECT current_setting('response.headers', true);
COMMIT;
SQL
	return error_answer($stderr) if $stderr =~ /ERROR:/;
	my $status = $method eq 'POST' && !$function ? 201 : 200;
	return { status => $status, reason => $reasons{$status}, headers => response_headers($stdout) };
}

# Returns the answer as the page shows it.  The order of a body's members is fixed.
sub shown
{
	my ($answer) = @_;
	my ($headers, $body) = @$answer{qw(headers body)};
	my $text = "HTTP/1.1 $answer->{status} $answer->{reason}\n";

	$text .= "$_: $headers->{$_}\n" foreach sort { $order{$a} <=> $order{$b} } keys %$headers;
	$text .= "\n{" . join(', ', map { qq("$_": ) . $json->encode($body->{$_}) } qw(code message details hint)) . "}\n" if $body;
	return $text;
}

#
# The page
#

my $page = DocPage->new("$FindBin::RealBin/../../docs/postgrest.md");
my @blocks = @{ $page->{blocks} };
my @lines = split /\n/, slurp_file($page->{file});
my @changed;

foreach my $i (0 .. $#blocks)
{
	my $block = $blocks[$i];

	in_shop($block->{text}) if $block->{language} eq 'sql';
	next unless $block->{language} eq 'http';
	my @answers = map { shown(answer($_)) } split /\n/, $block->{text};
	my $next = $blocks[ $i + 1 ];

	is($answers[-1], $next->{text}, "docs/postgrest.md, line $block->{line}: the answer");
	push @changed, [ $next, $answers[-1] ] if $answers[-1] ne $next->{text};
}
if ($ENV{RATELIMIT_PAGES_TO})
{
	splice @lines, $_->[0]{line} - 1, $_->[0]{text} =~ tr/\n//, split /\n/, $_->[1] foreach reverse @changed;
	unlink "$ENV{RATELIMIT_PAGES_TO}/postgrest.md";
	append_to_file("$ENV{RATELIMIT_PAGES_TO}/postgrest.md", join "\n", @lines, '');
}

#
# Each kind of limit in each case
#

in_shop(q{
	CREATE TABLE by_trigger (key text, quota integer);
	CREATE TABLE by_policy (key text, quota integer);
	CREATE TABLE plain (n integer);
	GRANT SELECT, INSERT ON by_trigger, by_policy, plain TO web_user;
	CREATE TRIGGER by_trigger BEFORE INSERT ON by_trigger
		FOR EACH ROW EXECUTE FUNCTION ratelimit.rl_enforce('trigger:{key}', 'sliding_log 5/1h', 'quota={quota}');
	CREATE FUNCTION by_function(kind text, key text, quota bigint) RETURNS boolean
		LANGUAGE plpgsql SECURITY DEFINER SET search_path = ratelimit, public, pg_temp AS $$
	BEGIN
		PERFORM rl_enforce(rl_key(kind, key), 'sliding_log 5/1h', quota);
		RETURN true;
	END $$;
	ALTER TABLE by_policy ENABLE ROW LEVEL SECURITY;
	CREATE POLICY paced ON by_policy FOR INSERT TO web_user WITH CHECK (by_function('policy', key, quota));
	CREATE FUNCTION by_gate() RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		claims json := current_setting('request.jwt.claims')::json;
	BEGIN
		PERFORM by_function('gate', claims->>'key', (claims->>'quota')::bigint);
	END $$;
	ALTER ROLE authenticator RESET ALL;
});

my %request = (
	trigger => 'POST /by_trigger {"key": "%s", "quota": %d}',
	function => 'POST /rpc/by_function {"kind": "function", "key": "%s", "quota": %d}',
	policy => 'POST /by_policy {"key": "%s", "quota": %d}',
	gate => 'GET /plain as {"key": "%s", "quota": %d}');
my @headers = ('RateLimit', 'RateLimit-Policy');
my %cases = (
	allowed => [ 5, qr/^20[01]$/ ],
	refused => [ 1, qr/^429$/, 'PT429', @headers, 'Retry-After' ],
	large => [ 6, qr/^413$/, 'PT413', @headers ],
	banned => [ 1, qr/^429$/, 'PT429', @headers, 'Retry-After' ],
	failed => [ 1, qr/^504$/, 'PT504', 'Retry-After' ]);

foreach my $format (qw(postgrest sql))
{
	in_shop("ALTER ROLE authenticator SET ratelimit.error_format = '$format'");
	foreach my $kind (qw(trigger function policy gate))
	{
		in_shop('ALTER ROLE authenticator '
			. ($kind eq 'gate' ? q{SET pgrst.db_pre_request = 'public.by_gate'} : 'RESET pgrst.db_pre_request'));
		foreach my $case (qw(allowed refused large banned failed))
		{
			my $key = $case eq 'allowed' || $case eq 'refused' ? $format : "$format $case";
			my ($quota, $status, $code, @expected) = @{ $cases{$case} };
			my $name = "$format, $kind, $case";

			in_shop("SELECT ratelimit.rl_ban(ratelimit.rl_key('$kind', '$key'), 60)") if $case eq 'banned';
			in_shop(q{ALTER ROLE authenticator SET ratelimit.redis_url = 'redis://127.0.0.1:1'}) if $case eq 'failed';
			my $answer = answer(sprintf $request{$kind}, $key, $quota);
			in_shop('ALTER ROLE authenticator RESET ratelimit.redis_url');

			like($answer->{status}, $status, "$name: the status") or diag shown($answer);
			is($answer->{body} && $answer->{body}{code}, $code, "$name: the code in the body");
			is(join(' ', sort keys %{ $answer->{headers} }), $format eq 'sql' ? '' : join(' ', @expected), "$name: the header fields");
			unlike($answer->{reason}, qr/\Q$key\E/, "$name: the reason phrase has no key") if $key =~ / /;
		}
	}
}

done_testing();
