"""The groups of settings. A part of the server is given the groups that it needs."""

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
    split,
    split_secrets,
)

MiB = 1024**2
GiB = 1024**3

_TRUSTED_RESULT = 8 * GiB
"""Maximum size of a trusted user's result, unless it is set."""
_PORTS = {"http": 80, "https": 443}

OLDEST_REDIS = "6.2"
"""Oldest version of Redis that has XAUTOCLAIM, by which a new leader takes over claimed requests."""
MOST = 2**53
"""Greatest number of a limit: every reader of JSON knows it exactly."""


class Group(BaseModel):
    """Settings that belong together. A string below a field says what its variable means."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class FolderSettings(Group):
    """Folders of this server's own."""

    session_root: Path = Path("~/.ndif")
    """Folder of sessions, runtimes, adapters and results."""
    secrets_dir: DirectoryPath | None = None
    """Folder of files that have the names of variables and hold their values, such as /run/secrets of a
    container: for secrets that should not be in the environment, where a variable comes first."""
    runtimes_dir: Path | None = None
    """Folder of installed nnsight generations. Default: runtimes in NDIF_SESSION_ROOT."""

    @property
    def root(self) -> Path:
        """Folder in `session_root`, as an absolute path."""
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
    """Limits of requests on their way in."""

    max_request_bytes: Size = Field(default=1 * GiB, gt=0)
    """Maximum size of a request; a larger one is refused while it is received."""
    max_queued_bytes: Size = Field(default=4 * GiB, gt=0)
    """Maximum size of all waiting and running requests together; beyond it, clients are asked to try
    again later."""
    max_incoming_bytes: Size = Field(default=4 * GiB, gt=0)
    """Maximum size of all requests and messages that have begun to arrive; half of it for those from
    one address, 256 MiB of it in memory. Beyond it, clients are asked to try again later."""
    incoming_idle_s: Duration = Field(default=60, gt=0)
    """Maximum pause in a request or message that arrives, and in a client's reading; after a longer one the
    connection is closed."""
    incoming_timeout_s: Duration = Field(default=3600, gt=0)
    """Maximum time until a request or message has arrived."""
    max_unread_bytes: Size = Field(default=16 * MiB, gt=0)
    """Maximum size of the updates that wait until their client reads them; its jobs wait before they
    send more, and a client that lets more updates gather is disconnected."""


class ResultSettings(Group):
    """Limits of results, and the times that they are kept."""

    max_result_bytes: Size = Field(default=1 * GiB, gt=0)
    """Maximum size of a result before compression; a larger one is an ERROR. Unless this is set, a trusted
    user's may have 8GiB."""
    max_inline_result_bytes: Size = Field(default=8 * MiB, ge=0)
    """Maximum size of a result that is sent on the client's live channel; a larger one is
    stored and fetched."""
    result_ttl_s: Duration = Field(default=86_400, gt=0)
    """Time that a result and its signed URL stay valid."""
    response_ttl_s: Duration = Field(default=7 * 86_400, gt=0)
    """Time that the responses of a polled job, and the record of any, are kept; at least as long as
    results."""
    max_stored_bytes: Size | None = Field(default=None, gt=0)
    """Maximum size of all stored results together; a further one is an ERROR until others have expired.
    Results of trusted users count, but are never refused. Default: half of the disk's free space at the
    start; no limit on S3."""
    max_stored_share: float = Field(default=0.25, gt=0, le=1)
    """Maximum fraction of NDIF_MAX_STORED_BYTES that the results of one user take."""

    def largest_result(self, *, trusted: bool) -> int:
        """Return the maximum bytes of a result of a trusted or an untrusted user."""
        is_set = "max_result_bytes" in self.model_fields_set
        return _TRUSTED_RESULT if trusted and not is_set else self.max_result_bytes


