from __future__ import annotations

import json
import random

import pytest

from ndif.host.runtimes import SUPPORTED
from ndif.schema.deployment import DeploymentConfig, explain_mismatch
from ndif.schema.model_key import SERVED_CLASSES, ModelKey, explain_class

NEW = "nnsight.modeling.transformers.TransformersModel"
OLD = "nnsight.modeling.language.LanguageModel"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (
            f'{NEW}:{{"repo_id": "org/name", "revision": "v2", "task": "fill-mask"}}',
            ModelKey(NEW, "org/name", "v2", "fill-mask"),
        ),
        (f'{OLD}:{{"repo_id": "org/name", "revision": null}}', ModelKey(OLD, "org/name")),
        (f'{OLD}:{{"repo_id": "gpt2"}}', ModelKey(OLD, "gpt2")),
        # Unknown fields of later clients are ignored.
        (f'{NEW}:{{"repo_id": "a/b", "quantization": {{"bits": 4}}}}', ModelKey(NEW, "a/b")),
        (f'{OLD}:{{"repo_id": "org:with/colons:"}}', ModelKey(OLD, "org:with/colons:")),
        (f'{OLD}: {{"repo_id": "modèle/né"}} ', ModelKey(OLD, "modèle/né")),
    ],
)
def test_client_key_is_parsed(text: str, key: ModelKey) -> None:
    assert ModelKey.parse(text) == key


def test_revision_main_equals_no_revision() -> None:
    named, unnamed = (
        ModelKey.parse(f'{OLD}:{{"repo_id": "a/b", "revision": {revision}}}')
        for revision in ('"main"', "null")
    )
    assert named == unnamed
    assert named.revision is None


@pytest.mark.parametrize("revision", [None, "v2", "refs/pr/1"])
@pytest.mark.parametrize("task", [None, "fill-mask"])
def test_written_key_parses_to_same_key(revision: str | None, task: str | None) -> None:
    key = ModelKey(NEW, 'org/"quoted"', revision, task)
    assert ModelKey.parse(str(key)) == key


def test_key_without_task_is_written_like_older_clients() -> None:
    fields = json.loads(str(ModelKey(OLD, "a/b")).removeprefix(f"{OLD}:"))
    assert fields == {"repo_id": "a/b", "revision": None}


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "gpt2",
        "org/name",
        '{"repo_id": "a/b"}',
        ':{"repo_id": "a/b"}',
        f"{OLD}:",
        f"{OLD}:gpt2",
        f'{OLD}:"gpt2"',
        f"{OLD}:null",
        f'{OLD}:["a/b"]',
        f'{OLD}:{{"repo_id": "a/b"',
        f'{OLD}:{{"repo_id": "a/b"}} and more',
        f"{OLD}:{{'repo_id': 'a/b'}}",
        f'{OLD}:{{"repo_id": "a\0b"}}',
        f"{OLD}:{'9' * 5000}",
        f"{OLD}:{'[' * 100_000}",
        f'{OLD}:{{"repo_id": {"[" * 100_000}',
    ],
)
def test_invalid_key_is_rejected_with_expected_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a model key\. .*to_model_key\(\)\.$") as caught:
        ModelKey.parse(text)
    # The message quotes the text in part and on one line.
    assert len(str(caught.value)) < 1200
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("repo_id", ["null", '""', "7", "true", '["a/b"]', '{"a": "b"}'])
def test_repo_id_must_be_text(repo_id: str) -> None:
    with pytest.raises(ValueError, match=r"names no repo_id\.$"):
        ModelKey.parse(f'{OLD}:{{"repo_id": {repo_id}}}')
    with pytest.raises(ValueError, match=r"names no repo_id\.$"):
        ModelKey.parse(f"{OLD}:{{}}")


@pytest.mark.parametrize("field", ["revision", "task"])
@pytest.mark.parametrize("value", ["7", "false", "[]", "{}"])
def test_revision_and_task_must_be_text(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=r"^revision and task in .* must be text\.$"):
        ModelKey.parse(f'{NEW}:{{"repo_id": "a/b", "{field}": {value}}}')


