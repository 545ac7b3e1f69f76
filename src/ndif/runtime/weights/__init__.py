"""Fetch, place, share and check the weights of a model."""
