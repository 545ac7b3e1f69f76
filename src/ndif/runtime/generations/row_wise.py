"""A static check that a block touches only its own rows of a forward pass.

The source of a block must be in a small language: named parts of the model, the values of their `output`
and `input`, arithmetic on values, loops, and containers. A block in that language affects only its own
values. So the block can share a forward pass with others, and can be rerun if that pass fails. Any other
block must run alone.

If a block runs alone, the model continues with the object that the block assigns to a part. In a shared
pass, that object is copied into the block's rows. Both give the same result if no later write changes the
assigned or the replaced object. So a block may either assign or write in place, and only blocks of the same
kind share a pass.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from enum import Enum, auto


class ExpressionKind(Enum):
    """The kind of value of an expression in a block."""

    PART = auto()
    """The model, or a module of it."""
    VALUE = auto()
    """A tensor, number, string, or a container of these. A tensor may share memory with the model's."""
    OWN = auto()
    """A `VALUE` that the block created or brought along, so a write into it has no other effect."""
    TORCH = auto()
    """`torch`, `torch.nn` or `torch.nn.functional`."""
    NNSIGHT = auto()
    """The module `nnsight`; a block may call its `save`."""
    OTHER = auto()
    """Any other value from the block's script."""


class Edits(Enum):
    """The way in which a row-wise block changes the model's values."""

    IN_PLACE = auto()
    """The block writes into values, if it changes them at all."""
    ASSIGNED = auto()
    """The block assigns other values to a part."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ACCESSES = frozenset({"output", "input"})
"""Attributes of a part of the model with its values."""
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
"""Methods of values without side effects, except that `append` and `extend` change the block's own list."""
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
"""Functions and methods whose result is a new object, and no tensor of the model."""
_ITERATORS = _words("enumerate zip")
_WRITING = _words("hook out inplace")
"""Arguments that make a function write into a value, or act on the pass."""
_VALUES = (ExpressionKind.VALUE, ExpressionKind.OWN)


class _UnsupportedError(Exception):
    """The block has code outside the language."""


