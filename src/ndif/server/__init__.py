"""Servers in their three sizes: one model, one machine, many machines."""
