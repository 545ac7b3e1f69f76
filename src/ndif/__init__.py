"""ndif: runs nnsight traces next to large models."""

__version__ = "0.1.0"
