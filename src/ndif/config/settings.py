"""Every variable once: its name, type, default and meaning. Nothing else reads the environment."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, FilePath, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ndif.cluster.resources import parse_gpus
from ndif.schema.quantities import size

MiB = 1024**2
GiB = 1024**3


class Settings(BaseSettings):
    """The server's configuration, read from the environment (specification, section 12.3)."""

    model_config = SettingsConfigDict(env_prefix="NDIF_", extra="ignore")

    session_root: Path = Field(
        default=Path("~/.ndif"), description="Where sessions, runtimes and results live."
    )
    runtimes_dir: Path | None = Field(
        default=None, description="Installed nnsight generations; default SESSION_ROOT/runtimes."
    )
    max_request_bytes: int = Field(
        default=1 * GiB, gt=0, description="A larger request is refused while it streams in."
    )
    max_queued_bytes: int = Field(
        default=4 * GiB,
        gt=0,
        description="Requests that wait and run have no more than this together; others are told to come "
        "again.",
    )
    max_result_bytes: int = Field(
        default=8 * GiB, gt=0, description="A larger result (before compression) is an ERROR."
    )
    max_inline_result_bytes: int = Field(
        default=8 * MiB,
        ge=0,
        description="Results up to this size ride on the live channel; larger ones are stored.",
    )
    result_ttl_s: float = Field(
        default=7200, gt=0, description="Seconds that results and their signed URLs live."
    )
    broker_url: str = Field(
        default="",
        description="Redis (6.2 or newer) or Valkey, as redis://HOST:PORT, through which several processes "
        "and machines are one server. Empty: this process is all there is.",
    )
    broker_inline_bytes: int = Field(
        default=1 * MiB,
        ge=0,
        description="With NDIF_BROKER_URL: larger payloads and results go by way of the object store.",
    )
    status_cache_freq_s: float = Field(
        default=120,
        gt=0,
        validation_alias="COORDINATOR_STATUS_CACHE_FREQ_S",
        description="With NDIF_BROKER_URL: how long the status is told of a leader that is gone.",
    )
    ray_address: str = Field(
        default="",
        description="With NDIF_BROKER_URL: the Ray cluster whose nodes carry replicas, as HOST:PORT of its "
        "head, or auto for the one that this machine belongs to. Empty: replicas are on this machine.",
    )
    ray_temp_dir: Path = Field(
        default=Path("/tmp/ray"),  # noqa: S108 - Ray's own default
        description="Where a Ray node that `ndif start` starts has its files and sockets: a short path.",
    )
    api_workers: int = Field(
        default=1,
        ge=1,
        le=256,
        description="With NDIF_BROKER_URL: processes that answer clients, on one port.",
    )
    object_store_url: str = Field(
        default="",
        description="An S3 server for results, like https://s3.example.org. Empty: files of this machine.",
    )
    object_store_public_url: str = Field(
        default="",
        description="The address at which clients reach that server, where it is another.",
    )
    object_store_access_key: str = Field(default="", description="The access key of that server.")
    object_store_secret_key: SecretStr = Field(
        default=SecretStr(""), description="The secret key of that server."
    )
    object_store_bucket: str = Field(
        default="ndif",
        min_length=3,
        description="The bucket for results, which is made if it is not there.",
    )
    object_store_region: str = Field(default="us-east-1", description="The region of that server.")
    object_store_verify: bool | FilePath = Field(
        default=True,
        description="Whether its certificate is verified: true, false, or by a file of authorities.",
    )
    execution_timeout_seconds: float = Field(
        default=3600, gt=0, description="A request that runs longer is ended."
    )
    model_start_timeout_s: float = Field(
        default=1800, gt=0, description="A model process that is not ready by then has failed."
    )
    processor_reply_freq_s: float = Field(
        default=3,
        gt=0,
        validation_alias="COORDINATOR_PROCESSOR_REPLY_FREQ_S",
        description="Seconds between updates to a queued user.",
    )
    max_attempts: int = Field(
        default=2, ge=1, description="How often a request is run whose replica is lost."
    )
    socketio_max_http_buffer_size: int = Field(
        default=100_000_000,
        validation_alias="SOCKETIO_MAX_HTTP_BUFFER_SIZE",
        description="Largest Socket.IO message a client may send.",
    )
    socketio_ping_timeout: int = Field(
        default=60,
        validation_alias="SOCKETIO_PING_TIMEOUT",
        description="Seconds of silence after which a Socket.IO client counts as gone.",
    )

    api_port: int = Field(
        default=8001,
        ge=1,
        le=65535,
        description="Where `ndif start` listens, unless told otherwise.",
    )
    api_keys: Path | None = Field(
        default=None,
        description="A YAML file of API keys and what each may do. None: whoever comes may use the server.",
    )
    hotswapping: bool = Field(
        default=True,
        description="Without API keys: whether users may have models loaded on demand.",
    )
    deployments: str = Field(
        default="",
        description="Models to deploy at the start, dedicated: repo ids or model keys with | between them.",
    )
    schedule: str = Field(
        default="",
        description="An iCalendar file or URL that says which models are dedicated when.",
    )
    node_gpus: str = Field(
        default="",
        description="GPUs to count on, like 2x24GiB, instead of those that are found.",
    )
    gpu_context_bytes: int = Field(
        default=512 * MiB,
        ge=0,
        description="GPU memory that each process of a replica takes beside its tensors (a CUDA context), "
        "set aside for all of them on every GPU of the replica.",
    )
    node_cpu_memory: str = Field(
        default="", description="CPU memory to count on, like 64GiB, instead of what is found."
    )
    minimum_deployment_time_seconds: float = Field(
        default=3600, ge=0, description="How long a replica serves before another may displace it."
    )
    model_cache_percentage: float = Field(
        default=0.9, gt=0, le=1, description="The part of CPU memory that models may take."
    )
    controller_sync_interval_s: float = Field(
        default=30, gt=0, description="Seconds between two looks at the machines and the schedule."
    )
    drain_timeout_s: float = Field(
        default=60,
        ge=0,
        description="How long a replica that has to leave may go on with what it runs; "
        "after that its request waits for another.",
    )
    line_patience: int = Field(
        default=32,
        ge=1,
        description="Nobody sees more than this many later requests go first in turn.",
    )
    line_head_start_s: float = Field(
        default=60, ge=0, description="Seconds of work by which a priority key goes before others."
    )
    autoscale_max_replicas: int = Field(
        default=4,
        ge=1,
        description="Up to so many replicas are added to a model whose line is long.",
    )
    autoscale_target_wait_s: float = Field(
        default=30, gt=0, description="A longer median wait asks for another replica."
    )
    autoscale_idle_s: float = Field(
        default=600, gt=0, description="An added replica that was not needed this long is let go."
    )
    autoscale_cooldown_s: float = Field(
        default=60, gt=0, description="Seconds between two such changes of a model."
    )
    autoscale_backoff_s: float = Field(
        default=30,
        gt=0,
        description="Seconds until a replica for which there was no room is asked for again; doubled each "
        "time.",
    )
    autoscale_longest_backoff_s: float = Field(
        default=960, gt=0, description="The most that these become."
    )
    sandbox: Literal["require", "best-effort", "off"] = Field(
        default="require",
        description="Whether untrusted code runs without the kernel's whole confinement: never, with "
        "what this kernel has, or with none.",
    )
    protector: Literal["on", "off"] = Field(
        default="on", description="The language policy for untrusted code, above the kernel's."
    )
    whitelist: Path | None = Field(
        default=None, description="A YAML file of further modules that untrusted code may import."
    )
    runner_pool: int = Field(
        default=2, ge=1, description="Runners that wait for untrusted requests, for each model."
    )
    runner_scope: Literal["auto", "request", "user"] = Field(
        default="auto",
        description="`request`: each untrusted request has a process of its own. `user`: a confined "
        "process serves one API key's requests in a row and is reset in between. `auto`: `user` where "
        "the weights are on GPUs, `request` elsewhere.",
    )
    runner_idle_s: float = Field(
        default=60,
        gt=0,
        description="Seconds without a request after which a user's runner is ended.",
    )
    runner_max_requests: int = Field(
        default=100, ge=1, description="Requests after which a user's runner is ended."
    )
    runner_memory_bytes: int = Field(
        default=8 * GiB, gt=0, description="Memory that one untrusted request may take."
    )
    runner_max_threads: int = Field(
        default=256, gt=0, description="Threads that one untrusted request may have."
    )
    max_log_bytes: int = Field(
        default=8 * MiB, gt=0, description="What one request may print altogether."
    )
    max_log_lines_per_s: float = Field(
        default=1000,
        gt=0,
        description="Lines that one request may print a second, averaged over ten.",
    )
    max_adapter_bytes: int = Field(
        default=2 * GiB,
        gt=0,
        description="A larger adapter is not fetched for an untrusted request.",
    )
    adapter_cache_bytes: int = Field(
        default=20 * GiB,
        gt=0,
        description="What such adapters take on disk; those that were named longest ago go first.",
    )
    max_streamed_bytes: int = Field(
        default=1 * GiB, gt=0, description="What one hybrid request may send its client altogether."
    )

    @field_validator("node_gpus")
    @classmethod
    def _declares_gpus(cls, text: str) -> str:
        parse_gpus(text)
        return text

    @field_validator("node_cpu_memory")
    @classmethod
    def _declares_memory(cls, text: str) -> str:
        if text:
            size(text)
        return text

    @field_validator("object_store_url", "object_store_public_url")
    @classmethod
    def _names_a_server(cls, text: str) -> str:
        parts = urlsplit(text)
        if text and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError(f"{text!r} is not like http://host:port or https://host")
        if parts.username or parts.query:
            raise ValueError("keys do not belong into an address")
        return text.rstrip("/")

    @model_validator(mode="after")
    def _keys_of_the_store(self) -> Settings:
        keys = (self.object_store_access_key, self.object_store_secret_key.get_secret_value())
        if self.object_store_url and not all(keys):
            raise ValueError(
                "NDIF_OBJECT_STORE_URL needs NDIF_OBJECT_STORE_ACCESS_KEY and NDIF_OBJECT_STORE_SECRET_KEY"
            )
        return self

    @model_validator(mode="after")
    def _bounds_agree(self) -> Settings:
        if self.autoscale_cooldown_s > self.autoscale_idle_s:
            raise ValueError(
                "NDIF_AUTOSCALE_COOLDOWN_S must not be more than NDIF_AUTOSCALE_IDLE_S"
            )
        if self.autoscale_backoff_s > self.autoscale_longest_backoff_s:
            raise ValueError(
                "NDIF_AUTOSCALE_BACKOFF_S must not be more than NDIF_AUTOSCALE_LONGEST_BACKOFF_S"
            )
        return self

    @property
    def adapters(self) -> Path:
        """Cache of the adapters that untrusted requests name."""
        return (self.session_root / "adapters").expanduser().absolute()

    @property
    def runtimes(self) -> Path:
        """Folder of installed runtimes."""
        return (self.runtimes_dir or self.session_root / "runtimes").expanduser()


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The process's settings, read once."""
    return Settings()
