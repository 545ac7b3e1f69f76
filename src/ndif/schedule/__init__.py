"""The schedule of dedicated deployments, read from a calendar."""
