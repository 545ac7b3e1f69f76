"""The groups of settings. Each part of the server gets only the groups that it needs."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    DirectoryPath,
    Field,
    FilePath,
    SecretStr,
    model_validator,
)
from typing_extensions import Self

from ndif.config.variable_types import (
    Domain,
    Duration,
    Gpus,
    HostNames,
    InfluxDatabase,
    Limit,
    LokiAddress,
    Mailbox,
    Mailboxes,
    MailServer,
    MailTemplate,
    Networks,
    Origins,
    OtlpAddress,
    PasswordHash,
    Secrets,
    ServerAddress,
    Size,
    SizeText,
    TimeOfDay,
    VersionText,
    Webhooks,
    origin_of_page,
    split,
    split_secrets,
)

MiB = 1024**2
GiB = 1024**3

_TRUSTED_RESULT = 8 * GiB
"""Default maximum size of a trusted user's result, in bytes."""

OLDEST_REDIS = "6.2"
"""Oldest version of Redis with XAUTOCLAIM, which a new leader needs to take over claimed requests."""
MAX_LIMIT = 2**53
"""Maximum value of a limit: every JSON reader represents it exactly."""


class Group(BaseModel):
    """Related settings. The docstring below a field is the help text of its variable."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class FolderSettings(Group):
    """Folders of this server."""

    session_root: Path = Path("~/.ndif")
    """Folder of sessions, runtimes, adapters and results."""
    secrets_dir: DirectoryPath | None = None
    """Folder with one file per variable, named like the variable and holding its value, such as
    /run/secrets of a container. Variables in the environment take precedence."""
    runtimes_dir: Path | None = None
    """Folder of installed nnsight generations. Default: runtimes in NDIF_SESSION_ROOT."""

    @property
    def root(self) -> Path:
        """The absolute path of `session_root`."""
        return self.session_root.expanduser().absolute()

    @property
    def adapters(self) -> Path:
        """Folder of the adapters that untrusted requests name."""
        return self.root / "adapters"

    @property
    def runtimes(self) -> Path:
        """Folder of installed runtimes."""
        return (self.runtimes_dir or self.session_root / "runtimes").expanduser()


class RequestSettings(Group):
    """Limits of incoming requests."""

    max_request_bytes: Size = Field(default=1 * GiB, gt=0)
    """Maximum size of a request. A larger request is refused while it is received."""
    max_queued_bytes: Size = Field(default=4 * GiB, gt=0)
    """Maximum total size of all waiting and running requests. Above it, clients are asked to try again
    later."""
    max_incoming_bytes: Size = Field(default=4 * GiB, gt=0)
    """Maximum total size of requests and messages that are being received: half of it from one address, and
    at most 256 MiB in memory. Above it, clients are asked to try again later."""
    incoming_idle_s: Duration = Field(default=60, gt=0)
    """Maximum pause while a client sends a request or message, or reads. The connection is closed after
    that."""
    incoming_timeout_s: Duration = Field(default=3600, gt=0)
    """Maximum time to receive a request or message."""
    max_connections: int = Field(default=0, ge=0)
    """Maximum number of open connections of a gateway, half of them from one address that is no trusted
    proxy. Above it, the longest idle connection is closed for a new one; without an idle one, the new one
    is refused. 0: three quarters of the process's limit of open files."""
    max_unread_bytes: Size = Field(default=16 * MiB, gt=0)
    """Maximum size of updates that a client has not read. Its jobs wait before they send more, and a client
    with more unread updates is disconnected."""