def row_wise_edits(
    source: str, names: Mapping[str, ExpressionKind], modules: Collection[str]
) -> Edits | None:
    """Return how a block edits its own rows; None if it may have any other effect.

    `names` are the kinds of the values that the block takes from its script. `modules` are the names of
    submodules in the model.
    """
    if ACCESSES & frozenset(modules):  # such an attribute could be a value or a submodule
        return None
    block = _Block(names, modules)
    try:
        block.follow(ast.parse(source).body)
    except (_UnsupportedError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if block.assigns and block.writes:
        return None
    return Edits.ASSIGNED if block.assigns else Edits.IN_PLACE


class _Block:
    """An abstract interpreter that infers the kinds of a block's names."""

    def __init__(self, names: Mapping[str, ExpressionKind], modules: Collection[str]) -> None:
        self._names = dict(names)
        self._modules = modules
        self.assigns = False
        """True if the block assigns a value to a part."""
        self.writes = False
        """True if the block writes into a value."""

    def follow(self, statements: list[ast.stmt]) -> None:
        """Interpret the block until the kinds are stable, because a loop may bind a name after its use."""
        before: dict[str, ExpressionKind] = {}
        while before != self._names:
            before = dict(self._names)
            self.run(statements)

    def run(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value=value):
                self._require_value(value)
            case ast.Assign(targets=targets, value=value):
                kind = self._kind(value)
                for target in targets:
                    self._assign(target, kind)
            case ast.AugAssign(target=target, value=value):
                self._require_value(value)
                self._augment(target)
            case ast.For(target=target, iter=iterable, body=body, orelse=[]):
                self._loop(target, iterable)
                self.run(body)
            case ast.If(test=test, body=body, orelse=orelse):
                self._require_value(test)
                self.run(body)
                self.run(orelse)
            case ast.Pass() | ast.Break() | ast.Continue():
                pass
            case _:
                raise _UnsupportedError

    def _assign(self, target: ast.expr, kind: ExpressionKind) -> None:
        match target:
            case ast.Name(id=name):
                self._bind(name, kind)
            case ast.Attribute(value=part, attr=attr) if attr in ACCESSES:
                if self._kind(part) is not ExpressionKind.PART or kind not in _VALUES:
                    raise _UnsupportedError
                self.assigns = True
            case ast.Subscript() if kind in _VALUES:
                self._write(target)
            case ast.Tuple(elts=targets) if kind in _VALUES:
                for element in targets:
                    self._assign(element, ExpressionKind.VALUE)
            case _:
                raise _UnsupportedError

    def _bind(self, name: str, kind: ExpressionKind) -> None:
        """Bind a name to a kind, which may only change from OWN to VALUE."""
        before = self._names.setdefault(name, kind)
        if before is not kind and {before, kind} == set(_VALUES):
            self._names[name] = ExpressionKind.VALUE
        elif before is not kind or name in _BUILTINS | _ITERATORS:
            raise _UnsupportedError

    def _augment(self, target: ast.expr) -> None:
        """Interpret a statement like `x += 1`, which writes into a tensor or list."""
        match target:
            case ast.Name(id=name) if self._names.get(name) is ExpressionKind.OWN:
                self.writes = True
            case ast.Attribute(value=part, attr=attr) if attr in ACCESSES:
                # Not an assignment in the sense of `assigns`: the part gets the same object again.
                if self._kind(part) is not ExpressionKind.PART:
                    raise _UnsupportedError
                self.writes = True
            case ast.Subscript(value=ast.Name()):  # the item may be the model's tensor
                raise _UnsupportedError
            case ast.Subscript():
                self._write(target)
            case _:
                raise _UnsupportedError

    def _write(self, target: ast.Subscript) -> None:
        """Interpret a write to an item or slice, which must belong to a part's value or an OWN name."""
        self.writes = True
        self._require_value(target.slice)
        owner = target.value
        if isinstance(owner, ast.Name) and self._names.get(owner.id) is ExpressionKind.OWN:
            return
        while isinstance(owner, ast.Subscript):
            self._require_value(owner.slice)
            owner = owner.value
        match owner:
            case ast.Attribute(value=part, attr=attr) if attr in ACCESSES:
                if self._kind(part) is ExpressionKind.PART:
                    return
        raise _UnsupportedError

    def _loop(self, target: ast.expr, iterable: ast.expr) -> None:
        match iterable, target:
            case (
                ast.Call(func=ast.Name(id="enumerate"), args=[items], keywords=[]),
                ast.Tuple(elts=[number, item]),
            ) if "enumerate" not in self._names:
                self._assign(number, ExpressionKind.VALUE)
                self._assign(item, self._item(items))
            case (
                ast.Call(func=ast.Name(id="zip"), args=arguments, keywords=[]),
                ast.Tuple(elts=targets),
            ) if "zip" not in self._names and len(arguments) == len(targets):
                for argument, item in zip(arguments, targets, strict=True):
                    self._assign(item, self._item(argument))
            case _:
                self._assign(target, self._item(iterable))

    def _item(self, iterable: ast.expr) -> ExpressionKind:
        """Return the kind of the items of an expression; items of the block's list may be the model's."""
        kind = self._kind(iterable)
        return ExpressionKind.VALUE if kind is ExpressionKind.OWN else kind

    def _require_value(self, node: ast.expr) -> None:
        if self._kind(node) not in _VALUES:
            raise _UnsupportedError

    def _kind(self, node: ast.expr) -> ExpressionKind:
        match node:
            case ast.Name(id=name) if (
                self._names.get(name, ExpressionKind.OTHER) is not ExpressionKind.OTHER
            ):
                return self._names[name]
            case ast.Attribute(value=owner, attr=attr):
                return self._attribute(self._kind(owner), attr)
            case ast.Subscript(value=owner, slice=index):
                self._require_value(index)
                kind = self._kind(owner)
                if kind is ExpressionKind.PART:
                    return kind
                if kind in _VALUES:
                    return ExpressionKind.VALUE
                raise _UnsupportedError
            case ast.Call():
                return self._call(node)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                self._comprehension(node.generators, [node.elt])
            case ast.DictComp(key=key, value=value):
                self._comprehension(node.generators, [key, value])
            case ast.Constant():
                pass
            case ast.IfExp() | ast.BoolOp():  # one of its values
                self._require_values(node)
                return ExpressionKind.VALUE
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
                self._require_values(node)
            case _:
                raise _UnsupportedError
        return ExpressionKind.OWN

    def _require_values(self, node: ast.expr) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._require_value(child)

    def _attribute(self, kind: ExpressionKind, attr: str) -> ExpressionKind:
        if kind is ExpressionKind.PART and attr in ACCESSES:
            return ExpressionKind.VALUE
        if kind is ExpressionKind.PART and attr in self._modules:
            return ExpressionKind.PART
        if kind is ExpressionKind.TORCH and attr in _NAMESPACES:
            return ExpressionKind.TORCH
        if (kind is ExpressionKind.TORCH and attr in _TYPES) or (
            kind in _VALUES and attr in _FIELDS
        ):
            return ExpressionKind.VALUE
        raise _UnsupportedError

    def _call(self, node: ast.Call) -> ExpressionKind:
        if any(keyword.arg is None or keyword.arg in _WRITING for keyword in node.keywords):
            raise _UnsupportedError
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        kind = ExpressionKind.VALUE
        match node.func:
            case ast.Name(id="len") if "len" not in self._names and len(arguments) == 1:
                if self._kind(arguments[0]) is ExpressionKind.PART:  # of layers
                    return ExpressionKind.OWN
                kind = ExpressionKind.OWN
            case ast.Name(id=name) if name in _BUILTINS and name not in self._names:
                kind = ExpressionKind.OWN if name in _MAKERS else kind
            case ast.Attribute(value=owner, attr=attr):
                owner_kind = self._kind(owner)
                permitted: Collection[str] = ()
                if owner_kind is ExpressionKind.PART:  # a submodule is applied to values
                    permitted = () if node.keywords else self._modules
                elif owner_kind in _VALUES:
                    permitted = _METHODS
                    kind = ExpressionKind.OWN if attr in _MAKERS else kind
                    # `save` returns the value itself.
                    kind = owner_kind if attr == "save" else kind
                elif owner_kind is ExpressionKind.TORCH:
                    permitted = _FUNCTIONS
                elif owner_kind is ExpressionKind.NNSIGHT:
                    permitted = ("save",)
                if attr not in permitted:
                    raise _UnsupportedError
            case part if self._kind(part) is not ExpressionKind.PART or node.keywords:
                raise _UnsupportedError
        for argument in arguments:
            self._require_value(argument)
        return kind

    def _comprehension(self, generators: list[ast.comprehension], elements: list[ast.expr]) -> None:
        outer = dict(self._names)  # the variables of a comprehension are local to it
        for generator in generators:
            if generator.is_async:
                raise _UnsupportedError
            self._loop(generator.target, generator.iter)
            for condition in generator.ifs:
                self._require_value(condition)
        for element in elements:
            self._require_value(element)
        self._names = outer
