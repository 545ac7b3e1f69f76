"""`ndif start`: from its options to a server that answers, or to a sentence why not."""
