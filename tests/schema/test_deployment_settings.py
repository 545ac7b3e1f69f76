"""CHECKPOINT on a command line, and the entry of a deployment in a file."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndif.errors import NdifError
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.deployment_file import to_entry
from ndif.schema.deployment_settings import parse_checkpoint
from tests.schema.configs import from_value

REST = '{"repo_id": "org/name", "revision": "v2", "task": "fill-mask"}'
KEY = f"nnsight.modeling.transformers.TransformersModel:{REST}"
OLD_KEY = f"nnsight.modeling.language.LanguageModel:{REST}"


def test_repo_id_names_repository() -> None:
    assert parse_checkpoint("org/name") == DeploymentConfig("org/name", "org/name")
    assert parse_checkpoint("gpt2") == DeploymentConfig("gpt2", "gpt2")


@pytest.mark.parametrize("key", [KEY, OLD_KEY])
def test_model_key_names_revision_and_task(key: str) -> None:
    assert parse_checkpoint(key) == DeploymentConfig(
        "org/name", "org/name", revision="v2", task="fill-mask"
    )


def test_named_folder_is_resolved_and_its_task_is_read(tiny_gpt2: Path) -> None:
    assert parse_checkpoint(f"org/name={tiny_gpt2}") == DeploymentConfig(
        "org/name", str(tiny_gpt2.resolve()), task="text-generation"
    )


def test_folder_can_be_relative_path_but_needs_name(
    tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_gpt2.parent)
    assert parse_checkpoint(f"org/name={tiny_gpt2.name}").checkpoint == str(tiny_gpt2.resolve())
    with pytest.raises(NdifError, match=f"write ORG/NAME={tiny_gpt2.name}"):
        parse_checkpoint(tiny_gpt2.name)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("/tmp", "/tmp is a folder, and clients ask for a model by name: write ORG/NAME=/tmp."),
        ("./x", "write ORG/NAME=./x"),
        ("org/name=/no/such/folder", "There is no folder /no/such/folder."),
        ("org/name=/tmp", "/tmp holds no config.json"),
        ("two words", "'two words' names no model"),
        ("", "names no model"),
        ("{}", "is not a model key"),
        (f"os.system:{REST}", "not with 'os.system'. Make 'org/name' with one of them."),
        ("=/tmp", "'' names no model"),
    ],
)
def test_invalid_checkpoint_argument_is_rejected_with_advice(argument: str, says: str) -> None:
    with pytest.raises(NdifError) as refused:
        parse_checkpoint(argument)
    assert says in str(refused.value)


def test_folder_on_another_machine_is_not_checked_locally() -> None:
    assert parse_checkpoint("org/name=/models/x", is_local=False).checkpoint == "/models/x"
    with pytest.raises(NdifError, match="write its whole path"):
        parse_checkpoint("org/name=models/x", is_local=False)


BOUNDS = st.integers(1, 9).flatmap(
    lambda least: st.tuples(st.just(least), st.none() | st.integers(least, 20))
)
RUNTIMES = st.sampled_from(
    [(None, ()), ("0.7", ()), ("0.7", ("0.7",)), (None, ("0.8",)), (None, ("0.8", "0.7"))]
)
CONFIGS = st.builds(
    lambda bounds, runtimes, **others: DeploymentConfig(
        replicas=bounds[0],
        max_replicas=bounds[1],
        runtime=runtimes[0],
        generations=runtimes[1],
        **others,
    ),
    BOUNDS,
    RUNTIMES,
    repo_id=st.sampled_from(["org/name", "gpt2"]),
    checkpoint=st.sampled_from(["org/name", "gpt2", "/models/x"]),
    revision=st.sampled_from([None, "v2", "main"]),
    task=st.sampled_from([None, "fill-mask"]),
    dtype=st.sampled_from(["auto", "bfloat16"]),
    device=st.sampled_from([None, "cpu"]),
    threads=st.integers(0, 4),
    execution_timeout_s=st.none() | st.floats(0.5, 1e6),
    dedicated=st.booleans(),
    size_bytes=st.none() | st.integers(0, 10**12),
    padding_factor=st.none() | st.floats(0, 2),
    padding_bytes=st.none() | st.integers(0, 10**12),
    trust_remote_code=st.booleans(),
)


@given(CONFIGS)
def test_entry_read_back_equals_deployment(config: DeploymentConfig) -> None:
    assert from_value([to_entry(config)], "x") == (config,)


@given(CONFIGS)
def test_deployment_survives_json_round_trip(config: DeploymentConfig) -> None:
    assert DeploymentConfig(**json.loads(json.dumps(asdict(config)))) == config


def test_entry_contains_every_changed_setting() -> None:
    other = DeploymentConfig(
        repo_id="a/b",
        checkpoint="/x",
        revision="v2",
        task="t",
        dtype="float32",
        device="cpu",
        attn_implementation="eager",
        threads=3,
        execution_timeout_s=1.5,
        replicas=2,
        max_replicas=4,
        dedicated=True,
        size_bytes=3,
        padding_factor=0.5,
        padding_bytes=7,
        trust_remote_code=True,
        runtime="0.7",
        generations=("0.7",),
    )
    assert len(to_entry(other)) == len(fields(DeploymentConfig))
    assert to_entry(DeploymentConfig("a/b", "a/b")) == {"repo_id": "a/b"}