class LimitSettings(Group):
    """Limits of a user, where the tier of the API key has none."""

    max_requests_per_minute: int | None = Field(default=3000, gt=0, le=MOST)
    """Number of requests that an API key may send in any minute, unless its tier says otherwise."""
    max_unfinished_jobs: int | None = Field(default=1000, gt=0, le=MOST)
    """Number of jobs of an API key that may wait or run at once, unless its tier says otherwise."""
    max_queue_depth: int | None = Field(default=10_000, gt=0, le=MOST)
    """Number of jobs of one model, of all users together, that may wait or run at once, unless the tier of
    an API key says otherwise for its jobs."""
    max_channels: int | None = Field(default=1000, gt=0, le=MOST)
    """Number of live channels of an API key that a gateway holds open at once, unless its tier says
    otherwise."""
    max_channels_per_address: int = Field(default=2000, gt=0)
    """Number of live channels of one address, with or without a key, that a gateway holds open at once."""
    max_execution_per_day: Duration | None = Field(default=None, gt=0)
    """Time that the blocks of a user with an API key may run in a day (UTC), unless its tier says
    otherwise. By default there is no limit."""


class ClusterSettings(Group):
    """The broker and the Ray cluster that join processes and machines into one server."""

    broker_url: str = Field(
        default="",
        description=f"Redis ({OLDEST_REDIS} or newer) or Valkey, as redis://HOST:PORT, that joins "
        "several processes and machines into one server. Empty: one process, which keeps live "
        "requests in memory and polled ones on its disk.",
    )
    allow_open_broker: bool = False
    """With NDIF_BROKER_URL: use a Redis that other machines reach without a password. Every such
    machine can read all requests and results, and can stop the server."""
    cluster_secret: Secrets = SecretStr("")
    """With NDIF_BROKER_URL: secret by which the processes of one server know each other, the same on every
    machine that starts a gateway or coordinator. A second one after a comma is accepted, and signs nothing,
    while one replaces the other. Default: the file cluster_secret in NDIF_SESSION_ROOT, which the first
    `ndif start` makes if it also starts the broker."""
    cluster_secret_file: Path | None = None
    """File that holds the secret instead."""
    broker_inline_bytes: Size = Field(default=1 * MiB, ge=0)
    """With NDIF_BROKER_URL: maximum size of a payload or result that travels through the broker; a
    larger one travels through the object store."""
    status_cache_freq_s: Duration = Field(
        default=120, gt=0, validation_alias="COORDINATOR_STATUS_CACHE_FREQ_S"
    )
    """With NDIF_BROKER_URL: time that gateways show the last status after the leader is gone."""
    status_request_timeout_s: Duration = Field(
        default=60, gt=0, validation_alias="STATUS_REQUEST_TIMEOUT_S"
    )
    """With NDIF_BROKER_URL: maximum time that gateways wait for the leader's status."""
    ray_address: str = ""
    """With NDIF_BROKER_URL: Ray cluster whose nodes run replicas, as HOST:PORT of its head, or auto
    for the cluster of this machine. Empty: replicas run on this machine."""
    ray_head_port: int = Field(default=6380, ge=1, le=65535)
    """Port of the head that `ndif start` starts where NDIF_RAY_ADDRESS is ray:// of this machine and nobody
    answers there. If it is the broker's, the next one is taken."""
    ray_temp_dir: Path = Path("/tmp/ray")  # noqa: S108 - Ray's own default
    """Folder for the files and sockets of a Ray node that `ndif start` starts; its path must be short."""
    api_workers: int = Field(default=1, ge=1, le=256)
    """With NDIF_BROKER_URL: number of gateway processes, which share one port."""

    @property
    def has_own_secret(self) -> bool:
        """True if the variables name a cluster secret."""
        return bool(self.cluster_secret.get_secret_value()) or self.cluster_secret_file is not None


