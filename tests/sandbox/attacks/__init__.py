"""What a malicious user would try, and what must stop it: see `table`."""
