from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from ndif.schema.deployment import DeploymentConfig
from ndif.schema.deployment_file import (
    DeploymentFileError,
    from_variable,
    read_file,
    schema,
)
from ndif.schema.deployment_settings import SETTING_NAMES, DeploymentSettings
from tests.fuzzing import examples
from tests.schema.configs import from_value, read

KEY = 'nnsight.modeling.transformers.TransformersModel:{"repo_id": "a/b", "revision": "v2"}'

LIST = """\
- openai-community/gpt2
- repo_id: meta-llama/Llama-3.1-8B
  dedicated: true
  replicas: 2
  dtype: bfloat16
  padding_bytes: 12GiB
  execution_timeout_seconds: 15m
  runtime: "0.8"
"""

MAPPING = """\
# What this server has.
openai-community/gpt2:
meta-llama/Llama-3.1-8B:
  dedicated: true
  replicas: 2
  dtype: bfloat16
  padding_bytes: 12 GiB
  execution_timeout_seconds: 900
  runtime: "0.8"
"""

BOTH = (
    DeploymentConfig("openai-community/gpt2", "openai-community/gpt2"),
    DeploymentConfig(
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B",
        dtype="bfloat16",
        execution_timeout_s=900,
        replicas=2,
        dedicated=True,
        padding_bytes=12 * 1024**3,
        runtime="0.8",
    ),
)


def problems_of(text: str, source: str = "models.yaml") -> tuple[str, ...]:
    with pytest.raises(DeploymentFileError) as caught:
        read(text, source)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


# Valid files


@pytest.mark.parametrize("text", [LIST, MAPPING], ids=["list", "mapping"])
def test_list_and_mapping_are_read_alike(text: str, tmp_path: Path) -> None:
    assert read(text, "models.yaml") == BOTH
    as_json = json.dumps(yaml.safe_load(text), indent="\t")
    assert read(as_json, "models.json") == BOTH
    assert from_value(json.loads(as_json), "the request") == BOTH
    path = tmp_path / "models.yaml"
    path.write_text("\ufeff" + text)
    assert read_file(path) == BOTH


@pytest.mark.parametrize("text", ["", "# nothing\n", "[]", "{}", "null", "---\n"])
def test_empty_file_has_no_deployments(text: str) -> None:
    assert read(text, "models.yaml") == ()


def test_empty_json_has_no_deployments() -> None:
    assert read(" \n", "models.json") == read("[]", "models.json") == ()


def test_missing_setting_has_its_default() -> None:
    assert read("- a/b\n", "x") == (DeploymentConfig("a/b", "a/b"),)
    defaults = {field.name: field.default for field in fields(DeploymentConfig)}
    for name, field in DeploymentSettings.model_fields.items():
        if name != "checkpoint":
            assert field.default == defaults[name], name


def test_model_key_names_model() -> None:
    expected = DeploymentConfig("a/b", "a/b", revision="v2", replicas=2)
    assert read(f"- repo_id: '{KEY}'\n  replicas: 2\n", "x") == (expected,)
    assert read(f"'{KEY}': {{replicas: 2}}", "x") == (expected,)


def test_home_is_expanded_and_checkpoint_defaults_to_repo_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/anna")
    configs = read("{a: {checkpoint: ~/m}, b: {checkpoint: /srv/m}, c: {checkpoint: null}}", "x")
    assert [config.checkpoint for config in configs] == ["/home/anna/m", "/srv/m", "c"]


def test_yaml_anchors_and_merges_are_supported() -> None:
    text = "- &big\n  repo_id: a/b\n  replicas: 2\n- <<: *big\n  repo_id: a/c\n"
    assert [(config.repo_id, config.replicas) for config in read(text, "x")] == [
        ("a/b", 2),
        ("a/c", 2),
    ]


def test_two_revisions_are_two_models() -> None:
    text = "[{repo_id: a/b}, {repo_id: a/b, revision: v2}]"
    assert [config.revision for config in read(text, "x")] == [None, "v2"]


