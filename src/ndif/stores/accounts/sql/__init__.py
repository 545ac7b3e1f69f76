"""Accounts in a database: one schema for SQLite and PostgreSQL."""
