"""`GET /status` of an idle server, with and without loading on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from ndif.cluster.models import Models
from ndif.gateway.health import HealthRoutes
from ndif.host.runtimes import Runtimes
from ndif.schema.answer import from_plain
from ndif.schema.client_status import ServerStatus
from ndif.stores.accounts import Accounts, FileAccounts, OpenAccounts
from tests.gateway.catalogue import KnownCatalogue
from tests.on_loop import on_loop

READY = "Ready: loads on request"
KEY = 'nnsight.modeling.transformers.TransformersModel:{"repo_id": "a/b", "revision": null}'


def entry(level: str, state: str) -> dict[str, Any]:
    states = {"deployment_level": level, "application_state": state, "state": state}
    unknown = {"task": None, "revision": None, "parameters": None, "config": None}
    empty: dict[str, Any] = {"replicas": {}, "runtimes": {}, "nodes": []}
    return {
        "model_key": KEY,
        "repo_id": "a/b",
        "trust_remote_code": False,
        "on_demand": False,
        "dedicated": level == "HOT",
        **states,
        **unknown,
        **empty,
    }


async def listed(
    accounts: Accounts, folder: Path, deployments: dict[str, Any], *, fixed: bool = False
) -> dict[str, dict[str, Any]]:
    """Return the entries of `/status` by repository."""
    catalogue = KnownCatalogue(Models(fixed=fixed), deployments)
    app = Starlette(routes=HealthRoutes(catalogue, accounts, Runtimes(folder)).routes())
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://server"
    ) as http:
        answer = (await http.get("/status")).json()
    from_plain(ServerStatus, answer)
    return {row["repo_id"]: row for row in answer["deployments"].values()}


@pytest.mark.parametrize(
    "deployments",
    [{}, {KEY: entry("COLD", "NOT DEPLOYED")}, {KEY: entry("WARM", "NOT DEPLOYED")}],
    ids=["empty", "COLD", "WARM"],
)
@on_loop
async def test_idle_server_that_loads_on_request_is_reported_as_ready(
    deployments: dict[str, Any], tmp_path: Path
) -> None:
    listing = await listed(OpenAccounts(hotswapping=True), tmp_path, deployments)
    assert listing.keys() == {*(["a/b"] if deployments else []), READY}
    ready = listing[READY]
    # Clients of 0.8 count HOT entries; clients of 0.6 and 0.7 read the key and one of two fields.
    assert (ready["deployment_level"], ready["application_state"]) == ("HOT", "RUNNING")
    assert json.loads(ready["model_key"].partition(":")[2])["repo_id"] == READY
    assert ready["dedicated"] is False
    assert "schedule" not in ready


@on_loop
async def test_server_with_keys_is_reported_as_loading_on_request(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n- {key: the-key-of-ada, user: ada}\n")
    keys.chmod(0o600)
    assert (await listed(FileAccounts(keys), tmp_path, {})).keys() == {READY}


@on_loop
async def test_ready_entry_is_absent_with_model_or_without_loading(tmp_path: Path) -> None:
    accounts = OpenAccounts(hotswapping=True)
    for state in ("RUNNING", "DEPLOYING", "NOT DEPLOYED", "UNHEALTHY"):
        entries = {KEY: entry("HOT", state)}
        assert (await listed(accounts, tmp_path, entries)).keys() == {"a/b"}
    assert await listed(OpenAccounts(hotswapping=False), tmp_path, {}) == {}
    assert await listed(accounts, tmp_path, {}, fixed=True) == {}
