# Prints Lua files as a C string.  A line "--@ name" is replaced by the part of this
# name: the lines between "--< name ..." and "-->" in one of the files "parts".  A line
# "--@ name of file" is replaced by the part "name", in which lines "--@" stand for
# parts of this file first.
function show(line, file,    words, count, lines, i, name) {
	if (line !~ /^ *--@ /) {
		gsub(/["\\]/, "\\\\&", line)
		print "\"" line "\\n\""
		return
	}
	split(substr(line, index(line, "@") + 2), words, " ")
	file = words[2] == "of" ? words[3] : file
	name = (file, words[1]) in part ? file SUBSEP words[1] : words[1]
	if (!(name in part)) {
		print FILENAME ": no part " words[1] > "/dev/stderr"
		exit 1
	}
	count = split(part[name], lines, "\n")
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
			else
				for (n = 1; n <= names; n++) {
					part[name[n]] = part[name[n]] line "\n"
					part[file, name[n]] = part[file, name[n]] line "\n"
				}
		}
	}
}
{ show($0, "") }
