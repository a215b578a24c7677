# test/questions has questions of users: each is answered within two pages, at the anchor
# and by the words that stand there.
#
# Runs once: it reads the pages.
use RatelimitTest;
use DocPage;

my $root = "$FindBin::RealBin/../..";
my %page = map { (substr($_, length("$root/")) => DocPage->new($_)) } glob "$root/*.md $root/docs/*.md $root/src/README.md";
my (%question, %answers, %section);

# Returns the text in one line, without the marks of links and of bold text.
sub words { return $_[0] =~ s/\]\([^)]*\)//gr =~ s/\*\*|\[//gr =~ s/\s+/ /gr; }

foreach my $line (split /\n/, slurp_file("$root/test/questions"))
{
	next if $line =~ /^(?:#|$)/;
	my ($id, $question, $place, @words) = split / \| /, $line;
	my ($name, $anchor) = split /#/, $place // '';
	my $section = $section{ $place // '' } //= $page{ $name // '' } ? words($page{$name}->section($anchor // '') // '') : '';

	isnt(scalar @words, 0, "$id, $place: words are named");
	isnt($section, '', "$id: $place is there");
	foreach my $word (@words) { ok(index($section, words($word)) >= 0, "$id, $place: $word"); }
	is($question{$id} //= $question, $question, "$id: the question is the same at each answer");
	$answers{$id}{ $name // '' } = 1;
}

is(scalar keys %question, 172, 'there are 172 questions');
is_deeply([ grep { keys %{ $answers{$_} } > 2 } sort keys %answers ], [], 'each is answered within two pages');

done_testing();
