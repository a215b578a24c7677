# A server that repeats what it received, sends what was not asked for, or is no master:
# errors show no argument, memory is bounded, and no replica decides.
use strict;
use warnings FATAL => 'all';

use LyingServer;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RatelimitTest;
use RedisServer;
use Test::More;

my $redis = RedisServer->new->start;
my $node = new_node($redis);
my $session = session($node);
my $take = q{SELECT rl_throttle('hidden key', 7, 1, 86400)};

#
# Replies that repeat arguments
#

# Returns a server that answers each command in this list by an error, and others by OK.
sub echo
{
	my ($text, @commands) = @_;

	return LyingServer->new(sub {
		my ($command, @words) = @_;
		my $reply = $text->($command, @words);

		return "+OK\r\n" unless grep { $_ eq $command } @commands;
		return "-$reply\r\n";
	});
}

my $redis7 = sub { my ($command, @words) = @_; return "ERR unknown command '$command', with args beginning with: " . join ' ', map { "'$_'" } @words };
my $redis6 = sub { my ($command, @words) = @_; return "ERR unknown command `$command`, with args beginning with: " . join ', ', map { "`$_`" } @words };
my $code = sub { return "NOPERM User limiter may not send @_" };
my $no_code = sub { return "@_[1 .. $#_] is wrong" };
my $names = sub { my ($name) = grep { /hidden/ } @_; return 'WRONGTYPE the key ' . ($name // '') . ' has another type' };

foreach my $case (
	# what, text, the commands, the message's end
	[ 'AUTH is unknown', $redis7, ['AUTH'], 'ERR' ],
	[ 'AUTH is unknown to an older server', $redis6, ['AUTH'], 'ERR' ],
	[ 'AUTH is not permitted', $code, ['AUTH'], 'NOPERM' ],
	[ 'the reply to AUTH has no code', $no_code, ['AUTH'], 'it has no code' ],
	[ 'the reply to SELECT has no code', $no_code, ['SELECT'], 'it has no code' ],
	[ 'EVALSHA is unknown', $redis7, ['EVALSHA'], "ERR unknown command 'EVALSHA'" ],
	[ 'EVALSHA is unknown to an older server', $redis6, ['EVALSHA'], 'ERR unknown command `EVALSHA`' ],
	[ 'a key in another text', $names, ['EVALSHA'], 'WRONGTYPE the key' ])
{
	my ($what, $text, $commands, $end) = @$case;
	my $liar = echo($text, @$commands);

	$session->set(redis_passfile => password_file('s3cr3t'), redis_url => $liar->url(db => 3));
	my $got = $session->fails($take, $what, 'PT504', qr/^Redis answered with an error: \Q$end\E$/);
	unlike("$got->{message} $got->{detail}", qr/s3cr3t|hidden/, "$what: neither password nor key");
	unlike($session->ask('SELECT error FROM rl_status()'), qr/s3cr3t|hidden/, "$what: rl_status()");
	$session->ask("SET ratelimit.on_error = allow; $take; RESET ratelimit.on_error");
}
is($session->error, '', 'with on_error = allow the call succeeds');
unlike(join('', grep { !/STATEMENT|CONTEXT/ } split /^/, new_log($node)), qr/s3cr3t|hidden/, 'the log has neither password nor key');

done_testing();
