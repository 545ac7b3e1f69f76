"""Blocks of an untrusted user without bad intentions: compiled code, tables, and named shapes."""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import shelve
import statistics
import string
import subprocess
from collections.abc import Callable
from functools import partial
from functools import reduce as fold
from pathlib import Path
from typing import Any

import einops
import nnsight
import numpy
import pandas as pd
import torch
from comparing import assert_equal
from einops import rearrange, reduce
from nnsight import TransformersModel
from nnsight.intervention.backends.remote import AsyncRemoteBackend
from nnsight.schema.config import CONFIG
from scenarios_08 import PROMPT, error_of
from scipy import special, stats
from scipy.spatial.distance import cdist
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, Subset, TensorDataset
from tqdm.auto import tqdm

logger = logging.getLogger("researcher")
logger.addHandler(logging.NullHandler())
here = Path("/data/notes.txt")
store = shelve.Shelf({})


class Context:
    """The model without weights for remote runs, and with weights for runs in this process."""

    def __init__(self, name: str, folder: str) -> None:
        CONFIG.APP.REMOTE_LOGGING = False
        self.remote = TransformersModel(name, task="text-generation")
        self.local = TransformersModel(folder, task="text-generation", dispatch=True)

    def same(self, block: Callable[[Any, bool], Any]) -> Any:
        """Run `block(model, remote)` remotely and locally; return the values, which must be equal."""
        remote, local = block(self.remote, True), block(self.local, False)
        assert_equal(remote, local)
        return remote


def doubled(value: torch.Tensor) -> torch.Tensor:
    return value * 2


