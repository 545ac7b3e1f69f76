"""Delivery of messages to webhooks and mailboxes: one loop with retries, and the mailers."""
