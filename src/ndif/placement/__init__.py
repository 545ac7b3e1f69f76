"""Placement: decide the node and GPUs of each replica, without side effects."""
