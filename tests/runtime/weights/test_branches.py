"""The commits on a repository's branches and tags, asked of a hub on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from ndif.runtime.weights.branches import is_default, is_on_branch
from tests.runtime.weights.hub_with_refs import History, HubWithRefs
from tests.serving import serving

NAME = "a/model"
TIP, OLD, OLDEST, TAGGED, BEFORE_TAG, OF_PULL_REQUEST = (f"{digit}" * 40 for digit in "123456")


@pytest.fixture(scope="module")
def hub() -> Iterator[tuple[HubWithRefs, HfApi]]:
    served = HubWithRefs()
    history = History({"main": [TIP, OLD, "7" * 40, OLDEST]}, {"v1": [TAGGED, BEFORE_TAG]})
    served.histories[NAME] = history
    many = {f"step-{number}": [f"{number:040x}", f"{number + 1000:040x}"] for number in range(200)}
    served.histories["a/many"] = History({**many, "main": [TIP, OLD]})
    with serving(served.app()) as url:
        yield served, HfApi(endpoint=url)


@pytest.mark.parametrize(
    ("revision", "commit"),
    [
        *(("main", TIP), ("v1", TAGGED), (TIP, TIP), (OLD, OLD), (TAGGED, TAGGED)),
        # On later pages, in the history of a tag, and abbreviated.
        *((OLDEST, OLDEST), (BEFORE_TAG, BEFORE_TAG), (OLDEST[:7], OLDEST)),
    ],
)
def test_commit_of_branch_or_tag_is_recognized(
    hub: tuple[HubWithRefs, HfApi], revision: str, commit: str
) -> None:
    assert is_on_branch(hub[1], NAME, revision, commit)


# The hub may also resolve abbreviations of a reference, as `git rev-parse` does.
@pytest.mark.parametrize("revision", [OF_PULL_REQUEST, OF_PULL_REQUEST[:7], "refs/pr/1", "pr/1"])
def test_commit_of_pull_request_is_on_no_branch(
    hub: tuple[HubWithRefs, HfApi], revision: str
) -> None:
    assert not is_on_branch(hub[1], NAME, revision, OF_PULL_REQUEST)
    assert not is_on_branch(hub[1], NAME, revision, None)


def test_default_branch_needs_no_request(hub: tuple[HubWithRefs, HfApi]) -> None:
    served, api = hub
    served.asked.clear()
    for revision in (None, "main"):
        assert is_default(revision)
        assert is_on_branch(api, NAME, revision, None)
    assert served.asked == []


def test_number_of_searched_histories_is_limited(hub: tuple[HubWithRefs, HfApi]) -> None:
    served, api = hub
    # The newest commits are known from one request, and the default branch's history comes first.
    served.asked.clear()
    assert is_on_branch(api, "a/many", f"{199:040x}", f"{199:040x}")
    assert is_on_branch(api, "a/many", OLD, OLD)
    assert len(served.asked) == 3
    assert not is_on_branch(api, "a/many", OF_PULL_REQUEST, OF_PULL_REQUEST)
    assert len(served.asked) == 3 + 1 + 20


def test_branches_of_hub_that_lists_none_are_unknown(hub: tuple[HubWithRefs, HfApi]) -> None:
    assert not is_on_branch(hub[1], "a/other", TIP, TIP)


def test_failing_hub_raises_error(
    hub: tuple[HubWithRefs, HfApi], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, api = hub
    monkeypatch.setattr(served, "failing", True)
    with pytest.raises(HfHubHTTPError, match="500"):
        is_on_branch(api, NAME, TIP, TIP)
