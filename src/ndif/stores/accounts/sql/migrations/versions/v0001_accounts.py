"""Users, keys, tiers, and the assignments of tiers to keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "ndif_users",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("name", sa.String(320), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_ndif_users"),
        sa.UniqueConstraint("name", name="uq_ndif_users_name"),
    )
    op.create_table(
        "ndif_keys",
        sa.Column("id", sa.String(12), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("user_id", sa.Integer),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("last_used_at", sa.Double),
        sa.Column("revoked_at", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_ndif_keys"),
        sa.UniqueConstraint("digest", name="uq_ndif_keys_digest"),
        sa.ForeignKeyConstraint(["user_id"], ["ndif_users.id"], name="fk_ndif_keys_user_id"),
    )
    op.create_index("ix_ndif_keys_user_id", "ndif_keys", ["user_id"])
    op.create_table(
        "ndif_tiers",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("hotswapping", sa.Boolean, nullable=False),
        sa.Column("priority", sa.Boolean, nullable=False),
        sa.Column("trusted", sa.Boolean, nullable=False),
        sa.Column("weight", sa.Double, nullable=False),
        sa.Column("limits", sa.JSON),
        sa.PrimaryKeyConstraint("id", name="pk_ndif_tiers"),
        sa.UniqueConstraint("name", name="uq_ndif_tiers_name"),
    )
    op.create_table(
        "ndif_assignments",
        sa.Column("key_id", sa.String(12), nullable=False),
        sa.Column("tier_id", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("key_id", "tier_id", name="pk_ndif_assignments"),
        sa.ForeignKeyConstraint(
            ["key_id"], ["ndif_keys.id"], "fk_ndif_assignments_key_id", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["tier_id"], ["ndif_tiers.id"], "fk_ndif_assignments_tier_id", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_ndif_assignments_tier_id", "ndif_assignments", ["tier_id"])
