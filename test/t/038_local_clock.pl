# The clock of the local store: it runs while the system is suspended, follows the wall
# clock forward, and never goes back.
#
# Runs once: the clock depends only on the system.
use RatelimitTest;

use constant HOUR => 3_600_000_000;

my $library = preload("$FindBin::RealBin/../clocks.c");
plan skip_all => 'there is no C compiler' unless $library;

# The wall clock, and the time that the system was suspended, in microseconds.
set_clock($_, 0) foreach qw(wall suspended);
my $node = with_clocks($library, sub { return shared_node(RedisServer->new, 'ratelimit.store = local') }, CLOCK => 'wall', SUSPENDED => 'suspended');
my ($session, $other) = (session($node), session($node));
my $take = q{SELECT rl_allow('k', 'sliding_log 1/1h')};
my $wait = q{SELECT retry_after FROM rl_peek('k', 'sliding_log 1/1h')};

$_->ask($take) foreach $session, $other;
is($session->ask($take), 'f', 'the quota is used up');

set_clock(wall => 2 * HOUR);
await('the quota', sub { return $session->ask($take) eq 't' });
is($other->ask($take), 'f', 'the wall clock is set forward: all sessions follow');

set_clock(wall => -10 * HOUR);
cmp_ok($_->ask($wait), '<=', 3600, 'the wall clock is set back: the store is not') foreach $session, $other, session($node);
is($session->ask($take), 'f', 'and the wait goes on');

set_clock(suspended => HOUR);
is($session->ask($take), 't', 'the system was suspended for the rest of the wait');
is($other->ask($take), 'f', 'for all sessions');
cmp_ok($other->ask($wait), '>', 3000, 'and only for that time');

done_testing();
