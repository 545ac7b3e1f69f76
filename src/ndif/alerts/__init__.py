"""Alerts: the server notifies its operator of failures and their end, by webhook and e-mail."""
