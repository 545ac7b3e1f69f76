"""Hooks of MkDocs: pages that are made of the code, of the notebook, and of documents beside `docs/`.

Nothing of this is kept in the repository: a page is as new as what it is made of.
"""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import Any

from docs.make import commands, diagrams, metrics, notebook, routes, variables
from docs.make.links import PLACES, moved_to_the_site
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
REFERENCES = {
    "reference/variables.md": variables.page,
    "reference/commands.md": commands.page,
    "reference/http.md": routes.page,
    "reference/metrics.md": metrics.page,
}
_BESIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
_NOTEBOOK = "users/notebook"
_DIAGRAMS = "javascripts/mermaid.min.js"
_DRAWN = '<pre class="mermaid">'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""

    def add(place: str, content: str | bytes) -> None:
        files.append(File.generated(config, place, content=content))

    for place, page in REFERENCES.items():
        add(place, page())
    for name in _BESIDE:
        add(PLACES[name], (ROOT / name).read_text())
    folder = f"{posixpath.basename(_NOTEBOOK)}_files"
    text, images = notebook.page(ROOT / "docs" / f"{_NOTEBOOK}.ipynb", folder)
    add(f"{_NOTEBOOK}.md", text)
    for name, image in images.items():
        add(posixpath.join(posixpath.dirname(_NOTEBOOK), name), image)
    script = diagrams.script(ROOT / ".cache") if config.extra["diagrams"] else None
    if script is not None:
        add(_DIAGRAMS, script)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links in the repository into links on the site."""
    place = page.file.src_uri
    beside = (name for name in _BESIDE if PLACES[name] == place)
    document = next(beside, f"docs/{place}")
    if files.get_file_from_path(_DIAGRAMS) is None:
        # Without the library the theme would load one from another host.
        markdown = markdown.replace("```mermaid", "```text")
    return moved_to_the_site(markdown, document, place)


def on_post_page(output: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Give pages with diagrams the library that draws them."""
    if _DRAWN not in output:
        return output
    source = posixpath.relpath(_DIAGRAMS, posixpath.dirname(page.url) or ".")
    # Before the theme's own script, which loads the library from another host if there is none yet.
    return output.replace("</head>", f'<script src="{source}"></script></head>', 1)
