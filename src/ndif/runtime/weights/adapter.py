"""Download an adapter for an untrusted request: `python -m ndif.runtime.weights.adapter REPO CACHE BYTES`.

Prints the name that the hub has for the repository, which may have been renamed, before it is downloaded.
The download uses no credentials and takes only formats that are pure data: no file that is unpickled.
"""

from __future__ import annotations

import sys

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from ndif.sizes import format_size

_FILES = ("adapter_config.json", "adapter_model.safetensors")


def main(repo_id: str, cache: str, max_bytes: int) -> str:
    """Download the adapter into the cache; return the reason if that is not possible, else ""."""
    try:
        print(HfApi().model_info(repo_id, token=False).id, flush=True)
        listed = HfApi().list_repo_tree(repo_id, token=False)
        sizes = {entry.path: getattr(entry, "size", 0) for entry in listed}
        if missing := [name for name in _FILES if name not in sizes]:
            return f"it has no {missing[0]}"
        size = sum(sizes[name] for name in _FILES)
        if size > max_bytes:
            return f"it has {format_size(size)}; this server takes at most {format_size(max_bytes)}"
        snapshot_download(repo_id, cache_dir=cache, allow_patterns=list(_FILES), token=False)
    except RepositoryNotFoundError:
        return "there is no public repository of that name"
    except (HfHubHTTPError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


if __name__ == "__main__":
    reason = main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    if reason:
        raise SystemExit(reason)
