"""Real engines for tests: each a process of its own, on its own port and folder, gone afterwards."""
