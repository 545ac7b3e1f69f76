"""`POST /request`: accepts the submissions of both wires as requests."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.routing import BaseRoute

from ndif.config.settings import Settings
from ndif.control.leader import Catalogue
from ndif.gateway.answers import MODEL_KEY, OLDER_MODEL_KEY
from ndif.gateway.authority import base_url
from ndif.gateway.callbacks import CallbackRoute
from ndif.gateway.caller import caller_of, subscription_of
from ndif.gateway.envelope_wire import REFUSED_SESSION, Envelope, read_envelope
from ndif.gateway.header_wire import read_headers
from ndif.gateway.http_error import HttpError, reason_of
from ndif.gateway.incoming import Incoming, IncomingCount, IncomingPayload
from ndif.gateway.open_channels import OpenChannels
from ndif.gateway.openapi import BYTES, ApiRoute, Content, Description, Parameter
from ndif.gateway.quota import Quota
from ndif.host.runtimes import SUPPORTED, Runtimes, generation_of
from ndif.hostname import is_loopback
from ndif.schema import wires
from ndif.schema.limits import KeyLimits
from ndif.schema.model_key import ModelKey, explain_class
from ndif.schema.payload import ZSTD_MAGIC, Payload
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response as Update
from ndif.schema.status import Status
from ndif.schema.step import GATEWAY
from ndif.schema.wires import JobUpdate
from ndif.stores.accounts import Account, Caller
from ndif.stores.broker import Broker
from ndif.stores.stores import Stores
from ndif.telemetry import metrics
from ndif.telemetry.steps import Steps

logger = logging.getLogger(__name__)

_ENVELOPE_GENERATIONS = frozenset({"0.8"})
_NEWEST = "0.8"
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
"""Version 0 of the header: https://www.w3.org/TR/trace-context/"""
_NO_CHANNEL = (
    "The connection for updates that this request names is not open, or somebody else opened it. Run the "
    "trace again; with blocking=False it needs no such connection."
)
_MAX_QUOTED = 100
"""Characters of a client's text that an answer repeats."""


_SUBMIT = Description(
    "jobs",
    "Submit a job",
    "nnsight 0.8 sends a multipart body: `data`, an envelope, and `blob`, the payload. 0.6 and 0.7 send "
    "the payload as the body, and the envelope in headers. The payload is the block as the client's "
    "nnsight serialised it, mostly compressed with zstd; the gateway does not read it.",
    "The job is accepted and will not be lost.",
    parameters=(
        Parameter(
            "nnsight-version",
            "header",
            "Version of the client's nnsight; the block runs with its generation. Only 0.8 may omit it.",
            "0.8.1",
        ),
        Parameter("python-version", "header", "Version of the client's Python.", "3.11.2"),
        Parameter("nnsight-model-key", "header", "0.6 and 0.7: the model's key.", OLDER_MODEL_KEY),
        Parameter(
            "nnsight-compress",
            "header",
            "0.6 and 0.7: `True` if the payload is compressed and the result should be compressed, too.",
            "True",
            {"enum": ["True", "False"]},
        ),
        Parameter(
            "ndif-session_id",
            "header",
            "0.6 and 0.7: id of the live channel for updates; without it the client polls.",
            "kTvSxqbOfJ6Q0dEWAAAB",
        ),
        Parameter(
            "ndif-callback",
            "header",
            "0.6 and 0.7: address of a webhook or mail at the job's end.",
            "https://lab.example.org/done",
        ),
    ),
    body={
        "multipart/form-data": Content(
            {
                "type": "object",
                "properties": {
                    "data": Envelope.model_json_schema(),
                    "blob": {"type": "string", "contentMediaType": BYTES},
                },
                "required": ["data", "blob"],
            },
            {
                "data": {
                    "model_key": MODEL_KEY,
                    "session_id": "8f0d2c9be1f34c3c8f6f2c2f4a6b7d10",
                    "compress": True,
                    "env": {},
                },
                "blob": "the payload's bytes",
            },
            {"data": {"contentType": "application/json"}},
        ),
        BYTES: Content({}),
    },
    refusals={
        400: "The request is not valid, or the model, the version or the payload is not served here.",
        401: "The API key is missing or unknown.",
        403: "The key may not do this.",
        408: "The body came too slowly.",
        409: "The live channel that the request names is not open.",
        413: "The body is too large.",
        429: "Too many wrong keys, or too much is on its way from this address.",
        503: "The server cannot accept requests at the moment.",
    },
    needs="key",
)


