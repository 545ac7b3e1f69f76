"""The tables of accounts. Their names begin with ndif_, so that the database can hold other tables, too.

Times are Unix seconds. A change of a table needs a migration in `migrations/versions`.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    false,
)

VERSION_TABLE = "ndif_schema"
FOREIGN = ("keys", "tiers", "key_tier_assignments")
"""Tables of other NDIF servers, which `foreign.py` reads."""

METADATA = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)

USERS = Table(
    "ndif_users",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("name", String(320), nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
)

KEYS = Table(
    "ndif_keys",
    METADATA,
    # The name of the key for people; it gives no access.
    Column("id", String(12), primary_key=True),
    # SHA-256 in hexadecimal: the key itself is not stored.
    Column("digest", String(64), nullable=False, unique=True),
    Column("user_id", Integer, ForeignKey("ndif_users.id")),
    Column("name", String(200), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("last_used_at", Double),
    Column("revoked_at", Double),
    Index(None, "user_id"),
)

TIERS = Table(
    "ndif_tiers",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("hotswapping", Boolean, nullable=False),
    Column("priority", Boolean, nullable=False),
    Column("trusted", Boolean, nullable=False),
    Column("gated", Boolean, nullable=False, server_default=false()),
    Column("weight", Double, nullable=False),
    Column("limits", JSON(none_as_null=True)),
)

ASSIGNMENTS = Table(
    "ndif_assignments",
    METADATA,
    Column("key_id", ForeignKey("ndif_keys.id", ondelete="CASCADE"), primary_key=True),
    Column("tier_id", ForeignKey("ndif_tiers.id", ondelete="CASCADE"), primary_key=True),
    Index(None, "tier_id"),
)

JOBS = Table(
    "ndif_jobs",
    METADATA,
    Column("id", String(36), primary_key=True),
    Column("user", String(320), nullable=False),
    Column("key", String(64), nullable=False),
    Column("model", String(320), nullable=False),
    Column("generation", String(16), nullable=False),
    Column("status", String(16), nullable=False),
    Column("received", Double, nullable=False),
    Column("dispatched", Double),
    Column("ended", Double, nullable=False),
    Column("execution_s", Double, nullable=False),
    Column("result_bytes", BigInteger, nullable=False),
    # Lists of a step's fields.
    Column("steps", JSON(none_as_null=True)),
    Column("reason", Text, nullable=False, server_default=""),
    Column("traceparent", String(55), nullable=False, server_default=""),
    Index(None, "user", "ended"),
    Index(None, "ended"),
)
"""Ended jobs, until a sweep deletes them."""

USAGE = Table(
    "ndif_usage",
    METADATA,
    Column("user", String(320), primary_key=True),
    Column("model", String(320), primary_key=True),
    # YYYY-MM-DD in UTC.
    Column("day", String(10), primary_key=True),
    Column("jobs", BigInteger, nullable=False),
    Column("errors", BigInteger, nullable=False),
    Column("execution_s", Double, nullable=False),
    Column("result_bytes", BigInteger, nullable=False),
    Index(None, "day"),
)
"""Sums over ended jobs."""
