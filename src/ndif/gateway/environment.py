"""Packages of a runtime by import name; `nnsight.compare()` compares the client's packages with them."""

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
"""Requirements of ndif that models and users' code use; the others serve the server alone."""
_EXTRA = "server"
"""The extra of ndif with packages that no user's code uses."""


@lru_cache(maxsize=8)
def environment(runtime: Runtime | None) -> PythonEnvironment:
    """Return the versions of Python and of a runtime's packages; None is the runtime of this process.

    Packages that only the server needs are left out, because clients do not need them. Import names that
    several packages share are left out, too.
    """
    overlay = [str(folder) for folder in runtime.path] if runtime is not None else []
    installed: dict[str, Distribution] = {}
    for distribution in distributions(path=[*overlay, *sys.path]):
        # Python imports the first distribution on the path.
        installed.setdefault(canonicalize_name(distribution.metadata["Name"]), distribution)
    unused = _required([NAME], installed, _EXTRA) - _required(_FOR_BLOCKS, installed)
    names = {name: _import_names(distribution) for name, distribution in installed.items()}
    # A namespace such as `google` belongs to several distributions and has no version.
    counts = Counter(chain.from_iterable(names.values()))
    packages = {
        import_name: distribution.version
        for name, distribution in installed.items()
        if name not in unused
        for import_name in names[name]
        if counts[import_name] == 1
    }
    return PythonEnvironment(python_version=sys.version, packages=dict(sorted(packages.items())))


def _required(
    names: Iterable[str], installed: Mapping[str, Distribution], extra: str = ""
) -> set[str]:
    """Return these packages and their transitive requirements, if installed."""
    required: set[str] = set()
    pending = [canonicalize_name(name) for name in names]
    while pending:
        name = pending.pop()
        if name in required or name not in installed:
            continue
        required.add(name)
        for text in installed[name].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                pending.append(canonicalize_name(requirement.name))
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