def test_ndif_names_of_settings_are_accepted() -> None:
    (config,) = read("org/a: {pinned: true, padding_bias: 12GiB, padding_bytes: 12GiB}", "x")
    assert (config.dedicated, config.padding_bytes) == (True, 12 << 30)


# Problems


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("dedicate: true", "'dedicate' is not a setting; did you mean 'dedicated'?"),
        ("pinned: true\n  dedicated: false", "pinned is dedicated here, which has another value"),
        ("gpus: 2", "gpus is not a setting here: a model takes the fewest GPUs that hold it"),
        ("trusted: true", "if the repository's own code should run, write trust_remote_code."),
        ("timeout: 90s", "'timeout' is not a setting; did you mean 'execution_timeout_seconds'?"),
        ("Replicas: 2", "'Replicas' is not a setting; did you mean 'replicas'?"),
        ("colour: red", "'colour' is not a setting. There are: checkpoint, revision, task, dtype, "),
        ("replicas: two", "replicas must be a whole number, not 'two'."),
        ("replicas: 0", "replicas must be at least 1, not 0."),
        ("replicas: true", "replicas must be a whole number, not True."),
        ("replicas: 1.5", "replicas must be a whole number, not 1.5."),
        ("replicas:", "replicas must be a whole number, not None."),
        ("threads: -1", "threads must be at least 0, not -1."),
        ("dedicated: 'on'", "dedicated must be true or false, not 'on'."),
        ("dtype: ''", "dtype must be text that is not empty, not ''."),
        ("dtype: [a]", "dtype must be text, not ['a']."),
        ("padding_factor: lots", "padding_factor must be a number, not 'lots'."),
        ("padding_factor: .nan", "padding_factor must be a number, not nan."),
        ("padding_factor: -0.5", "padding_factor must be at least 0, not -0.5."),
        ("padding_bytes: 12G", 'padding_bytes must be a size, like "12GiB", "500MB" or a whole'),
        ("execution_timeout_seconds: soon", 'must be a duration, like "90s", "15m"'),
        ("execution_timeout_seconds: 0", "must be more than 0 seconds, not 0."),
        ("execution_timeout_seconds: .inf", "or a number of seconds, not inf."),
        ("revision: 1234567", "must be text, not 1234567: put it in quotes, revision: \"1234567\"."),
        ("revision: ../../made5", "revision must be a branch, a tag or a commit in the form that Git"),
        ("runtime: 0.8", 'runtime must be text, not 0.8: put it in quotes, runtime: "0.8".'),
        ("runtime: latest", "runtime must be a generation of nnsight, like \"0.8\", not 'latest'."),
        ("generations: '0.8'", "generations must be a list, like [\"0.8\"], not '0.8'."),
        ("generations: [0.8]", 'generations must be text, not 0.8: put it in quotes, "0.8".'),
        ("generations: !!set {new}", 'generations must be a generation of nnsight, like "0.8"'),
        ("generations: [new]", "must be a generation of nnsight, like \"0.8\", not 'new'."),
        ("max_replicas: 0", "max_replicas must be at least 1, not 0."),
        ("checkpoint: ./m", "checkpoint must be a repo id or the whole path of a folder, not './m'"),
        ("repo_id: c/d", "repo_id is already given by the entry's own name."),
        ("task: " + "x" * 5000 + "\n  nope: 1", "'nope' is not a setting."),
    ],
)  # fmt: skip
def test_wrong_setting_is_reported_with_its_line(setting: str, problem: str) -> None:
    (message,) = problems_of(
        f"# models\na/good:\n  replicas: 2\n'a/b':\n  task: x\n  {setting}\n"
        if not setting.startswith("task")
        else f"#\n#\n#\n#\na/b:\n  {setting}"
    )
    line = 7 if setting.startswith("task") else 6
    assert message.startswith(f"models.yaml, line {line}: 'a/b': ")
    assert problem in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"replicas": 3, "max_replicas": 2},
            "max_replicas is 2, but replicas, the minimum, is 3.",
        ),
        (
            {"runtime": "0.8", "generations": ["0.8", "0.7"]},
            "generations has 0.7, but runtime says that the model is served to 0.8 alone.",
        ),
    ],
)
def test_contradicting_settings_are_reported(settings: dict[str, object], problem: str) -> None:
    (message,) = problems_of(json.dumps([{"repo_id": "a/b", **settings}]), "models.json")
    assert message.endswith(f"'a/b': {problem}")


