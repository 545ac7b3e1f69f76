"""`ndif start`: from its options to a running server, or to an error message."""
