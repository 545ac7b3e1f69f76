"""One model process, supervised: start, run, cancel, stop."""