class ObjectStoreSettings(Group):
    """The S3 server for results."""

    object_store_url: ServerAddress = ""
    """S3 server for results, such as https://s3.example.org. Empty: files of this machine."""
    object_store_public_url: ServerAddress = ""
    """Address at which clients reach the S3 server, if it differs."""
    object_store_access_key: str = ""
    """Access key of the S3 server."""
    object_store_secret_key: SecretStr = SecretStr("")
    """Secret key of the S3 server."""
    object_store_bucket: str = Field(default="ndif", min_length=3)
    """Bucket for results, created if it does not exist."""
    object_store_region: str = "us-east-1"
    """Region of the S3 server."""
    object_store_verify: bool | FilePath = True
    """Verification of the S3 server's certificate: true, false, or a file of certificate authorities."""

    @model_validator(mode="after")
    def _has_keys(self) -> Self:
        keys = (self.object_store_access_key, self.object_store_secret_key.get_secret_value())
        if self.object_store_url and not all(keys):
            raise ValueError(
                "NDIF_OBJECT_STORE_URL needs NDIF_OBJECT_STORE_ACCESS_KEY and NDIF_OBJECT_STORE_SECRET_KEY"
            )
        return self


class ExecutionSettings(Group):
    """Execution of requests, and defaults of the models that execute them."""

    execution_timeout_seconds: Duration = Field(default=3600, gt=0)
    """Maximum run time of a request, from DISPATCHED on."""
    default_dtype: str = Field(default="auto", min_length=1)
    """Data type of models whose deployment names none, such as bfloat16; auto: the checkpoint's."""
    default_padding_factor: float = Field(default=0.15, ge=0, allow_inf_nan=False)
    """Memory reserved beside the weights of such models, as a fraction of their size."""
    default_padding_bytes: Size = Field(default=0, ge=0)
    """Memory reserved beside them in addition."""
    co_batch: int = Field(default=1, ge=1, le=64)
    """Maximum number of trusted requests for one model that share a forward pass, where that changes none
    of their values. A free replica takes so many of the waiting requests. 1: each has its own pass."""
    model_start_timeout_s: Duration = Field(default=1800, gt=0)
    """Maximum time until a model process is ready; a slower one counts as failed."""
    processor_reply_freq_s: Duration = Field(
        default=3, gt=0, validation_alias="COORDINATOR_PROCESSOR_REPLY_FREQ_S"
    )
    """Time between updates to waiting clients."""
    max_attempts: int = Field(default=2, ge=1)
    """Maximum number of times that a request is run if its replica is lost."""


class SocketIoSettings(Group):
    """Socket.IO, the live channel of clients of 0.6 and 0.7."""

    socketio_max_http_buffer_size: Size = Field(
        default=100_000_000, validation_alias="SOCKETIO_MAX_HTTP_BUFFER_SIZE"
    )
    """Maximum size of a client's Socket.IO message."""
    socketio_ping_timeout: Duration = Field(
        default=60, gt=0, validation_alias="SOCKETIO_PING_TIMEOUT"
    )
    """Silence after which a Socket.IO client is considered gone."""


class CallbackSettings(Group):
    """Call-backs at the end of a job."""

    callback_networks: Networks = ""
    """Networks, separated by commas, in which call-backs may reach addresses that are not public, such as
    10.20.0.0/16. Empty: none."""
    callback_secret: Secrets = SecretStr("")
    """Secret of 16 characters or more, from which each user's signing secret is derived; a second one after
    a comma signs as well. Default: the server's own, NDIF_CLUSTER_SECRET with a broker."""
    callback_timeout_s: Duration = Field(default=10, gt=0)
    """Maximum time of one attempt to deliver a call-back."""
    callback_attempts: int = Field(default=10, ge=1)
    """Maximum number of attempts to deliver a call-back."""
    callback_max_age_s: Duration = Field(default=24 * 3600, gt=0)
    """Time after which a call-back that cannot be delivered is given up."""
    max_callbacks: int = Field(default=1000, gt=0)
    """Number of call-backs of one user that wait for their delivery, beyond which the user's jobs that name
    one are refused."""

    @property
    def allowed_callback_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """Networks in `callback_networks`."""
        return tuple(map(ip_network, split(self.callback_networks)))

    @property
    def callback_secrets(self) -> tuple[str, ...]:
        """Secrets in `callback_secret`."""
        return split_secrets(self.callback_secret.get_secret_value())


