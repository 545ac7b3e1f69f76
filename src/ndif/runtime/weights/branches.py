"""The commits on a repository's branches and tags.

The hub also resolves commits of pull requests. Anybody can open a pull request, with weights and code that
the repository's owner has not accepted.
"""

from __future__ import annotations

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

_DEFAULT = "main"
_MAX_HISTORIES = 20
"""Most branches and tags whose histories are searched; the newest commit of every one is compared."""
_SERVER_ERROR = 500


def is_default(revision: str | None) -> bool:
    """Return True for the default branch, which every repository of the hub has."""
    return revision in (None, _DEFAULT)


def is_on_branch(hub: HfApi, repo_id: str, revision: str | None, commit: str | None) -> bool:
    """Return True if a branch or a tag has the name `revision`, or contains the commit.

    `commit` is the commit to which the hub resolved the revision. Return False if the hub does not list a
    repository's branches; raise an error if it cannot be reached or fails.
    """
    if is_default(revision):
        return True
    try:
        refs = hub.list_repo_refs(repo_id)
        named = {ref.name: ref.target_commit for ref in (*refs.tags, *refs.branches)}
        if revision in named or commit in named.values():
            return True
        histories = sorted(named, key=lambda name: name != _DEFAULT)[:_MAX_HISTORIES]
        return any(
            ancestor.commit_id == commit
            for name in histories
            for ancestor in hub.list_repo_commits(repo_id, revision=name)
        )
    except HfHubHTTPError as error:
        if error.response.status_code >= _SERVER_ERROR:
            raise
        return False
