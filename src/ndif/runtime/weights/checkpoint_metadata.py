"""Download the files for measuring a model: `python -m ndif.runtime.weights.checkpoint_metadata FD`.

The socket FD carries one line of JSON with the repository, and one line with the folder to measure. The
folder is the repository in the Hub's cache if its weights are there, else an outline: the configs, and for
each file of weights a sparse file of the same size with its header only. This process uses the operator's
account and imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import sys
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import (
    HfApi,
    constants,
    get_session,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import hf_raise_for_status

from ndif.runtime.process.children import end_with_parent
from ndif.runtime.sizing import Failure, OutlineQuestion, RepositoryFacts
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import UserFacingError
from ndif.runtime.typed_json import from_json, to_json
from ndif.runtime.weights.branches import is_default, is_on_branch
from ndif.runtime.weights.card import has_tokenizer, license_of
from ndif.runtime.weights.fetch import (
    HUB_TIMEOUT_S,
    code_of_others,
    explain_unavailable,
    is_gated,
    is_here,
    require_permitted,
    weights_of,
)
from ndif.runtime.weights.repository import CONFIG, is_pickled, largest
from ndif.sandbox.confinement.limits import limit_memory
from ndif.sizes import format_size

MEMORY_BYTES = 1 << 30
"""Memory that a process may take for one model, on top of the memory that it inherits by the fork."""
_CONFIGS = (CONFIG, "config.*.json", "*.index.json")
_PARALLEL_DOWNLOADS = 8
_MAX_FILES = 2000
"""Most files of weights whose headers are downloaded; the largest models have about 200."""
_MAX_CONFIG_BYTES, _MAX_HEADER_BYTES = 64 << 20, 256 << 20
_LENGTH_BYTES = 8
"""Bytes of the length field before a safetensors header."""
_FIRST_BYTES = 100_000
"""Bytes of the first download of a header; most headers are shorter."""
_MAX_ONE_HEADER_BYTES = 25_000_000
_MAX_ANSWER = 4096


class OutlineError(UserFacingError):
    """The model of a repository cannot be measured; the message is the reason."""


def main(fd: int) -> None:
    """Answer one `OutlineQuestion` from the socket `fd`."""
    end_with_parent()
    limit_memory(MEMORY_BYTES)
    with socket.socket(fileno=fd) as connection:
        line = connection.makefile("r").readline()
        if not line:  # the host has closed the socket
            return
        question = from_json(OutlineQuestion, line)
        _replace_environment(question.environment)
        answer: RepositoryFacts | Failure
        try:
            answer = find(question.spec, Path(question.folder))
        except Exception as error:
            traceback.print_exc()
            answer = Failure(explain_unavailable(question.spec, error)[:_MAX_ANSWER])
        connection.sendall(to_json(answer) + b"\n")


def _replace_environment(variables: Mapping[str, str]) -> None:
    """Replace this process's environment by the operator's, which the fork server does not have."""
    os.environ.clear()
    os.environ.update(variables)
    importlib.reload(constants)  # huggingface_hub reads variables on import


def find(spec: ModelSpec, empty: Path) -> RepositoryFacts:
    """Return the folder to measure, below `empty` if it is an outline, with facts from the hub."""
    info, is_reachable = None, True
    try:
        info = HfApi().model_info(
            spec.checkpoint, revision=spec.revision, timeout=HUB_TIMEOUT_S, files_metadata=True
        )
    except HfHubHTTPError:  # the download of the config below raises a more precise error
        pass
    except Exception:  # the hub is unreachable; the files may be in the cache
        is_reachable = False
    sizes = (
        {}
        if info is None
        else {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
    )
    _require_small(sizes)
    # The error of this download distinguishes a missing repository, revision and permission.
    config = hf_hub_download(
        spec.checkpoint, CONFIG, revision=spec.revision, local_files_only=not is_reachable
    )
    snapshot = Path(config).parent
    if info is None:
        # A commit whose branches cannot be listed is accepted only if it was loaded before. Without this
        # check, a refused commit, whose config is in the cache, would be accepted while the hub fails.
        is_whole = spec.trust_remote_code or weights_of([file.name for file in snapshot.iterdir()])
        if not is_default(spec.revision) and not is_whole:
            raise LocalEntryNotFoundError("its weights are not in the cache")
        return RepositoryFacts(str(snapshot), commit=snapshot.name)
    on_branch = is_on_branch(HfApi(), spec.checkpoint, spec.revision, info.sha)
    facts = RepositoryFacts(
        str(snapshot),
        info.id,
        info.pipeline_tag,
        is_gated(info),
        snapshot.name,
        # From the hub, because the measured folder may lack the card and the tokenizer.
        license_of(info.tags),
        has_tokenizer(sizes),
        on_branch,
    )
    names = weights_of(sizes)
    if not names and not spec.trust_remote_code:
        raise OutlineError(
            f"{spec.checkpoint!r} has no weights that transformers can load: neither safetensors nor "
            "pytorch_model.bin."
        )
    require_permitted(spec, names)
    configs = [name for name in sizes if _is_config(name)]
    if spec.trust_remote_code:
        configs += [name for name in sizes if name.endswith(".py")]
    if sum(sizes[name] for name in configs) > _MAX_CONFIG_BYTES:
        raise OutlineError(
            f"{spec.checkpoint!r} has more than {format_size(_MAX_CONFIG_BYTES)} of configs."
        )
    for name in configs:
        hf_hub_download(spec.checkpoint, name, revision=snapshot.name)
    if spec.trust_remote_code:
        for repository in code_of_others(snapshot):
            snapshot_download(repository, allow_patterns="*.py")
    if all(is_here(spec, name, snapshot.name) for name in names):
        return facts
    if len(names) > _MAX_FILES:
        raise OutlineError(f"{spec.checkpoint!r} has its weights in {len(names):,} files.")
    folder = empty / snapshot.name
    _write_outline(folder, snapshot, configs, {name: sizes[name] for name in names}, spec)
    return replace(facts, folder=str(folder))


def _is_config(name: str) -> bool:
    return "/" not in name and any(fnmatchcase(name, kind) for kind in _CONFIGS)


def _require_small(sizes: Mapping[str, int]) -> None:
    """Raise an OutlineError if a config is larger than the limit for parsing."""
    for name, size in sizes.items():
        limit = largest(name) if _is_config(name) else None
        if limit is not None and size > limit:
            raise OutlineError(
                f"Its {name} has {format_size(size)}; such a file may have {format_size(limit)}."
            )


def _write_outline(
    folder: Path, snapshot: Path, small: list[str], weights: Mapping[str, int], spec: ModelSpec
) -> None:
    for name in small:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(snapshot / name, folder / name)
    with ThreadPoolExecutor(_PARALLEL_DOWNLOADS) as threads:
        futures = [
            threads.submit(_write_header, folder / name, size, name, snapshot.name, spec)
            for name, size in weights.items()
        ]
        left = _MAX_HEADER_BYTES
        for future in futures:
            left -= future.result()
            if left < 0:
                threads.shutdown(cancel_futures=True)
                raise OutlineError(
                    f"The headers of {spec.checkpoint!r} have more than "
                    f"{format_size(_MAX_HEADER_BYTES)}."
                )


def _write_header(file: Path, size: int, name: str, commit: str, spec: ModelSpec) -> int:
    """Write a sparse file of weights with its header only; return the header's size."""
    header = b""
    if not is_pickled(file):
        header = _download(spec, name, commit, 0, _FIRST_BYTES)
        end = _LENGTH_BYTES + int.from_bytes(header[:_LENGTH_BYTES], "little")
        if len(header) < end <= min(size, _MAX_ONE_HEADER_BYTES):
            header += _download(spec, name, commit, len(header), end)
        header = header[:end]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as written:
        written.write(header)
        written.truncate(max(size, len(header)))
    return len(header)


def _download(spec: ModelSpec, name: str, commit: str, start: int, end: int) -> bytes:
    """Return the bytes from `start` to `end` of a repository's file, or to its end."""
    headers = {
        **build_hf_headers(),
        "Range": f"bytes={start}-{end - 1}",
        "Accept-Encoding": "identity",
    }
    url = hf_hub_url(spec.checkpoint, name, revision=commit)
    with get_session().stream("GET", url, headers=headers, timeout=HUB_TIMEOUT_S) as answer:
        hf_raise_for_status(answer)
        # A server without support for ranges sends the file from its beginning.
        skipped = 0 if answer.status_code == 206 else start
        content = bytearray()
        for part in answer.iter_bytes():
            content += part
            if len(content) >= skipped + end - start:
                break
    return bytes(content[skipped : skipped + end - start])


if __name__ == "__main__":
    main(int(sys.argv[1]))
