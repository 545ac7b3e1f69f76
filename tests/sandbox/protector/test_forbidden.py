"""Blocks that reach for forbidden objects are refused, at the user's own line and with a clear message."""

# ruff: noqa: E501 - one case per line

from __future__ import annotations

import textwrap

import pytest
import torch

from tests.sandbox.protector.running import protector, refusal

ATTRIBUTE = "AttributeError: the attribute {!r} is not available on this server"
CLASS = "AttributeError: the attribute '__class__' is not available on this server; use type(...) instead"

_LIAR = """\
import {0}
HASH = hash({0}.{1})
class Meta(type):
    __hash__ = lambda cls: HASH
    __eq__ = lambda cls, other: True
class Liar(metaclass=Meta):
    harmless = 1
Liar().harmless
"""

# The start of the error, and the source.
REFUSED = [
    # imports
    ("ImportError: module 'os' is not available on this server; you can import: abc, ", "import os\nos.getcwd()"),
    ("ImportError: module 'os' is not available", "\nfrom os import path"),
    ("ImportError: module 'os.path' is not available", "import os.path as p\np.join('a')"),
    ("ImportError: module 'subprocess' is not available", "import subprocess as s\n\ns.run('ls')"),
    ("ImportError: module 'sys' is not available", "import sys\nsys.modules"),
    ("ImportError: module 'importlib' is not available", "__import__('importlib').import_module('os')"),
    ("ImportError: module 'pickle' is not available", "import pickle\npickle.loads(b'')"),
    ("ImportError: module 'inspect' is not available", "import inspect\ninspect.currentframe()"),
    ("AttributeError: module 'socket' is not available", "import socket\nsocket.x = 1"),
    ("ImportError: module 'torch.hub' is not available on this server: it downloads", "import torch.hub as h\nh.load"),
    ("ImportError: torch.hub is not available on this server: it downloads", "from torch import hub"),
    ("ImportError: nnsight.NNsight is not available", "from nnsight import NNsight"),
    # modules
    ("AttributeError: torch.os: the module 'os' is not available on this server", "import torch\ntorch.os"),
    ("AttributeError: enum.sys: the module 'sys' is not available on this server", "import enum\nenum.sys.modules"),
    ("AttributeError: the attribute '_sys' of 'ProtectedModule' is private", "import collections\ncollections._sys"),
    ("AttributeError: torch.load is not available on this server: it reads files", "import torch\ntorch.load('x')"),
    ("AttributeError: torch.save is not available", "import torch\ntorch.save(1, 'x')"),
    ("AttributeError: torch.jit is not available", "import torch\ntorch.jit.script"),
    ("AttributeError: torch.ops is not available", "import torch\ntorch.ops.load_library('x')"),
    ("AttributeError: torch.utils.cpp_extension is not", "import torch.utils\ntorch.utils.cpp_extension"),
    ("AttributeError: torch.distributed is not available", "import torch\ntorch.distributed"),
    ("AttributeError: numpy.load is not available", "import numpy as np\nnp.load('x')"),
    ("AttributeError: numpy.memmap is not available", "import numpy as np\nnp.memmap"),
    ("AttributeError: numpy.ctypeslib is not available", "import numpy as np\nnp.ctypeslib"),
    ("AttributeError: typing.get_type_hints is not", "import typing\ntyping.get_type_hints"),
    ("AttributeError: cannot modify the module 'torch': it is protected", "import torch\ntorch.save = 1"),
    ("AttributeError: cannot modify the module 'torch.nn'", "import torch\ntorch.nn.Linear = 1"),
    ("AttributeError: cannot modify the module 'math'", "import math\ndel math.pi"),
    ("AttributeError: cannot modify the module 'math'", "import math\nsetattr(math, 'pi', 3)"),
    ("AttributeError: cannot set 'relu' of <class", "import torch\ntorch.Tensor.relu = 1"),
    ("AttributeError: the attribute '__dict__' is not", "import math\nmath.__dict__"),
    ("AttributeError: torch.compile is not available on this server: it writes and runs compiled code; call", "import torch\ntorch.compile(print)"),
    ("AttributeError: Linear.compile is not available", "import torch\ntorch.nn.Linear(1, 1).compile()"),
    ("AttributeError: Module.compile is not available", "import torch\ntorch.nn.Module.compile"),
    ("ImportError: module 'torch._dynamo' is not available", "import torch._dynamo as d\nd.reset"),
    ("ImportError: module 'torch._inductor.codecache' is not", "from torch._inductor.codecache import PyCodeCache"),
    ("ImportError: torch._C is private", "from torch import _C"),
    ("ImportError: module 'numpy._core' is not available", "import numpy._core as c\nc.x"),
    ("ImportError: module 'torch.jit' is not available", "import torch.jit as j\nj.script"),
    ("ImportError: module 'torch.utils.jit' is not available", "from torch.utils.jit import log_extract"),
    ("ImportError: module 'torch.backends.xeon' is not available", "from torch.backends.xeon import run_cpu"),
    ("ImportError: torch.library is not available", "from torch import library"),
    ("ImportError: torch.package is not available", "from torch import package"),
    ("ImportError: module 'numpy.matlib' is not available", "import numpy.matlib as m\nm.load"),
    ("ImportError: module 'numpy.tests' is not available", "import numpy.tests as t\nt.x"),
    ("ImportError: module 'einops.tests.run_tests' is not available", "from einops.tests.run_tests import run"),
    ("ImportError: sympy.core.cache.lazy_function is not available", "from sympy.core.cache import lazy_function"),
    ("ImportError: torch.utils.checkpoint.get_type_hints is not", "from torch.utils.checkpoint import get_type_hints"),
    ("AttributeError: torch.utils.checkpoint.ForwardRef is not", "import torch.utils.checkpoint as c\nc.ForwardRef"),
    ("AttributeError: typing_extensions.get_annotations is not", "import typing_extensions as t\nt.get_annotations"),
    ("AttributeError: warnings.formatwarning is not", "import warnings\nwarnings.formatwarning"),
    ("AttributeError: warnings.warn_explicit is not", "import warnings\nwarnings.warn_explicit"),
    # the classic ways
    (CLASS, "().__class__"),
    (CLASS, "x = 1\ngetattr(x, '__class__')"),
    (ATTRIBUTE.format("__subclasses__"), "object.__subclasses__()"),
    (ATTRIBUTE.format("__mro__"), "int.__mro__"),
    (ATTRIBUTE.format("mro"), "int.mro()"),
    (ATTRIBUTE.format("__bases__"), "type(1).__bases__"),
    (ATTRIBUTE.format("__globals__"), "def f(): pass\nf.__globals__"),
    (ATTRIBUTE.format("__globals__"), "import torch\ntorch.nn.Module.__init__.__globals__"),
    (ATTRIBUTE.format("__code__"), "(lambda: 0).__code__"),
    (ATTRIBUTE.format("__closure__"), "def f(): pass\nf.__closure__"),
    (ATTRIBUTE.format("__self__"), "len.__self__"),
    (ATTRIBUTE.format("__func__"), "class A:\n def f(self): pass\nA().f.__func__"),
    (ATTRIBUTE.format("__reduce_ex__"), "(1).__reduce_ex__(2)"),
    (ATTRIBUTE.format("gi_frame"), "g = (i for i in [])\ng.gi_frame"),
    (ATTRIBUTE.format("cr_frame"), "async def f(): pass\nc = f()\nc.close()\nc.cr_frame"),
    (ATTRIBUTE.format("__traceback__"), "try:\n 1/0\nexcept Exception as e:\n e.__traceback__"),
    (ATTRIBUTE.format("f_globals"), "getattr(1, 'f_globals')"),
    (ATTRIBUTE.format("tb_frame"), "x = 1\nx.tb_frame"),
    (ATTRIBUTE.format("__builtins__"), "(lambda: 0).__builtins__"),
    (ATTRIBUTE.format("__annotations__"), "class A:\n x: int\nA.__annotations__['y'] = 1"),
    ("AttributeError: the attribute '_modules' of 'Linear' is private", "import torch\ntorch.nn.Linear(1, 1)._modules"),
    ("AttributeError: the attribute '__get__' of", "property.__get__"),
    # strings that name attributes
    (CLASS, "'{0.__class__}'.format(1)"),
    (CLASS, "'{x.real.__class__}'.format_map({'x': 1})"),
    (CLASS, "str.format('{0.__class__}', 1)"),
    (CLASS, "f'{().__class__}'"),
    (CLASS, "import operator\noperator.attrgetter('real.__class__')(1)"),
    (ATTRIBUTE.format("__subclasses__"), "import operator\noperator.methodcaller('__subclasses__')(object)"),
    (CLASS, "list(map(getattr, [1], ['__class__']))"),
    ("TypeError: attribute name must be string, not 'Name'", "class Name(str): pass\ngetattr(1, Name('real'))"),
    ("AttributeError: UserString.format is not", "import collections\ncollections.UserString('{0.real}').format(1)"),
    ("AttributeError: S.format_map is not", "import collections\nclass S(collections.UserString): pass\nS('').format_map({})"),
    ("AttributeError: UserString.format is not", "import collections\nlist(map(collections.UserString.format, ['{0}'], [1]))"),
    # builtins
    ("NameError: open() is not available on this server", "open('/etc/passwd')"),
    ("NameError: input() is not available", "input()"),
    ("NameError: breakpoint() is not available", "breakpoint()"),
    ("AttributeError: builtins.open is not available", "import builtins\nbuiltins.open"),
    ("AttributeError: builtins.open is not available", "__builtins__.open"),
    ("AttributeError: builtins.save is not available", "import builtins\nbuiltins.save"),
    (CLASS, "eval('().__class__')"),
    (CLASS, "exec('x = ().__class__')"),
    (CLASS, "exec(compile('().__class__', 'f', 'exec'), {})"),
    ("ImportError: module 'os' is not", "exec('import os; os.getcwd()', {'__builtins__': {}})"),
    ("AttributeError: the attribute 'co_code'", "compile('1', 'f', 'eval').co_code"),
    # names and definitions
    ("SyntaxError: the name '__builtins__' cannot be bound", "x = 1\n__builtins__ = {}"),
    ("SyntaxError: the name '__import__' cannot be bound", "def __import__(): pass"),
    ("SyntaxError: the name '__reduce__' cannot be bound", "class A:\n  def __reduce__(self): pass"),
    ("SyntaxError: the name '__builtins__' cannot be bound", "match 1:\n case __builtins__: pass"),
    ("SyntaxError: the name '__annotations__' cannot be used", "class A:\n  __annotations__['x'] = 1"),
    ("SyntaxError: an annotation that is not evaluated", "def f(x: '().__class__'): pass"),
    ("TypeError: the name '__reduce__' cannot be bound", "type('A', (), {'__reduce__': 1})"),
    ("TypeError: the name '__reduce__' cannot be bound", "class D(dict):\n def __iter__(self): return iter(())\ntype('A', (), D(__reduce__=1))"),
    ("AttributeError: the attribute '__code__' cannot be set", "def f(): pass\nf.__code__ = 1"),
    ("AttributeError: the attribute '__class__' cannot be set", "class A: pass\na = A()\na.__class__ = A"),
    ("AttributeError: the attribute '__class__' cannot be set", "class A: pass\nobject.__setattr__(A(), '__class__', A)"),
    # files and memory
    ("AttributeError: Tensor.data_ptr is not available", "import torch\ntorch.ones(1).data_ptr()"),
    ("AttributeError: ndarray.tofile is not available", "import numpy as np\nnp.ones(1).tofile('x')"),
    ("AttributeError: ndarray.ctypes is not available", "import numpy as np\ngetattr(np.ones(1), 'ctypes')"),
    ("AttributeError: torch.UntypedStorage belongs to the module 'torch.storage'", "import torch\ntorch.UntypedStorage.from_file('x')"),
    ("AttributeError: Tensor.untyped_storage is not", "import torch\ntorch.ones(1).untyped_storage()"),
    # objects that control their own construction
    ("AttributeError: cannot set 'name' of a dataclass's field", "import dataclasses as d\n@d.dataclass\nclass A:\n x: int\nd.fields(A)[0].name = 'y'"),
    ("AttributeError: cannot set 'name' of a dataclass's field", "import dataclasses as d\n@d.dataclass\nclass A:\n x: int\nsetattr(d.fields(A)[0], 'name', 'y')"),
    ("AttributeError: cannot set 'name' of a dataclass's field", "import dataclasses as d\n@d.dataclass\nclass A:\n x: int\nobject.__setattr__(d.fields(A)[0], 'name', 'y')"),
    ("TypeError: an object of the class 'A' cannot be copied", "import copy\nclass A: pass\na = A()\nvars(a)['__reduce_ex__'] = lambda n: (lambda: print, (), {})\ncopy.copy(a)"),
    ("TypeError: an object of the class 'A' cannot be copied", "import copy\nclass A: pass\na = A()\nvars(a)['__reduce_ex__'] = lambda n: (lambda: print, (), {})\ncopy.deepcopy([a])"),
    # classes that claim to equal others
    ("AttributeError: the attribute '_numerator' of 'Fraction' is private", _LIAR.format("fractions", "Fraction") + "fractions.Fraction(1, 2)._numerator"),
    ("AttributeError: DataFrame.to_csv is not available", _LIAR.format("pandas", "DataFrame") + "pandas.DataFrame().to_csv('x')"),
    ("AttributeError: Liar.to_csv is not available", "import pandas\nH = hash(int)\nclass M(type):\n __hash__ = lambda c: H\n __eq__ = lambda c, o: True\nclass Liar(pandas.DataFrame, metaclass=M): pass\nLiar().to_csv('x')"),
    # functions with hidden side effects
    ("AttributeError: enum.global_enum is not available on this server: it writes into a module", "import enum\nenum.global_enum"),
    ("AttributeError: enum.global_str is not", "import enum\nenum.global_str.__globals__"),
    ("ImportError: enum.global_flag_repr is not", "from enum import global_flag_repr"),
    ("ImportError: enum.global_enum_repr is not", "from enum import global_enum_repr"),
    ("AttributeError: sympy.var is not available on this server: it binds names", "import sympy\nsympy.var('private')"),
    ("ImportError: sympy.core.symbol.var is not", "from sympy.core.symbol import var"),
    ("AttributeError: sympy.utilities.magic is not", "import sympy\nsympy.utilities.magic.pollute"),
    ("AttributeError: sympy.utilities.decorator.public is not", "import sympy\nsympy.utilities.decorator.public"),
    ("AttributeError: sympy.utilities.public is not", "import sympy\nsympy.utilities.public"),
    ("AttributeError: pandas.api.extensions.register_dataframe_accessor is not", "import pandas\npandas.api.extensions.register_dataframe_accessor('sum')(int)"),
    ("AttributeError: pandas.api.extensions.register_series_accessor is not", "import pandas\npandas.api.extensions.register_series_accessor"),
    ("ImportError: pandas.api.extensions.register_index_accessor is not", "from pandas.api.extensions import register_index_accessor"),
    ("AttributeError: contextlib.chdir is not available on this server: it changes the process", "import contextlib\ncontextlib.chdir('/')"),
    *((f"AttributeError: numpy.{name}test is not available on this server: it runs tests", f"import numpy\nnumpy.{name}test()") for name in ("", "linalg.", "fft.", "random.", "ma.", "polynomial.")),
    # functools
    ("TypeError: functools.wraps takes functions", "import functools\nfunctools.update_wrapper(1, 2)"),
    ("AttributeError: functools.singledispatch is not", "import functools\nfunctools.singledispatch"),
    ("AttributeError: string.Formatter is not available", "import string\nstring.Formatter"),
    # objects that forward the attributes of other objects
    ("AttributeError: ndarray.tofile is not available", "import numpy\nclass A: f = classmethod(numpy.ndarray)\nA.f.tofile"),
    (CLASS, "class A: f = classmethod(str)\nA.f.format('{0.__class__}', 1)"),
    ("AttributeError: ndarray.tofile is not available", "import numpy\nnumpy.ndarray[int, int].tofile"),
    (CLASS, "import typing\ntyping.Annotated[str, 1].format('{0.__class__}', 1)"),
    ("AttributeError: the attribute 'format' of 'G'", "class G(type(list[int])): __origin__ = str\nG(list, int).format"),
    ("AttributeError: cannot set 'forward' of <class 'torch.nn.modules.linear.Linear'>", "import torch, typing\ntyping.Annotated[torch.nn.Linear, 1].forward = print"),
    ("AttributeError: 'functools._lru_cache_wrapper' object has no attribute", "import functools\nfunctools.cache(str).format"),
    ("AttributeError: 'function' object has no attribute", "import contextlib\ncontextlib.contextmanager(str).format"),
    ("AttributeError: 'function' object has no attribute", "import numpy, torch\ntorch.vmap(numpy.ndarray).tofile"),
    ("AttributeError: X.format is no parameter", "from sklearn.decomposition import PCA\nclass X(PCA, str):\n def __init__(self, format=1): pass\nX('{0.__class__}').get_params()"),
    ("AttributeError: X.to_csv is not available", "import os, pandas\nclass X(type(os), pandas.DataFrame):\n def __init__(self): pass\n __getattribute__ = pandas.DataFrame.__getattribute__\nX().to_csv"),
    # functions of libraries, which the reset between requests does not check under the policy
    ("AttributeError: the attribute '__code__' is not available", "import textwrap\ntextwrap.indent.__code__ = (lambda: 1).__code__"),
    ("AttributeError: the attribute '__defaults__' cannot be set", "import textwrap\ntextwrap.indent.__defaults__ = (1,)"),
    ("AttributeError: the attribute '__defaults__' cannot be set", "import textwrap\ndel textwrap.indent.__defaults__"),
    ("AttributeError: the attribute '__kwdefaults__' cannot be set", "import torch\ntorch.nn.Module.forward.__kwdefaults__ = {}"),
    ("AttributeError: the attribute '__dict__' is not available", "import textwrap\nvars(textwrap.indent)['a'] = 1"),
    ("AttributeError: cannot set 'note' of <function indent", "import textwrap\nsetattr(textwrap.indent, 'note', 1)"),
    ("AttributeError: cannot set 'note' of <function indent", "import textwrap\nobject.__setattr__(textwrap.indent, 'note', 1)"),
    # strings that libraries use as names and as code; objects that such libraries return
    ("AttributeError: torch.cuda.nvtx is not available on this server: it looks up", "import torch\ntorch.cuda.nvtx"),
    ("AttributeError: the printmethod '__getattribute__' of a printer", "from sympy.printing.str import StrPrinter\nclass P(StrPrinter):\n printmethod = '__getattribute__'\nP().doprint(1)"),
    ("AttributeError: the printmethod '_build' of a printer", "from sympy.printing.str import StrPrinter\nfrom sympy.polys.monomials import MonomialOps\nclass P(StrPrinter):\n printmethod = '_build'\nP().doprint(MonomialOps(1))"),
    ("TypeError: the printmethod of a printer must be", "from sympy.printing.str import StrPrinter\nclass P(StrPrinter):\n def __getattribute__(self, name):\n  return 'format' if name == 'printmethod' else super().__getattribute__(name)\nP().doprint('')"),
    ("SyntaxError: on this server, the names in an expression", "import sympy\nx = sympy.Symbol('x')\nsympy.nsolve(sympy.Function('print(chr(1), \"\") or abs')(x), x, 1)"),
    ("SyntaxError: on this server, the names in an expression", "from sympy.polys.monomials import MonomialOps\nclass M(MonomialOps): pass\nM(1)._build('import os', 'os')"),
    ("NameError: name 'open' is not defined", "from sympy.polys.monomials import MonomialOps\nclass M(MonomialOps): pass\nM(1)._build('x = open(1)', 'x')"),
    ("AttributeError: a redirection replaces stdout or stderr", "import contextlib\nclass R(contextlib.redirect_stdout): _stream = 'modules'\nR({}).__enter__()"),
    ("AttributeError: a redirection replaces stdout or stderr", "import contextlib\nclass R(contextlib.redirect_stdout): _stream = 'modules'\nR({}).__exit__(None, None, None)"),
    ("TypeError: a dataclass cannot have a field '__globals__'", "import dataclasses\n@dataclasses.dataclass\nclass A: __globals__: object = None"),
    ("TypeError: a dataclass cannot have a field '__class__'", "import dataclasses\n@dataclasses.dataclass\nclass A: __class__: object = None"),
    ("TypeError: cached_property belongs to a class", "import functools, torch\nclass C(functools.cached_property): pass\nc = C(print)\nc.__set_name__(None, 'x')\nc.__get__(torch)"),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "source"), REFUSED, ids=range(len(REFUSED)))
