"""From an accepted request to a replica that runs it."""
