"""Jobs that have ended, and their sums."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "ndif_jobs",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("user", sa.String(320), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("model", sa.String(320), nullable=False),
        sa.Column("generation", sa.String(16), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("received", sa.Double, nullable=False),
        sa.Column("dispatched", sa.Double),
        sa.Column("ended", sa.Double, nullable=False),
        sa.Column("execution_s", sa.Double, nullable=False),
        sa.Column("result_bytes", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_ndif_jobs"),
    )
    op.create_index("ix_ndif_jobs_user", "ndif_jobs", ["user", "ended"])
    op.create_index("ix_ndif_jobs_ended", "ndif_jobs", ["ended"])
    op.create_table(
        "ndif_usage",
        sa.Column("user", sa.String(320), nullable=False),
        sa.Column("model", sa.String(320), nullable=False),
        sa.Column("day", sa.String(10), nullable=False),
        sa.Column("jobs", sa.BigInteger, nullable=False),
        sa.Column("errors", sa.BigInteger, nullable=False),
        sa.Column("execution_s", sa.Double, nullable=False),
        sa.Column("result_bytes", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("user", "model", "day", name="pk_ndif_usage"),
    )
    op.create_index("ix_ndif_usage_day", "ndif_usage", ["day"])
