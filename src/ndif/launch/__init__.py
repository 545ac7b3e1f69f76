"""`ndif start`: from its options to a running server, or to a sentence that says why there is none."""