class ResultSettings(Group):
    """Limits and retention of results."""

    max_result_bytes: Size = Field(default=1 * GiB, gt=0)
    """Maximum size of a result before compression; a larger one ends the job with an ERROR. Default for
    trusted users: 8GiB."""
    max_inline_result_bytes: Size = Field(default=8 * MiB, ge=0)
    """Maximum size of a result that is sent on the client's live channel. A larger result is stored, and
    the client downloads it."""
    result_ttl_s: Duration = Field(default=86_400, gt=0)
    """Time for which a result and its signed URL are valid."""
    response_ttl_s: Duration = Field(default=7 * 86_400, gt=0)
    """Time for which the responses of polled jobs and the records of all jobs are kept; at least as long as
    results."""
    max_stored_bytes: Size | None = Field(default=None, gt=0)
    """Maximum total size of all users' stored results; above it, untrusted users' results are an ERROR
    until others expire. Default: half of the disk's free space at the start; no limit on S3."""
    max_stored_share: float = Field(default=0.25, gt=0, le=1)
    """Maximum fraction of NDIF_MAX_STORED_BYTES for the results of one user."""

    def largest_result(self, *, trusted: bool) -> int:
        """Return the maximum bytes of a result of a trusted or an untrusted user."""
        is_set = "max_result_bytes" in self.model_fields_set
        return _TRUSTED_RESULT if trusted and not is_set else self.max_result_bytes


class LimitSettings(Group):
    """Limits of a user, unless the tier of the API key overrides them."""

    max_requests_per_minute: int | None = Field(default=3000, gt=0, le=MAX_LIMIT)
    """Maximum number of requests of an API key per minute, unless its tier sets another limit."""
    max_unfinished_jobs: int | None = Field(default=1000, gt=0, le=MAX_LIMIT)
    """Maximum number of waiting and running jobs of an API key, unless its tier sets another limit."""
    max_queue_depth: int | None = Field(default=10_000, gt=0, le=MAX_LIMIT)
    """Maximum number of waiting and running jobs of one model, of all users, unless the tier of an API key
    sets another limit for its jobs."""
    max_channels: int | None = Field(default=1000, gt=0, le=MAX_LIMIT)
    """Maximum number of open live channels of an API key per gateway, unless its tier sets another
    limit."""
    max_channels_per_address: int = Field(default=2000, gt=0)
    """Maximum number of open live channels of one address per gateway, with or without an API key."""
    max_execution_per_day: Duration | None = Field(default=None, gt=0)
    """Maximum execution time per day (UTC) of a user with an API key, unless its tier sets another limit.
    Empty: no limit."""


class ClusterSettings(Group):
    """The broker and the Ray cluster that join processes and machines into one server."""

    broker_url: str = Field(
        default="",
        description=f"Redis ({OLDEST_REDIS} or newer) or Valkey, as redis://HOST:PORT, that joins "
        "several processes and machines into one server. Empty: one process, which keeps live "
        "requests in memory and polled ones on its disk.",
    )
    allow_open_broker: bool = False
    """With NDIF_BROKER_URL: use a Redis that other machines can reach without a password. Every such
    machine can read all requests and results, and can stop the server."""
    cluster_secret: Secrets = SecretStr("")
    """With NDIF_BROKER_URL: secret that all gateways and coordinators share; for rotation, a second one
    after a comma is accepted but signs nothing. Default: the file cluster_secret in NDIF_SESSION_ROOT,
    created by the first `ndif start` that starts the broker."""
    cluster_secret_file: Path | None = None
    """File that holds the cluster secret, instead of NDIF_CLUSTER_SECRET."""
    broker_inline_bytes: Size = Field(default=1 * MiB, ge=0)
    """With NDIF_BROKER_URL: maximum size of a payload or result that is sent through the broker. A larger
    one is sent through the object store."""
    status_cache_freq_s: Duration = Field(
        default=120, gt=0, validation_alias="COORDINATOR_STATUS_CACHE_FREQ_S"
    )
    """With NDIF_BROKER_URL: time for which gateways show the last status after the leader is gone."""
    status_request_timeout_s: Duration = Field(
        default=60, gt=0, validation_alias="STATUS_REQUEST_TIMEOUT_S"
    )
    """With NDIF_BROKER_URL: maximum time for which gateways wait for the leader's status."""
    ray_address: str = ""
    """With NDIF_BROKER_URL: Ray cluster whose nodes run replicas: HOST:PORT of its head, or auto for the
    cluster of this machine. Empty: replicas run on this machine."""
    ray_head_port: int = Field(default=6380, ge=1, le=65535)
    """Port of the head that `ndif start` starts if NDIF_RAY_ADDRESS is a ray:// address of this machine
    where nothing listens. If the broker uses this port, the head uses the next one."""
    ray_temp_dir: Path = Path("/tmp/ray")  # noqa: S108 - Ray's own default
    """Folder for files and sockets of a Ray node that `ndif start` starts. Its path must be short."""
    api_workers: int = Field(default=1, ge=1, le=256)
    """With NDIF_BROKER_URL: number of gateway processes that share one port."""

    @property
    def has_own_secret(self) -> bool:
        """True if the variables name a cluster secret."""
        return bool(self.cluster_secret.get_secret_value()) or self.cluster_secret_file is not None