def test_every_problem_of_file_is_reported() -> None:
    text = (
        "- repo_id: a/b\n  replicas: 0\n  dedicate: 1\n- 'not a model'\n- c/d\n- replicas: 1\n- 7\n"
    )
    assert problems_of(text) == (
        "models.yaml, line 2: 'a/b': replicas must be at least 1, not 0.",
        "models.yaml, line 3: 'a/b': 'dedicate' is not a setting; did you mean 'dedicated'?",
        "models.yaml, line 4: 'not a model': 'not a model' names no model: give a repo id, like "
        "openai-community/gpt2, or a model key, as model.to_model_key() gives it.",
        "models.yaml, line 6: entry 4: The entry has no repo_id, so clients could not request the model.",
        "models.yaml, line 7: entry 5: A repo id must be text, not 7: put it in quotes.",
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("just text", "models.yaml must hold a list of models or a mapping from repo id to"),
        ("7", "models.yaml must hold a list of models"),
        ("a/b: 7", "models.yaml, line 1: 'a/b': Settings must be a mapping, not 7."),
        ("a/b: [x]", "Settings must be a mapping, not ['x']."),
        ("1: {}", "models.yaml: entry 1: A repo id must be text, not 1: put it in quotes."),
        ("a/b: {}\n\na/b: {}", "models.yaml, line 3: 'a/b' appears more than once (first in line 1)"),
        ("a/b: {}\n\nA/B: {}", "models.yaml, line 3: 'A/B' appears more than once (first in line 1)"),
        ("- a/b\n- repo_id: a/b", "models.yaml, line 2: 'a/b' appears more than once (first in line"),
        ("a/b: {threads: 1, threads: 2}", "line 1: 'threads' appears more than once (first in line 1"),
        ("a/b: {revision: v1}\n'" + KEY + "': {revision: v1}", "revision is 'v1', but the key says"),
        ("../models/x:", "'../models/x' names no model: give a repo id"),
        ("/models/x:", "'/models/x' names no model"),
        ("a: [", "models.yaml, line 1: this is not YAML: "),
        ("a:\n\t- b", "models.yaml, line 2: this is not YAML: "),
        ("a: !!python/object:os.system {}", "line 1: this is not YAML: could not determine a construct"),
        ("? [a]\n: {}", "models.yaml, line 1: this is not YAML: "),
        ("a: 2026-13-45", "models.yaml is not readable YAML"),
        ("--- a\n--- b", "models.yaml, line 2: this is not YAML: "),
        ("[" * 5000, "models.yaml"),
        ("a/b: {replicas: 0x" + "f" * 9000 + "x}", "models.yaml"),
        ("a/b: {task: 0x" + "f" * 9000 + "}", "task must be text, not a number too long to show"),
        ("\0", "models.yaml is not readable YAML"),
    ],
)  # fmt: skip
def test_invalid_file_is_reported(text: str, problem: str) -> None:
    assert any(problem in message for message in problems_of(text))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"repo_id": "a/b"\n"x"}]', "models.json, line 2: this is not JSON: "),
        ("- a/b", "models.json, line 1: this is not JSON: "),
        ('{"a/b": {}, "a/b": {}}', "models.json: 'a/b' appears more than once."),
        (
            '{"a/b": {"threads": 1, "threads": 2}}',
            "models.json: 'threads' appears more than once.",
        ),
        ('{"a/b": {"replicas": 0}}', "models.json: 'a/b': replicas must be at least 1, not 0."),
        ("[" * 100_000, "models.json is not readable JSON"),
        ("9" * 5000, "models.json"),
    ],
)
def test_invalid_json_is_reported(text: str, problem: str) -> None:
    assert any(problem in message for message in problems_of(text, "models.json"))


