"""Which replicas exist, and where."""
