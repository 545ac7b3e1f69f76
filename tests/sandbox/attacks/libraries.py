"""Attacks through libraries that treat strings as methods, files or code, or trust an object's claims."""

# These are attacks; the usual style rules do not apply.

from __future__ import annotations

from typing import Any

# numpy, under other names


def reads_with_matlib(secret_file: str) -> object:
    """numpy.matlib, which has all of numpy's functions"""
    import numpy.matlib

    return numpy.matlib.genfromtxt(secret_file, dtype=str)


def opens_with_records(secret_file: str) -> object:
    """numpy.ma.mrecords.openfile"""
    import numpy.ma.mrecords

    return numpy.ma.mrecords.openfile(secret_file).readline()


# pandas


def reads_with_read_csv(secret_file: str) -> object:
    """pandas.read_csv"""
    import pandas

    return pandas.read_csv(secret_file, header=None).to_numpy().tolist()


def reads_with_a_reader_of_json(secret_file: str) -> object:
    """pandas.api.typing.JsonReader, the class behind read_json"""
    import pandas

    given = dict.fromkeys(
        ("dtype", "convert_axes", "convert_dates", "keep_default_dates", "precise_float"), False
    )
    reader = pandas.api.typing.JsonReader(
        secret_file, orient=None, typ="frame", date_unit=None, encoding=None, lines=True,
        chunksize=1, compression=None, nrows=None, **given,
    )  # fmt: skip
    return [*reader.data]


def evaluates_with_pandas(secret_file: str) -> object:
    """pandas.eval, which reads any attribute"""
    import pandas

    names = {"p": print, "f": secret_file}
    return pandas.eval("p.__self__.open(f).read()", engine="python", local_dict=names)


def evaluates_with_query(secret_file: str) -> object:
    """DataFrame.eval"""
    import pandas

    frame = pandas.DataFrame({"a": [1]})
    return frame.eval(
        "@p.__self__.open(@f).read()", engine="python", local_dict={"p": print, "f": secret_file}
    )


def names_a_function_of_numpys(secret_file: str) -> object:
    """agg with the name of a numpy function, on a frame that poses as a path"""
    import pandas

    class Path(pandas.DataFrame):
        def __fspath__(self) -> str:
            return secret_file

        def __len__(self) -> int:
            return 1

    return Path({"a": [1]}).agg("genfromtxt", dtype=str)


def names_a_getter(secret_file: str) -> object:
    """agg of a group with the name `__getattribute__`"""
    import pandas

    groups = pandas.DataFrame({"a": [1], "b": [2]}).groupby("a")["b"]
    method = groups.agg("__getattribute__", "agg")
    return method.__func__.__globals__["__builtins__"]["open"](secret_file).read()


def writes_with_to_csv(canary_folder: str) -> object:
    """DataFrame.to_csv"""
    import pandas

    return pandas.DataFrame({"a": [1]}).to_csv(f"{canary_folder}/new")


def writes_with_to_string(canary_folder: str) -> object:
    """DataFrame.to_string, which can write a file"""
    import pandas

    return pandas.DataFrame({"a": [1]}).to_string(f"{canary_folder}/new")


def writes_with_to_pickle(canary_folder: str) -> object:
    """Series.to_pickle"""
    import pandas

    return pandas.Series([1]).to_pickle(f"{canary_folder}/new")


def writes_by_a_name(canary_folder: str) -> object:
    """agg with the name of a method that writes"""
    import pandas

    return pandas.DataFrame({"a": [1]}).agg("to_csv", path_or_buf=f"{canary_folder}/new")


def writes_by_a_name_in_a_group(canary_folder: str) -> object:
    """filter of a group with the name of a method that writes"""
    import pandas

    groups = pandas.DataFrame({"a": [1], "b": [2]}).groupby("a")["b"]
    return groups.filter("to_csv", True, f"{canary_folder}/new")


def writes_by_a_column(canary_folder: str) -> object:
    """pandas.col, which reads any attribute later"""
    import pandas

    frame = pandas.DataFrame({"a": [1]})
    return frame.assign(b=pandas.col("a").to_csv(f"{canary_folder}/new"))


