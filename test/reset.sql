-- Removes what the blocks of a page leave in a server: the database shop, the roles and the
-- settings.  Run it in the database postgres as the cluster's first role.  A restart completes it.
DROP DATABASE IF EXISTS shop;
SELECT format('DROP OWNED BY %1$I; DROP ROLE %1$I', rolname) FROM pg_roles WHERE oid >= 16384 \gexec
ALTER ROLE CURRENT_USER RESET ALL;
ALTER SYSTEM RESET ALL;