def test_forbidden_access_is_refused_with_clear_message(expected: str, source: str) -> None:
    text, _ = refusal(source)
    assert text.startswith(expected), text


@pytest.mark.parametrize(
    ("line", "source"),
    [
        (4, "import os\n\n\nos.getcwd()"),
        (3, "def f():\n    x = 1\n    return ().__class__\nf()"),
        (2, "x = [\n    open('a'),\n]"),
        (3, "class A:\n    x = 1\n    __reduce__ = 1"),
        (5, "import torch\ny = 1\nif y:\n    for i in range(3):\n        torch.hub\n"),
    ],
)
def test_error_is_reported_at_users_line(line: int, source: str) -> None:
    assert refusal(source)[1] == line


SYMPY = [
    "__import__('os').system('true')",
    "().__class__",
    "eval('1')",
    "lambdify(x, 'x')",
]


@pytest.mark.parametrize("text", SYMPY)
def test_sympify_evaluates_no_code(text: str) -> None:
    source = f"import sympy\nsympy.sympify({text!r})"
    assert refusal(source)[0].partition(":")[0] in ("SympifyError", "SyntaxError", "NameError")


PATTERNS = """
    def f(): pass
    class Any_(type):
        def __instancecheck__(cls, value):
            return True
    class Reader(metaclass=Any_):
        __match_args__ = ("__globals__",)
    match f:
        case Reader(found):
            pass
        case _:
            found = None
"""


