# Runs the whole test in a network namespace of its own, and with --mount a mount namespace:
#
#   use Namespace '--mount', 'ip link add near type veth peer name far';
#
# The last argument is a command that must succeed there, as a trial. If it does not, the test goes on outside.
# This comes before other modules, because they redirect the output. in_namespace() says where the test is.
package Namespace;

use strict;
use warnings FATAL => 'all';

sub in_namespace { return $ENV{RATELIMIT_NAMESPACE}; }

sub import
{
	my (undef, @options) = @_;
	my $trial = pop @options;
	my @unshare = ('unshare', '--user', '--net', '--map-current-user', '--keep-caps', @options);

	no strict 'refs';
	*{ caller() . '::in_namespace' } = \&in_namespace;
	return if in_namespace() || system("@unshare sh -c '$trial' 2>/dev/null") != 0;
	$ENV{RATELIMIT_NAMESPACE} = 1;
	exec @unshare, $^X, (map { "-I$_" } @INC), $0;
}

1;
