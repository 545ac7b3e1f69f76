"""The image's Dockerfile as instructions, by stage."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = DOCKER / "Dockerfile"

_MOUNT = re.compile(r"^(--mount=\S+\s+)+")
_ASSIGNMENT = re.compile(r'(\w+)=("[^"]*"|\S*)')


@dataclass(frozen=True)
class Instruction:
    """One instruction with its continued lines joined."""

    name: str
    value: str

    @property
    def assignments(self) -> dict[str, str]:
        """Return the variables of an ENV, ARG or LABEL."""
        return {name: value.strip('"') for name, value in _ASSIGNMENT.findall(self.value)}

    @property
    def command(self) -> str:
        """Return the shell's command of a RUN."""
        return _MOUNT.sub("", self.value)


def stages() -> list[list[Instruction]]:
    """Return the instructions of each stage, without instructions before the first FROM."""
    parser = DockerfileParser(str(DOCKERFILE), cache_content=True)
    groups: list[list[Instruction]] = []
    for part in parser.structure:
        instruction = Instruction(part["instruction"].upper(), part["value"])
        if instruction.name == "FROM":
            groups.append([])
        if groups and instruction.name != "COMMENT":
            groups[-1].append(instruction)
    return groups


def only(stage: list[Instruction], name: str) -> list[Instruction]:
    """Return the instructions of one kind."""
    return [instruction for instruction in stage if instruction.name == name]