class ObjectStoreSettings(Group):
    """The S3 server for results."""

    object_store_url: ServerAddress = ""
    """S3 server for results, such as https://s3.example.org. Empty: results are files on this machine."""
    object_store_public_url: ServerAddress = ""
    """Address of the S3 server for clients, if it differs from NDIF_OBJECT_STORE_URL."""
    object_store_access_key: str = ""
    """Access key of the S3 server."""
    object_store_secret_key: SecretStr = SecretStr("")
    """Secret key of the S3 server."""
    object_store_bucket: str = Field(default="ndif", min_length=3)
    """Bucket for results. It is created if it does not exist."""
    object_store_region: str = "us-east-1"
    """Region of the S3 server."""
    object_store_verify: bool | FilePath = True
    """Verification of the S3 server's certificate: true, false, or a file of certificate authorities."""

    @model_validator(mode="after")
    def _require_keys_of_store(self) -> Self:
        keys = (self.object_store_access_key, self.object_store_secret_key.get_secret_value())
        if self.object_store_url and not all(keys):
            raise ValueError(
                "NDIF_OBJECT_STORE_URL needs NDIF_OBJECT_STORE_ACCESS_KEY and NDIF_OBJECT_STORE_SECRET_KEY"
            )
        return self


class ExecutionSettings(Group):
    """Execution of requests, and defaults of models."""

    execution_timeout_seconds: Duration = Field(default=3600, gt=0)
    """Maximum run time of a request, counted from its status DISPATCHED."""
    default_dtype: str = Field(default="auto", min_length=1)
    """Data type of models whose deployment sets none, such as bfloat16. auto: the checkpoint's data
    type."""
    default_padding_factor: float = Field(default=0.15, ge=0, allow_inf_nan=False)
    """Memory reserved in addition to a model's weights, as a fraction of their size, unless its deployment
    sets another."""
    default_padding_bytes: Size = Field(default=0, ge=0)
    """Memory reserved in addition to NDIF_DEFAULT_PADDING_FACTOR, unless a model's deployment sets another
    size."""
    co_batch: int = Field(default=1, ge=1, le=64)
    """Maximum number of trusted requests that a free replica takes from the queue to share a forward pass,
    if sharing changes none of their values. 1: each request has its own forward pass."""
    model_start_timeout_s: Duration = Field(default=1800, gt=0)
    """Maximum time until a model process is ready. A slower start counts as failed."""
    processor_reply_freq_s: Duration = Field(
        default=3, gt=0, validation_alias="COORDINATOR_PROCESSOR_REPLY_FREQ_S"
    )
    """Time between updates to waiting clients."""
    max_attempts: int = Field(default=2, ge=1)
    """Maximum number of runs of a request whose replica is lost."""


class SocketIoSettings(Group):
    """Socket.IO, the live channel of nnsight 0.6 and 0.7 clients."""

    socketio_max_http_buffer_size: Size = Field(
        default=100_000_000, validation_alias="SOCKETIO_MAX_HTTP_BUFFER_SIZE"
    )
    """Maximum size of a client's Socket.IO message."""
    socketio_ping_timeout: Duration = Field(
        default=60, gt=0, validation_alias="SOCKETIO_PING_TIMEOUT"
    )
    """Time without a sign of life after which a Socket.IO client counts as disconnected."""


