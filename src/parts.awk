# Prints Lua files as a C string.  A line "--@ name" is replaced by the part of this
# name: the lines between "--< name ..." and "-->" in one of the files "parts".
BEGIN {
	count = split(parts, files, " ")
	for (i = 1; i <= count; i++) {
		names = 0
		while ((getline line < files[i]) > 0) {
			if (line ~ /^ *-->$/)
				names = 0
			else if (line ~ /^ *--< /)
				names = split(substr(line, index(line, "<") + 2), name, " ")
			else
				for (n = 1; n <= names; n++)
					part[name[n]] = part[name[n]] line "\n"
		}
	}
}
function show(line) {
	gsub(/["\\]/, "\\\\&", line)
	print "\"" line "\\n\""
}
/^ *--@ / {
	wanted = substr($0, index($0, "@") + 2)
	if (!(wanted in part)) {
		print FILENAME ": no part " wanted > "/dev/stderr"
		exit 1
	}
	count = split(part[wanted], lines, "\n")
	for (i = 1; i < count; i++)
		show(lines[i])
	next
}
{ show($0) }
