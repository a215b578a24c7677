# perl page.pl FILE           prints the input of a psql that runs the SQL blocks of a page
# perl page.pl FILE OUTPUT    compares what this psql printed with the page
#
# test/t/DocPage.pm has the convention of the blocks.
use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/t";

use DocPage;

my ($file, $output) = @ARGV;
my $page = DocPage->new($file);

if (!defined $output) { print $page->script; exit; }

my @printed = $page->outputs(DocPage::slurp($output));
my $wrong = 0;

foreach my $block ($page->commands)
{
	my $printed = shift @printed // '';
	my $right = $page->right($block, $printed) && @printed;

	$wrong++ if !$right;
	print $right ? 'as shown' : 'NOT as shown', ": $file, line $block->{line}\n", $right ? '' : $printed;
}
exit($wrong != 0);
