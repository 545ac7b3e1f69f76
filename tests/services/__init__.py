"""Real services for tests: each is a process with its own port and folder, which is removed afterwards."""
