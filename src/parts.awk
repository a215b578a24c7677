# Prints scripts as C variables: <name>.lua is rl_<name>_script; with -v plain=1 as Redis gets
# them, without comments and indents. A line "--@ NAME..." stands for parts of the files "parts": a
# part is the lines between "--< NAME" and "-->" there, or the whole file NAME.lua. A part can have
# parts within it.
#
# "NAME of FILE" is the part NAME in which each part that FILE has, NAME too, is that of FILE.
# "NAME of each" is an if statement: where "algorithm" is the name of a file that has a part NAME,
# this part runs. A line "--= NAME... of FILE" in a file gives it parts of another file for this.
#
# "--< NAME(a, b) -> c" says that the part reads a and b, and sets c for the text behind it. A
# script ends the build if no line above in it sets a or b. What clock.lua sets is for all parts,
# and not listed; a part without parentheses is a template, which is checked by the parts in it.
function fail(text) {
	print (FILENAME == "" ? "parts.awk" : FILENAME) ": " text > "/dev/stderr"
	failed = 1
	exit 1
}
# Notes the names in a text, also words between them, as set.
function note(text,    names, count, i) {
	gsub(/[^A-Za-z0-9_]+/, " ", text)
	count = split(text, names, " ")
	for (i = 1; i <= count; i++)
		is_set[names[i]] = 1
}
# Notes the names that a line of Lua declares or assigns: variables, loops' variables, parameters.
function note_line(line) {
	if (match(line, /^(local |for )?[A-Za-z_][A-Za-z0-9_, ]*( (=|in)( |$)|$)/))
		note(substr(line, 1, RLENGTH))
	if (match(line, /function[ A-Za-z0-9_.]*\([A-Za-z0-9_, ]*\)/))
		note(substr(line, RSTART, RLENGTH))
}
function show(line, file,    words, count, i) {
	if (line !~ /^ *--@ /) {
		sub(/^ +/, "", line)
		if (line == "" || line ~ /^--/)
			return
		note_line(line)
		gsub(/["\\]/, plain ? "&" : "\\\\&", line)
		print plain ? line : "\"" line "\\n\""
		return
	}
	count = split(substr(line, index(line, "@") + 2), words, " ")
	for (i = 1; i <= count; i++)
		if (words[i + 1] == "of" && words[i + 2] == "each") {
			include_each(words[i])
			i += 2
		} else if (words[i + 1] == "of") {
			include(words[i], words[i + 2])
			i += 2
		} else
			include(words[i], file)
}
function include(name, file,    key, count, lines, i) {
	key = (file, name) in part ? file SUBSEP name : name
	if (!(key in part) || part[key] == "twice")
		fail((key in part ? "several parts " : "no part ") name)
	count = split(reads[key], lines, " ")
	for (i = 1; i <= count; i++)
		if (!(lines[i] in is_set))
			fail("part " name " reads " lines[i] ", which no line above sets")
	count = split(part[key], lines, "\n")
	for (i = 1; i < count; i++)
		show(lines[i], file)
}
function include_each(name,    word, i, file) {
	if (!("algorithm" in is_set))
		fail(name " of each reads algorithm, which no line above sets")
	word = "if"
	for (i = 1; i <= files; i++) {
		file = path[i]
		gsub(/^.*\/|[.]lua$/, "", file)
		if (!((file, name) in part))
			continue
		show(word " algorithm == '" file "'" also[file, name] " then", "")
		include(name, file)
		word = "elseif"
	}
	if (word == "if")
		fail("no part " name)
	show("end", "")
}
# Reads the line that begins parts: their names, and the names in parentheses that they read.
function begin_parts(line, file,    open, n, name) {
	sub(/^ *--< /, "", line)
	open = index(line, "(")
	before[++depth] = names
	names += split(open ? substr(line, 1, open - 1) : line, name, " ")
	gsub(/^[^(]*[(]|[)].*$/, "", line)
	gsub(/,/, " ", line)
	for (n = before[depth] + 1; n <= names; n++) {
		opened[n] = name[n - before[depth]]
		if ((file, opened[n]) in part)
			fail("two parts " opened[n] " in " file)
		reads[file, opened[n]] = reads[opened[n]] = open ? line : ""
	}
}
# Reads the line that gives a file parts of another file.
function share_parts(line, file,    words, count, i) {
	count = split(line, words, " ")
	for (i = 2; i < count - 1; i++)
		also[words[count], words[i]] = also[words[count], words[i]] " or algorithm == '" file "'"
}
BEGIN {
	files = split(parts, path, " ")
	for (i = 1; i <= files; i++) {
		file = path[i]
		gsub(/^.*\/|[.]lua$/, "", file)
		names = depth = 0
		while ((getline line < path[i]) > 0) {
			if (line ~ /^ *-->$/)
				names = before[depth--]
			else if (line ~ /^ *--< /)
				begin_parts(line, file)
			else if (line ~ /^--= /)
				share_parts(line, file)
			else {
				whole[file] = whole[file] line "\n"
				for (n = 1; n <= names; n++) {
					part[file, opened[n]] = part[file, opened[n]] line "\n"
					if (!(opened[n] in of))
						of[opened[n]] = file
					part[opened[n]] = of[opened[n]] == file ? part[file, opened[n]] : "twice"
				}
			}
		}
	}
	for (file in whole)
		if (!(file in part))
			part[file] = whole[file]
}
FNR == 1 {
	split("", is_set)
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