def test_match_pattern_reads_only_allowed_attributes() -> None:
    from tests.sandbox.protector.running import guarded

    assert guarded(textwrap.dedent(PATTERNS))["found"] is None
    assert "c" not in guarded("match 1:\n case object(__class__=c): pass\n case _: d = 1")


def test_guard_cannot_be_replaced_by_name_in_scope() -> None:
    scope = {"getattr": lambda *_: 1, "_getattr_": lambda *_: 1, "__builtins__": {}}
    text, _ = refusal("().__class__", **scope)
    assert text == CLASS


def test_copied_module_is_same_module() -> None:
    from tests.sandbox.protector.running import guarded

    source = (
        "import copy, math\nfound = [copy.copy(math) is math, copy.deepcopy([math])[0] is math]"
    )
    assert guarded(source)["found"] == [True, True]


def test_dataclass_field_with_code_as_name_is_refused() -> None:
    """A payload may bring a field whose name is code, from which a subclass would be generated."""
    import dataclasses

    from tests.sandbox.protector.running import guarded

    scope = guarded("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 0")
    dataclasses.fields(scope["A"])[0].name = 'x" + str(1) + "'
    text, _ = refusal("import dataclasses\n@dataclasses.dataclass\nclass B(A): pass", A=scope["A"])
    assert text.startswith("TypeError: the field name "), text


