"""Alerts: the server itself tells its operator what fails, by webhook and e-mail, and when it is over."""
