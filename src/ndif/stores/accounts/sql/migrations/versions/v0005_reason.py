"""The reason for which a job was cancelled."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; of earlier jobs no reason is known."""
    op.add_column("ndif_jobs", sa.Column("reason", sa.Text, nullable=False, server_default=""))
