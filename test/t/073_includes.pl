# The sources are arranged as src/README.md says: includes and calls between files point one way
# and have no cycle, a header has the functions of its file, and functions are short.
#
# Runs once: it reads only the sources and the names in their objects.
use strict;
use warnings FATAL => 'all';

use File::Find;
use FindBin;
use Test::More;
use Text::Tabs;

$tabstop = 4;

my $root = "$FindBin::RealBin/../..";

# A file may include files of its own level and of lower levels.  The headers of
# level 0, and what they declare, are for all files.
my %level = ('src/sql' => 5, 'src' => 4, 'src/redis' => 3, 'src/shared' => 2, 'src/algorithm' => 1);
my %for_all = map { ("src/$_" => 1) } qw(ratelimit.h settings.c error.h error.c key_text.h key_text.c shared/clock.h shared/clock.c);

# Returns the paths of the files in a folder of the root that match.
sub files
{
	my ($folder, $pattern) = @_;
	my @files;

	find({ no_chdir => 1, wanted => sub { push @files, substr $_, length "$root/" if /$pattern/ && -f } }, "$root/$folder");
	return sort @files;
}

sub lines
{
	my ($file) = @_;

	open my $in, '<', "$root/$file" or die "$file: $!";
	my @lines = <$in>;
	close $in;
	return @lines;
}

sub level
{
	my ($file) = @_;
	my ($folder) = $file =~ m{^(.*)/};

	return $for_all{$file} ? 0 : $level{$folder} // die "$folder has no level";
}

# Checks that there are no problems; shows all of them.
sub none { my ($problems, $name) = @_; return is(join("\n", @$problems), '', $name); }

# Returns the functions that have more than 100 lines.  A function's body begins with a
# line "{" and ends with a line that begins with "}".
sub long_functions
{
	my (@files) = @_;
	my @long;

	foreach my $file (@files)
	{
		my @lines = lines($file);
		my ($first, $name);

		foreach my $n (0 .. $#lines)
		{
			($first, $name) = ($n, $lines[ $n - 1 ] =~ s/\s+$//r) if $lines[$n] =~ /^\{\s*$/ && $lines[ $n - 1 ] !~ /^typedef /;
			next unless defined $first && $lines[$n] =~ /^\}/;
			my $count = $n - $first + 1;

			push @long, "$file, line $first: $name has $count lines" if $count > 100;
			undef $first;
		}
	}
	return \@long;
}

#
# Includes
#

# The headers that each file includes.  A path is relative to the file's folder or to src.
my @c_files = files('src', qr/(?<!\.lua)\.[ch]$/);
my %is_file = map { ($_ => 1) } @c_files;
my %includes;

foreach my $file (@c_files)
{
	my ($folder) = $file =~ m{^(.*)/};

	foreach my $name (map { /^\s*#\s*include\s+"([^"]+)"/ } lines($file))
	{
		my ($header) = grep { $is_file{$_} } "$folder/$name", "src/$name";

		push @{ $includes{$file} }, $header if $header;
	}
}
cmp_ok(scalar @c_files, '>', 50, 'the sources: ' . @c_files . ' files');
cmp_ok(scalar keys %includes, '>', 50, 'files with includes: ' . keys %includes);

my @upwards = map { my $file = $_; map { "$file includes $_" } grep { level($_) > level($file) } @{ $includes{$file} } } sort keys %includes;
none(\@upwards, 'includes point from sql to src, redis, shared and algorithm');

# Returns the cycles with which paths from a file end; "next" has the next files of each
# file, and "done" those that need not be followed again.
sub cycles
{
	my ($next, $done, @path) = @_;
	my $file = $path[-1];
	my ($begin) = grep { $path[$_] eq $file } 0 .. $#path - 1;

	return join ' > ', @path[ $begin .. $#path ] if defined $begin;
	return if $done->{$file}++;
	return map { cycles($next, $done, @path, $_) } @{ $next->{$file} || [] };
}

# Returns the cycles of a graph.
sub cycles_of
{
	my ($next) = @_;
	my %done;

	return [ map { cycles($next, \%done, $_) } sort keys %$next ];
}

none(cycles_of(\%includes), 'includes have no cycle');

#
# Calls
#

# Returns the files whose functions each object calls, and whose variables it uses, each with one
# of their names; not through a table of functions, which is initialized.
sub calls
{
	my (@objects) = @_;
	my (%file_of, %wants, %calls);

	# One program for all of them.
	foreach (`cd '$root' && nm -A @objects`)
	{
		my ($object) = /^([^:]*):/;

		$file_of{$1} = $object if / [TBC] (\w+)$/;
		push @{ $wants{$object} }, $1 if / U (\w+)$/;
	}
	foreach my $object (@objects)
	{
		$calls{$object}{ $file_of{$_} } = $_ foreach grep { $file_of{$_} } @{ $wants{$object} };
	}
	return (\%calls, \%file_of);
}

my ($calls, $file_of) = calls(grep { $is_file{s/o$/c/r} } files('src', qr/\.o$/));
cmp_ok(scalar keys %$calls, '>', 50, 'objects: ' . keys %$calls);
none(cycles_of({ map { ($_ => [ sort keys %{ $calls->{$_} } ]) } keys %$calls }), 'no files call each other in a circle');

# The functions and variables of headers for all are in files for all.  Raising an error needs its report.
my @high;
foreach my $from (sort keys %$calls)
{
	push @high, map { "$from uses $calls->{$from}{$_} of $_" }
	  grep { level(s/o$/c/r) > level($from =~ s/o$/c/r) && $calls->{$from}{$_} ne 'rl_raise' } sort keys %{ $calls->{$from} };
}
none(\@high, 'calls point from sql to src, redis, shared and algorithm');

# What a header for all declares is in its own file.
my @astray;
foreach my $header (qw(error.h key_text.h shared/clock.h))
{
	push @astray, grep { $_ ne 'rl_raise' && ($file_of->{$_} // '') ne "src/$header" =~ s/h$/o/r } map { /^(?:pg_noreturn )?extern .*?\b(rl_\w+)\(/ } lines("src/$header");
}
none(\@astray, 'the headers for all have the functions of their own files');

#
# Lengths
#

none(long_functions(@c_files), 'no function of the sources has more than 100 lines');
none(long_functions(files('test', qr/\.(?:c|pl|pm)$/)), 'no function of the tests has more than 100 lines');

# The text of a message stays on one line, so that a search finds it.
my @wide;
foreach my $file (@c_files)
{
	my $n = 0;

	foreach my $line (lines($file)) { $n++; push @wide, "$file, line $n" if length(expand($line)) > 111 && $line !~ /".{40}/; }
}
none(\@wide, 'no line of the sources has more than 110 columns');

done_testing();