def writes_by_a_class_that_lies(canary_folder: str) -> object:
    """a class that equals a class with denied names, and has the same hash"""
    import pandas

    hashed = hash(pandas.DataFrame)

    class Liar(type):
        def __hash__(cls) -> int:
            return hashed

        def __eq__(cls, other: object) -> bool:
            return True

    class Lie(metaclass=Liar):
        harmless = 1

    # A cache keyed by equality confuses the two classes.
    harmless = [Lie().harmless]
    return harmless, pandas.DataFrame({"a": [1]}).to_csv(f"{canary_folder}/new")


# scipy, scikit-learn


def writes_with_scipy(canary_folder: str) -> object:
    """scipy.io.savemat"""
    import scipy.io

    return scipy.io.savemat(f"{canary_folder}/new", {"a": [1]})


def writes_a_sparse_matrix(canary_folder: str) -> object:
    """scipy.sparse.save_npz"""
    import scipy.sparse

    return scipy.sparse.save_npz(f"{canary_folder}/new", scipy.sparse.eye(2).tocsr())


def writes_a_tree(canary_folder: str) -> object:
    """sklearn.tree.export_graphviz"""
    from sklearn import tree

    return tree.export_graphviz(
        tree.DecisionTreeClassifier().fit([[0], [1]], [0, 1]), f"{canary_folder}/new"
    )


def writes_with_a_pipeline(canary_folder: str) -> object:
    """the memory of a sklearn Pipeline, which stores its results on disk"""
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    steps = make_pipeline(StandardScaler(), LinearRegression(), memory=f"{canary_folder}/new")
    return steps.fit([[0.0], [1.0]], [0, 1])


def starts_scipys_workers() -> object:
    """scipy.optimize with workers, which are processes"""
    import contextlib
    import time

    from scipy.optimize import minimize

    with contextlib.suppress(Exception):
        minimize(lambda x: (x**2).sum(), [1.0, 2.0], method="BFGS", options={"workers": 2})
    time.sleep(0.5)
    return True


def starts_scikits_workers() -> object:
    """sklearn with n_jobs, which are processes"""
    import time

    from sklearn.linear_model import LinearRegression
    from sklearn.model_selection import cross_val_score

    data = [[float(number)] for number in range(8)]
    cross_val_score(LinearRegression(), data, list(range(8)), cv=2, n_jobs=2)
    time.sleep(0.5)
    return True


# logging, tqdm


def writes_with_a_handler(canary_folder: str) -> object:
    """logging.FileHandler"""
    import logging

    return logging.FileHandler(f"{canary_folder}/new")


def writes_with_a_configuration(canary_folder: str) -> object:
    """logging.basicConfig with a file's name"""
    import logging

    logging.basicConfig(filename=f"{canary_folder}/new", force=True)
    return logging.getLogger().warning("a line")


def formats_a_record(variable: str) -> object:
    """logging.Formatter, whose format may look up attributes"""
    import logging

    import torch

    logger = logging.getLogger("a")
    record = logger.makeRecord("a", 30, "f", 1, "%s", (torch.load,), None)
    text = "{args[0].__globals__[os].environ}"
    return logging.Formatter(text, style="{").format(record)


def formats_a_bar(variable: str) -> object:
    """the bar_format of tqdm, which may look up attributes"""
    from tqdm import tqdm

    text = "{bar.__format__.__globals__[os].environ}"
    return tqdm.format_meter(1, 2, 1.0, bar_format=text)


# sympy, einops


def imports_lazily(secret_file: str) -> object:
    """sympy's lazy_function, which imports any module"""
    from sympy.core.cache import lazy_function

    return lazy_function("io", "open")(secret_file).read()


def runs_a_librarys_tests(token: str) -> object:
    """einops.tests, whose runner starts programs"""
    from einops.tests.run_tests import run

    return run(["sh", "-c", f"sleep 0.2; : {token}"])


# The standard library


def shows_a_line(secret_file: str) -> object:
    """warnings.formatwarning, which shows the line of a file"""
    import warnings

    return warnings.formatwarning("note", UserWarning, secret_file, 1)


def shows_a_line_in_a_traceback(secret_file: str) -> object:
    """an error in code that claims to come from that file: the traceback shows its line"""
    exec(compile("raise ValueError", secret_file, "exec"))
    return None


