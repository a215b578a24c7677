/*
 * lease_end.c
 *		Units of leases that come back, from a rollback or from a call that was not
 *		sent; and the end of a key's leases.  See lease.c.
 */
#include "postgres.h"

#include "algorithm/limits.h"
#include "shared/counters.h"
#include "shared/lease_table.h"

/* Returns units to the grant that had them, or returns false if it has ended.  Does not throw. */
bool
rl_lease_return(RlKeyHash key_hash, uint64 id, int64 units)
{
	Set		   *set;
	bool		found = false;

	if (!rl_lease_may_use())
		return false;
	set = rl_lease_lock(key_hash);
	for (int i = 0; i < WAYS && !found; i++)
	{
		Entry	   *entry = rl_lease_entry_of(set, i, key_hash);

		for (int g = 0; g < GRANTS && entry != NULL && !found; g++)
		{
			Grant	   *grant = &entry->grants[g];

			found = grant->id == id && rl_lease_now() < grant->ends;
			if (found)
				grant->units += units;
		}
	}
	rl_lease_unlock(set);
	return found;
}

/*
 * Ends the key's leases, under whatever limits.  Their units become leftovers, unless
 * their charges are deleted: by a reset of all of the key, or of the states of the
 * limits if not NULL.  To be called before and after a command that resets, refunds or
 * bans the key, and after a report of a ban.  Needs no shared memory.  Does not throw.
 */
void
rl_lease_end(const RlKey *key, bool reset, const RlLimits *limits)
{
	RlKeyHash	key_hash;
	Set		   *set;

	if (!rl_shared_available())
		return;
	key_hash = rl_key_hash(key);
	set = rl_lease_lock(key_hash);
	for (int i = 0; i < WAYS; i++)
	{
		Entry	   *entry = rl_lease_entry_of(set, i, key_hash);

		if (entry == NULL)
			continue;
		entry->generation = rl_lease_new_id();
		for (int g = 0; g < GRANTS; g++)
		{
			if (reset && (limits == NULL || rl_limits_share_state(limits, &entry->limits)))
				rl_lease_end_grant(&entry->limits, key, &entry->grants[g]);
			entry->grants[g].ends = 0;
		}
	}
	rl_lease_unlock(set);
}

/* Returns a call's leftovers to the key, because it was not sent.  Does not throw. */
void
rl_lease_not_asked(const RlKey *key, RlKeyHash key_hash, const RlLimits *limits, RlLeaseCall *call)
{
	Set		   *set;
	Entry	   *entry;

	if (call->nleft == 0)
		return;
	set = rl_lease_lock(key_hash);
	entry = rl_lease_find(set, key_hash, limits);
	/* The entry may have been evicted meanwhile, or have new grants. */
	while (call->nleft > 0 && entry != NULL && rl_lease_replaced(entry)->units == 0)
	{
		const RlLeftover *left = &call->left[--call->nleft];
		Grant	   *grant = rl_lease_replaced(entry);

		*grant = (Grant) {.units = left->units,.renew_at = PG_INT64_MAX,.id = rl_lease_new_id(),.at = left->at,.life = left->life};
		memcpy(grant->mark, left->mark, sizeof(grant->mark));
		rl_counters_add_lease(limits, key, 0, -left->units);
	}
	call->nleft = 0;
	rl_lease_unlock(set);
}