def test_traceback_of_users_code_reads_no_source_file() -> None:
    import traceback

    from tests.sandbox.protector.running import guarded

    source = f"exec(compile('raise ValueError', {__file__!r}, 'exec'))"
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        guarded(source)
    lines = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert lines[-1] == ""


def test_a_module_found_in_a_container_is_wrapped_or_refused() -> None:
    import os

    text, _ = refusal("found['m'].getcwd()", found={"m": os})
    assert text.startswith("AttributeError: the module 'os' is not available on this server")
    text, _ = refusal("found['m'].save", found={"m": torch})
    assert text.startswith("AttributeError: torch.save is not available")


FOUND = {
    "a loader": "found[0].get_data('x')",
    "its class": "found[1].get_data(None, 'x')",
    "a finder": "found[2].find_spec('os')",
    "a file": "found[3].read()",
    "a call": "found[0:1] and x.__globals__",
    "by match": "import operator\noperator.attrgetter('get_data')(found[0])",
}


@pytest.mark.parametrize("way", FOUND)
def test_objects_of_server_modules_found_in_containers_are_refused(way: str) -> None:
    import importlib.machinery

    loader = importlib.machinery.SourceFileLoader("x", __file__)
    with open(__file__) as file:  # noqa: PTH123
        values = [loader, type(loader), importlib.machinery.PathFinder, file]
        text, _ = refusal(FOUND[way], found=values, x=print)
    assert text.startswith("AttributeError: ")
    assert "not available on this server" in text


@pytest.mark.parametrize("name", ["open", "eval", "exec", "compile", "__import__", "getattr"])
def test_unsafe_builtin_found_in_container_is_refused(name: str) -> None:
    import builtins

    found = {"it": vars(builtins)[name]}
    text, _ = refusal("found['it']('1')", found=found)
    assert text == f"AttributeError: {name}() is not available on this server"
    text, _ = refusal("import operator\noperator.itemgetter('it')(found)", found=found)
    assert text == f"AttributeError: {name}() is not available on this server"


def test_library_code_is_not_guarded() -> None:
    """The process's own code keeps its builtins and imports while a block runs."""
    from tests.sandbox.protector.running import guarded

    def library() -> str:
        import os

        return f"{os.sep}{().__class__.__name__}"

    assert guarded("x = library()", library=library)["x"] == "/tuple"
    assert protector().builtins is not __builtins__