def evaluates_annotations(secret_file: str) -> object:
    """typing_extensions.get_annotations of an object with computed attributes"""
    import typing_extensions

    class Annotated:
        def __call__(self) -> None: ...

        def __getattr__(self, name: str) -> Any:
            if name == "__annotations__":
                return {"note": f"__import__('io').open({secret_file!r}).read()"}
            if name == "__wrapped__":
                raise AttributeError(name)
            return None

    return typing_extensions.get_annotations(Annotated(), eval_str=True)


def evaluates_hints_elsewhere(secret_file: str) -> object:
    """typing.get_type_hints, imported by torch.utils.checkpoint"""
    import torch.utils.checkpoint

    class Hinted: ...

    Hinted.__annotations__ = {"note": f"int(open({secret_file!r}).read())"}
    return torch.utils.checkpoint.get_type_hints(Hinted)


def names_a_field(secret_file: str) -> object:
    """a dataclass field renamed to code, from which a subclass is generated"""
    from dataclasses import dataclass, fields

    names = {"dataclass": dataclass}
    exec("@dataclass\nclass Above:\n    x: int = 0", names)
    Above = names["Above"]  # noqa: N806
    fields(Above)[0].name = f'x" + __import__("io").open({secret_file!r}).read() + "'

    @dataclass(init=False, eq=False)
    class Below(Above): ...

    return repr(Below())


def copies_into_a_module(secret_file: str) -> object:
    """copy.copy of an object whose reduction returns a module and the attributes to set on it"""
    import copy
    import dataclasses

    contents: list[Any] = []
    try:
        module = copy.copy(dataclasses)
    except TypeError:
        module = dataclasses

    class Copied: ...

    class Module:
        __module__ = "io"

    def hook(*arguments: Any, **options: Any) -> Any:
        names = [scopes for scopes in (*arguments, *options.values()) if isinstance(scopes, dict)]
        contents.extend(scopes["open"](secret_file).read() for scopes in names if "open" in scopes)
        raise ValueError(str(contents))

    copied = Copied()
    changed = {"_create_fn": hook, "_FuncBuilder": hook}
    vars(copied)["__reduce_ex__"] = lambda _: (lambda: module, (), changed)
    copy.copy(copied)
    return dataclasses.dataclass(Module)


def formats_a_users_string(variable: str) -> object:
    """collections.UserString, whose format is not str.format"""
    import collections

    import torch

    return collections.UserString("{0.__globals__[os].environ}").format(torch.load)


def prunes_a_class(secret_file: str) -> object:
    """torch.nn.utils.prune, which reads an attribute by name and passes it on"""
    import contextlib

    from torch.nn.utils import prune

    values: list[Any] = []

    class Module(type):
        _forward_pre_hooks: dict[str, Any] = {}  # noqa: RUF012

        @classmethod
        def register_parameter(cls, name: str, value: object) -> None:
            values.append(value)

    with contextlib.suppress(AttributeError):
        prune.Identity.apply(Module, "__subclasses__")
    [loader] = [kind for kind in values[0](object) if kind.__name__ == "FileLoader"]
    return loader("notes", secret_file).get_data(secret_file)


# Strings that libraries use as names and as code


def formats_with_a_printer(variable: str) -> object:
    """a sympy printer whose printmethod is `format`"""
    import torch
    from sympy.printing.str import StrPrinter

    class Printer(StrPrinter):
        printmethod = "format"
        given = torch.unique

    return Printer().doprint("{0.given.__globals__[sys].modules[os].environ}")


def reads_with_a_printer(secret_file: str) -> object:
    """a sympy printer that is a string, and whose printmethod is `__getattribute__`"""
    import torch
    from sympy.printing.str import StrPrinter

    class Printer(str, StrPrinter):
        printmethod = "__getattribute__"

        def __init__(self, name: str) -> None:
            StrPrinter.__init__(self)
            self._str = lambda value: value

    return Printer("__globals__").doprint(torch.einsum)["__builtins__"]["open"](secret_file).read()


