"""The proof that a block touches nothing but its own rows of a forward pass.

The source of a block is read as a small language: parts of the model that are named, the values that their
`output` and `input` give, arithmetic on these, loops over them, and containers to keep them in. A block
within that language can run beside others in one forward pass, and again if that fails: it has no effect
but on its own values. Whatever else a block holds, it is taken to be something that must run alone.

Alone, what a block assigns to a part is what the model goes on with; beside others it is copied into the
rows. That is the same as long as nobody writes into what was assigned, or into what was replaced. So a
block that assigns writes into nothing, and those that write share their passes with others that do.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from enum import Enum, auto


class Kind(Enum):
    """Kind of value that an expression of a block gives."""

    PART = auto()
    """The model, or a module of it."""
    VALUE = auto()
    """A tensor, a number, text, or a container of these. A tensor may be rows of the model's."""
    OWN = auto()
    """One of these that was made by the block or came with it: to write into it changes nothing else."""
    TORCH = auto()
    """`torch`, `torch.nn` or `torch.nn.functional`."""
    NNSIGHT = auto()
    """`nnsight`, of which a block calls `save`."""
    OTHER = auto()
    """Anything else that came with the block."""


class Edits(Enum):
    """How a row-wise block changes the model's values."""

    IN_PLACE = auto()
    """By writing into them, if at all."""
    ASSIGNED = auto()
    """By assigning others to a part."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ACCESSES = frozenset({"output", "input"})
"""Attributes of a part of the model that give its values."""
_FIELDS = _words("shape dtype device ndim T mT H values indices real")
_METHODS = _words("""
    save clone detach cpu to float double half bfloat16 long int bool item tolist type contiguous
    mean sum prod max min amax amin argmax argmin argsort sort topk std var norm median cumsum all any
    abs exp log log2 sqrt rsqrt square pow sign neg clamp round floor ceil sigmoid tanh relu softmax
    log_softmax add sub mul div matmul mm bmm dot outer eq ne lt le gt ge where masked_fill isnan nonzero
    size dim numel reshape view flatten unflatten squeeze unsqueeze transpose permute expand expand_as
    repeat repeat_interleave unbind split chunk narrow select index_select gather diagonal flip roll tril
    triu view_as t
    append extend keys values items get copy count index join format
    """)
"""Methods of values that change nothing but, with `append` and `extend`, the block's own list."""
_FUNCTIONS = _words("""
    tensor as_tensor zeros ones full arange linspace eye zeros_like ones_like full_like empty_like
    cat concat stack hstack vstack split chunk where einsum matmul mm bmm dot outer tensordot
    mean sum prod max min amax amin argmax argmin argsort sort topk std var norm median cumsum all any
    abs exp log log2 sqrt rsqrt square pow sign neg clamp round floor ceil sigmoid tanh relu softmax
    log_softmax add sub mul div eq ne lt le gt ge maximum minimum isnan nonzero allclose
    reshape flatten squeeze unsqueeze transpose permute index_select gather diagonal flip roll tril triu
    cosine_similarity normalize gelu silu cross_entropy kl_div mse_loss layer_norm linear
    """)
_NAMESPACES = frozenset({"nn", "functional"})
_TYPES = _words(
    "float32 float64 float16 bfloat16 float half double int8 int16 int32 int64 uint8 int long bool"
)
_BUILTINS = _words(
    "len range int float bool str list dict tuple set min max sum abs round sorted slice"
)
_MAKERS = _words("clone item tolist float int bool str len round list dict tuple set")
"""Functions and methods whose result is no tensor of the model's, nor a container of somebody else."""
_ITERATORS = _words("enumerate zip")
_WRITING = _words("hook out inplace")
"""Arguments of functions that have them write into a value, or act on the pass."""
_VALUES = (Kind.VALUE, Kind.OWN)


class _OtherError(Exception):
    """The block holds something that is not part of the language."""