class MailSettings(Group):
    """The server's way to send mail."""

    smtp_url: MailServer = SecretStr("")
    """SMTP server for the mail that users want of their jobs: smtp://USER:PASSWORD@HOST:PORT (STARTTLS) or
    smtps://… (TLS). Empty, and no MAILGUN_API_KEY: the server sends no mail."""
    mail_from: Mailbox = ""
    """Address from which the server sends mail. Default with Mailgun: ndif@ its domain."""
    mailgun_api_key: SecretStr = Field(default=SecretStr(""), validation_alias="MAILGUN_API_KEY")
    """Key of Mailgun's API, to send mail through it."""
    mailgun_domain: Domain = Field(default="", validation_alias="MAILGUN_DOMAIN")
    """Domain of the Mailgun account."""
    mailgun_url: ServerAddress = Field(
        default="https://api.mailgun.net", validation_alias="MAILGUN_URL"
    )
    """Address of Mailgun's API; https://api.eu.mailgun.net for a domain in Europe."""

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
        """True if the variables name a way to send mail."""
        secrets = (self.smtp_url, self.mailgun_api_key)
        return any(each.get_secret_value() for each in secrets)


class AlertSettings(Group):
    """Alerts for the operator."""

    alert_webhooks: Webhooks = SecretStr("")
    """Addresses, separated by commas, to which the server posts alerts for its operator: webhooks of Slack
    (hooks.slack.com) and Discord (discord.com/api/webhooks); others get JSON. A prefix slack+,
    discord+ or json+ names the form of another host. Empty, and no NDIF_ALERT_EMAIL: no alerts."""
    alert_email: Mailboxes = ""
    """Mail addresses that get alerts, separated by commas; needs NDIF_SMTP_URL or MAILGUN_API_KEY."""
    alert_email_template: MailTemplate | None = None
    """File with the text of these mails instead of the server's own: a line `Subject: $headline`, an empty
    line, and text with $headline, $details, $advice, $server, $event, $severity and $time."""
    alert_digest_at: TimeOfDay = ""
    """Time of the machine's day, such as 08:00, at which a digest of the last day goes where alerts go.
    Empty: never."""
    alert_after_s: Duration = Field(default=60, gt=0)
    """Time for which something is wrong before an alert, and right again before it is resolved."""
    alert_repeat_s: Duration = Field(default=4 * 3600, gt=0)
    """Time after which what is still wrong is told again."""
    alert_queue_s: Duration = Field(default=300, gt=0)
    """Time in which jobs of a model wait and none is dispatched, that is an alert."""
    alert_error_rate: float = Field(default=0.5, gt=0, lt=1)
    """Fraction of a model's jobs that may fail without an alert, from 0 to 1."""
    alert_disk_free: float = Field(default=0.1, ge=0, lt=1)
    """Fraction of the disk of results below which less that is free is an alert, from 0 to 1."""

    @model_validator(mode="after")
    def _have_recipients(self) -> Self:
        if self.alert_email_template is not None and not self.alert_email:
            raise ValueError("NDIF_ALERT_EMAIL_TEMPLATE needs NDIF_ALERT_EMAIL")
        if self.alert_digest_at and not self.sends_alerts:
            raise ValueError(
                "NDIF_ALERT_DIGEST_AT needs NDIF_ALERT_WEBHOOKS or NDIF_ALERT_EMAIL: nobody would get it"
            )
        return self

    @property
    def sends_alerts(self) -> bool:
        """True if the variables name somebody who gets alerts."""
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
    """Addresses of the server, and the clients and pages that it answers."""

    min_nnsight_version: VersionText = Field(default="", validation_alias="MIN_NNSIGHT_VERSION")
    """Oldest nnsight whose requests are taken, such as 0.8.1. Empty: any of an installed generation."""
    min_python_version: VersionText = Field(default="", validation_alias="MIN_PYTHON_VERSION")
    """Oldest Python whose requests are taken, such as 3.11. Empty: any."""
    public_url: ServerAddress = ""
    """Address at which clients reach the server through a proxy, such as https://ndif.example.org: the
    addresses of results begin with it."""
    allowed_hosts: HostNames = ""
    """Further names by which clients may ask for this server, separated by commas; *.example.org stands
    for every name below example.org, * for any. Loopback, the host of NDIF_PUBLIC_URL, this machine's names
    and all addresses are always answered."""
    cors_origins: Origins = ""
    """Origins of web pages, such as https://notebook.example.org, separated by commas, that may use the
    routes of users and read the answers; such a page can run code here with the rights of its visitor."""
    forwarded_allow_ips: str = Field(default="", validation_alias="FORWARDED_ALLOW_IPS")
    """Addresses or networks of proxies, separated by commas, whose X-Forwarded-For and X-Forwarded-Proto
    are believed; * for any. Empty: this machine's, if NDIF_PUBLIC_URL or NDIF_ALLOWED_HOSTS is set."""
    api_port: int = Field(default=8001, ge=1, le=65535)
    """Port on which `ndif start` listens unless --port is given."""
    metrics_allow: Networks = ""
    """Networks, separated by commas, that may read GET /metrics without the operator's token, such as
    10.20.0.0/16. This machine may always."""

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
        """Origins in `cors_origins`, each as a browser writes it: without the port of its scheme."""
        origins = map(urlsplit, split(self.cors_origins.lower()))
        return tuple(
            f"{each.scheme}://{each.netloc.removesuffix(f':{_PORTS[each.scheme]}')}"
            for each in origins
        )

    @property
    def proxies(self) -> str:
        """Addresses whose forwarded headers are believed: without a proxy, anybody may write them."""
        is_behind_one = self.public_url or self.allowed_hosts
        return self.forwarded_allow_ips or ("127.0.0.1,::1" if is_behind_one else "")


