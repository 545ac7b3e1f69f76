"""Delivery of messages to webhooks and mailboxes: one loop that repeats what failed, and the mailers."""
