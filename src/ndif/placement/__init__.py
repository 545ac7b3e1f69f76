"""Decide which replica runs on which GPUs of which node, without side effects."""
