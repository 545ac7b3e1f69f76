"""The weights of a model: fetched, placed, shared and checked."""
