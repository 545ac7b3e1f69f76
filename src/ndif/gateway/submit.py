"""`POST /request`: from either wire to an accepted request (specification, sections 3.2 and 8.1)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ndif.cluster.models import NotServedError
from ndif.config import Settings
from ndif.gateway.catalogue import Catalogue
from ndif.gateway.multipart import Malformed, Parts
from ndif.gateway.origin import is_loopback
from ndif.gateway.refusal import Refusal
from ndif.host.runtimes import SUPPORTED, Runtimes, generation_of
from ndif.queue.responder import Responder
from ndif.schema import wires
from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response as Update
from ndif.schema.status import Status
from ndif.stores.accounts import Account, Accounts, NoSuchKeyError
from ndif.stores.broker import Broker

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ENVELOPE_GENERATIONS = frozenset({"0.8"})
_NEWEST = "0.8"
_SHOWN = 100
"""How much of what a client sent is repeated to it."""


class Envelope(BaseModel):
    """What nnsight 0.8 says about its payload (`nnsight.schema.request.RequestModel`)."""

    model_config = ConfigDict(protected_namespaces=(), strict=True)

    model_key: str
    session_id: str = ""
    compress: bool = False
    env: dict[str, Any] = {}


class Submit:
    """The route, and everything that can be wrong before a request is accepted."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        responder: Responder,
        runtimes: Runtimes,
        catalogue: Catalogue,
        accounts: Accounts,
    ) -> None:
        self._settings = settings
        self._broker = broker
        self._responder = responder
        self._runtimes = runtimes
        self._installed = runtimes.installed()
        self._catalogue = catalogue
        self._accounts = accounts

    def routes(self) -> list[BaseRoute]:
        """Where it answers."""
        return [Route("/request", self.submit, methods=["POST"])]

    async def submit(self, http: HttpRequest) -> Response:
        """Accept a request and answer RECEIVED.

        Raises:
            Refusal: with what to do about it.
        """
        try:
            account = await self._accounts.account(
                http.headers.get("ndif-api-key", ""), http.client.host if http.client else ""
            )
        except NoSuchKeyError as error:
            raise Refusal(401, str(error)) from error
        try:
            if http.headers.get("content-type", "").startswith("multipart/form-data"):
                request = await self._from_envelope(http, account)
            elif "nnsight-model-key" in http.headers:
                request = await self._from_headers(http, account)
            else:
                raise Refusal(
                    400,
                    "This is neither a request of nnsight 0.8 (multipart/form-data with `data` and "
                    "`blob`) nor of 0.6 or 0.7 (the header nnsight-model-key is missing).",
                )
        except ClientDisconnect:
            return Response(status_code=400)
        await self._check(request)
        received = Update(request.id, Status.RECEIVED, "Your job has been received.")
        if request.session is None:
            # A poll that comes at once must find it.
            await self._responder.respond(request, received)
        await self._broker.submit(request)
        return JSONResponse(wires.fields(request, received))

    async def _from_envelope(self, http: HttpRequest, account: Account) -> Request:
        version = http.headers.get("nnsight-version", "")
        # A client run from a source tree does not know its version.
        generation = self._generation(version, Wire.ENVELOPE) if version else _NEWEST
        try:
            parts = await Parts(http.headers["content-type"]).read(self._body(http))
        except Malformed as error:
            raise Refusal(
                400, f"The multipart body cannot be read: {error}. Send it again."
            ) from error
        if missing := [name for name in ("data", "blob") if name not in parts]:
            raise Refusal(400, f"The multipart body lacks the part {missing[0]!r}.")
        try:
            envelope = Envelope.model_validate_json(bytes(parts["data"]))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(step) for step in first["loc"]) or "data"
            raise Refusal(
                400, f"The request's envelope is not valid: {where}: {first['msg']}."
            ) from error
        return Request(
            model=await self._model(envelope.model_key, generation, account),
            generation=generation,
            wire=Wire.ENVELOPE,
            payload=parts["blob"],
            compress=envelope.compress,
            base_url=_base_url(http),
            nearby=http.client is not None and is_loopback(http.client.host),
            session=envelope.session_id or None,
            env=envelope.env,
            user=account.user,
            key=account.key,
            weight=account.weight,
            priority=account.priority,
            hotswapping=account.hotswapping,
            trusted=account.trusted,
        )

    async def _from_headers(self, http: HttpRequest, account: Account) -> Request:
        headers = http.headers
        generation = self._generation(headers.get("nnsight-version", ""), Wire.HEADERS)
        compress = headers.get("nnsight-compress", "True")
        if compress not in ("True", "False"):
            raise Refusal(
                400, f"The header nnsight-compress must be True or False, not {_shown(compress)}."
            )
        callback = headers.get("ndif-callback", "")
        if callback and not callback.startswith(("http://", "https://")):
            raise Refusal(
                400, f"The callback must be an http or https URL, not {_shown(callback)}."
            )
        model = await self._model(headers["nnsight-model-key"], generation, account)
        payload = bytearray()
        async for chunk in self._body(http):
            payload += chunk
        return Request(
            model=model,
            generation=generation,
            wire=Wire.HEADERS,
            payload=payload,
            compress=compress == "True",
            base_url=_base_url(http),
            nearby=http.client is not None and is_loopback(http.client.host),
            session=headers.get("ndif-session_id") or None,
            callback=callback,
            user=account.user,
            key=account.key,
            weight=account.weight,
            priority=account.priority,
            hotswapping=account.hotswapping,
            trusted=account.trusted,
        )

    async def _body(self, http: HttpRequest) -> AsyncIterator[bytes]:
        """The body's chunks, until it is over the limit."""
        limit = self._settings.max_request_bytes
        too_large = Refusal(
            413,
            f"The request is larger than {limit:,} bytes, the most this server takes "
            "(NDIF_MAX_REQUEST_BYTES). Does the block refer to a large object, such as a dataset or "
            "another model? Refer only to what it needs.",
            close=True,
        )
        length = http.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > limit:
            raise too_large
        size = 0
        async for chunk in http.stream():
            size += len(chunk)
            if size > limit:
                raise too_large
            yield chunk

    async def _model(self, text: str, generation: str, account: Account) -> ModelKey:
        """The name under which the model that a client means is known here."""
        try:
            key = ModelKey.parse(text)
            known = await self._catalogue.models()
            model = known.admit(key, hotswapping=account.hotswapping, keep=False)
        except (ValueError, NotServedError) as error:
            raise Refusal(400, str(error)) from error
        only = model.wanted.runtime
        if only is not None and only != generation:
            raise Refusal(
                400,
                f"{model.config.repo_id!r} is served to nnsight {only} alone, not to {generation}. On your "
                f"side run `pip install '{SUPPORTED.get(only, f'nnsight=={only}.*')}'`.",
            )
        return model.key

    def _generation(self, version: str, wire: Wire) -> str:
        generation = generation_of(version)
        if generation is not None and generation not in self._installed:
            # One that was added since the server started is served without a restart.
            self._installed = self._runtimes.installed()
        installed = self._installed
        served = ", ".join(sorted(r.version for r in installed.values()))
        if generation is None:
            raise Refusal(
                400,
                f"The header nnsight-version is {_shown(version)}, which is not a version. "
                f"This server serves nnsight {served}.",
            )
        if generation in installed:
            if (generation in _ENVELOPE_GENERATIONS) is not (wire is Wire.ENVELOPE):
                raise Refusal(
                    400,
                    f"nnsight {version[:_SHOWN]} does not send requests of this form; is it modified?",
                )
            return generation
        here = f", or ask its operator to run `ndif runtime add {generation}`"
        raise Refusal(
            400,
            f"This server serves nnsight {served}; yours is {version[:_SHOWN]}. On your side run "
            f"`pip install '{SUPPORTED[_NEWEST]}'`{here if generation in SUPPORTED else ''}.",
        )

    async def _check(self, request: Request) -> None:
        if not request.payload:
            raise Refusal(400, "The request has no payload.")
        if request.compress and not request.payload.startswith(_ZSTD_MAGIC):
            raise Refusal(
                400,
                "The payload is not zstd data though the request says it is compressed: it was damaged "
                "on its way. Send it again.",
            )
        if request.session is not None and await self._broker.absent([request.session]):
            raise Refusal(
                409,
                "The live channel that this request names is not open (any more). Run the trace again; "
                "with blocking=False no channel is needed.",
            )


def _shown(text: str) -> str:
    return repr(text[:_SHOWN])


def _base_url(http: HttpRequest) -> str:
    return str(http.base_url).rstrip("/")
