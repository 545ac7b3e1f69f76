"""A simulated day of requests through the server's own queue and placement, in virtual time."""