class TelemetrySettings(Group):
    """Logs, and the services that take metrics, logs and spans."""

    influxdb_url: InfluxDatabase = SecretStr("")
    """InfluxDB database that metrics are written to, as http://USER:PASSWORD@HOST:8086/DATABASE or https://…
    Percent-escape special characters. InfluxDB 2 and 3 take NDIF_INFLUXDB_TOKEN instead of a user."""
    influxdb_token: SecretStr = SecretStr("")
    """Token that may write into the database of NDIF_INFLUXDB_URL."""
    loki_url: LokiAddress = SecretStr("")
    """Grafana Loki that the log is sent to, as http://HOST:3100 or https://USER:PASSWORD@HOST."""
    otlp_url: OtlpAddress = SecretStr("")
    """Collector that the steps of each job are sent to as spans, by OTLP over HTTP, as http://HOST:4318.
    OTEL_EXPORTER_OTLP_HEADERS may have a token."""
    log_format: Literal["pretty", "json"] = "pretty"
    """pretty: the log has lines for people. json: it has an object a line for programs, and one for each
    step of a job."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Lowest level that is logged. With debug it has the steps of each job, and what the processes of
    models print while blocks run."""
    log_max_bytes: Size = Field(default=64 * MiB, gt=0)
    """Size at which a log of the session is set aside and begun anew."""
    log_files: int = Field(default=4, ge=0)
    """Number of earlier parts of each log that are kept."""

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
    """Port of the operator's routes, /admin/*, which the other port then does not have. Empty: the port
    of clients has them, too."""
    admin_host: str = "127.0.0.1"
    """With NDIF_ADMIN_PORT: name or address on which it listens."""
    admin_password_hash: PasswordHash = SecretStr("")
    """Argon2 hash of the password that opens the operator's part of the web page, as `ndif admin password`
    prints it, or a bcrypt hash. Empty: only the server's token opens it."""
    admin_session_s: Duration = Field(default=12 * 3600, ge=60, le=30 * 86_400)
    """Time after which an operator who logged in does so again."""
    dashboard: Literal["public", "login", "off"] | None = None
    """Viewers of the dashboard, the page at /. public: everybody sees models, machines and queues. login:
    users with an API key. off: there is no page. Default: public on loopback, and login on a server that
    other machines reach."""


