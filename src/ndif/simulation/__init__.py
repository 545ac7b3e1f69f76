"""A day of requests through the server's own queue and cluster, in virtual time."""