class CallbackSettings(Group):
    """Webhooks and mails that report a job's status."""

    callback_networks: Networks = ""
    """Networks, separated by commas, with private addresses that webhooks may reach, such as 10.20.0.0/16.
    Empty: none."""
    callback_secret: Secrets = SecretStr("")
    """Secret of at least 16 characters from which each API key's signing secret is derived; a second one
    after a comma signs too. Default: the server's own, with a broker NDIF_CLUSTER_SECRET."""
    callback_timeout_s: Duration = Field(default=10, gt=0)
    """Maximum time of one attempt to deliver a webhook or mail."""
    callback_attempts: int = Field(default=10, ge=1)
    """Maximum number of attempts to deliver a webhook or mail."""
    callback_max_age_s: Duration = Field(default=24 * 3600, gt=0)
    """Time after which an undelivered webhook or mail is given up."""
    max_callbacks: int = Field(default=1000, gt=0)
    """Maximum number of undelivered webhooks and mails of one user. At this number, the user's new jobs
    that request one are refused."""

    @property
    def allowed_callback_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """Networks in `callback_networks`."""
        return tuple(map(ip_network, split(self.callback_networks)))

    @property
    def callback_secrets(self) -> tuple[str, ...]:
        """Secrets in `callback_secret`."""
        return split_secrets(self.callback_secret.get_secret_value())


class MailSettings(Group):
    """Outgoing mail."""

    smtp_url: MailServer = SecretStr("")
    """SMTP server for outgoing mail: smtp://USER:PASSWORD@HOST:PORT (STARTTLS) or smtps://… (TLS). If this
    and MAILGUN_API_KEY are empty, the server sends no mail."""
    mail_from: Mailbox = ""
    """Sender address of the server's mail. Default with Mailgun: ndif@ followed by MAILGUN_DOMAIN."""
    mailgun_api_key: SecretStr = Field(default=SecretStr(""), validation_alias="MAILGUN_API_KEY")
    """Key of Mailgun's API, for mail through Mailgun instead of an SMTP server."""
    mailgun_domain: Domain = Field(default="", validation_alias="MAILGUN_DOMAIN")
    """Domain of the Mailgun account."""
    mailgun_url: ServerAddress = Field(
        default="https://api.mailgun.net", validation_alias="MAILGUN_URL"
    )
    """Address of Mailgun's API. For a domain in the EU: https://api.eu.mailgun.net."""

    @model_validator(mode="after")
    def _has_one_way(self) -> Self:
        smtp, mailgun = self.smtp_url.get_secret_value(), self.mailgun_api_key.get_secret_value()
        if smtp and mailgun:
            raise ValueError("NDIF_SMTP_URL and MAILGUN_API_KEY must not both be set")
        if smtp and not self.mail_from:
            raise ValueError("NDIF_SMTP_URL needs NDIF_MAIL_FROM")
        if mailgun and not self.mailgun_domain:
            raise ValueError("MAILGUN_API_KEY needs MAILGUN_DOMAIN")
        return self

    @property
    def sends_mail(self) -> bool:
        """True if an SMTP server or Mailgun is configured."""
        secrets = (self.smtp_url, self.mailgun_api_key)
        return any(secret.get_secret_value() for secret in secrets)


