"""Usage limits of an API key."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ndif.config.groups import MAX_LIMIT, LimitSettings
from ndif.config.variable_types import Duration, Size

logger = logging.getLogger(__name__)

_WHOLE = ("requests_per_minute", "unfinished_jobs", "queue_depth", "channels")


class KeyLimits(BaseModel):
    """Limits of one API key; None means no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    request_bytes: Size | None = Field(default=None, gt=0, le=MAX_LIMIT)
    """Maximum size of a request; the server's own limit applies too."""
    result_bytes: Size | None = Field(default=None, gt=0, le=MAX_LIMIT)
    """Maximum size of a result before compression; the server's own limit applies too."""
    requests_per_minute: int | None = Field(default=None, gt=0, le=MAX_LIMIT)
    """Maximum number of requests per minute."""
    unfinished_jobs: int | None = Field(default=None, gt=0, le=MAX_LIMIT)
    """Maximum number of the key's waiting and running jobs."""
    queue_depth: int | None = Field(default=None, gt=0, le=MAX_LIMIT)
    """Number of a model's unfinished jobs, of all users, at which new jobs of the key are refused."""
    channels: int | None = Field(default=None, gt=0, le=MAX_LIMIT)
    """Maximum number of open live channels."""
    stored_bytes: Size | None = Field(default=None, gt=0, le=MAX_LIMIT)
    """Maximum size of the stored results of the key's user; the server's own limits apply too."""
    execution_s_per_day: Duration | None = Field(default=None, gt=0)
    """Maximum execution time of the key's user per day (UTC), in seconds."""

    @field_validator(*_WHOLE, mode="before")
    @classmethod
    def _refuse_truth(cls, value: object) -> object:
        """Refuse booleans, because true would count as 1."""
        if isinstance(value, bool):
            raise ValueError(f"must be a whole number, not {value}")
        return value

    @classmethod
    def of(cls, settings: LimitSettings, own: Mapping[str, Any]) -> KeyLimits:
        """Return the server's limits, overridden by a key's `own`.

        If `own` is invalid, which another server's database may cause, log a warning and ignore it.
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
