"""Names by which logs tell what belongs together."""