class AlertSettings(Group):
    """Alerts for the operator."""

    alert_webhooks: Webhooks = SecretStr("")
    """Webhooks for alerts, separated by commas: hooks.slack.com and discord.com/api/webhooks get their own
    form, others JSON; a prefix slack+, discord+ or json+ selects the form. If this and NDIF_ALERT_EMAIL
    are empty, there are no alerts."""
    alert_email: Mailboxes = ""
    """Mail addresses that get alerts, separated by commas. Requires NDIF_SMTP_URL or MAILGUN_API_KEY."""
    alert_email_template: MailTemplate | None = None
    """Template file of alert mails: a line such as `Subject: $headline`, an empty line, and text. It may
    use $headline, $details, $advice, $server, $event, $severity and $time."""
    alert_digest_at: TimeOfDay = ""
    """Local time, such as 08:00, at which a digest of the last day is sent to the recipients of alerts.
    Empty: never."""
    alert_after_s: Duration = Field(default=60, gt=0)
    """Time for which a condition must hold before an alert fires, and be clear before the alert
    resolves."""
    alert_repeat_s: Duration = Field(default=4 * 3600, gt=0)
    """Time after which an alert that still holds is sent again."""
    alert_queue_s: Duration = Field(default=300, gt=0)
    """Time for which jobs of a model wait while none of them is dispatched, before an alert."""
    alert_error_rate: float = Field(default=0.5, gt=0, lt=1)
    """Fraction of a model's jobs, from 0 to 1, that may fail without an alert."""
    alert_disk_free: float = Field(default=0.1, ge=0, lt=1)
    """Fraction of the results' disk, from 0 to 1, that must be free to avoid an alert."""

    @model_validator(mode="after")
    def _have_recipients(self) -> Self:
        if self.alert_email_template is not None and not self.alert_email:
            raise ValueError("NDIF_ALERT_EMAIL_TEMPLATE needs NDIF_ALERT_EMAIL")
        if self.alert_digest_at and not self.sends_alerts:
            raise ValueError(
                "NDIF_ALERT_DIGEST_AT needs a recipient: NDIF_ALERT_WEBHOOKS or NDIF_ALERT_EMAIL"
            )
        return self

    @property
    def sends_alerts(self) -> bool:
        """True if the variables name a recipient of alerts."""
        return bool(self.alert_webhook_addresses or self.alert_recipients)

    @property
    def alert_webhook_addresses(self) -> tuple[str, ...]:
        """Addresses in `alert_webhooks`, with their prefixes."""
        return split(self.alert_webhooks.get_secret_value())

    @property
    def alert_recipients(self) -> tuple[str, ...]:
        """Addresses in `alert_email`."""
        return split(self.alert_email)


class GatewaySettings(Group):
    """Addresses of the server, and the clients and web pages that it serves."""

    min_nnsight_version: VersionText = Field(default="", validation_alias="MIN_NNSIGHT_VERSION")
    """Oldest nnsight version of clients, such as 0.8.1. Empty: any version of an installed generation."""
    min_python_version: VersionText = Field(default="", validation_alias="MIN_PYTHON_VERSION")
    """Oldest Python version of clients, such as 3.11. Empty: any."""
    public_url: ServerAddress = ""
    """Address at which clients reach the server through a proxy, such as https://ndif.example.org.
    Addresses of results begin with it."""
    allowed_hosts: HostNames = ""
    """Further host names of the server, separated by commas; *.example.org allows every name below it, *
    any. localhost, the host of NDIF_PUBLIC_URL, this machine's names and all addresses but 0.0.0.0 and ::
    are always allowed."""
    cors_origins: Origins = ""
    """Origins of web pages that may use the routes of users, separated by commas, such as
    https://notebook.example.org. Such a page can run code on the server with the rights of its visitor."""
    forwarded_allow_ips: str = Field(default="", validation_alias="FORWARDED_ALLOW_IPS")
    """Addresses or networks of proxies, separated by commas, whose X-Forwarded-For and X-Forwarded-Proto
    are trusted; * for any. Empty: this machine's, if NDIF_PUBLIC_URL or NDIF_ALLOWED_HOSTS is set."""
    api_port: int = Field(default=8001, ge=1, le=65535)
    """Port of `ndif start`, unless --port is given."""
    metrics_allow: Networks = ""
    """Networks, separated by commas, that may read GET /metrics without the operator's token, such as
    10.20.0.0/16. This machine always may."""

    @property
    def allowed_metrics_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """Networks in `metrics_allow`."""
        return tuple(map(ip_network, split(self.metrics_allow)))

    @property
    def allowed_host_names(self) -> tuple[str, ...]:
        """Names in `allowed_hosts`."""
        return split(self.allowed_hosts)

    @property
    def cors_origin_names(self) -> tuple[str, ...]:
        """Origins in `cors_origins` as browsers send them: the host's normal form, no default port."""
        return tuple(map(origin_of_page, split(self.cors_origins)))

    @property
    def is_behind_tls(self) -> bool:
        """True if clients reach the server over TLS, by its public URL."""
        return urlsplit(self.public_url).scheme == "https"

    @property
    def proxies(self) -> str:
        """Addresses whose forwarded headers are trusted; by default loopback, and only behind a proxy."""
        is_behind_one = self.public_url or self.allowed_hosts
        return self.forwarded_allow_ips or ("127.0.0.1,::1" if is_behind_one else "")


