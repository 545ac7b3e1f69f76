"""The packages of a runtime, by import name: what `nnsight.compare()` compares a client's with."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import Distribution, distributions
from itertools import chain

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ndif.distribution import NAME
from ndif.gateway.answers import PythonEnvironment
from ndif.host.runtimes import Runtime

_FOR_BLOCKS = ("nnsight", "torch", "transformers", "accelerate", "peft")
"""Packages that this one requires for models and for users' code."""
_EXTRA = "server"
"""The extra of this distribution that no block uses."""


@lru_cache(maxsize=8)
def environment(runtime: Runtime | None) -> PythonEnvironment:
    """Return Python's and the packages' versions of a runtime; of this process without one.

    Packages that the server alone needs are left out: no client has to have them. So are names that several
    packages share.
    """
    overlay = [str(folder) for folder in runtime.path] if runtime is not None else []
    found: dict[str, Distribution] = {}
    for distribution in distributions(path=[*overlay, *sys.path]):
        # The first one on the path is the one that is imported.
        found.setdefault(canonicalize_name(distribution.metadata["Name"]), distribution)
    unused = _required([NAME], found, _EXTRA) - _required(_FOR_BLOCKS, found)
    names = {name: _import_names(distribution) for name, distribution in found.items()}
    # Several distributions share a namespace such as `google`: it has no version.
    times = Counter(chain.from_iterable(names.values()))
    packages = {
        imported: distribution.version
        for name, distribution in found.items()
        if name not in unused
        for imported in names[name]
        if times[imported] == 1
    }
    return PythonEnvironment(python_version=sys.version, packages=dict(sorted(packages.items())))


def _required(names: Iterable[str], found: Mapping[str, Distribution], extra: str = "") -> set[str]:
    """Return these packages and what they require, as far as it is installed."""
    required: set[str] = set()
    coming = [canonicalize_name(name) for name in names]
    while coming:
        name = coming.pop()
        if name in required or name not in found:
            continue
        required.add(name)
        for text in found[name].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                coming.append(canonicalize_name(requirement.name))
    return required


def _import_names(distribution: Distribution) -> set[str]:
    listed = distribution.read_text("top_level.txt")
    names = set(listed.split()) if listed else set()
    if not names:
        names = {
            file.parts[0].partition(".")[0]
            for file in distribution.files or ()
            if file.suffix in (".py", ".so")
        }
    names = {name for name in names if "." not in name and name != "__pycache__"}
    return names or {distribution.metadata["Name"]}
