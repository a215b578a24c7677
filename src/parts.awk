# Prints scripts as C variables: <name>.lua is rl_<name>_script; with -v plain=1 as Redis gets
# them, without comments and indents. A line "--@ NAME..." stands
# for parts of the files "parts": for the lines between "--< NAME ..." and "-->" there, or for
# the whole file NAME.lua. In a part that is named by "NAME of FILE", and in the parts that it
# names, such a line stands for parts of FILE first.
function fail(text) {
	print FILENAME ": " text > "/dev/stderr"
	failed = 1
	exit 1
}
function show(line, file,    words, count, i) {
	if (line !~ /^ *--@ /) {
		sub(/^ +/, "", line)
		if (line == "" || line ~ /^--/)
			return
		gsub(/["\\]/, plain ? "&" : "\\\\&", line)
		print plain ? line : "\"" line "\\n\""
		return
	}
	count = split(substr(line, index(line, "@") + 2), words, " ")
	for (i = 1; i <= count; i++)
		if (words[i + 1] == "of") {
			include(words[i], words[i + 2])
			i += 2
		} else
			include(words[i], file)
}
function include(name, file,    key, count, lines, i) {
	key = (file, name) in part ? file SUBSEP name : name
	if (!(key in part) || part[key] == "twice")
		fail((key in part ? "several parts " : "no part ") name)
	count = split(part[key], lines, "\n")
	for (i = 1; i < count; i++)
		show(lines[i], file)
}
BEGIN {
	files = split(parts, path, " ")
	for (i = 1; i <= files; i++) {
		file = path[i]
		gsub(/^.*\/|[.]lua$/, "", file)
		names = 0
		while ((getline line < path[i]) > 0) {
			if (line ~ /^ *-->$/)
				names = 0
			else if (line ~ /^ *--< /)
				names = split(substr(line, index(line, "<") + 2), name, " ")
			else {
				whole[file] = whole[file] line "\n"
				for (n = 1; n <= names; n++) {
					part[file, name[n]] = part[file, name[n]] line "\n"
					if (!(name[n] in of))
						of[name[n]] = file
					part[name[n]] = of[name[n]] == file ? part[file, name[n]] : "twice"
				}
			}
		}
	}
	for (file in whole)
		if (!(file in part))
			part[file] = whole[file]
}
FNR == 1 && !plain {
	script = FILENAME
	gsub(/^.*\/|[.]lua$/, "", script)
	variable = "RlScript rl_" script "_script"
	printf "%sextern %s;\n%s = {.source =\n", (NR == 1 ? "" : "};\n\n"), variable, variable
}
{ show($0, "") }
END {
	if (!failed && !plain)
		print "};"
}
