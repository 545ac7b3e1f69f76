"""The folder in which a run of the server is kept: its record, its logs, its token."""
