"""Attacks of a malicious user, and the defences that must stop each attack: see `table`."""
