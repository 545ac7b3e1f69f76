"""One file a migration, in the order of its number."""
