#!/bin/sh
# Deletes the keys that match RATELIMIT_KEYS in the Redis at RATELIMIT_REDIS_URL.  Needs
# redis-cli, and one server without a password; otherwise the keys stay until they expire.
cli=$(command -v redis-cli || command -v valkey-cli) || exit 0
case $RATELIMIT_REDIS_URL in
unix://*\?db=*) set -- -n "${RATELIMIT_REDIS_URL##*=}" ;;
unix://*) set -- ;;
*) set -- -u "$RATELIMIT_REDIS_URL" ;;
esac
case $RATELIMIT_REDIS_URL in
unix://*)
	path=${RATELIMIT_REDIS_URL#unix://}
	set -- -s "${path%%\?*}" "$@"
	;;
esac
cursor=0
while cursor=$("$cli" "$@" EVAL 'local found = redis.call("SCAN", ARGV[1], "MATCH", ARGV[2], "COUNT", 1000)
	for _, key in ipairs(found[2]) do redis.call("UNLINK", key) end
	return found[1]' 0 "$cursor" "$RATELIMIT_KEYS" 2>/dev/null); do
	case $cursor in
	0 | *[!0-9]* | '') break ;;
	esac
done