class TelemetrySettings(Group):
    """Logs, and the services that receive metrics, logs and spans."""

    influxdb_url: InfluxDatabase = SecretStr("")
    """InfluxDB database for metrics, as http://USER:PASSWORD@HOST:8086/DATABASE or https://…, with special
    characters percent-escaped. InfluxDB 2 and 3 need NDIF_INFLUXDB_TOKEN instead of a user."""
    influxdb_token: SecretStr = SecretStr("")
    """Token with write access to the database of NDIF_INFLUXDB_URL."""
    loki_url: LokiAddress = SecretStr("")
    """Grafana Loki server for the log, as http://HOST:3100 or https://USER:PASSWORD@HOST."""
    otlp_url: OtlpAddress = SecretStr("")
    """Collector for the steps of each job, sent as spans by OTLP over HTTP, as http://HOST:4318.
    OTEL_EXPORTER_OTLP_HEADERS may contain a token."""
    log_format: Literal["pretty", "json"] = "pretty"
    """Format of the log. pretty: lines for people; json: one JSON object per line, and one for each step
    of a job."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Lowest level that is logged. With debug, the log includes the steps of each job and the output of
    model processes while blocks run."""
    log_max_bytes: Size = Field(default=64 * MiB, gt=0)
    """Size at which a log of the session is rotated."""
    log_files: int = Field(default=4, ge=0)
    """Number of rotated files that are kept of each log."""

    @model_validator(mode="after")
    def _has_one_login(self) -> Self:
        if self.influxdb_token.get_secret_value() and (
            urlsplit(self.influxdb_url.get_secret_value()).username is not None
        ):
            raise ValueError(
                "NDIF_INFLUXDB_TOKEN and a user in NDIF_INFLUXDB_URL exclude each other"
            )
        return self


class OperatorSettings(Group):
    """The operator's routes and the web page."""

    admin_port: int | None = Field(default=None, ge=1, le=65535)
    """Separate port of the operator's routes, /admin/*, which the clients' port then does not serve.
    Empty: the clients' port serves them too."""
    admin_host: str = "127.0.0.1"
    """With NDIF_ADMIN_PORT: host name or address on which that port listens."""
    admin_password_hash: PasswordHash = SecretStr("")
    """Hash of the password for the operator's part of the web page: Argon2, as `ndif admin password`
    prints it, or bcrypt. Empty: only the server's token gives access."""
    admin_session_s: Duration = Field(default=12 * 3600, ge=60, le=30 * 86_400)
    """Time after which an operator must log in again."""
    dashboard: Literal["public", "login", "off"] | None = None
    """Viewers of the dashboard at /, with models, nodes and queues: public (everyone), login (users with
    an API key) or off. Default: public on loopback, login on a server that other machines can reach."""


class ProbeSettings(Group):
    """Traces that the server sends to its own models."""

    probe_interval_s: Duration = Field(default=0, ge=0)
    """Interval at which the server sends a trace to each dedicated model, as a client does, and checks the
    value. 0: never."""
    probe_timeout_s: Duration = Field(default=60, gt=0)
    """Time after which a probe has failed, including the start of its client and its wait in the queue."""


