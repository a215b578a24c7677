/*
 * addresses.c
 *		Preloaded into a server, makes hosts resolve to addresses that a test
 *		chooses: RATELIMIT_HOSTS is "host=address,address host=address ...".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>

typedef int (*Resolver) (const char *, const char *, const struct addrinfo *, struct addrinfo **);

int
getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
			struct addrinfo **list)
{
	Resolver	resolve = (Resolver) dlsym(RTLD_NEXT, "getaddrinfo");
	const char *env = getenv("RATELIMIT_HOSTS");
	size_t		len = host ? strlen(host) : 0;
	char		addresses[256] = "";
	struct addrinfo **end = list;
	char	   *rest = addresses;
	char	   *address;

	for (const char *entry = env; len > 0 && entry && *entry; entry += strspn(entry, " "))
	{
		size_t		size = strcspn(entry, " ");

		if (size > len && size - len - 1 < sizeof(addresses) &&
			strncmp(entry, host, len) == 0 && entry[len] == '=')
		{
			memcpy(addresses, entry + len + 1, size - len - 1);
			addresses[size - len - 1] = '\0';
		}
		entry += size;
	}
	if (addresses[0] == '\0')
		return resolve(host, service, hints, list);
	*list = NULL;
	while ((address = strsep(&rest, ",")) != NULL)
		if (resolve(address, service, hints, end) == 0)
			while (*end != NULL)
				end = &(*end)->ai_next;
		else
			*end = NULL;
	return *list ? 0 : EAI_NONAME;
}
