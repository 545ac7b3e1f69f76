"""Reading of a snapshot in the Hub's cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from ndif.runtime.spec import ModelSpec
from ndif.runtime.weights import loading

COMMIT = "0123456789" * 4


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Messages that the Hub's library logs."""
    logger = logging.getLogger("huggingface_hub")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_partial_snapshot_is_read_without_warnings(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    repository = tmp_path / "models--test-org--model"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "refs", repository / "blobs", repository / "trees"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text('{"model_type": "gpt2"}')
    files = {name: {"size": 1, "blob_id": "0"} for name in ("config.json", "tf_model.h5")}
    listing = {"format_version": 1, "files": files}
    (repository / "trees" / f"{COMMIT}.json").write_text(json.dumps(listing))
    # transformers asks for a model's chat templates in this way.
    loaded_folder = loading.read_confined(
        ModelSpec("test-org/model", "0.8", folder=str(snapshot)),
        lambda: snapshot_download("test-org/model", cache_dir=tmp_path, local_files_only=True),
    )
    assert Path(loaded_folder) == snapshot
    assert log.messages == []
