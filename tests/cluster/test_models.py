"""Models by the names that clients use, and the permissions to use them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ndif.cluster.models import Models, NotServedError
from ndif.cluster.status import publish, read
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import ModelKey
from ndif.schema.repositories import Repositories
from ndif.telemetry.model_labels import MODELS

CLASS = "nnsight.modeling.transformers.TransformersModel"
OLDER = "nnsight.modeling.language.LanguageModel"


def key(repo_id: str, revision: str | None = None, task: str | None = None) -> ModelKey:
    return ModelKey(CLASS, repo_id, revision, task)


def test_names_of_every_generation_find_same_model() -> None:
    config = DeploymentConfig("Org/Name", "/folder", task="text-generation", dedicated=True)
    models = Models([config])
    (model,) = models
    for named in (
        key("Org/Name", task="text-generation"),
        key("org/name"),
        ModelKey(OLDER, "Org/Name"),
    ):
        assert models.admit(named, "0.8", hotswapping=False) is model
        assert models.admit(named, "0.8", hotswapping=True) is model


def test_other_task_or_revision_is_another_model_with_hotswapping() -> None:
    models = Models([DeploymentConfig("a/a", "a/a", task="fill-mask", dedicated=True)])
    for named in (key("a/a", task="feature-extraction"), key("a/a", "v2")):
        with pytest.raises(NotServedError, match="This server serves 'a/a'"):
            models.admit(named, "0.8", hotswapping=False)
        assert models.admit(named, "0.8", hotswapping=True).on_demand
    assert len(list(models)) == 3


def test_rejection_names_dedicated_models() -> None:
    with pytest.raises(NotServedError, match="no model is deployed on this server"):
        Models().admit(key("a/b"), "0.8", hotswapping=False)
    configs = [DeploymentConfig(f"a/m{i}", "x", dedicated=i != 1) for i in range(3)]
    models = Models(configs)
    for asked in ("a/b", "a/m1"):
        with pytest.raises(NotServedError, match=r"'a/m0', 'a/m2'\. Loading") as error:
            models.admit(key(asked), "0.8", hotswapping=False)
        assert f"{asked!r} is not deployed" in str(error.value)
    many = Models(DeploymentConfig(f"a/m{i}", "x", dedicated=True) for i in range(300))
    with pytest.raises(NotServedError, match="280 others"):
        many.admit(key("a/b"), "0.8", hotswapping=False)


def test_rejection_names_missing_right_unless_models_are_fixed() -> None:
    only = [DeploymentConfig("a/one", "x", dedicated=True)]
    reason = "needs the right `hotswapping`, which you do not have: ask the server's operator"
    for configs in (only, []):
        with pytest.raises(NotServedError, match=reason):
            Models(configs).admit(key("a/b"), "0.8", hotswapping=False)
    with pytest.raises(NotServedError, match=r"not 'a/b'\. Make the model with that name\.$"):
        Models(only, fixed=True).admit(key("a/b"), "0.8", hotswapping=False)


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../secrets",
        "./model",
        "a/../b",
        "~/model",
        "a/b/c",
        "",
        "a b",
        "a/" + "b" * 200,
        "https://host/x",
        ".hidden",
        "ä/b",
    ],
)
def test_user_cannot_load_path(name: str) -> None:
    models = Models()
    with pytest.raises(NotServedError, match="names no repository"):
        models.admit(key(name), "0.8", hotswapping=True)
    assert list(models) == []


def test_user_cannot_load_folder_named_like_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotServedError):
        Models().admit(key("org/name"), "0.8", hotswapping=True)


@pytest.mark.parametrize(
    ("allowed", "denied", "may", "may_not"),
    [
        ((), ("meta/*",), ["a/b", "metal/x"], ["meta/x", "META/X", "meta/y-z"]),
        (("meta/*", "gpt2"), (), ["Meta/X", "GPT2"], ["a/b", "gpt2/x", "x/meta"]),
        (("meta/*",), ("*/*-405b",), ["meta/x-8b"], ["meta/x-405B", "a/x-405b"]),
    ],
)
def test_operator_limits_repositories_loaded_on_demand(
    allowed: tuple[str, ...], denied: tuple[str, ...], may: list[str], may_not: list[str]
) -> None:
    deployed = [DeploymentConfig(name, "x", dedicated=True) for name in may_not[:1]]
    models = Models(deployed, repositories=Repositories(allowed, denied))
    for name in may:
        assert models.admit(key(name), "0.8", hotswapping=True).config.repo_id == name
    for name in may_not[1:]:
        with pytest.raises(NotServedError, match="does not allow that repository") as refused:
            models.admit(key(name, "v2"), "0.8", hotswapping=True)
        assert all(pattern in str(refused.value) for pattern in allowed)
    # A deployed model needs no permission; its other revisions are not deployed.
    assert models.admit(key(may_not[0]), "0.8", hotswapping=False) in [*models]
    with pytest.raises(NotServedError, match="does not allow"):
        models.admit(key(may_not[0], "v2"), "0.8", hotswapping=True)


PULL_REQUEST = "refs/pr/7"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("revision", [PULL_REQUEST, "refs/convert/parquet", "REFS/pr/7"])
def test_pull_request_revision_is_refused(revision: str) -> None:
    models = Models()
    with pytest.raises(NotServedError, match="anybody can open a pull request") as refused:
        models.admit(key("a/a", revision), "0.8", hotswapping=True, gated=True)
    assert "NDIF_ALLOWED_REVISIONS" in str(refused.value)
    assert list(models) == []


@pytest.mark.parametrize("pattern", [PULL_REQUEST, "refs/pr/*", "*"])
def test_operator_allows_pull_request(pattern: str) -> None:
    models = Models(repositories=Repositories(revisions=("refs/convert/*", pattern)))
    model = models.admit(key("a/a", PULL_REQUEST), "0.8", hotswapping=True)
    assert model.config.revision == PULL_REQUEST
    assert not model.config.trust_remote_code


def test_allowed_revisions_do_not_allow_repository() -> None:
    models = Models(repositories=Repositories(denied=("a/*",), revisions=("*",)))
    with pytest.raises(NotServedError, match="does not allow that repository"):
        models.admit(key("a/a", PULL_REQUEST), "0.8", hotswapping=True)


def test_deployed_pull_request_is_served() -> None:
    models = Models([DeploymentConfig("a/a", "a/a", PULL_REQUEST)])
    (deployed,) = models
    models.learn(deployed, "a/a", None, on_branch=False)
    assert models.admit(key("a/a", PULL_REQUEST), "0.8", hotswapping=True) is deployed
    with pytest.raises(NotServedError, match="'refs/pr/8' is not loaded on demand"):
        models.admit(key("a/a", "refs/pr/8"), "0.8", hotswapping=True)


def test_commit_known_to_be_on_no_branch_is_refused() -> None:
    named = key("a/a", COMMIT)
    for rules, is_admitted in ((Repositories(), False), (Repositories(revisions=("0123*",)), True)):
        models = Models(repositories=rules)
        model = models.admit(named, "0.8", hotswapping=True)
        models.learn(model, "a/a", None, on_branch=False)
        models.learn(model, "a/a", None)  # by a replica, which does not know
        assert (models.not_permitted(named, model, gated=True) is None) == is_admitted


def test_on_demand_model_runs_no_remote_code() -> None:
    model = Models().admit(key("a/a"), "0.8", hotswapping=True)
    assert not model.config.trust_remote_code
    assert not model.dedicated


def test_model_keeps_key_when_canonical_name_is_learned() -> None:
    models = Models()
    model = models.admit(key("gpt2"), "0.8", hotswapping=True)
    models.learn(model, "openai-community/gpt2", "text-generation")
    assert model.config.repo_id == "openai-community/gpt2"
    assert models.of(key("gpt2")) is model
    for named in (key("gpt2"), key("openai-community/gpt2", task="text-generation")):
        assert models.find(named) is model


@pytest.mark.parametrize(
    "use",
    [
        lambda models, config: models.put(config),
        lambda models, config: models.schedule([config]),
        lambda models, config: models.note_loaded([f"{config.key}@0.8"]),
    ],
    ids=["deployed", "scheduled", "loaded"],
)
def test_used_model_has_label_in_metrics(use: Callable[[Models, DeploymentConfig], Any]) -> None:
    name = f"labels/{uuid.uuid4().hex}"
    models = Models()
    model = models.admit(DeploymentConfig(name, name).key, "0.8", hotswapping=True)
    read(publish(models), Repositories())  # as a gateway does
    assert MODELS.of(name) == "other"
    use(models, model.config)
    assert MODELS.of(name) == name


def test_deployed_model_has_label_in_metrics_of_gateways() -> None:
    name = f"labels/{uuid.uuid4().hex}"
    published = replace(publish(Models([DeploymentConfig("a/a", "a/a")]))[0], key=str(key(name)))
    assert MODELS.of(name) == "other"
    read([published], Repositories())
    assert MODELS.of(name) == "a/a"


def test_model_with_two_names_has_label_of_hub_in_metrics() -> None:
    name = f"labels/{uuid.uuid4().hex}"
    models = Models([DeploymentConfig(name, name)])
    (model,) = models
    models.learn(model, name.upper(), None)
    assert MODELS.of(name) == MODELS.of(name.upper()) == name.upper()


def test_operator_selects_model_by_repo_id_or_key() -> None:
    models = Models([DeploymentConfig("Org/Name", "x"), DeploymentConfig("Org/Name", "x", "v2")])
    both, versioned = models.called("org/name"), models.called(str(key("Org/Name", "v2")))
    assert len(both) == 2
    assert versioned == [both[1]]
    assert models.called("org/other") == []
    with pytest.raises(ValueError, match="not a model key"):
        models.called("{")


def test_operator_config_replaces_on_demand_model() -> None:
    models = Models()
    model = models.admit(key("a/a"), "0.8", hotswapping=True)
    config = DeploymentConfig("a/a", "/folder", dedicated=True)
    assert models.put(config) is model
    assert (model.config, model.on_demand) == (config, False)
    models.forget(model)
    assert list(models) == [model]


def test_on_demand_model_is_forgotten_unless_deploying() -> None:
    models = Models()
    model = models.admit(key("a/a"), "0.8", hotswapping=True)
    model.deploying += 1
    models.forget(model)
    assert list(models) == [model]
    model.deploying -= 1
    models.forget(model)
    assert list(models) == []


def test_bookings_begin_and_end() -> None:
    mine = DeploymentConfig("a/a", "x", replicas=2)
    models = Models([mine])
    booked = [
        DeploymentConfig("a/a", "x", dedicated=True),
        DeploymentConfig("a/b", "a/b", dedicated=True),
    ]
    begun, ended = models.schedule(booked)
    assert [model.config.repo_id for model in begun] == ["a/a", "a/b"]
    assert ended == []
    assert all(model.dedicated for model in models)
    assert models.schedule(booked) == ([], [])
    begun, ended = models.schedule([replace(booked[0], replicas=3)])
    assert [(m.config.repo_id, m.deployment.replicas) for m in begun] == [("a/a", 3)]
    assert [model.config.repo_id for model in ended] == ["a/b"]
    models.schedule([])
    assert not any(model.dedicated for model in models)
    assert models.find(mine.key).deployment == mine  # type: ignore[union-attr]


def test_dedicated_model_takes_precedence_over_on_demand_model() -> None:
    models = Models()
    models.admit(key("a/a", task="fill-mask"), "0.8", hotswapping=True)
    dedicated = Models.put(
        models, DeploymentConfig("a/a", "a/a", task="text-generation", dedicated=True)
    )
    assert models.admit(key("a/a"), "0.8", hotswapping=False) is dedicated


def test_admission_without_keep_adds_no_model() -> None:
    models = Models()
    models.admit(key("a/a"), "0.8", hotswapping=True, keep=False)
    assert list(models) == []


def test_number_of_on_demand_models_is_limited() -> None:
    models = Models()
    for number in range(1000):
        models.admit(key(f"a/m{number}"), "0.8", hotswapping=True)
    with pytest.raises(NotServedError, match="Try again in a minute"):
        models.admit(key("a/one-more"), "0.8", hotswapping=True)
    assert models.admit(key("a/m1"), "0.8", hotswapping=True).config.repo_id == "a/m1"
