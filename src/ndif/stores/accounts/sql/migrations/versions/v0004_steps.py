"""The steps of a job, and the trace that it is a part of."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; of earlier jobs no steps are known."""
    op.add_column("ndif_jobs", sa.Column("steps", sa.JSON))
    traceparent = sa.Column("traceparent", sa.String(55), nullable=False, server_default="")
    op.add_column("ndif_jobs", traceparent)