def test_unreadable_file_is_reported(tmp_path: Path) -> None:
    def problem(path: Path) -> str:
        with pytest.raises(DeploymentFileError) as caught:
            read_file(path)
        return str(caught.value)

    path = tmp_path / "models.yaml"
    assert problem(path) == f"{path} cannot be read: No such file or directory."
    assert problem(tmp_path) == f"{tmp_path} cannot be read: Is a directory."
    path.write_bytes(b"\xff\xfe\x00")
    assert problem(path) == f"{path} is not text in UTF-8."
    path.write_bytes(b"#" * (4 * 1024**2 + 1))
    assert problem(path) == f"{path} is larger than 4 MiB."
    path.write_text("a/b: {replicas: 0}")
    assert problem(path) == f"{path}, line 1: 'a/b': replicas must be at least 1, not 0."


# The variable


def test_deployments_variable_is_parsed() -> None:
    assert from_variable("") == from_variable(" | ") == ()
    assert from_variable(f"gpt2| org/name |{KEY}") == (
        DeploymentConfig("gpt2", "gpt2"),
        DeploymentConfig("org/name", "org/name"),
        DeploymentConfig("a/b", "a/b", revision="v2"),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a/b|not one", "the variable NDIF_DEPLOYMENTS: 'not one': 'not one' names no model: give"),
        ("a/b|A/b", "the variable NDIF_DEPLOYMENTS: 'A/b' appears more than once."),
        ("a.B:{}", "names no repo_id."),
        ("a.B:{", "is not a model key."),
        ("a/b,c/d", "'a/b,c/d' names no model"),
    ],
)
def test_invalid_deployments_variable_is_reported(text: str, problem: str) -> None:
    with pytest.raises(DeploymentFileError) as caught:
        from_variable(text)
    (message,) = caught.value.problems
    assert problem in message


# The schema


def test_schema_is_valid_json_schema() -> None:
    Draft202012Validator.check_schema(schema())
    settings = schema()["$defs"]["DeploymentSettings"]
    assert settings["additionalProperties"] is False
    assert all(
        property_schema["description"] for property_schema in settings["properties"].values()
    )
    assert json.loads(json.dumps(schema())) == schema()


NAMES = st.sampled_from([*SETTING_NAMES, "dedicate", "repo_id"])
VALUES = st.one_of(
    st.sampled_from([None, True, False, "", "x", "0.8", "12GiB", "15m", "90 s", "1.5", [], {}]),
    st.integers(-2, 10),
    # To JSON Schema 2.0 is a whole number.
    st.floats(-1, 10).filter(lambda number: number != int(number)),
)
ENTRIES = st.dictionaries(NAMES, VALUES, max_size=3)
DOCUMENTS = st.one_of(
    st.lists(st.one_of(st.just("a/b"), ENTRIES, VALUES), max_size=2),
    st.dictionaries(st.sampled_from(["a/b", "c/d"]), st.one_of(st.none(), ENTRIES), max_size=2),
    VALUES,
)


VALIDATOR = Draft202012Validator(schema())


@settings(max_examples=examples(2))
@given(DOCUMENTS)
def test_schema_agrees_with_reader(document: Any) -> None:
    """The schema allows every document that the reader takes; the reader alone checks names."""
    valid = VALIDATOR.is_valid(document)
    try:
        from_value(document, "it")
        problems = None
    except DeploymentFileError as error:
        problems = error.problems
    if problems is None:
        assert valid or document is None
    elif valid:
        about_names = ("names no model", "more than once", "already given")
        assert all(any(words in problem for words in about_names) for problem in problems)


def test_published_schema_is_up_to_date() -> None:
    published = Path(__file__).parents[2] / "docs" / "deployments.schema.json"
    assert json.loads(published.read_text()) == schema()
