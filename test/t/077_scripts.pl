# luacheck finds no fault in a script as Redis gets it, nor an open block in a part.  The shell scripts
# say what they do, and find their servers at the end.  script/mutate can make its edits.
#
# Runs once: it reads only the scripts.
use strict;
use warnings FATAL => 'all';

use File::Temp;
use FindBin;
use Test::More;

my $root = "$FindBin::RealBin/../..";

plan skip_all => 'there is no luacheck' if system('command -v luacheck >/dev/null');

# Returns what luacheck says of texts, by name.  Options can leave out warnings.
sub faults
{
	my ($texts, @options) = @_;
	my $folder = File::Temp->newdir;

	foreach my $name (keys %$texts)
	{
		open my $out, '>', "$folder/$name.lua" or die "$name: $!";
		print $out $texts->{$name};
		close $out;
	}
	return scalar qx(cd $folder && luacheck . --config '$root/.luacheckrc' --no-cache --formatter plain --codes @options 2>&1);
}

like(faults({ unused => 'local function never_called() return unknown end' }), qr/W211.*W113/s, 'luacheck finds faults');
like(faults({ open => "if x then\n" }, '--only 0'), qr/E011/, 'luacheck finds an open block');

# The scripts, in the header for C.
my @parts = glob "$root/src/{algorithm,redis}/*.lua";
my @scripts = glob "$root/src/redis/scripts/*.lua";
my $header = qx(awk -v parts='@parts' -f '$root/src/parts.awk' @scripts);
my %script;

while ($header =~ /^RlScript rl_(\w+)_script = \{\.source =\n((?:".*\\n"\n)+)\};/mg)
{
	$script{$1} = join '', map { s/^"|\\n"$//gr =~ s/\\(["\\])/$1/gr . "\n" } split /\n/, $2;
}
is(scalar keys %script, scalar @scripts, @scripts . ' scripts');
is(faults(\%script), '', 'the scripts have no fault');

# The awk of macOS and the BSDs.
SKIP:
{
	skip 'there is no original-awk', 1 if system('command -v original-awk >/dev/null');
	is(scalar qx(original-awk -v parts='@parts' -f '$root/src/parts.awk' @scripts 2>&1), $header, "Kernighan's awk makes the same of them");
}

# Returns a script as Redis gets it, and what the composer says against it.
sub composed
{
	my ($lua) = @_;
	my $file = File::Temp->new;

	print $file $lua;
	close $file;
	my $text = qx(awk -v parts='@parts' -v plain=1 -f '$root/src/parts.awk' <$file 2>&1);
	return ($text, $? == 0);
}

# Returns many scripts by name as Redis gets them.  One shell composes them all.
sub all_composed
{
	my ($scripts) = @_;
	my $folder = File::Temp->newdir;
	my %composed;

	foreach my $name (keys %$scripts)
	{
		open my $out, '>', "$folder/$name" or die "$name: $!";
		print $out $scripts->{$name};
		close $out;
	}
	my $failed = qx(cd '$folder' && for name in *; do awk -v parts='@parts' -v plain=1 -f '$root/src/parts.awk' <\$name >\$name.composed || echo \$name; done 2>&1);
	die $failed if $failed;
	foreach my $name (keys %$scripts)
	{
		open my $in, '<', "$folder/$name.composed" or die "$name: $!";
		$composed{$name} = join '', <$in>;
	}
	return %composed;
}

foreach my $case ([ 'load', 'several parts load' ], [ 'unknown', 'no part unknown' ], [ 'clock reset_of', 'part reset_of reads l, which no line above sets' ],
	[ 'load of token_bucket', 'part load reads value, which no line above sets' ],
	[ 'made of each', 'made of each reads algorithm, which no line above sets' ])
{
	my ($text, $succeeds) = composed("--@ $case->[0]\n");

	ok(!$succeeds, "a script cannot name $case->[0] alone");
	like($text, qr/: $case->[1]$/m, 'and the error says why');
}

# Each file by itself, and each part of it.
my (%part, %function);
my $templates = '';

foreach my $file (@parts, @scripts)
{
	open my $in, '<', $file or die "$file: $!";
	my $lua = join '', <$in>;
	close $in;
	my ($name) = $file =~ m{([^/]+)[.]lua$};

	$part{$name} = $lua;
	my @open;
	foreach my $line (split /^/, $lua)
	{
		if ($line =~ /^ *--< (\w+)/) { push @open, $1; }
		elsif ($line =~ /^ *-->$/) { pop @open; }
		else { $part{"$name.$_"} .= $line foreach @open; }
	}

	# As a function, a part reads its parameters and no other variable, and sets what it returns.
	while ($lua =~ /^ *--< (\w+)[\w ]*(?:\((.*?)\)(?: -> (.*))?)?$/mg)
	{
		my ($part, $reads, $sets) = ($1, $2, $3 // '');

		$templates .= " $name.$part" unless defined $reads;
		next unless defined $reads;
		my $own = join ', ', grep { ", $reads, " !~ /, $_, / } split /, /, $sets;
		$function{"$name.$part"} = "local hash, call, now, real, least = ...\n" . ($own ? "local $own\n" : '')
			  . "return function($reads)\n--@ $part of $name\nreturn $sets\nend\n";
	}
}
my %signed = all_composed(\%function);
cmp_ok(scalar keys %signed, '>', 50, keys(%signed) . ' parts say what they read and set');
is(faults(\%signed, '--only 111 112 113 212 221'), '', 'and that is true');
like($templates, qr/^( (check|list|reserved|settle_simple|single)\.\w+)+$/, 'only templates do not say it');
cmp_ok(scalar keys %part, '>', 60, keys(%part) . ' files and parts');
is(faults(\%part, '--only 0'), '', 'no file and no part has an open block');

#
# The shell scripts
#

# Each says what it does, and does nothing else.
foreach my $name (qw(bench chroot count demo fuzz lua mutate old_release package pairs plots prove soak test volume))
{
	my $said = qx('$root/script/$name' --help 2>&1);

	is($?, 0, "script/$name --help succeeds");
	like($said, qr{\A(?:usage: )?script/$name\b}, 'and says how it is called');
}

# The files have the texts that script/mutate replaces.
{
	my @edits = split /\n/, qx('$root/script/mutate' --list 2>&1);

	is($?, 0, 'each edit of test/mutations can be made') or diag $edits[-1];
	cmp_ok(scalar @edits, '>', 80, scalar(@edits) . ' edits');
}

# Their end looks for servers among all processes of the machine, without a program for each process.
{
	my $folder = File::Temp->newdir;
	my ($sleep) = grep { -x } '/usr/bin/sleep', '/bin/sleep';

	symlink $sleep, "$folder/redis-fake" or die "no link: $!";
	mkdir "$folder/data" or die "no folder: $!";
	my $found = qx(bash -c '
		. "$root/script/lib.sh"
		trap - EXIT
		readlink() { echo "readlink was called" >>$folder/called; command readlink "\$@"; }
		T=$folder
		cd $folder/data
		exec -a redis-fake ../redis-fake 600 &
		cd /
		until [[ \$(servers) ]]; do sleep 0.1; done
		[[ \$(servers) == "\$! redis-fake" ]] && echo found
		kill \$!
		cat $folder/called 2>/dev/null');

	is($found, "found\n", 'a server in the folder of a script is found by a single program');
}

done_testing();
