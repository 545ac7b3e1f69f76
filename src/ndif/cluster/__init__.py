"""The replicas that exist: created, watched and ended as placement decides."""