@pytest.mark.parametrize("revision", ["..\\..\\made5", "../../made5", "a b", "", "x" * 300])
def test_malformed_revision_is_refused(revision: str) -> None:
    with pytest.raises(
        ValueError, match=r"^The revision .* must be a branch, a tag or a"
    ) as caught:
        ModelKey.parse(f'{NEW}:{{"repo_id": "a/b", "revision": {json.dumps(revision)}}}')
    assert len(str(caught.value)) < 500


def test_damaged_key_raises_only_value_error() -> None:
    chance = random.Random(8)
    whole = str(ModelKey(NEW, "org/name", "v2", "text-generation"))
    read = 0
    for _ in range(3000):
        text = list(whole)
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(text))
            text[at] = chance.choice(["", "\0", '"', "{", "}", "[", ":", "\\", "\udcff", "é", "9"])
        try:
            key = ModelKey.parse("".join(text))
        except ValueError as error:
            str(error).encode()  # an answer must be able to carry it
        else:
            read += 1
            assert isinstance(key.repo_id, str)
    # Both outcomes occurred.
    assert 0 < read < 3000


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (ModelKey(NEW, "a/b"), None),
        (ModelKey(OLD, "A/B", None, "text-generation"), None),
        (ModelKey(NEW, "a/other"), "serves 'a/b', not 'a/other'"),
        (ModelKey(NEW, "b"), "serves 'a/b', not 'b'"),
        (ModelKey(NEW, "a/b", "v2"), "at revision 'main', not 'v2'"),
        (ModelKey(NEW, "a/b", None, "fill-mask"), "for the task 'text-generation', not"),
        (ModelKey(NEW, "a\ud800/b"), r"not 'a\ud800/b'"),
    ],
)
def test_key_of_another_model_is_mismatch(key: ModelKey, why: str | None) -> None:
    explanation = explain_mismatch(
        DeploymentConfig("a/b", "/models/b", task="text-generation"), key
    )
    if why is None:
        assert explanation is None
        return
    assert explanation is not None
    assert why in explanation
    assert explanation.endswith(".")
    assert "/models/b" not in explanation
    explanation.encode()


@pytest.mark.parametrize(("asked", "served"), [("v2", True), (None, False), ("main", False)])
def test_key_of_another_revision_is_mismatch(asked: str | None, served: bool) -> None:
    explanation = explain_mismatch(
        DeploymentConfig("a/b", "a/b", revision="v2"), ModelKey(NEW, "a/b", asked)
    )
    assert (explanation is None) is served


def test_each_supported_generation_has_classes() -> None:
    assert SERVED_CLASSES.keys() == SUPPORTED.keys()


@pytest.mark.parametrize(
    ("path", "served_in"),
    [
        (NEW, {"0.8"}),
        (OLD, {"0.7", "0.6"}),
        ("nnsight.modeling.huggingface.HuggingFaceModel", {"0.7", "0.6"}),
        ("nnsight.modeling.vlm.VisionLanguageModel", set()),
        ("nnsight.modeling.diffusion.DiffusionModel", set()),
        ("nnsight.modeling.vllm.vllm.VLLM", set()),
        ("nnsight.modeling.transformers.transformersmodel", set()),
        ("os.system", set()),
        ("x" * 100_000, set()),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value)[-20:],
)
def test_class_is_served_in_generations_whose_clients_name_it(
    path: str, served_in: set[str]
) -> None:
    key = ModelKey(path, "a/b")
    for generation in SUPPORTED:
        explanation = explain_class(key, generation)
        assert (explanation is None) is (generation in served_in)
        if explanation is not None:
            # nnsight 0.7 and 0.6 have only the second class.
            both = "TransformersModel or " if generation == "0.8" else ""
            assert f"made with nnsight's {both}LanguageModel, not with" in explanation
            assert f"not with {path[:200]!r}. Make 'a/b'" in explanation
            images = generation != "0.8" and path.endswith("VisionLanguageModel")
            assert ("image-text-to-text" in explanation) is images
            assert ("_remoteable_class" in explanation) is (generation == "0.8")
            assert len(explanation) < 1000
    # An operator's key may belong to any generation.
    assert (explain_class(key) is None) is bool(served_in)
    assert explain_class(key, "0.5") is not None


def test_label_contains_revision_if_set() -> None:
    assert ModelKey(NEW, "org/name").label == "org/name"
    assert ModelKey(NEW, "org/name", "v2", "fill-mask").label == "org/name@v2"
