"""`python -m ndif.runtime.adapter REPO CACHE MAX_BYTES`: fetch an adapter that a stranger named.

Without credentials, and as data alone: a format that unpickles is left where it is.
"""

from __future__ import annotations

import sys

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

_FILES = ("adapter_config.json", "adapter_model.safetensors")


def main(repo_id: str, cache: str, max_bytes: int) -> str:
    """Have the adapter in the cache; why that cannot be, or nothing."""
    try:
        listed = HfApi().list_repo_tree(repo_id, token=False)
        sizes = {entry.path: getattr(entry, "size", 0) for entry in listed}
        if missing := [name for name in _FILES if name not in sizes]:
            return f"it has no {missing[0]}"
        size = sum(sizes[name] for name in _FILES)
        if size > max_bytes:
            return f"it has {size:,} bytes; this server takes at most {max_bytes:,}"
        snapshot_download(repo_id, cache_dir=cache, allow_patterns=list(_FILES), token=False)
    except RepositoryNotFoundError:
        return "there is no public repository of that name"
    except (HfHubHTTPError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


if __name__ == "__main__":
    why = main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    if why:
        raise SystemExit(why)