class AccountSettings(Group):
    """API keys, and the rights of users."""

    dev_mode: bool = False
    """Allow everyone who can reach the server to use it without an API key."""
    database_url: SecretStr = SecretStr("")
    """Database of API keys and tiers, as postgresql://USER:PASSWORD@HOST/DATABASE or
    sqlite:////FOLDER/accounts.sqlite. Default: the file accounts.sqlite in NDIF_SESSION_ROOT."""
    postgres_host: str = Field(default="", validation_alias="POSTGRES_HOST")
    """Host of a PostgreSQL database of API keys and tiers, instead of NDIF_DATABASE_URL."""
    postgres_port: int = Field(default=5432, ge=1, le=65535, validation_alias="POSTGRES_PORT")
    """Port of the PostgreSQL database."""
    postgres_db: str = Field(default="ndif", validation_alias="POSTGRES_DB")
    """Name of the PostgreSQL database."""
    postgres_user: str = Field(default="ndif", validation_alias="POSTGRES_USER")
    """User of the PostgreSQL database."""
    postgres_password: SecretStr = Field(
        default=SecretStr(""), validation_alias="POSTGRES_PASSWORD"
    )
    """Password of the PostgreSQL user."""
    accounts_cache_s: Duration = Field(default=5, gt=0, le=60)
    """Time for which answers of the database are cached. A revoked key works for at most this time."""
    api_key: SecretStr = SecretStr("")
    """API key of the user who runs `ndif jobs` or `ndif usage`."""
    api_keys: Path | None = None
    """YAML file of API keys and their rights, instead of a database."""
    hotswapping: bool = True
    """Without API keys: load models on demand for users."""
    allowed_repositories: str = ""
    """Repositories from which users may load models and adapters on demand: patterns such as meta-llama/*,
    separated by commas. Empty: all; operators may deploy any model."""
    denied_repositories: str = ""
    """Repositories from which users may not load models and adapters, even if NDIF_ALLOWED_REPOSITORIES
    includes them."""
    allowed_revisions: str = ""
    """Revisions that users may have loaded on demand although no branch or tag contains them: patterns such
    as refs/pr/7,refs/convert/*. Empty: none; operators may deploy any revision."""

    @property
    def allowed_repository_patterns(self) -> tuple[str, ...]:
        """Patterns in `allowed_repositories`."""
        return split(self.allowed_repositories)

    @property
    def denied_repository_patterns(self) -> tuple[str, ...]:
        """Patterns in `denied_repositories`."""
        return split(self.denied_repositories)

    @property
    def allowed_revision_patterns(self) -> tuple[str, ...]:
        """Patterns in `allowed_revisions`."""
        return split(self.allowed_revisions)


class PlacementSettings(Group):
    """Models to deploy, and the memory that they may use."""

    deployments: str = ""
    """Models to deploy at the start as dedicated: repo ids or model keys, separated by |."""
    schedule: str = ""
    """iCalendar file or URL with the times at which models are dedicated."""
    schedule_fetch_ahead_s: Duration = Field(default=3600, ge=0)
    """Time before an event of the schedule at which its model is downloaded to the planned nodes. 0: at the
    start of the event."""
    node_gpus: Gpus = ""
    """GPUs to use in place of the detected ones, such as 2x24GiB."""
    gpu_context_bytes: Size = Field(default=768 * MiB, ge=0)
    """GPU memory of a process without its tensors: a CUDA context, 760 MiB on an H200. It is reserved for
    each process of a replica on every GPU of the replica."""
    node_cpu_memory: SizeText = ""
    """CPU memory to use in place of the detected size, such as 64GiB."""
    minimum_deployment_time_seconds: Duration = Field(default=3600, ge=0)
    """Minimum time for which a replica serves before it may be evicted for another model."""
    model_cache_percentage: float = Field(default=0.9, gt=0, le=1)
    """Maximum fraction of CPU memory, from 0 to 1, that models may use."""
    controller_sync_interval_s: Duration = Field(default=30, gt=0)
    """Time between checks of the nodes and the schedule."""
    drain_timeout_s: Duration = Field(default=60, ge=0)
    """Time for which a replica may finish its request before it is evicted. After that, the request
    returns to the queue."""