def reads_with_a_computed_printer(secret_file: str) -> object:
    """the same, with a printer whose printmethod changes on each access"""
    import torch
    from sympy.printing.str import StrPrinter

    names = iter(["_latex"] + ["__getattribute__"] * 10)

    class Printer(str, StrPrinter):
        @property
        def printmethod(self) -> str:
            return next(names)

        def __init__(self, name: str) -> None:
            StrPrinter.__init__(self)
            self._str = lambda value: value

    next(names)
    return Printer("__globals__").doprint(torch.einsum)["__builtins__"]["open"](secret_file).read()


def names_a_symbol(secret_file: str) -> object:
    """a sympy symbol whose name is code, in an equation that nsolve compiles"""
    import contextlib

    import sympy

    x = sympy.Symbol("x")
    code = sympy.Symbol(f"print(__import__('io').open({secret_file!r}).read())")
    with contextlib.suppress(TypeError):
        sympy.nsolve([x - code], [x], [1])


def names_a_function(secret_file: str) -> object:
    """a sympy function whose name is code, in an equation that nsolve compiles"""
    import contextlib

    import sympy

    x = sympy.Symbol("x")
    code = sympy.Function(f"print(__import__('io').open({secret_file!r}).read()) or float")
    with contextlib.suppress(TypeError, ValueError):
        sympy.nsolve(code(x), x, 1)


def builds_operations(secret_file: str) -> object:
    """a subclass of sympy's MonomialOps, which inherits a method that runs source text"""
    from sympy.polys.monomials import MonomialOps

    class Operations(MonomialOps): ...

    return Operations(1)._build(f"found = open({secret_file!r}).read()", "found")


def redirects_more_than_a_stream(secret_file: str) -> object:
    """a subclass of contextlib.redirect_stdout that names another attribute of sys"""
    import contextlib

    class Redirection(contextlib.redirect_stdout):
        _stream = "meta_path"

    redirection = Redirection([])
    redirection.__enter__()
    finders = list(redirection._old_targets[0])
    redirection.__exit__(None, None, None)
    [finder] = [
        candidate for candidate in finders if getattr(candidate, "__name__", "") == "PathFinder"
    ]
    return finder.find_spec("textwrap").loader.get_data(secret_file)


def compares_fields(secret_file: str) -> object:
    """a dataclass with a field `__globals__`, compared with a torch function"""
    from dataclasses import dataclass

    import torch

    values: list[Any] = []

    class Catcher:
        def __eq__(self, other: object) -> bool:
            values.append(other)
            return True

    names = {"dataclass": dataclass, "kind": type(torch.einsum)}
    fields = "    __class__ = kind\n    __globals__: object = None"
    exec(f"@dataclass\nclass Reader:\n{fields}", names)
    Reader = names["Reader"]  # noqa: N806
    Reader.__eq__(Reader(Catcher()), torch.einsum)
    return values[0]["__builtins__"]["open"](secret_file).read()


def takes_a_metaclass_for_a_token(secret_file: str) -> object:
    """a method of sympy's code tokens, which reads the attributes that its object names"""
    from sympy.codegen.ast import Token

    class Meta(type):
        _fields = ("__subclasses__",)

    kinds = Token.kwargs(Meta)["__subclasses__"]
    [loader] = [kind for kind in kinds(object) if kind.__name__ == "FileLoader"]
    return loader("notes", secret_file).get_data(secret_file)


def calls_a_reciprocal(secret_file: str) -> object:
    """a subclass of a sympy class, which inherits a method that calls methods by name"""
    import torch
    from sympy.functions.elementary.trigonometric import ReciprocalTrigonometricFunction

    class Call(ReciprocalTrigonometricFunction):
        @classmethod
        def eval(cls, arg: object) -> None:
            return None

        def _reciprocal_of(self, _: object = None) -> object:
            return torch.einsum

    names = Call(1)._call_reciprocal("__getattribute__", "__globals__")
    return [*names["__builtins__"]["open"](secret_file)]


# Code that libraries load, and files that they open without Python


def generates_with_a_folder(model: Any, code_folder: str) -> object:
    """generate with a folder of code, which transformers runs if it is trusted"""
    return model.generate("a", custom_generate=code_folder, trust_remote_code=True)


def loads_a_tokenizer(model: Any, secret_tokenizer: str) -> object:
    """the class of the model's tokenizer, called with another tokenizer's file"""
    return list(type(model.tokenizer)(tokenizer_file=secret_tokenizer).get_vocab())