@dataclass
class SubmitRoute:
    """Accepts requests of both wires.

    Looks up the account of the API key, and reads the submission with the wire's module. Then checks it
    against the installed runtimes and the catalogue of models, and submits it to the broker. The payload is
    never parsed here.
    """

    settings: Settings
    stores: Stores[Broker]
    catalogue: Catalogue
    runtimes: Runtimes
    incoming: Incoming
    quota: Quota
    callbacks: CallbackRoute
    channels: OpenChannels

    def __post_init__(self) -> None:
        self._installed = self.runtimes.installed()

    def routes(self) -> list[BaseRoute]:
        """Return the route."""
        return [ApiRoute("/request", self.submit, _SUBMIT, "POST")]

    async def submit(self, http: HttpRequest) -> JobUpdate:
        """Accept a request and answer RECEIVED."""
        caller, began = caller_of(http), time.time()
        with self.incoming.open(caller.address) as unfinished:
            payload = IncomingPayload(self.stores.broker.create_payload, unfinished)
            try:
                return await self._submit(http, caller, payload, unfinished, began)
            except BaseException as error:
                payload.discard()
                metrics.REFUSALS.labels(reason_of(error)).inc()
                raise

    async def _submit(
        self,
        http: HttpRequest,
        caller: Caller,
        payload: IncomingPayload,
        unfinished: IncomingCount,
        began: float,
    ) -> JobUpdate:
        account = await self.stores.accounts.account(caller)
        limits = self.quota.limits_of(account)
        version = http.headers.get("nnsight-version", "")
        self._refuse_older(version, http.headers.get("python-version", ""))
        callback = http.headers.get("ndif-callback", "")
        await self.quota.admit(account, limits)
        if callback:
            await self.callbacks.admit(callback, account.user)
        body = self.incoming.body(http, unfinished, limits.request_bytes)
        if http.headers.get("content-type", "").startswith("multipart/form-data"):
            wire = Wire.ENVELOPE
            # A client of 0.8 that runs from a source tree does not know its version.
            generation = self._generation(version, wire) if version else _NEWEST
            envelope = await read_envelope(http.headers["content-type"], body, payload)
            model = await self._model(envelope.model_key, generation, account)
        elif "nnsight-model-key" in http.headers:
            wire = Wire.HEADERS
            generation = self._generation(version, wire)
            envelope = read_headers(http.headers)
            model = await self._model(envelope.model_key, generation, account)
            await self._read_payload(body, payload)
        else:
            raise HttpError(
                400,
                "This is neither a request of nnsight 0.8 (multipart/form-data with `data` and "
                "`blob`) nor of 0.6 or 0.7 (the header nnsight-model-key is missing).",
            )
        content = await payload.finish()
        _refuse_unreadable(content, compressed=envelope.compress)
        request = Request(
            model=model,
            generation=generation,
            wire=wire,
            payload=content,
            compress=envelope.compress,
            base_url=base_url(http, self.settings.public_url),
            nearby=is_loopback(caller.address),
            subscription_id=await self._subscription(envelope, wire, caller, account),
            env=envelope.env,
            callback=callback,
            user=account.user,
            key=account.key,
            weight=account.weight,
            priority=account.priority,
            hotswapping=account.hotswapping,
            trusted=account.trusted and envelope.trusted is not False,
            gated=account.gated,
            max_result_bytes=limits.result_bytes,
            max_stored_bytes=limits.stored_bytes,
            began=began,
            traceparent=_traceparent(http),
        )
        return await self._send(request, limits)

    async def _read_payload(
        self, body: AsyncIterator[list[bytes]], payload: IncomingPayload
    ) -> None:
        async for chunks in body:
            for chunk in chunks:
                payload.add(chunk)
            await payload.spill()

    async def _send(self, request: Request, limits: KeyLimits) -> JobUpdate:
        """Submit a request to the broker, and return the update RECEIVED."""
        steps = Steps(request, GATEWAY)
        steps.add("receive", request.began, request.received)
        received = Update(request.id, Status.RECEIVED, "Your job has been received.")
        if request.subscription_id is None:
            # A client may poll at once, and must find the job.
            await self.stores.responder.respond(request, received)
        await self.stores.broker.submit(
            request, most_of_key=limits.unfinished_jobs, most_of_model=limits.queue_depth
        )
        metrics.submitted(request)
        logger.info("job %s is accepted", request.id)
        steps.add("submit", request.received)
        return wires.fields(request, received)

    async def _subscription(
        self, envelope: Envelope, wire: Wire, caller: Caller, account: Account
    ) -> str | None:
        """Return the id of the subscription that a request names; None for a polled job.

        Raise an `HttpError` if the subscription is not open, or belongs to another caller.
        """
        if not envelope.session_id:
            return None
        no_channel = HttpError(409, _NO_CHANNEL)
        if envelope.session_id == REFUSED_SESSION:
            no_channel = self.channels.refusal(caller, account) or no_channel
        # Clients of the older wire send no key when they open a channel: its owner is the caller's name.
        owner = account.user if wire is Wire.ENVELOPE else caller.name
        subscription_id = subscription_of(envelope.session_id, owner)
        if await self.stores.broker.disconnected([subscription_id]):
            raise no_channel
        # A channel that was opened without a key belongs to the user of the first job that names it.
        is_unclaimed = account.key and wire is Wire.HEADERS
        if is_unclaimed and not await self.stores.broker.takes(subscription_id, account.user):
            raise no_channel
        return subscription_id

    async def _model(self, text: str, generation: str, account: Account) -> ModelKey:
        """Return the server's key of the model that a client's key names, or raise an `HttpError`."""
        try:
            key = ModelKey.parse(text)
        except ValueError as error:
            raise HttpError(400, str(error)) from error
        if problem := explain_class(key, generation):
            raise HttpError(400, problem)
        models = await self.catalogue.models()
        model = models.admit(
            key, generation, hotswapping=account.hotswapping, gated=account.gated, keep=False
        )
        required = model.deployment.runtime
        if required is not None and required != generation:
            raise HttpError(
                400,
                f"{model.config.repo_id!r} is served to nnsight {required} alone, not to {generation}. On "
                f"your side run `pip install '{SUPPORTED.get(required, f'nnsight=={required}.*')}'`.",
            )
        return model.key

    def _refuse_older(self, nnsight: str, python: str) -> None:
        """Refuse clients older than the operator's minimum; a client without a version passes."""
        oldest = self.settings.min_nnsight_version
        if oldest and _release(nnsight) < _release(oldest):
            raise HttpError(
                400,
                f"This server takes requests of nnsight {oldest} and later; yours is "
                f"{nnsight[:_MAX_QUOTED]}. On your side run `pip install 'nnsight>={oldest}'`.",
            )
        oldest = self.settings.min_python_version
        if oldest and _release(python)[:2] < _release(oldest)[:2]:
            raise HttpError(
                400,
                f"This server takes requests of Python {oldest} and later; yours is "
                f"{python.split(' ')[0][:_MAX_QUOTED]}. Run your client with a later one.",
            )

    def _generation(self, version: str, wire: Wire) -> str:
        """Return the installed generation for a client of this version and wire; raise if there is none."""
        generation = generation_of(version)
        if generation is not None and generation not in self._installed:
            # The operator may have added the runtime since the last look.
            self._installed = self.runtimes.installed()
        installed = self._installed
        served = ", ".join(sorted(runtime.version for runtime in installed.values()))
        if generation is None:
            raise HttpError(
                400,
                f"The header nnsight-version is {version[:_MAX_QUOTED]!r}, which is not a version. "
                f"This server serves nnsight {served}.",
            )
        if generation in installed:
            if (generation in _ENVELOPE_GENERATIONS) is not (wire is Wire.ENVELOPE):
                raise HttpError(
                    400,
                    f"nnsight {version[:_MAX_QUOTED]} does not send requests of this form; is it "
                    "modified?",
                )
            return generation
        advice = f", or ask its operator to run `ndif runtime add {generation}`"
        raise HttpError(
            400,
            f"This server serves nnsight {served}; yours is {version[:_MAX_QUOTED]}. On your side run "
            f"`pip install '{SUPPORTED[_NEWEST]}'`{advice if generation in SUPPORTED else ''}.",
        )


def _refuse_unreadable(payload: Payload, *, compressed: bool) -> None:
    """Refuse a payload that is empty, or not zstd data although the request says so."""
    if not payload:
        raise HttpError(400, "The request has no payload.")
    if compressed and not payload.startswith(ZSTD_MAGIC):
        raise HttpError(
            400,
            "The payload is not zstd data though the request says it is compressed: it was damaged "
            "on its way. Send it again.",
        )


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version; without any, a number greater than every version."""
    match = re.match(r"\s*v?(\d{1,9}(?:\.\d{1,9})*)", version)
    return tuple(map(int, match[1].split("."))) if match else (10**9,)


def _traceparent(http: HttpRequest) -> str:
    """Return the request's `traceparent`, or "" if it is malformed or missing."""
    traceparent = http.headers.get("traceparent", "")
    return traceparent if _TRACEPARENT.fullmatch(traceparent) else ""