class SchedulingSettings(Group):
    """Fair scheduling of requests, and autoscaling."""

    line_patience: int = Field(default=32, ge=1)
    """Maximum number of later requests that may overtake the oldest one in a row."""
    line_head_start_s: Duration = Field(default=60, ge=0)
    """Head start of requests of priority keys in fair scheduling, in execution time."""
    autoscale_max_replicas: int = Field(default=4, ge=1)
    """Maximum number of replicas that autoscaling gives a model with a long queue."""
    autoscale_target_wait_s: Duration = Field(default=30, gt=0)
    """Median wait above which a model gets another replica."""
    autoscale_idle_s: Duration = Field(default=600, gt=0)
    """Time after which an unneeded replica that autoscaling added is removed."""
    autoscale_cooldown_s: Duration = Field(default=60, gt=0)
    """Minimum time between two autoscaling changes of a model."""
    autoscale_backoff_s: Duration = Field(default=30, gt=0)
    """Initial back-off after autoscaling finds no memory for a replica. It doubles each time."""
    autoscale_longest_backoff_s: Duration = Field(default=960, gt=0)
    """Maximum back-off of autoscaling."""

    @model_validator(mode="after")
    def _are_in_order(self) -> Self:
        if self.autoscale_cooldown_s > self.autoscale_idle_s:
            raise ValueError(
                "NDIF_AUTOSCALE_COOLDOWN_S must not be more than NDIF_AUTOSCALE_IDLE_S"
            )
        if self.autoscale_backoff_s > self.autoscale_longest_backoff_s:
            raise ValueError(
                "NDIF_AUTOSCALE_BACKOFF_S must not be more than NDIF_AUTOSCALE_LONGEST_BACKOFF_S"
            )
        return self


class RunnerSettings(Group):
    """Confinement and limits of runners."""

    sandbox: Literal["require", "best-effort", "off"] = "require"
    """Confinement of untrusted code by the kernel. `require`: refuse to run without full confinement;
    `best-effort`: use the layers that the kernel offers; `off`: none."""
    protector: Literal["on", "off"] = "on"
    """Language policy for untrusted code, in addition to the kernel's confinement."""
    whitelist: Path | None = None
    """YAML file of further modules that untrusted code may import."""
    runner_pool: int = Field(default=2, ge=1)
    """Number of idle runners per replica that wait for untrusted requests."""
    runner_scope: Literal["user", "request"] = "user"
    """Lifetime of a runner for untrusted code. `user`: one confined process per API key, reset between
    requests; `request`: one process per request, as for requests without a key."""
    runner_users: int = Field(default=32, ge=1)
    """Number of API keys per replica whose runner is kept for the next request, about 30 MB each. Fewer if
    less than a tenth of the memory is available; one if the weights are on GPUs."""
    runner_idle_s: Duration = Field(default=60, gt=0)
    """Idle time after which a user's runner is stopped."""
    runner_max_requests: int = Field(default=100, ge=1)
    """Number of requests after which a user's runner is stopped."""
    runner_memory_bytes: Size = Field(default=8 * GiB, gt=0)
    """Maximum memory of an untrusted request."""
    runner_max_threads: int = Field(default=256, gt=0)
    """Maximum number of threads of an untrusted request."""
    max_log_bytes: Size = Field(default=8 * MiB, gt=0)
    """Maximum size of the printed output of one request."""
    max_log_lines_per_s: float = Field(default=1000, gt=0)
    """Maximum number of lines that one request may print per second, averaged over ten seconds."""
    max_streamed_bytes: Size = Field(default=1 * GiB, gt=0)
    """Maximum size of the data that one hybrid request may send to its client."""


class DownloadSettings(Group):
    """Downloads of weights and adapters from a hub."""

    allow_pickled_weights: bool | None = None
    """Load models whose weights exist only as pickles (pytorch_model.bin); these are read in confinement.
    Default: true for `ndif local start`, false for `ndif start`."""
    max_adapter_bytes: Size = Field(default=2 * GiB, gt=0)
    """Maximum size of an adapter downloaded for an untrusted request."""
    adapter_cache_bytes: Size = Field(default=20 * GiB, gt=0)
    """Maximum disk space for downloaded adapters. The least recently used adapters are deleted first."""
    cache_bytes: Limit = ""
    """Maximum size of the Hub's cache on a node, such as 500GB, or 80% of its disk. Downloads delete the
    least recently used models that are not deployed, booked or in use; empty: no limit."""
