/*
 * address.c
 *		Reads ratelimit.redis_url and ratelimit.redis_passfile.
 *
 * The URL is
 *
 *	redis://[user@]host[:port][,host[:port] ...][/db]
 *	redis+sentinel://[user@]host[:port][,host[:port] ...]/service[/db]
 *	unix://[user@]/path[?db=n]
 *
 * With rediss instead of redis, connections use TLS.
 *
 * An error never shows the URL, which may hold a password.
 */
#include "postgres.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "storage/fd.h"

#include "error.h"
#include "redis/address.h"

static bool
wrong_url(RlError *error, const char *detail)
{
	rl_error_set(error, ERRCODE_INVALID_PARAMETER_VALUE,
				 "invalid value for parameter \"ratelimit.redis_url\"");
	rl_error_detail(error, "%s", detail);
	return false;
}

static bool
take_scheme(const char **url, const char *scheme)
{
	size_t		len = strlen(scheme);

	if (strncmp(*url, scheme, len) != 0)
		return false;
	*url += len;
	return true;
}

/* Copies [from, to) as a string.  Returns false if it is empty or does not fit. */
static bool
copy_part(char *dest, size_t size, const char *from, const char *to)
{
	size_t		len = to - from;

	if (len == 0 || len >= size)
		return false;
	memcpy(dest, from, len);
	dest[len] = '\0';
	return true;
}

/* Reads all of [from, to) as a number.  Returns false if it is none from least to most. */
static bool
read_number(const char *from, const char *to, int least, int most, int *number)
{
	int			value = 0;

	if (from == to || to - from > 5)
		return false;
	for (; from < to; from++)
	{
		if (*from < '0' || *from > '9')
			return false;
		value = value * 10 + (*from - '0');
	}
	*number = value;
	return value >= least && value <= most;
}

/* Reads [url, end) as a host with or without a port.  Returns false with the error set. */
static bool
parse_host(const char *url, const char *end, RlAddress *address, RlError *error)
{
	/* An address of IP version 6 stands in brackets. */
	bool		bracket = url[0] == '[';
	const char *host_end = memchr(url, bracket ? ']' : ':', end - url);

	if (host_end == NULL && bracket)
		return wrong_url(error, "The host's bracket is not closed.");
	if (host_end == NULL)
		host_end = end;
	if (!copy_part(address->host, sizeof(address->host), url + bracket, host_end))
		return wrong_url(error, "The host is empty or too long.");
	host_end += bracket;
	if (strpbrk(address->host, "?#, \t") != NULL)
		return wrong_url(error, "The host holds a character that no host has.");
	if (host_end < end &&
		(*host_end != ':' ||
		 !read_number(host_end + 1, end, 1, 65535, &address->port)))
		return wrong_url(error, "The port must be a number from 1 to 65535.");
	return true;
}

/* Parses the URL.  Returns false with the error set; the target is undefined then. */
bool
rl_target_parse(const char *url, RlTarget *target, RlError *error)
{
	RlAddress	address = {0};
	const char *at;
	const char *end;

	target->deployment = RL_SERVERS;
	target->n = 1;
	target->first = 0;
	address.tls = strncmp(url, "rediss", 6) == 0;
	if (take_scheme(&url, "unix://"))
		address.is_path = true;
	else if (take_scheme(&url, "redis+sentinel://") || take_scheme(&url, "rediss+sentinel://"))
		target->deployment = RL_SENTINELS;
	else if (!take_scheme(&url, "redis://") && !take_scheme(&url, "rediss://"))
		return wrong_url(error, "The URL must start with redis://, rediss://, redis+sentinel://, rediss+sentinel:// or unix://.");

	/* A password may hold an @, so the host begins after the last one. */
	at = address.is_path && url[0] == '/' ? NULL : strrchr(url, '@');
	if (at != NULL)
	{
		if (memchr(url, ':', at - url) != NULL)
			return wrong_url(error, "The URL must not hold a password; put it into the file that ratelimit.redis_passfile names.");
		if (!copy_part(address.user, sizeof(address.user), url, at))
			return wrong_url(error, "The user is empty or too long.");
		url = at + 1;
	}

	if (address.is_path)
	{
		end = strstr(url, "?db=");
		if (end != NULL && !read_number(end + 4, strchr(end, '\0'), 0, 65535, &address.db))
			return wrong_url(error, "The database must be a number from 0 to 65535.");
		if (end == NULL)
			end = strchr(url, '\0');
		if (url[0] != '/')
			return wrong_url(error, "The socket's path must be absolute.");
		if (memchr(url, '?', end - url) != NULL)
			return wrong_url(error, "The only option is ?db=.");
		if ((size_t) (end - url) >= sizeof(((struct sockaddr_un *) 0)->sun_path) ||
			!copy_part(address.host, sizeof(address.host), url, end))
			return wrong_url(error, "The socket's path is too long.");
		target->seeds[0] = address;
		return true;
	}

	address.port = target->deployment == RL_SENTINELS ? 26379 : 6379;
	end = url + strcspn(url, "/");
	if (memchr(url, '?', end - url) != NULL)
		return wrong_url(error, "Only a socket has the option ?db=; after a host, write the database as /1.");
	for (int i = 0;; i++)
	{
		const char *comma = memchr(url, ',', end - url);

		if (i == RL_MAX_SEEDS)
			return wrong_url(error, "The URL names too many hosts.");
		target->seeds[i] = address;
		if (!parse_host(url, comma ? comma : end, &target->seeds[i], error))
			return false;
		target->n = i + 1;
		if (comma == NULL)
			break;
		url = comma + 1;
	}
	if (target->deployment == RL_SENTINELS)
	{
		url = *end == '/' ? end + 1 : end;
		end = url + strcspn(url, "/");
		if (!copy_part(target->service, sizeof(target->service), url, end))
			return wrong_url(error, "The name of the Sentinels' service is missing or too long.");
	}
	if (*end == '/' && end[1] != '\0' &&
		!read_number(end + 1, strchr(end, '\0'), 0, 65535, &address.db))
		return wrong_url(error, "The database must be a number from 0 to 65535.");
	for (int i = 0; i < target->n; i++)
		target->seeds[i].db = address.db;
	return true;
}

