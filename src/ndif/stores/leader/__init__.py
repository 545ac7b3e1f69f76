"""The leader of a server's processes: its lock, calls to it, and values that it shares."""
