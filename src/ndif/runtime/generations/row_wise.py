"""The proof that a block touches nothing but its own rows of a forward pass.

The source of a block is read as a small language: parts of the model that are named, the values that their
`output` and `input` give, arithmetic on these, loops over them, and containers to keep them in. A block
within that language can run beside others in one forward pass, and again if that fails: it has no effect
but on its own values. Whatever else a block holds, it is taken to be something that must run alone.
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
    """A tensor, a number, text, or a container of these."""
    TORCH = auto()
    """`torch`, `torch.nn` or `torch.nn.functional`."""
    NNSIGHT = auto()
    """`nnsight`, of which a block calls `save`."""


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


class _OtherError(Exception):
    """The block holds something that is not part of the language."""


def is_row_wise(source: str, names: Mapping[str, Kind], modules: Collection[str]) -> bool:
    """Return True if a block reads and edits its own rows alone.

    `names` are the values that the block takes from its script, as far as they are of a known kind, and
    `modules` the names under which a part of the model has others.
    """
    if ACCESSES & frozenset(modules):  # such a name could be either
        return False
    try:
        _Block(names, modules).run(ast.parse(source).body)
    except (_OtherError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


class _Block:
    """The names of a block and their kinds, from its first statement to its last."""

    def __init__(self, names: Mapping[str, Kind], modules: Collection[str]) -> None:
        self._names = dict(names)
        self._modules = modules

    def run(self, statements: list[ast.stmt]) -> None:
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
                if isinstance(target, ast.Name):
                    self._value(ast.Name(target.id, ast.Load()))
                self._assign(target, Kind.VALUE)
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
                # A name of two kinds is not followed, nor one by which a function is known.
                if self._names.setdefault(name, kind) is not kind or name in _BUILTINS:
                    raise _OtherError
            case ast.Attribute(value=part, attr=attr) if attr in ACCESSES:
                if self._kind(part) is not Kind.PART or kind is not Kind.VALUE:
                    raise _OtherError
            case ast.Subscript(value=value, slice=index) if kind is Kind.VALUE:
                self._value(value)
                self._value(index)
            case ast.Tuple(elts=targets) if kind is Kind.VALUE:
                for each in targets:
                    self._assign(each, kind)
            case _:
                raise _OtherError

    def _loop(self, target: ast.expr, iterable: ast.expr) -> None:
        """Bind the variables of a loop."""
        match iterable, target:
            case (
                ast.Call(func=ast.Name(id="enumerate"), args=[each], keywords=[]),
                ast.Tuple(elts=[number, item]),
            ) if "enumerate" not in self._names:
                self._assign(number, Kind.VALUE)
                self._assign(item, self._kind(each))
            case (
                ast.Call(func=ast.Name(id="zip"), args=several, keywords=[]),
                ast.Tuple(elts=targets),
            ) if "zip" not in self._names and len(several) == len(targets):
                for each, item in zip(several, targets, strict=True):
                    self._assign(item, self._kind(each))
            case _:
                self._assign(target, self._kind(iterable))

    def _value(self, node: ast.expr) -> None:
        """Require an expression to give a value."""
        if self._kind(node) is not Kind.VALUE:
            raise _OtherError

    def _kind(self, node: ast.expr) -> Kind:
        match node:
            case ast.Name(id=name) if name in self._names:
                return self._names[name]
            case ast.Attribute(value=owner, attr=attr):
                return self._attribute(self._kind(owner), attr)
            case ast.Subscript(value=owner, slice=index):
                self._value(index)
                kind = self._kind(owner)
                if kind in (Kind.PART, Kind.VALUE):
                    return kind
                raise _OtherError
            case ast.Call():
                self._call(node)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                self._comprehension(node.generators, [node.elt])
            case ast.DictComp(key=key, value=value):
                self._comprehension(node.generators, [key, value])
            case ast.Constant():
                pass
            case (
                ast.BinOp()
                | ast.UnaryOp()
                | ast.BoolOp()
                | ast.Compare()
                | ast.IfExp()
                | ast.Tuple()
                | ast.List()
                | ast.Set()
                | ast.Dict()
                | ast.Slice()
                | ast.JoinedStr()
                | ast.FormattedValue()
            ):
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._value(child)
            case _:
                raise _OtherError
        return Kind.VALUE

    def _attribute(self, kind: Kind, attr: str) -> Kind:
        if kind is Kind.PART and attr in ACCESSES:
            return Kind.VALUE
        if kind is Kind.PART and attr in self._modules:
            return Kind.PART
        if kind is Kind.TORCH and attr in _NAMESPACES:
            return Kind.TORCH
        if (kind is Kind.TORCH and attr in _TYPES) or (kind is Kind.VALUE and attr in _FIELDS):
            return Kind.VALUE
        raise _OtherError

    def _call(self, node: ast.Call) -> None:
        arguments = [*node.args, *(each.value for each in node.keywords)]
        match node.func:
            case ast.Name(id="len") if "len" not in self._names and len(arguments) == 1:
                if self._kind(arguments[0]) is Kind.PART:  # of layers
                    return
            case ast.Name(id=name) if name in _BUILTINS and name not in self._names:
                pass
            case ast.Attribute(value=owner, attr=attr):
                known = {
                    Kind.PART: self._modules,  # a module that is applied to a value
                    Kind.VALUE: _METHODS,
                    Kind.TORCH: _FUNCTIONS,
                    Kind.NNSIGHT: ("save",),
                }
                if attr not in known[self._kind(owner)]:
                    raise _OtherError
            case part if self._kind(part) is not Kind.PART:
                raise _OtherError
        for each in arguments:
            self._value(each)

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
