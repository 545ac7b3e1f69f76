"""The researchers' notebook, run against a server and with a local model."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from tests.clients.harness import CHEAP_TLS, LocalServer
from tests.conftest import client_environment
from tests.docs.documents import ROOT

pytestmark = [pytest.mark.process, pytest.mark.slow]

NOTEBOOK = ROOT / "docs" / "users" / "notebook.ipynb"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PATIENCE_S = 300
COMPUTED = (
    *("token", "lens_probabilities", "lens_tokens", "effects", "direction", "leanings"),
    *("sentences", "samples", "features", "reconstructed", "scores", "erased"),
)
"""Variables of every section."""
PLOTS = 5


@pytest.fixture(scope="module")
def notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def served(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A sandboxed server of the demo's model."""
    environment = {"NDIF_SESSION_ROOT": str(tmp_path_factory.mktemp("session"))}
    arguments = (str(smollm2), "--name", MODEL, "--sandbox", "--threads", "1")
    started = LocalServer(*arguments, environment=environment)
    try:
        yield started.ready()
    finally:
        started.stop()


def run(notebook: Any, values: dict[str, str], environment: dict[str, str], file: Path) -> Any:
    """Run a notebook with other values in its parameter cell; return the notebook and its results."""
    filled = copy.deepcopy(notebook)
    (cell,) = (cell for cell in filled.cells if "parameters" in cell.metadata.get("tags", []))
    cell.source = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    kept = ", ".join(f"{name!r}: {name}" for name in COMPUTED)
    saving = nbformat.v4.new_code_cell(f"torch.save({{{kept}}}, {str(file)!r})")  # type: ignore[no-untyped-call]
    filled.cells.append(saving)
    client = NotebookClient(filled, timeout=PATIENCE_S, kernel_name="python3")
    # One thread, as for the server's model, so that sums have the same order.
    client.execute(env={**os.environ, **CHEAP_TLS, "OMP_NUM_THREADS": "1", **environment})
    return filled, torch.load(file)


def local(notebook: Any) -> Any:
    """Return the notebook with the model in its own process."""
    copied = copy.deepcopy(notebook)
    for cell in copied.cells:
        if cell.cell_type == "code":
            cell.source = cell.source.replace("remote=True", "remote=False").replace(
                'task="text-generation")', 'task="text-generation", dispatch=True)'
            )
    return copied


def test_notebook_has_one_parameter_cell(notebook: Any) -> None:
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    names = [line.partition(" = ")[0] for line in tagged[0].source.splitlines()]
    assert names == ["HOST", "API_KEY", "MODEL"]
    others = "\n".join(cell.source for cell in notebook.cells if cell is not tagged[0])
    assert "127.0.0.1" not in others


def test_saved_outputs_come_from_one_full_run(notebook: Any) -> None:
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type in ("error", "stream")]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PLOTS


def test_remote_values_equal_local_values(
    notebook: Any, served: LocalServer, smollm2: Path, tmp_path: Path
) -> None:
    remotely = {"HOST": served.url, "API_KEY": "", "MODEL": MODEL}
    parameters = {"HOST": "http://127.0.0.1:9", "API_KEY": "", "MODEL": str(smollm2)}
    with ThreadPoolExecutor(2) as pool:
        client = client_environment(served, tmp_path / "hf", None)
        first = pool.submit(run, notebook, remotely, client, tmp_path / "remote.pt")
        second = pool.submit(run, local(notebook), parameters, {}, tmp_path / "local.pt")
        (filled, remote), (_, expected) = first.result(), second.result()
    for name in COMPUTED:
        if isinstance(expected[name], torch.Tensor):
            assert torch.equal(remote[name], expected[name]), name
        else:
            assert remote[name] == expected[name], name
    # Outputs of the sections.
    shown = [output for cell in filled.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in shown) == PLOTS
    assert "' Paris'" in [output.get("data", {}).get("text/plain") for output in shown]
    assert remote["lens_tokens"][-1, -1] == remote["token"]
    assert remote["effects"].max() > 0 > remote["effects"].min()
    assert remote["leanings"][0] < remote["leanings"][-1]
    assert len(set(remote["sentences"].values())) == 2
    assert 0 < (remote["features"] > 0).float().mean() < 1
    assert not torch.equal(remote["erased"], remote["reconstructed"])
