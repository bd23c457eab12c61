"""The PostgreSQL server: logins, errors, identity, catalogs."""