/* Writes the target's name, in RL_MAX_TARGET bytes at most. */
void
rl_target_name(const RlTarget *target, char *name)
{
	rl_address_name(&target->seeds[0], name);
	if (target->deployment == RL_SENTINELS)
		snprintf(name + strlen(name), RL_MAX_SERVICE + 1, "/%s", target->service);
}

/* Writes the address as errors show it, in RL_MAX_SERVER bytes at most. */
void
rl_address_name(const RlAddress *address, char *name)
{
	if (address->is_path)
		snprintf(name, RL_MAX_SERVER, "\"%s\"", address->host);
	else
		snprintf(name, RL_MAX_SERVER, strchr(address->host, ':') ? "\"[%s]:%d\"" : "\"%s:%d\"",
				 address->host, address->port);
}

/* Reads "host:port" into the address; without a host it keeps its own.  Returns false if it is none. */
bool
rl_address_redirect(const char *text, RlAddress *address)
{
	const char *colon = strrchr(text, ':');

	if (colon == NULL || strpbrk(text, " /") != NULL ||
		!read_number(colon + 1, strchr(colon, '\0'), 1, 65535, &address->port))
		return false;
	if (address->is_path)
		strcpy(address->host, "127.0.0.1");
	address->is_path = false;
	return colon == text || (colon == text + 1 && text[0] == '?') ||
		copy_part(address->host, sizeof(address->host), text, colon);
}

/*
 * Returns what stat says of the file of a setting.  Raises an error if it is not a plain file, or if it must
 * be private and others have access to it.  To be called before it is opened, because opening a pipe would
 * wait for its writer.
 */
struct stat
rl_check_file(const char *kind, const char *setting, const char *path, bool must_be_private)
{
	struct stat st;

	if (stat(path, &st) != 0)
		ereport(ERROR,
				(errcode_for_file_access(),
				 errmsg("could not stat file \"%s\": %m", path),
				 errdetail("%s names it.", setting)));
	if (!S_ISREG(st.st_mode))
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("%s \"%s\" is not a plain file", kind, path)));
	if (must_be_private && (st.st_mode & (S_IRWXG | S_IRWXO)))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("%s \"%s\" has group or world access", kind, path),
				 errdetail("Permissions should be u=rw (0600) or less.")));
	return st;
}

/*
 * Reads the password, the first line of ratelimit.redis_passfile, into a buffer of
 * RL_MAX_PASSWORD bytes, which the caller wipes.  Without that setting it is empty.  Raises an
 * error if the file has no password or is not private; the buffer is wiped then.
 */
void
rl_password_read(char *password)
{
	int			fd;
	int			len;

	password[0] = '\0';
	if (rl_redis_passfile[0] == '\0')
		return;
	(void) rl_check_file("Redis password file", "ratelimit.redis_passfile", rl_redis_passfile, true);
	fd = OpenTransientFile(rl_redis_passfile, O_RDONLY | PG_BINARY);
	if (fd < 0)
		ereport(ERROR,
				(errcode_for_file_access(),
				 errmsg("could not open file \"%s\": %m", rl_redis_passfile)));
	/* stdio would leave a copy in a buffer of its own. */
	len = read(fd, password, RL_MAX_PASSWORD - 1);
	if (len < 0)
		ereport(ERROR,
				(errcode_for_file_access(),
				 errmsg("could not read file \"%s\": %m", rl_redis_passfile)));
	CloseTransientFile(fd);
	password[len] = '\0';
	len = strcspn(password, "\r\n");
	explicit_bzero(password + len, RL_MAX_PASSWORD - len);
	if (len == 0 || len == RL_MAX_PASSWORD - 1)
	{
		explicit_bzero(password, RL_MAX_PASSWORD);
		ereport(ERROR,
				(errcode(ERRCODE_CONFIG_FILE_ERROR),
				 len == 0 ? errmsg("Redis password file \"%s\" holds no password", rl_redis_passfile) :
				 errmsg("Redis password file \"%s\" has too long a line", rl_redis_passfile)));
	}
}
