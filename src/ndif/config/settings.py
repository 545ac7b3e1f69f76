"""The server's configuration, read from environment variables."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from pydantic import model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SecretsSettingsSource,
    SettingsConfigDict,
)
from typing_extensions import Self

from ndif.config import groups
from ndif.config.ndif_names import NdifNames

_SECRETS_DIR = "NDIF_SECRETS_DIR"
"""Variable of the folder with files of other variables; its field only describes and validates it."""


# pydantic collects the fields of the last base first.
class Settings(
    groups.DownloadSettings,
    groups.RunnerSettings,
    groups.SchedulingSettings,
    groups.PlacementSettings,
    groups.AccountSettings,
    groups.ProbeSettings,
    groups.OperatorSettings,
    groups.TelemetrySettings,
    groups.GatewaySettings,
    groups.AlertSettings,
    groups.MailSettings,
    groups.CallbackSettings,
    groups.SocketIoSettings,
    groups.ExecutionSettings,
    groups.ObjectStoreSettings,
    groups.ClusterSettings,
    groups.LimitSettings,
    groups.ResultSettings,
    groups.RequestSettings,
    groups.FolderSettings,
    BaseSettings,
):
    """The server's configuration: all groups, read from the environment."""

    model_config = SettingsConfigDict(env_prefix="NDIF_", env_ignore_empty=True, extra="ignore")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """See `BaseSettings`. Environment variables take precedence over files in `secrets_dir`."""
        folder = os.environ.get(_SECRETS_DIR, "")
        if not Path(folder).is_dir() or not folder:  # the field's validator reports it
            return init_settings, env_settings, NdifNames(settings_cls)
        files = SecretsSettingsSource(settings_cls, folder)
        return init_settings, env_settings, files, NdifNames(settings_cls)

    @model_validator(mode="after")
    def _can_send_alerts(self) -> Self:
        if self.alert_email and not self.sends_mail:
            raise ValueError("NDIF_ALERT_EMAIL needs NDIF_SMTP_URL or MAILGUN_API_KEY")
        return self


@lru_cache(maxsize=1)
def settings() -> Settings:
    """Return the process's settings, which are read once; raise a ValidationError if some are invalid."""
    return Settings()
