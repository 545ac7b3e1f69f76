"""A hub on loopback that also lists branches, tags and commits, as the Hugging Face Hub does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

PAGE = 2
"""Commits in one answer; the next ones are at a link."""


@dataclass
class History:
    """The branches and tags of one repository: each one's commits, the newest first."""

    branches: dict[str, Sequence[str]] = field(default_factory=dict)
    tags: dict[str, Sequence[str]] = field(default_factory=dict)


@dataclass
class HubWithRefs:
    """The hub's answers on references, by repository."""

    histories: dict[str, History] = field(default_factory=dict)
    failing: bool = False
    """True to answer with 500."""
    asked: list[str] = field(default_factory=list)
    """Paths of the requests."""

    def app(self, *others: BaseRoute) -> Starlette:
        """Return the hub, with further routes behind its own."""
        base = "/api/models/{owner}/{name}"
        routes = [
            Route(f"{base}/refs", self._refs),
            Route(f"{base}/commits/{{revision:path}}", self._commits),
        ]
        return Starlette(routes=[*routes, *others])

    def _history(self, http: Request) -> History | None:
        self.asked.append(http.url.path)
        return self.histories.get("{owner}/{name}".format(**http.path_params))

    async def _refs(self, http: Request) -> Response:
        history = self._history(http)
        if self.failing:
            return JSONResponse({"error": "An internal error"}, 500)
        if history is None:
            return JSONResponse({}, 404, headers={"X-Error-Code": "RepoNotFound"})

        def listed(kind: str, named: dict[str, Sequence[str]]) -> list[dict[str, str]]:
            return [
                {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": commits[0]}
                for name, commits in named.items()
            ]

        return JSONResponse(
            {
                "branches": listed("heads", history.branches),
                "tags": listed("tags", history.tags),
                "converts": [],
            }
        )

    async def _commits(self, http: Request) -> Response:
        history = self._history(http)
        assert history is not None
        commits = (history.tags | history.branches)[http.path_params["revision"]]
        at = int(http.query_params.get("at", "0"))
        page = [
            {
                "id": commit,
                "title": "a change",
                "message": "",
                "authors": [],
                "date": "2024-01-02T03:04:05.000Z",
            }
            for commit in commits[at : at + PAGE]
        ]
        further = http.url.include_query_params(at=at + PAGE)
        links = {"Link": f'<{further}>; rel="next"'} if at + PAGE < len(commits) else {}
        return JSONResponse(page, headers=links)