class ProbeSettings(Group):
    """Traces that the server sends to its own models."""

    probe_interval_s: Duration = Field(default=0, ge=0)
    """Time in which the server sends one trace to each dedicated model, as a client does, and checks the
    value. 0: it sends none."""
    probe_timeout_s: Duration = Field(default=60, gt=0)
    """Time after which such a trace has failed: its client's start and its wait in the queue count."""


class AccountSettings(Group):
    """API keys, and the rights of users."""

    dev_mode: bool = False
    """True to let anyone who reaches the server use it, without an API key."""
    database_url: SecretStr = SecretStr("")
    """Database of API keys and tiers, as postgresql://USER:PASSWORD@HOST/DATABASE or
    sqlite:////FOLDER/accounts.sqlite. Default: the file accounts.sqlite in NDIF_SESSION_ROOT."""
    postgres_host: str = Field(default="", validation_alias="POSTGRES_HOST")
    """Host of a PostgreSQL database of API keys and tiers, instead of NDIF_DATABASE_URL."""
    postgres_port: int = Field(default=5432, ge=1, le=65535, validation_alias="POSTGRES_PORT")
    """Port of that database."""
    postgres_db: str = Field(default="ndif", validation_alias="POSTGRES_DB")
    """Name of that database."""
    postgres_user: str = Field(default="ndif", validation_alias="POSTGRES_USER")
    """User of that database."""
    postgres_password: SecretStr = Field(
        default=SecretStr(""), validation_alias="POSTGRES_PASSWORD"
    )
    """Password of that user."""
    accounts_cache_s: Duration = Field(default=5, gt=0, le=60)
    """Time that an answer of the database holds: a key that is revoked works no longer than this."""
    api_key: SecretStr = SecretStr("")
    """With `ndif jobs` and `ndif usage`: the API key of the user who asks."""
    api_keys: Path | None = None
    """YAML file of API keys and what each may do, instead of a database."""
    hotswapping: bool = True
    """Without API keys: true if users may have models loaded on demand."""
    allowed_repositories: str = ""
    """Repositories whose models users may have loaded on demand, and whose adapters: patterns like
    meta-llama/*, separated by commas. Empty: all. What an operator deploys needs no permission."""
    denied_repositories: str = ""
    """Repositories whose models and adapters users may not have loaded, though they are allowed."""

    @property
    def allowed_repository_patterns(self) -> tuple[str, ...]:
        """Patterns in `allowed_repositories`."""
        return split(self.allowed_repositories)

    @property
    def denied_repository_patterns(self) -> tuple[str, ...]:
        """Patterns in `denied_repositories`."""
        return split(self.denied_repositories)


class PlacementSettings(Group):
    """Models to deploy, and the memory that they may take."""

    deployments: str = ""
    """Models to deploy at the start as dedicated: repo ids or model keys, separated by |."""
    schedule: str = ""
    """iCalendar file or URL that says when which models are dedicated."""
    schedule_fetch_ahead_s: Duration = Field(default=3600, ge=0)
    """Time before an event of the schedule from which on its model is downloaded to where it will go;
    0: at its start."""
    node_gpus: Gpus = ""
    """GPUs to use in place of the detected ones, such as 2x24GiB."""
    gpu_context_bytes: Size = Field(default=768 * MiB, ge=0)
    """GPU memory that each process of a replica needs beside its tensors (a CUDA context: 760 MiB
    on an H200); reserved for all of them on every GPU of the replica."""
    node_cpu_memory: SizeText = ""
    """CPU memory to use in place of the detected size, such as 64GiB."""
    minimum_deployment_time_seconds: Duration = Field(default=3600, ge=0)
    """Time that a replica serves before another model may displace it."""
    model_cache_percentage: float = Field(default=0.9, gt=0, le=1)
    """Maximum fraction of CPU memory that models may use, from 0 to 1."""
    controller_sync_interval_s: Duration = Field(default=30, gt=0)
    """Time between checks of the machines and the schedule."""
    drain_timeout_s: Duration = Field(default=60, ge=0)
    """Time that a replica may finish its request before it is evicted; after that the request
    returns to the queue."""


