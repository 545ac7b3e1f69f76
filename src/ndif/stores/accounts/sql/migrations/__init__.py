"""Alembic's migrations of the accounts' schema."""
