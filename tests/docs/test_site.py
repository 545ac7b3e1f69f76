"""The site: it builds without warnings, has every page, and loads nothing from other hosts."""

from __future__ import annotations

import logging
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from docs.make.links import PLACES
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tests.docs.documents import DOCUMENTS, ROOT, name_of

LOADS = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}


class Page(HTMLParser):
    """The ids and links of a page, and the files that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.comments: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if (loaded := attributes.get(LOADS.get(tag, ""))) and attributes.get("rel") != "canonical":
            self.loads.append(loaded)
        if identifier := attributes.get("id"):
            self.ids.add(identifier)
        if tag == "a" and (link := attributes.get("href")):
            self.links.append(link)

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site; a warning during the build is a failure."""
    folder = tmp_path_factory.mktemp("site")
    warned: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.append(record.getMessage())

    collector = Collector(logging.WARNING)
    logging.getLogger("mkdocs").addHandler(collector)
    try:
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
        config.extra["diagrams"] = False
        build(config)
    except BaseException as error:
        raise AssertionError("\n".join(warned) or str(error)) from error
    finally:
        logging.getLogger("mkdocs").removeHandler(collector)
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    return {
        file.relative_to(site).as_posix(): Page(file.read_text()) for file in site.rglob("*.html")
    }


def test_every_document_is_a_page_of_site(pages: dict[str, Page]) -> None:
    for document in DOCUMENTS:
        name = name_of(document)
        place = PLACES.get(name, name.removeprefix("docs/"))
        place = re.sub(r"(^|/)README\.md$", r"\1index.md", place)
        assert place.replace(".md", ".html") in pages
    for name in ("variables", "commands", "http", "metrics"):
        assert f"reference/{name}.html" in pages


def test_pages_load_nothing_from_other_hosts(pages: dict[str, Page]) -> None:
    outside = {
        (name, loaded)
        for name, page in pages.items()
        for loaded in page.loads
        if "//" in loaded and not loaded.startswith("data:")
    }
    assert not outside


def test_links_and_anchors_of_every_page_exist(pages: dict[str, Page], site: Path) -> None:
    broken = []
    for name, page in pages.items():
        if name == "404.html":  # its links are absolute
            continue
        for link in page.links:
            path, _, anchor = link.partition("#")
            if "://" in link or link.startswith("mailto:"):
                continue
            target = (site / name).parent / path if path else site / name
            target_path = target.resolve().relative_to(site.resolve()).as_posix()
            if target_path == ".":
                target_path = "index.html"
            if not (site / target_path).exists() or (
                anchor and target_path in pages and anchor not in pages[target_path].ids
            ):
                broken.append((name, link))
    assert not broken


def test_pages_contain_no_test_marks(pages: dict[str, Page]) -> None:
    assert not [name for name, page in pages.items() if "not run" in "".join(page.comments)]


def test_notebook_page_shows_plots(pages: dict[str, Page], site: Path) -> None:
    plots = [address for address in pages["users/notebook.html"].loads if address.endswith(".png")]
    assert len(plots) >= 5
    for plot in plots:
        assert (site / "users" / plot).read_bytes().startswith(b"\x89PNG")


def test_missing_anchor_fails_build(tmp_path: Path) -> None:
    """Build a page with a broken link under the settings of `mkdocs.yml`."""
    documents = tmp_path / "docs"
    documents.mkdir()
    (documents / "index.md").write_text("[a](#nowhere)\n")
    config = load_config(
        str(ROOT / "mkdocs.yml"),
        docs_dir=str(documents),
        site_dir=str(tmp_path / "site"),
        strict=True,
        nav=["index.md"],
        hooks=[],
    )
    with pytest.raises(BaseException, match=r"[Aa]borted|warnings"):
        build(config)
