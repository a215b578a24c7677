# A page of the documentation: its headings, links and fenced blocks.
#
# The convention of the pages (070_docs.pl checks it):
#
# - A ```sql block runs in psql, one session for a page, blocks in the order of
#   the page, in a new database named shop, on a server that preloads the
#   library, as superuser.  The database has the extension, unless the page
#   itself creates it.  127.0.0.1:6379 in a block means the test's Redis.
# - A block without a language that follows a ```sql block, with only blank lines
#   between, is the output: all that psql -q prints, errors included, and their context
#   only in README.md.  Without such a block the statements must succeed; their output is
#   not compared.
# - In the output, each of the following matches any other of its kind: a time
#   stamp, an address with a port, a number with a decimal point (so a duration
#   or a version).  Write 1.998 where a duration varies, and 2 where it does
#   not.  Runs of blanks and of dashes match runs of any length.  The hint about
#   candidate functions is that of PostgreSQL 15 to 18; it has a detail from 19 on.
# - A block of any other language (text, sh, ...) is not run and not compared.
package DocPage;

use strict;
use warnings FATAL => 'all';

my $border = '=== the next block ===';

sub slurp
{
	my ($file) = @_;

	open my $in, '<', $file or die "$file: $!\n";
	local $/;
	return scalar <$in>;
}

# Reads a page.  A block is a hash: language, text, line (of its first line),
# and output, the index of the block that shows its output, if there is one.
sub new
{
	my ($class, $file) = @_;
	my (@blocks, @headings, @starts, $block, $prose, $gap);
	my @lines = split /\n/, slurp($file);
	my $n = 0;

	foreach my $line (@lines)
	{
		$n++;
		if ($block)
		{
			if ($line eq '```') { push @blocks, $block; $block = undef; $gap = ''; }
			else { $block->{text} .= "$line\n"; }
		}
		elsif ($line =~ /^```(\w*)$/)
		{
			$block = { language => $1, text => '', line => $n + 1 };
			$blocks[-1]{output} = @blocks
			  if $1 eq '' && @blocks && $blocks[-1]{language} eq 'sql' && $gap !~ /\S/;
		}
		else
		{
			die "$file, line $n: a block that is not at the line's start, or with options\n" if $line =~ /^\s*```/;
			if ($line =~ /^(#+) +(.*?) *$/)
			{
				push @headings, $2;
				push @starts, [ length $1, $n ];
			}
			$prose .= "$line\n";
			$gap .= $line;
		}
	}
	die "$file: a block does not end\n" if $block;
	return bless { file => $file, lines => \@lines, blocks => \@blocks, headings => \@headings, starts => \@starts, prose => $prose }, $class;
}

# Returns the blocks that run.
sub commands { my ($self) = @_; return grep { $_->{language} eq 'sql' } @{ $self->{blocks} }; }

# Returns the input of a psql that runs the blocks, in a database without the extension.
sub script
{
	my ($self) = @_;
	my @texts = map { $_->{text} } $self->commands;
	my $creates = grep { /CREATE EXTENSION (IF NOT EXISTS )?ratelimit\b/ } @texts;

	return join '', $self->{file} =~ m{(^|/)README\.md$} ? () : "\\set SHOW_CONTEXT never\n",
	  $creates ? () : "CREATE EXTENSION ratelimit;\n\\connect\n", map { "$_\n\\echo '$border'\n" } @texts;
}

# Returns the outputs of the blocks, of all that psql has printed for script().  If it
# ran all blocks, an empty text follows.
sub outputs { my ($self, $printed) = @_; return split /^\Q$border\E\n/m, $printed, -1; }

# Returns the output that the page shows for a block, or undef.
sub shown
{
	my ($self, $block) = @_;

	return defined $block->{output} ? $self->{blocks}[ $block->{output} ]{text} : undef;
}

# Returns the targets of all links and pictures.
sub links
{
	my ($self) = @_;
	my $text = $self->{prose} =~ s/`[^`\n]*`//gr;

	return $text =~ /\]\(([^()\s]+)\)/g, $text =~ /(?:src|href)="([^"]+)"/g;
}

# Returns the anchors that GitHub makes of the headings.
sub anchors
{
	my ($self) = @_;
	my (%seen, @anchors);

	foreach my $heading (@{ $self->{headings} })
	{
		my $anchor = lc $heading =~ s/\[([^\]]*)\]\([^)]*\)/$1/gr;

		$anchor =~ s/[^\w\- ]//g;
		$anchor =~ tr/ /-/;
		my $again = $seen{$anchor}++;
		push @anchors, $again ? "$anchor-$again" : $anchor;
	}
	return @anchors;
}

# Returns the text of the section with this anchor, with those below it, or undef.
sub section
{
	my ($self, $anchor) = @_;
	my @anchors = $self->anchors;
	my ($first) = grep { $anchors[$_] eq $anchor } 0 .. $#anchors;
	my @lines = @{ $self->{lines} };

	return if !defined $first;
	my ($level, $line) = @{ $self->{starts}[$first] };
	my ($next) = grep { $_->[0] <= $level } @{ $self->{starts} }[ $first + 1 .. $#anchors ];
	return join "\n", @lines[ $line - 1 .. ($next ? $next->[1] - 2 : $#lines) ];
}

# Returns the page's text with the outputs, in the order of commands(), put in
# where the page shows another output.
sub with_outputs
{
	my ($self, @outputs) = @_;
	my @lines = @{ $self->{lines} };

	foreach my $block (reverse $self->commands)
	{
		my $output = pop @outputs;
		my $old = defined $block->{output} ? $self->{blocks}[ $block->{output} ] : next;

		splice @lines, $old->{line} - 1, $old->{text} =~ tr/\n//, split /\n/, $output =~ s/ +$//gmr
		  unless matches($old->{text}, $output);
	}
	return join "\n", @lines, '';
}

# Replaces the parts of an output that vary by the names of their kinds.
sub plain
{
	my ($text) = @_;

	$text =~ s/\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?(?:[+-]\d\d(?::\d\d)?)?/<time>/g;
	$text =~ s/\b\d+(?:\.\d+){3}:\d+\b/<address>/g;
	$text =~ s/\b\d+(?:\.\d+)+(?:e-\d+)?\b/<number>/g;
	$text =~ s/^DETAIL: +(Could not choose a best candidate function\.)\nHINT: +/HINT:  $1 /gm;
	$text =~ s/-{2,}/--/g;
	$text =~ s/[ \t]+/ /g;
	$text =~ s/ *\n/\n/g;
	$text =~ s/^ //gm;
	$text =~ s/\A\n+|\n+\z//g;
	return $text;
}

# Returns true if the output is that of the page, or without an error where the page
# shows none.
sub right
{
	my ($self, $block, $printed) = @_;
	my $shown = $self->shown($block);

	return defined $shown ? matches($shown, $printed) : $printed !~ /^(?:ERROR|FATAL|PANIC):|^\\|invalid command/m;
}

# Returns true if psql has printed the output that the page shows.
sub matches
{
	my ($shown, $printed) = @_;

	return plain($shown) eq plain($printed);
}

1;
