"""The way of an accepted request to a replica that runs it."""
