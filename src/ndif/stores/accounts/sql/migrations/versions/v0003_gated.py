"""The right to gated models, which not everybody may download."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; no tier has the right."""
    column = sa.Column("gated", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("ndif_tiers", column)
