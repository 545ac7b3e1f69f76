"""The notebook as a page: its text, its code, and the outputs and plots that it was saved with."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter


def page(file: Path, folder: str) -> tuple[str, dict[str, bytes]]:
    """Return the page, and the content of its images by their names below `folder`."""
    notebook = nbformat.read(file, as_version=4)  # type: ignore[no-untyped-call]
    text, resources = MarkdownExporter().from_notebook_node(
        notebook, resources={"output_files_dir": folder}
    )
    return text, dict(resources["outputs"])