@torch.compile
def compiled_at_home(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def refused(run: Callable[[], Any]) -> str:
    """Return the error of `run`, which must not show lines of libraries."""
    message = error_of(run)
    assert "site-packages" not in message, message
    assert "torch/" not in message, message
    return message


def logs_of(context: Context, block: Callable[[Any, Any], None]) -> list[str]:
    """Return the LOG lines of a block."""

    async def watch() -> list[Any]:
        backend = AsyncRemoteBackend(context.remote.to_model_key())
        block(context.remote, backend)
        return [update async for update in backend]

    updates = asyncio.run(watch())[:-1]
    return [update.description for update in updates if update.status.value == "LOG"]


def scenario_logging_and_tqdm_write_to_the_log(context: Context) -> None:
    def block(model: Any, backend: Any) -> None:
        with model.trace(PROMPT, backend=backend):
            for _ in tqdm(range(20_000), desc="layers"):
                pass
            for _ in range(2_000):
                with tqdm(total=1) as bar:
                    bar.update()
            logger.info("seen %d of %s", 2, "two")
            logger.debug("not shown")
            logging.getLogger().warning("careful")
            model.lm_head.output.save()

    lines = logs_of(context, block)
    bars = [line for line in lines if "(100%)" in line]
    assert bars[0].startswith("layers: 20000/20000 (100%)"), lines
    # Short bars in a row are not shown individually.
    assert len(bars) < 10, lines
    assert lines[-2:] == ["INFO | researcher | seen 2 of two", "WARNING | root | careful"], lines


def scenario_a_data_loader_in_a_block(context: Context) -> None:
    """The block's own process does the work of a DataLoader's workers."""
    sent = Subset(TensorDataset(torch.arange(10.0)), [1, 3, 5, 7])

    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            scale = model.transformer.h[0].output.mean()
            loader = DataLoader(sent, batch_size=3, num_workers=2 if remote else 0)
            batches = [[value * scale for value in batch] for batch in [*loader, *loader]].save()
        return batches

    context.same(block)


def scenario_modules_that_compute(context: Context) -> None:
    draw = random.Random(3)

    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            norms = [float(layer.output.norm()) for layer in model.transformer.h]
            add = partial(fold, lambda left, other: left + other)
            found = nnsight.save(
                [
                    add(norms),
                    statistics.median(norms),
                    heapq.nlargest(1, norms),
                    string.capwords("a block"),
                    draw.random() if remote else random.Random(3).random(),
                ]
            )
        return found

    context.same(block)


def scenario_probes_of_scikit_and_statistics_of_scipy(context: Context) -> None:
    """A call with several workers runs with one, and a fitted probe travels both ways."""
    data = numpy.random.default_rng(0).normal(size=(40, 64))
    sent = LogisticRegression().fit(data, data[:, 0] > 0)

    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            hidden = model.transformer.h[0].output[0].detach().numpy()
            labels = numpy.arange(len(hidden)) % 2
            probe = make_pipeline(StandardScaler(), PCA(2), LogisticRegression()).fit(
                hidden, labels
            )
            scores = cross_val_score(Ridge(), hidden, labels, cv=2, n_jobs=2 if remote else 1)
            distances = cdist(hidden, hidden, "cosine")
            related = stats.spearmanr(hidden[0], hidden[1]).statistic
            found = nnsight.save(
                [probe.predict_proba(hidden), sent.decision_function(hidden), scores, distances]
            )
            told = nnsight.save([float(related), float(special.expit(1)), probe])
        return [*found, *told[:2], told[2].predict(hidden_here)]

    with context.local.trace(PROMPT):
        hidden_here = nnsight.save(context.local.transformer.h[0].output[0].detach().numpy())
    for remote, local in zip(block(context.remote, True), block(context.local, False), strict=True):
        assert numpy.allclose(remote, local), (remote, local)


def scenario_names_that_are_not_used(context: Context) -> None:
    """The names cause no refusal; their first use is an error at its line."""

    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            hidden = model.transformer.h[0].output
            if hidden.isnan().any():
                subprocess.run(["true"], check=True)
                store.sync()
            found = hidden.save()
        return found

    context.same(block)

    def run() -> None:
        with context.remote.trace(PROMPT, remote=True):
            context.remote.lm_head.output.save()
            text = store.get("a")

    message = refused(run)
    assert 'text = store.get("a")' in message or "text = store.get('a')" in message, message
    assert "the variable 'store' cannot be used: it holds an object of shelve.Shelf" in message
    assert "shelve.Shelf is not available on this server; you can import: " in message
    for name in ("logging", "tqdm", "scipy", "sklearn", "pandas"):
        assert f" {name}," in message, message


def scenario_a_path_is_data(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            model.lm_head.output.save()
            found = nnsight.save(
                [here.stem, str(here.parent / "other.txt"), here.with_suffix(".pt")]
            )
        return found

    context.same(block)

    def run() -> None:
        with context.remote.trace(PROMPT, remote=True):
            context.remote.lm_head.output.save()
            text = here.read_text()

    message = refused(run)
    assert "text = here.read_text()" in message, message
    assert (
        "PosixPath.read_text is not available on this server: the path belongs to your" in message
    )


def scenario_torch_compile_in_a_block(context: Context) -> None:
    def run() -> None:
        with context.remote.trace(PROMPT, remote=True):
            hidden = context.remote.transformer.h[0].output
            nnsight.save(torch.compile(doubled)(hidden))

    message = refused(run)
    assert "torch.compile is not available on this server" in message, message
    assert "call the function itself" in message
    assert "nnsight.save(torch.compile(doubled)(hidden))" in message


def scenario_compile_of_the_model(context: Context) -> None:
    def run() -> None:
        with context.remote.trace(PROMPT, remote=True):
            context.remote.transformer.compile()
            context.remote.lm_head.output.save()

    assert "compile is not available on this server" in refused(run)


def scenario_torch_jit_in_a_block(context: Context) -> None:
    def run() -> None:
        with context.remote.trace(PROMPT, remote=True):
            torch.jit.script(doubled)
            context.remote.lm_head.output.save()

    assert "torch.jit is not available on this server: it compiles text" in refused(run)


def scenario_a_function_that_was_compiled_at_home(context: Context) -> None:
    """The server runs the function's source, without the compilation."""

    with context.remote.trace(PROMPT, remote=True):
        result = nnsight.save(compiled_at_home(context.remote.transformer.h[0].output))
    with context.local.trace(PROMPT):
        expected = nnsight.save(context.local.transformer.h[0].output * 2)
    assert_equal(result, expected)


def scenario_pandas_in_a_block(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            rows = []
            for index, layer in enumerate(model.transformer.h):
                hidden = layer.output[0]
                for token in range(len(hidden)):
                    norm = float(hidden[token].norm())
                    rows.append({"layer": index, "token": token, "norm": norm})
            frame = pd.DataFrame(rows)
            means = frame.groupby("layer")["norm"].agg(["mean", "max"])
            found = nnsight.save(means.to_numpy().tolist())
            told = nnsight.save(frame.describe().loc["count", "norm"].item())
            largest = nnsight.save(frame.loc[frame.norm.idxmax(), "token"].item())
        return [found, told, largest]

    context.same(block)


def scenario_a_frame_is_sent_and_returned(context: Context) -> None:
    given = pd.DataFrame({"layer": [0, 1], "scale": [1.5, 2.5]})

    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            norms = [float(layer.output.norm()) for layer in model.transformer.h]
            frame = given.assign(norm=lambda rows: [norms[row] for row in rows.layer])
            result = nnsight.save(frame)
        return result

    remote, local = block(context.remote, True), block(context.local, False)
    pd.testing.assert_frame_equal(remote, local)


def scenario_einops_in_a_block(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            hidden = model.transformer.h[0].output
            heads = nnsight.save(rearrange(hidden, "b t (h d) -> b h t d", h=2))
            means = nnsight.save(reduce(hidden, "b t d -> b d", "mean"))
            scores = nnsight.save(einops.einsum(heads, heads, "b h q d, b h k d -> b h q k"))
            model.transformer.h[0].output = rearrange(heads, "b h t d -> b t (h d)")
            logits = nnsight.save(model.lm_head.output)
        return [heads, means, scores, logits]

    context.same(block)


def scenario_a_file_of_pandas(context: Context) -> None:
    def run() -> None:
        with context.remote.trace(PROMPT, remote=True):
            context.remote.lm_head.output.save()
            pd.DataFrame({"a": [1]}).to_csv("/tmp/mine.csv")

    message = refused(run)
    assert "DataFrame.to_csv is not available on this server: it writes files" in message


def scenario_requests_draw_different_numbers(context: Context) -> None:
    def drawn() -> Any:
        with context.remote.trace(PROMPT, remote=True):
            numbers = [].save()
            numbers.append((torch.rand(1).item(), numpy.random.rand(), random.random()))
        return numbers[0]

    first, second = drawn(), drawn()
    assert all(left != other for left, other in zip(first, second, strict=True)), (first, second)


def scenario_what_a_tokenizer_returns_is_sent_whole(context: Context) -> None:
    encoding = context.remote.tokenizer([PROMPT], return_tensors="pt")
    assert encoding.encodings  # a client sends the encodings, too

    def block(model: Any, remote: bool) -> Any:
        with model.trace(encoding, remote=remote):
            hidden = model.transformer.h[0].output.save()
        return hidden

    context.same(block)
