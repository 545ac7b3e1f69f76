"""Download an adapter for a process that cannot reach the hub.

`python -m ndif.runtime.weights.adapter REPO` downloads it to the Hub's cache, for a trusted request. With
arguments `CACHE BYTES` it is for untrusted requests: it is downloaded to a separate cache, without
credentials, and only in data formats that need no unpickling. In that case, the hub's present name of the
repository is printed before the download. The process ends when its standard input is closed.
"""

from __future__ import annotations

import sys

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from ndif.runtime.process.children import end_with_input
from ndif.runtime.weights.fetch import discard_partial
from ndif.sizes import format_size

_FILES = ("adapter_config.json", "adapter_model.safetensors")


def main(repo_id: str, cache: str = "", max_bytes: str = "0") -> str:
    """Download the adapter; return "" or the reason why that is not possible."""
    try:
        if cache:
            return _fetch_public(repo_id, cache, int(max_bytes))
        snapshot_download(repo_id, allow_patterns=["adapter_*"])
    except RepositoryNotFoundError:
        return f"there is no {'public repository' if cache else 'repository'} of that name"
    except (HfHubHTTPError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _fetch_public(repo_id: str, cache: str, max_bytes: int) -> str:
    print(HfApi().model_info(repo_id, token=False).id, flush=True)
    listed = HfApi().list_repo_tree(repo_id, token=False)
    sizes = {entry.path: getattr(entry, "size", 0) for entry in listed}
    if missing := [name for name in _FILES if name not in sizes]:
        return f"it has no {missing[0]}"
    size = sum(sizes[name] for name in _FILES)
    if size > max_bytes:
        return f"it has {format_size(size)}; this server takes at most {format_size(max_bytes)}"
    snapshot_download(repo_id, cache_dir=cache, allow_patterns=list(_FILES), token=False)
    return ""


if __name__ == "__main__":
    end_with_input(discard_partial)
    reason = main(*sys.argv[1:])
    if reason:
        raise SystemExit(reason)