class SchedulingSettings(Group):
    """Fair scheduling of requests, and autoscaling."""

    line_patience: int = Field(default=32, ge=1)
    """Maximum number of later requests that may overtake the oldest one in a row."""
    line_head_start_s: Duration = Field(default=60, ge=0)
    """Head start of requests with a priority key, in time of work."""
    autoscale_max_replicas: int = Field(default=4, ge=1)
    """Maximum number of replicas that autoscaling gives a model with a long queue."""
    autoscale_target_wait_s: Duration = Field(default=30, gt=0)
    """Median wait above which a model gets another replica."""
    autoscale_idle_s: Duration = Field(default=600, gt=0)
    """Time after which a replica that autoscaling added, and that nothing needs, is removed."""
    autoscale_cooldown_s: Duration = Field(default=60, gt=0)
    """Minimum time between two autoscaling changes of a model."""
    autoscale_backoff_s: Duration = Field(default=30, gt=0)
    """Initial back-off after autoscaling finds no room for a replica; doubled each time."""
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
    """Runners, their confinement and their limits."""

    sandbox: Literal["require", "best-effort", "off"] = "require"
    """Confinement of untrusted code by the kernel. `require`: refuse to run without full
    confinement; `best-effort`: use what the kernel offers; `off`: none."""
    protector: Literal["on", "off"] = "on"
    """Language policy for untrusted code, on top of the kernel's confinement."""
    whitelist: Path | None = None
    """YAML file of further modules that untrusted code may import."""
    runner_pool: int = Field(default=2, ge=1)
    """Number of runners per model that wait for untrusted requests."""
    runner_scope: Literal["user", "request"] = "user"
    """Lifetime of a runner for untrusted code. `user`: a confined process for the requests of one API
    key, reset in between; `request`: a process for each request, as there is for requests without a key."""
    runner_users: int = Field(default=32, ge=1)
    """Number of API keys per replica whose runner waits for their next request, some 30 MB each. Fewer
    where less than a tenth of the memory is available, one where the weights are on GPUs."""
    runner_idle_s: Duration = Field(default=60, gt=0)
    """Time without a request after which a user's runner is stopped."""
    runner_max_requests: int = Field(default=100, ge=1)
    """Number of requests after which a user's runner is stopped."""
    runner_memory_bytes: Size = Field(default=8 * GiB, gt=0)
    """Maximum memory of an untrusted request."""
    runner_max_threads: int = Field(default=256, gt=0)
    """Maximum number of threads of an untrusted request."""
    max_log_bytes: Size = Field(default=8 * MiB, gt=0)
    """Maximum output that one request may print."""
    max_log_lines_per_s: float = Field(default=1000, gt=0)
    """Maximum lines that one request may print per second, averaged over ten seconds."""
    max_streamed_bytes: Size = Field(default=1 * GiB, gt=0)
    """Maximum data that one hybrid request may send to its client."""


class DownloadSettings(Group):
    """Weights and adapters from a hub."""

    allow_pickled_weights: bool | None = None
    """True to load models whose weights are pickles alone (pytorch_model.bin), which are read confined. By
    default `ndif local start` does, `ndif start` does not."""
    max_adapter_bytes: Size = Field(default=2 * GiB, gt=0)
    """Maximum size of an adapter that is downloaded for an untrusted request."""
    adapter_cache_bytes: Size = Field(default=20 * GiB, gt=0)
    """Maximum disk space for downloaded adapters; the least recently used are removed first."""
    cache_bytes: Limit = ""
    """Maximum size of the Hub's cache of models on a machine: 500GB, or 80% for a share of its disk. Before
    a download, the least recently used models are deleted until the new one fits, but none that is
    deployed, booked or in use. Empty: there is no limit, and none is deleted."""
