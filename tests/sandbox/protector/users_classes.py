"""Classes as researchers write them. A client sends them by value; a block may define them, too."""

# ruff: noqa: UP006, UP035 - in older forms, too

import abc
import enum
import functools
from abc import ABC, abstractmethod
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from typing import (
    Any,
    Dict,
    Generic,
    List,
    NamedTuple,
    Protocol,
    TypedDict,
    TypeVar,
    runtime_checkable,
)

T = TypeVar("T")
K = TypeVar("K", bound=str)
N = TypeVar("N", int, float)


class Box(Generic[T]):
    size: int = 1

    def __init__(self, value: T) -> None:
        self.value = value

    def doubled(self) -> Any:
        return self.value * 2


class Sub(Box[int]):
    def tripled(self) -> int:
        return self.value * 3


class Two(Box[T], Generic[T, K]):
    def key(self, key: K) -> Any:
        return (key, self.value)


class Numbers(List[N]):
    def first(self) -> N:
        return self[0]


class Table(Dict[str, int]):
    def total(self) -> int:
        return sum(self.values())


class Plain(dict[str, list[int]]):
    def longest(self) -> int:
        return max(len(layer) for layer in self.values())


@dataclass
class Pack(Generic[T]):
    items: list = field(default_factory=list)

    def total(self) -> Any:
        return sum(self.items)


@dataclass(frozen=True, order=True)
class Plan(Generic[T]):
    layers: tuple[int, ...] = (0, 1)
    note: str | None = None

    @property
    def table(self) -> OrderedDict:
        return OrderedDict((layer, None) for layer in self.layers)


@dataclass
class Wide(Pack[int]):
    width: int = 2


@runtime_checkable
class Scales(Protocol):
    def scale(self, x: float) -> float: ...


class Named(Protocol[T]):
    name: str

    def get(self) -> T: ...


class Half(Scales):
    def scale(self, x: float) -> float:
        return x / 2


class Other:
    name = "other"

    def scale(self, x: float) -> float:
        return x / 4

    def get(self) -> int:
        return 1


class Given(Named[int]):
    def __init__(self, name: str) -> None:
        self.name = name

    def get(self) -> int:
        return len(self.name)


class Pair(NamedTuple):
    a: float
    b: float = 2.0

    def total(self) -> float:
        return self.a + self.b


Point = namedtuple("Point", "x y", defaults=[0])


class Options(TypedDict):
    a: int


class More(TypedDict, total=False):
    a: int
    b: str


class Base(ABC):
    @abstractmethod
    def go(self, x: int) -> int: ...

    @property
    @abstractmethod
    def name(self) -> str: ...


class Concrete(Base):
    name = "concrete"

    def go(self, x: int) -> int:
        return x * 2


class Meta(abc.ABCMeta):
    made = 0

    def __call__(cls, *arguments: Any) -> Any:
        return super().__call__(*arguments)


class Registered(metaclass=Meta):
    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        return True if other.__name__ == "Other" else NotImplemented


class Kind(str, enum.Enum):
    MEAN = "mean"
    NORM = "norm"

    def of(self, x: int) -> int:
        return x if self is Kind.MEAN else -x


class Colour(enum.Enum):
    RED = enum.auto()
    BLUE = (1, 2)

    @property
    def short(self) -> str:
        return self.name[0]


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Flags(enum.Flag):
    A = enum.auto()
    B = enum.auto()


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Typed(Generic[T], ABC):
    @abstractmethod
    def make(self) -> T: ...


class Maker(Typed[int]):
    def make(self) -> int:
        return 7


class Store(UserDict):
    def __missing__(self, key: str) -> str:
        return key.upper()


@functools.total_ordering
class Ordered:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __eq__(self, other: Any) -> Any:
        return self.rank == other.rank

    def __lt__(self, other: Any) -> Any:
        return self.rank < other.rank

    def __hash__(self) -> int:
        return self.rank


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: int) -> None:
        self.a = a
