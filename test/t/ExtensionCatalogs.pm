# The catalogs of the extension: every column of every row that describes an object
# of the extension, its comments, privileges, initial privileges and dependencies,
# with names in place of OIDs.  So two databases can be compared.
package ExtensionCatalogs;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';

our @EXPORT = qw(catalogs differences);

# Reads the catalogs into the table "found".  pg_get_catalog_foreign_keys() tells
# which columns hold OIDs.  Columns that hold a node tree are replaced by the
# definition that they stand for.  Columns that describe a file are left out, and so
# is a number in attoptions that some builds of PostgreSQL count up.
my $read = <<'END';
SET client_min_messages = error;

CREATE FUNCTION pg_temp.name(class oid, object oid, part int DEFAULT 0) RETURNS text LANGUAGE sql AS $$
	SELECT CASE WHEN object = 0 THEN '-' ELSE (SELECT type || ' ' || identity FROM pg_identify_object(class, object, part)) END
$$;

CREATE FUNCTION pg_temp.columns(class regclass) RETURNS text LANGUAGE sql AS $$
	SELECT string_agg(format('(%L, %s)', attname, CASE
		WHEN pktable IS NOT NULL AND is_array
			THEN format('(SELECT string_agg(pg_temp.name(%s, o), '', '' ORDER BY n) FROM unnest(c.%I::oid[]) WITH ORDINALITY u (o, n))', pktable::oid, attname)
		WHEN pktable IS NOT NULL THEN format('pg_temp.name(%s, c.%I)', pktable::oid, attname)
		WHEN atttypid = 'aclitem[]'::regtype
			THEN format('(SELECT string_agg(i::text, '', '' ORDER BY i::text) FROM unnest(c.%I) i)', attname)
		WHEN atttypid = 'pg_node_tree'::regtype
			THEN format('CASE WHEN c.%I IS NOT NULL THEN %s END', attname, CASE attname
				WHEN 'proargdefaults' THEN 'pg_get_expr(c.proargdefaults, 0)'
				WHEN 'prosqlbody' THEN 'pg_get_function_sqlbody(c.oid)'
				WHEN 'ev_action' THEN 'pg_get_ruledef(c.oid)'
				WHEN 'ev_qual' THEN quote_literal('in ev_action')
				WHEN 'typdefaultbin' THEN 'c.typdefault'
				ELSE quote_literal('unknown node tree') END)
		WHEN attname = 'attoptions' THEN '(SELECT string_agg(o, '', '') FROM unnest(c.attoptions) o WHERE o NOT LIKE ''pg_attver=%'')'
		ELSE format('c.%I::text', attname) END), ', ')
	FROM pg_attribute a
		LEFT JOIN pg_get_catalog_foreign_keys() ON fktable = class AND fkcols = ARRAY[attname::text] AND pkcols = '{oid}'
	WHERE attrelid = class AND attnum > 0
		AND attname NOT IN ('oid', 'relfilenode', 'relpages', 'reltuples', 'relallvisible', 'relallfrozen', 'relfrozenxid', 'relminmxid')
$$;

CREATE TEMP TABLE made AS
	WITH RECURSIVE made (class, object) AS (
		SELECT tableoid, oid FROM pg_extension WHERE extname = 'ratelimit'
		UNION
		SELECT d.classid, d.objid FROM pg_depend d JOIN made ON d.refclassid = class AND d.refobjid = object AND d.deptype IN ('e', 'i', 'a'))
	SELECT * FROM made;

CREATE TEMP TABLE found (object text, property text, value text);
DO $$
DECLARE
	catalog regclass;
BEGIN
	FOR catalog IN SELECT DISTINCT class FROM made LOOP
		EXECUTE format('INSERT INTO found SELECT pg_temp.name(class, object), v.*
			FROM %s c JOIN made ON class = c.tableoid AND object = c.oid CROSS JOIN LATERAL (VALUES %s) v',
			catalog, pg_temp.columns(catalog));
	END LOOP;
	EXECUTE format('INSERT INTO found SELECT pg_temp.name(class, object, attnum), v.*
		FROM pg_attribute c JOIN made ON class = ''pg_class''::regclass AND object = attrelid
			CROSS JOIN LATERAL (VALUES %s) v WHERE attnum > 0 AND NOT attisdropped', pg_temp.columns('pg_attribute'));
END $$;
INSERT INTO found SELECT pg_temp.name(class, object, objsubid), 'comment', description
	FROM pg_description JOIN made ON class = classoid AND object = objoid;
INSERT INTO found SELECT pg_temp.name(class, object, objsubid), 'security label of ' || provider, label
	FROM pg_seclabel JOIN made ON class = classoid AND object = objoid;
INSERT INTO found SELECT pg_temp.name(class, object, objsubid), 'initial privileges',
		(SELECT string_agg(i::text, ', ' ORDER BY i::text) FROM unnest(initprivs) i)
	FROM pg_init_privs JOIN made ON class = classoid AND object = objoid;
INSERT INTO found SELECT pg_temp.name(class, object, objsubid),
		'dependency on ' || pg_temp.name(refclassid, refobjid, refobjsubid), string_agg(DISTINCT deptype::text, ', ')
	FROM pg_depend JOIN made ON class = classid AND object = objid GROUP BY 1, 2;
INSERT INTO found SELECT pg_temp.name(class, object), 'kind of relation that this test does not know', relkind::text
	FROM pg_class c JOIN made ON class = c.tableoid AND object = c.oid WHERE relkind NOT IN ('v', 'c');

SELECT object || E'\t' || property || E'\t' || coalesce(translate(value, E'\t\n', '  '), 'NULL') FROM found;
END

# Returns the extension's objects in a database: a hash by name, and for each object a
# hash of values by property.
sub catalogs
{
	my ($node, $database) = @_;
	my %objects;

	foreach my $line (split /\n/, $node->safe_psql($database, $read))
	{
		my ($object, $property, $value) = split /\t/, $line;

		die "$object, $property: $value" if $value eq 'unknown node tree' || $property =~ /does not know$/;
		die "$object has two values of $property" if exists $objects{$object}{$property};
		$objects{$object}{$property} = $value;
	}
	die "$database has no extension" unless %objects;
	return \%objects;
}

# Compares the catalogs of an extension that was upgraded, or restored, with those of
# one that was installed.  Returns the differences as lines, sorted.
sub differences
{
	my ($got, $installed) = @_;
	my (%all, @differences) = (%$got, %$installed);

	foreach my $object (sort keys %all)
	{
		my ($has, $needs) = ($got->{$object}, $installed->{$object});

		if (!$has || !$needs)
		{
			push @differences, $object . ($has ? ' is left over' : ' is missing');
			next;
		}
		foreach my $property (sort keys %{ { %$has, %$needs } })
		{
			my ($is, $must_be) = map { $_->{$property} // 'none' } $has, $needs;

			push @differences, "$object: $property is $is, must be $must_be" if $is ne $must_be;
		}
	}
	return @differences;
}

1;
