"""The limits of what the holder of an API key may use."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ndif.config.groups import MOST, LimitSettings
from ndif.config.variable_types import Duration, Size

logger = logging.getLogger(__name__)

_WHOLE = ("requests_per_minute", "unfinished_jobs", "queue_depth", "channels")


class KeyLimits(BaseModel):
    """Limits of one API key; None: there is none."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    request_bytes: Size | None = Field(default=None, gt=0, le=MOST)
    """Size of a request; the server's own limit holds as well."""
    result_bytes: Size | None = Field(default=None, gt=0, le=MOST)
    """Size of a result before compression; the server's own limit holds as well."""
    requests_per_minute: int | None = Field(default=None, gt=0, le=MOST)
    """Number of requests in any minute."""
    unfinished_jobs: int | None = Field(default=None, gt=0, le=MOST)
    """Number of the key's jobs that wait or run at once."""
    queue_depth: int | None = Field(default=None, gt=0, le=MOST)
    """Number of a model's jobs, of all users together, from which on the key's are refused."""
    channels: int | None = Field(default=None, gt=0, le=MOST)
    """Number of live channels that are open at once."""
    stored_bytes: Size | None = Field(default=None, gt=0, le=MOST)
    """Size of the stored results of the key's user; the server's own limits hold as well."""
    execution_s_per_day: Duration | None = Field(default=None, gt=0)
    """Seconds that the blocks of the key's user may run in a day (UTC)."""

    @field_validator(*_WHOLE, mode="before")
    @classmethod
    def _refuse_truth(cls, value: object) -> object:
        """Refuse true, which would be the number 1."""
        if isinstance(value, bool):
            raise ValueError(f"must be a whole number, not {value}")
        return value

    @classmethod
    def of(cls, settings: LimitSettings, own: Mapping[str, Any]) -> KeyLimits:
        """Return the server's limits, but where a key has its `own`.

        What is no limit, in a database that somebody else has written, counts for nothing.
        """
        server = {
            "requests_per_minute": settings.max_requests_per_minute,
            "unfinished_jobs": settings.max_unfinished_jobs,
            "queue_depth": settings.max_queue_depth,
            "channels": settings.max_channels,
            "execution_s_per_day": settings.max_execution_per_day,
        }
        try:
            return cls.model_validate({**server, **own})
        except ValidationError as error:
            logger.warning("the limits of a tier are ignored: %s", error)
            return cls.model_validate(server)
