"""Alembic's environment: migrates over the connection, and in the transaction, of `Database.migrate`."""

from alembic import context

from ndif.stores.accounts.sql.tables import METADATA, VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    version_table=VERSION_TABLE,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