def row_wise_edits(
    source: str, names: Mapping[str, Kind], modules: Collection[str]
) -> Edits | None:
    """Return how a block edits its own rows; None if it may do anything else.

    `names` are the values that the block takes from its script, and `modules` the names under which a part
    of the model has others.
    """
    if ACCESSES & frozenset(modules):  # such a name could be either
        return None
    block = _Block(names, modules)
    try:
        block.follow(ast.parse(source).body)
    except (_OtherError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if block.assigns and block.writes:
        return None
    return Edits.ASSIGNED if block.assigns else Edits.IN_PLACE


class _Block:
    """The names of a block and their kinds, from its first statement to its last."""

    def __init__(self, names: Mapping[str, Kind], modules: Collection[str]) -> None:
        self._names = dict(names)
        self._modules = modules
        self.assigns = False
        """True if a value is assigned to a part."""
        self.writes = False
        """True if something is written into a value."""

    def follow(self, statements: list[ast.stmt]) -> None:
        """Read the block until the kinds of its names are known: a loop may bind one after its use."""
        before: dict[str, Kind] = {}
        while before != self._names:
            before = dict(self._names)
            self.run(statements)

    def run(self, statements: list[ast.stmt]) -> None:
        """Read statements once, each of which may bind names."""
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value=value):
                self._value(value)
            case ast.Assign(targets=targets, value=value):
                kind = self._kind(value)
                for target in targets:
                    self._assign(target, kind)
            case ast.AugAssign(target=target, value=value):
                self._value(value)
                self._augment(target)
            case ast.For(target=target, iter=iterable, body=body, orelse=[]):
                self._loop(target, iterable)
                self.run(body)
            case ast.If(test=test, body=body, orelse=orelse):
                self._value(test)
                self.run(body)
                self.run(orelse)
            case ast.Pass() | ast.Break() | ast.Continue():
                pass
            case _:
                raise _OtherError

    def _assign(self, target: ast.expr, kind: Kind) -> None:
        match target:
            case ast.Name(id=name):
                self._bind(name, kind)
            case ast.Attribute(value=part, attr=attr) if attr in ACCESSES:
                if self._kind(part) is not Kind.PART or kind not in _VALUES:
                    raise _OtherError
                self.assigns = True
            case ast.Subscript() if kind in _VALUES:
                self._write(target)
            case ast.Tuple(elts=targets) if kind in _VALUES:
                for each in targets:
                    self._assign(each, Kind.VALUE)
            case _:
                raise _OtherError

    def _bind(self, name: str, kind: Kind) -> None:
        """Give a name a kind, which it keeps."""
        before = self._names.setdefault(name, kind)
        if before is not kind and {before, kind} == set(_VALUES):
            self._names[name] = Kind.VALUE
        elif before is not kind or name in _BUILTINS | _ITERATORS:
            raise _OtherError

    def _augment(self, target: ast.expr) -> None:
        """Take a statement like `x += 1`, which writes into a tensor or a list."""
        match target:
            case ast.Name(id=name) if self._names.get(name) is Kind.OWN:
                self.writes = True
            case ast.Attribute(value=part, attr=attr) if attr in ACCESSES:
                # What is then assigned is the very value that was written into.
                if self._kind(part) is not Kind.PART:
                    raise _OtherError
                self.writes = True
            case ast.Subscript(value=ast.Name()):  # an item of the block's list may be the model's
                raise _OtherError
            case ast.Subscript():
                self._write(target)
            case _:
                raise _OtherError

    def _write(self, target: ast.Subscript) -> None:
        """Take an item or a slice that is written: of a part's value, or of a name that is the block's."""
        self.writes = True
        self._value(target.slice)
        owner = target.value
        if isinstance(owner, ast.Name) and self._names.get(owner.id) is Kind.OWN:
            return
        while isinstance(owner, ast.Subscript):
            self._value(owner.slice)
            owner = owner.value
        match owner:
            case ast.Attribute(value=part, attr=attr) if attr in ACCESSES:
                if self._kind(part) is Kind.PART:
                    return
        raise _OtherError

    def _loop(self, target: ast.expr, iterable: ast.expr) -> None:
        """Bind the variables of a loop."""
        match iterable, target:
            case (
                ast.Call(func=ast.Name(id="enumerate"), args=[each], keywords=[]),
                ast.Tuple(elts=[number, item]),
            ) if "enumerate" not in self._names:
                self._assign(number, Kind.VALUE)
                self._assign(item, self._item(each))
            case (
                ast.Call(func=ast.Name(id="zip"), args=several, keywords=[]),
                ast.Tuple(elts=targets),
            ) if "zip" not in self._names and len(several) == len(targets):
                for each, item in zip(several, targets, strict=True):
                    self._assign(item, self._item(each))
            case _:
                self._assign(target, self._item(iterable))

    def _item(self, iterable: ast.expr) -> Kind:
        """Return the kind of what a loop over an expression gives: what is kept may be the model's."""
        kind = self._kind(iterable)
        return Kind.VALUE if kind is Kind.OWN else kind

    def _value(self, node: ast.expr) -> None:
        """Require an expression to give a value."""
        if self._kind(node) not in _VALUES:
            raise _OtherError

    def _kind(self, node: ast.expr) -> Kind:
        match node:
            case ast.Name(id=name) if self._names.get(name, Kind.OTHER) is not Kind.OTHER:
                return self._names[name]
            case ast.Attribute(value=owner, attr=attr):
                return self._attribute(self._kind(owner), attr)
            case ast.Subscript(value=owner, slice=index):
                self._value(index)
                kind = self._kind(owner)
                if kind is Kind.PART:
                    return kind
                if kind in _VALUES:
                    return Kind.VALUE
                raise _OtherError
            case ast.Call():
                return self._call(node)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                self._comprehension(node.generators, [node.elt])
            case ast.DictComp(key=key, value=value):
                self._comprehension(node.generators, [key, value])
            case ast.Constant():
                pass
            case ast.IfExp() | ast.BoolOp():  # one of its values
                self._values(node)
                return Kind.VALUE
            case (
                ast.BinOp()
                | ast.UnaryOp()
                | ast.Compare()
                | ast.Tuple()
                | ast.List()
                | ast.Set()
                | ast.Dict()
                | ast.Slice()
                | ast.JoinedStr()
                | ast.FormattedValue()
            ):
                self._values(node)
            case _:
                raise _OtherError
        return Kind.OWN

    def _values(self, node: ast.expr) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._value(child)

    def _attribute(self, kind: Kind, attr: str) -> Kind:
        if kind is Kind.PART and attr in ACCESSES:
            return Kind.VALUE
        if kind is Kind.PART and attr in self._modules:
            return Kind.PART
        if kind is Kind.TORCH and attr in _NAMESPACES:
            return Kind.TORCH
        if (kind is Kind.TORCH and attr in _TYPES) or (kind in _VALUES and attr in _FIELDS):
            return Kind.VALUE
        raise _OtherError

    def _call(self, node: ast.Call) -> Kind:
        """Return the kind of what a call gives."""
        if any(each.arg is None or each.arg in _WRITING for each in node.keywords):
            raise _OtherError
        arguments = [*node.args, *(each.value for each in node.keywords)]
        kind = Kind.VALUE
        match node.func:
            case ast.Name(id="len") if "len" not in self._names and len(arguments) == 1:
                if self._kind(arguments[0]) is Kind.PART:  # of layers
                    return Kind.OWN
                kind = Kind.OWN
            case ast.Name(id=name) if name in _BUILTINS and name not in self._names:
                kind = Kind.OWN if name in _MAKERS else kind
            case ast.Attribute(value=owner, attr=attr):
                of = self._kind(owner)
                known: Collection[str] = ()
                if of is Kind.PART:  # a module that is applied to values
                    known = () if node.keywords else self._modules
                elif of in _VALUES:
                    known = _METHODS
                    kind = Kind.OWN if attr in _MAKERS else kind
                    # As it is: `save` marks a value.
                    kind = of if attr == "save" else kind
                elif of is Kind.TORCH:
                    known = _FUNCTIONS
                elif of is Kind.NNSIGHT:
                    known = ("save",)
                if attr not in known:
                    raise _OtherError
            case part if self._kind(part) is not Kind.PART or node.keywords:
                raise _OtherError
        for each in arguments:
            self._value(each)
        return kind

    def _comprehension(self, generators: list[ast.comprehension], elements: list[ast.expr]) -> None:
        outer = dict(self._names)  # its variables end with it
        for each in generators:
            if each.is_async:
                raise _OtherError
            self._loop(each.target, each.iter)
            for condition in each.ifs:
                self._value(condition)
        for element in elements:
            self._value(element)
        self._names = outer
