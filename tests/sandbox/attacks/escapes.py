"""Attacks on the language policy.

They start at an allowed object, reach a forbidden one, and finally read a file.
"""

# These are attacks; the usual style rules do not apply.
# ruff: noqa: N818, PTH123, SIM115, TRY301, UP030, UP032

from __future__ import annotations

from typing import Any

# Through importable modules


def finds_os_in_torch(secret_file: str) -> object:
    """torch.os"""
    import torch

    return torch.os.read(torch.os.open(secret_file, 0), 4096)


def finds_builtins_in_torch(secret_file: str) -> object:
    """torch.builtins"""
    import torch

    return torch.builtins.open(secret_file).read()


def finds_ctypes_in_torch(secret_file: str) -> object:
    """torch.ctypes"""
    import torch

    libc = torch.ctypes.CDLL(None)
    content = torch.ctypes.create_string_buffer(4096)
    libc.read(libc.open(secret_file.encode(), 0), content, 4096)
    return content.value


def finds_modules_in_torch(secret_file: str) -> object:
    """torch.sys.modules"""
    import torch

    return torch.sys.modules["io"].open(secret_file).read()


def finds_sys_in_enum(secret_file: str) -> object:
    """enum.sys.modules"""
    import enum

    return enum.sys.modules["io"].open(secret_file).read()


def finds_sys_in_collections(secret_file: str) -> object:
    """collections._sys.modules"""
    import collections

    return collections._sys.modules["io"].open(secret_file).read()


def finds_sys_in_typing(secret_file: str) -> object:
    """typing.sys.modules"""
    import typing

    return typing.sys.modules["io"].open(secret_file).read()


def finds_sys_in_warnings(secret_file: str) -> object:
    """warnings.sys.modules"""
    import warnings

    return warnings.sys.modules["io"].open(secret_file).read()


def finds_os_in_torch_hub(secret_file: str) -> object:
    """from torch.hub import os"""
    from torch.hub import os

    return os.read(os.open(secret_file, 0), 4096)


def finds_io_in_torch_serialization(secret_file: str) -> object:
    """from torch.serialization import io"""
    from torch.serialization import io

    return io.open(secret_file).read()


def finds_subprocess_in_torch(secret_file: str) -> object:
    """torch.utils.cpp_extension.subprocess"""
    import torch.utils.cpp_extension

    return torch.utils.cpp_extension.subprocess.check_output(["cat", secret_file])


def finds_ctypes_in_numpy(secret_file: str) -> object:
    """numpy.ctypeslib.ctypes"""
    import numpy

    libc = numpy.ctypeslib.ctypes.CDLL(None)
    content = numpy.ctypeslib.ctypes.create_string_buffer(4096)
    libc.read(libc.open(secret_file.encode(), 0), content, 4096)
    return content.value


def evaluates_with_sympy(secret_file: str) -> object:
    """sympy.sympify of a text, which is eval"""
    import sympy

    return str(sympy.sympify(f"Symbol(__import__('io').open({secret_file!r}).read())"))


def evaluates_with_any_of_sympys(secret_file: str) -> object:
    """a sympy function: each of them evaluates strings"""
    import sympy

    return str(sympy.expand(f"Symbol(__import__('io').open({secret_file!r}).read())"))


def evaluates_with_a_matrix(secret_file: str) -> object:
    """sympy.Matrix of a text, in a list"""
    import sympy

    return str(sympy.Matrix([[f"Symbol(__import__('io').open({secret_file!r}).read())"]]))


def compiles_with_sympy(secret_file: str) -> object:
    """sympy.lambdify of a text"""
    import sympy

    text = f"__import__('io').open({secret_file!r}).read()"
    return sympy.lambdify([], text, modules=["math"])()


def evaluates_a_forward_reference(secret_file: str) -> object:
    """typing.ForwardRef"""
    import typing

    text = f"print(__import__('io').open({secret_file!r}).read())"
    return typing._eval_type(typing.ForwardRef(text), {}, {})


def runs_source_with_fx(secret_file: str) -> object:
    """torch.fx, which compiles functions from strings"""
    import torch

    source = f"def forward():\n    return open({secret_file!r}).read()"
    return torch.fx.graph_module._forward_from_src(source, {}, None)()


def runs_source_with_an_fx_graph(secret_file: str) -> object:
    """a graph of torch.fx whose node has a name that is code"""
    import torch

    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node._rename(f"x=open({secret_file!r}).read()")
    node.name = f"x=open({secret_file!r}).read()"
    node.target = f"x=open({secret_file!r}).read()"
    graph.output(node)
    return torch.fx.GraphModule(torch.nn.Module(), graph)()


def runs_source_with_numpy(secret_file: str) -> object:
    """numpy.testing's runstring, which is exec"""
    import numpy

    scope: dict[str, Any] = {}
    numpy.testing.runstring(f"found = open({secret_file!r}).read()", scope)
    return scope["found"]


def gets_attributes_with_operator(secret_file: str) -> object:
    """operator.attrgetter"""
    import operator

    import torch

    return operator.attrgetter("__globals__")(torch.load)["os"].popen(f"cat {secret_file}").read()


def calls_methods_with_operator(secret_file: str) -> object:
    """operator.methodcaller"""
    import operator

    import torch

    names = operator.methodcaller("__getattribute__", "__globals__")(torch.nn.Linear.__init__)
    return names["__builtins__"]["open"](secret_file).read()


def reads_memory_with_numpy(secret_file: str) -> object:
    """an array of any memory, by the interface of arrays"""
    import numpy

    text = b"in memory"

    class Anywhere:
        __array_interface__ = {  # noqa: RUF012
            "data": (id(text), True),
            "shape": (64,),
            "typestr": "|u1",
            "version": 3,
        }

    return "REACHED" if text in bytes(numpy.asarray(Anywhere()).tolist()) else secret_file


def reads_memory_with_ctypes_of_numpy(secret_file: str) -> object:
    """any memory, through the class of an array's ctypes shape"""
    import numpy

    text = b"in memory"
    kind = type(numpy.zeros((1,) * 8).ctypes.shape)
    words = list(kind.from_address(id(text)))
    content = b"".join((word % (1 << 64)).to_bytes(8, "little") for word in words)
    return "REACHED" if text in content else secret_file


def reads_memory_with_strides(secret_file: str) -> object:
    """memory beyond an array, by unchecked strides"""
    import numpy

    array = numpy.zeros(8, "u1")
    beyond = numpy.lib.stride_tricks.as_strided(array, (1 << 16,), (1,))
    return f"REACHED {beyond[4096]}"


def reads_with_an_instances_storage(secret_file: str) -> object:
    """from_file, a class method, of a tensor's storage"""
    import torch

    storage = torch.zeros(1).untyped_storage()
    return bytes(storage.from_file(secret_file, False, 30).tolist())


# Through the language


def calls_import(secret_file: str) -> object:
    """__import__"""
    return __import__("io").open(secret_file).read()


def calls_eval(secret_file: str) -> object:
    """eval"""
    return eval(f"open({secret_file!r}).read()")


def calls_exec(secret_file: str) -> object:
    """exec"""
    scope: dict[str, Any] = {}
    exec(f"found = open({secret_file!r}).read()", scope)
    return scope["found"]


def calls_compile(secret_file: str) -> object:
    """compile, and a function of the code"""
    code = compile(f"open({secret_file!r}).read()", "attack", "eval")
    return type(lambda: None)(code, {})()


def uses_builtins_by_name(secret_file: str) -> object:
    """__builtins__"""
    names: Any = __builtins__
    names = names if isinstance(names, dict) else vars(names)
    return names["open"](secret_file).read()


def uses_globals(secret_file: str) -> object:
    """globals()"""
    names = globals()["__builtins__"]
    names = names if isinstance(names, dict) else vars(names)
    return names["open"](secret_file).read()


def uses_the_self_of_a_builtin(secret_file: str) -> object:
    """print.__self__"""
    return print.__self__.open(secret_file).read()


def uses_getattr(secret_file: str) -> object:
    """getattr with a concatenated name"""
    return getattr(getattr(print, "__se" + "lf__"), "op" + "en")(secret_file).read()


def uses_getattr_of_others(secret_file: str) -> object:
    """getattr given to map"""
    [module] = map(getattr, [print], ["__self__"])
    return module.open(secret_file).read()


def uses_object_getattribute(secret_file: str) -> object:
    """object.__getattribute__"""
    return object.__getattribute__(print, "__self__").open(secret_file).read()


def uses_vars(secret_file: str) -> object:
    """vars of a module"""
    import torch

    return vars(torch)["os"].popen(f"cat {secret_file}").read()


def uses_function_globals(secret_file: str) -> object:
    """__globals__ of the block's function"""
    return (lambda: None).__globals__["__builtins__"]["open"](secret_file).read()


def uses_function_builtins(secret_file: str) -> object:
    """__builtins__ of the block's function"""
    return (lambda: None).__builtins__["open"](secret_file).read()


def uses_subclasses(secret_file: str) -> object:
    """object.__subclasses__()"""
    for kind in ().__class__.__base__.__subclasses__():
        if kind.__name__ == "_wrap_close":
            descriptor = kind.__init__.__globals__["open"](secret_file, 0)
            break
    return kind.__init__.__globals__["read"](descriptor, 4096)


def uses_mro(secret_file: str) -> object:
    """type.mro, which has no underscores"""
    kinds = type.__subclasses__(type.mro(int)[-1])
    [loader] = [kind for kind in kinds if kind.__name__ == "FileLoader"]
    return loader("notes", secret_file).get_data(secret_file)


def uses_a_generators_frame(secret_file: str) -> object:
    """gi_frame"""
    generator = (item for item in ())
    return generator.gi_frame.f_builtins["open"](secret_file).read()


def uses_a_coroutines_frame(secret_file: str) -> object:
    """cr_frame"""

    async def nothing() -> None: ...

    coroutine = nothing()
    return coroutine.cr_frame.f_builtins["open"](secret_file).read()


def uses_a_traceback(secret_file: str) -> object:
    """the frame of an error"""
    try:
        raise ValueError
    except ValueError as error:
        names = error.__traceback__.tb_frame.f_builtins
    return names["open"](secret_file).read()


def uses_a_context_managers_traceback(secret_file: str) -> object:
    """the frame of the traceback that __exit__ receives"""
    frames = []

    class Catches:
        def __enter__(self) -> None: ...
        def __exit__(self, kind: object, error: object, traceback: Any) -> bool:
            frames.append(traceback.tb_frame.f_builtins)
            return True

    with Catches():
        raise ValueError
    return frames[0]["open"](secret_file).read()


def uses_an_errors_object(secret_file: str) -> object:
    """the object that an AttributeError holds"""
    import torch

    try:
        torch.not_there  # noqa: B018
    except AttributeError as error:
        module = error.obj
    return module.os.popen(f"cat {secret_file}").read()


def uses_a_match_pattern(secret_file: str) -> object:
    """a class pattern, which reads attributes without a dot"""
    match print:
        case object(__self__=found):
            pass
    return found.open(secret_file).read()


def uses_match_args(secret_file: str) -> object:
    """__match_args__, which names attributes in a text"""

    class Named(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return True

    class Anything(metaclass=Named):
        __match_args__ = ("__self__",)

    match print:
        case Anything(found):
            pass
    return found.open(secret_file).read()


def uses_a_metaclass(secret_file: str) -> object:
    """a metaclass that calls type.__getattribute__"""

    class Meta(type):
        def __call__(cls, name: str) -> object:
            return type.__getattribute__(type, name)

    class Opened(metaclass=Meta): ...

    kinds = Opened("__subclasses__")(object)
    [loader] = [kind for kind in kinds if kind.__name__ == "FileLoader"]
    return loader("notes", secret_file).get_data(secret_file)


def uses_super(secret_file: str) -> object:
    """super() and its attributes"""

    class Child:
        def escape(self) -> object:
            return super().__getattribute__("__class__").__base__.__subclasses__()

    [loader] = [kind for kind in Child().escape() if kind.__name__ == "FileLoader"]
    return loader("notes", secret_file).get_data(secret_file)


def uses_a_descriptor(secret_file: str) -> object:
    """type.__dict__, whose descriptors need no attribute access"""
    subclasses = type.__dict__["__subclasses__"]
    [loader] = [kind for kind in subclasses(object) if kind.__name__ == "FileLoader"]
    return loader("notes", secret_file).get_data(secret_file)


def uses_a_property(secret_file: str) -> object:
    """a property that calls getattr for itself"""

    class Holder:
        found = property(getattr)

    return Holder.found.fget(print, "__self__").open(secret_file).read()


def uses_a_class_made_of_a_dict(secret_file: str) -> object:
    """type() with three arguments: names that no class statement may bind"""
    cls = type("Made", (), {"__reduce__": lambda self: (open, (secret_file,))})
    return open(cls().__reduce__()[1][0]).read()


def formats_globals(variable: str) -> object:
    """str.format, which walks attributes"""
    import torch

    return "{0.__globals__[os].environ}".format(torch.load)


def formats_with_a_map(variable: str) -> object:
    """str.format_map"""
    import torch

    return "{f.__globals__[os].environ}".format_map({"f": torch.load})


def formats_as_an_attribute(variable: str) -> object:
    """str.format, taken from the class and called by map"""
    import torch

    [text] = map(str.format, ["{0.__globals__[os].environ}"], [torch.load])
    return text


def formats_with_formatter(variable: str) -> object:
    """string.Formatter"""
    import string

    import torch

    return string.Formatter().format("{0.__globals__[os].environ}", torch.load)


def formats_in_an_f_string(secret_file: str) -> object:
    """an f-string with code"""
    return f"{print.__self__.open(secret_file).read()}"


def formats_with_numpy(variable: str) -> object:
    """str.format of a numpy string"""
    import numpy
    import torch

    return numpy.str_("{0.__globals__[os].environ}").format(torch.load)


def breaks_in(secret_file: str) -> object:
    """breakpoint(), which runs a replaceable hook"""
    import sys

    sys.breakpointhook = lambda: open(secret_file).read()
    return breakpoint()


def helps_itself(secret_file: str) -> object:
    """help(), which is pydoc"""
    return type(help).__call__.__globals__["sys"].modules["io"].open(secret_file).read()


def licenses_itself(secret_file: str) -> object:
    """license(), which reads the files in its attributes"""
    license._Printer__filenames = [secret_file]
    license._Printer__lines = None
    license._Printer__setup()
    return license._Printer__lines


def uses_sys_modules(secret_file: str) -> object:
    """sys.modules"""
    import sys

    return sys.modules["posix"].read(sys.modules["posix"].open(secret_file, 0), 4096)


def imports_relatively(secret_file: str) -> object:
    """importlib"""
    import importlib

    return importlib.import_module("io").open(secret_file).read()


# Through methods that run after the block


def reads_when_it_is_saved(secret_file: str) -> object:
    """__reduce__, which runs when the result is written"""

    class Late:
        def __reduce__(self) -> object:
            return (str, (open(secret_file).read(),))

    return Late()


def reads_when_its_state_is_saved(secret_file: str) -> object:
    """__getstate__, which runs when the result is written"""

    class Late:
        def __getstate__(self) -> object:
            raise ValueError(open(secret_file).read())

    return Late()


def reads_when_a_dict_is_walked(secret_file: str) -> object:
    """items() of a dict subclass, which the serializer of results calls"""

    class Late(dict):
        def items(self) -> object:
            raise ValueError(open(secret_file).read())

    return Late(a=1)


def reads_when_its_error_is_told(secret_file: str) -> object:
    """__str__ of an error, which runs when the server formats the error"""

    class Late(Exception):
        def __str__(self) -> str:
            return open(secret_file).read()

    raise Late
    return None


def reads_when_its_error_has_notes(secret_file: str) -> object:
    """__notes__ of an error, which the server reads"""

    class Late(Exception):
        def __getattribute__(self, name: str) -> object:
            if name == "__notes__":
                return [open(secret_file).read()]
            return Exception.__getattribute__(self, name)

    raise Late
    return None


def reads_when_it_is_printed(secret_file: str) -> object:
    """__str__ of a printed object"""

    class Late:
        def __str__(self) -> str:
            return open(secret_file).read()

    print(Late())
    return None


def reads_in_a_hook(model: Any, secret_file: str) -> object:
    """a hook on the model, which runs in the model's code"""
    contents: list[str] = []
    model._module.register_forward_pre_hook(lambda *_: contents.append(open(secret_file).read()))
    model.lm_head.output.sum()
    return contents


def reads_in_a_torch_function(secret_file: str) -> object:
    """__torch_function__, which torch calls"""
    import torch

    class Late:
        @classmethod
        def __torch_function__(cls, *_: object) -> object:
            return open(secret_file).read()

    return torch.add(Late(), 1)


# Through the model


def finds_globals_of_the_model(model: Any, secret_file: str) -> object:
    """the globals of the model's forward"""
    forward = type(model._module).forward
    return forward.__globals__["__builtins__"]["open"](secret_file).read()


def loads_with_the_model(model: Any, secret_file: str) -> object:
    """from_pretrained of the configuration's class"""
    try:
        return str(type(model.config).from_json_file(secret_file))
    except ValueError as error:
        return error.doc  # type: ignore[attr-defined]


def imports_by_a_loader(secret_file: str) -> object:
    """the loader of an importable module"""
    import enum

    return enum.__loader__.get_data(secret_file)


def uses_a_decorator(secret_file: str) -> object:
    """decorators, which are calls without parentheses"""

    @list
    @open
    @(lambda _: secret_file)
    class Escape: ...

    return Escape


def reads_when_it_is_let_go(secret_file: str) -> object:
    """__del__, which runs when the object is freed"""

    class Late:
        def __del__(self) -> None:
            print(open(secret_file).read())

    Late()
    return None


def reads_in_a_sort(secret_file: str) -> object:
    """a key function, which C calls"""
    contents: list[str] = []
    sorted([secret_file], key=lambda file: contents.append(open(file).read()) or 0)
    return contents


def evaluates_an_annotation(secret_file: str) -> object:
    """typing.get_type_hints, which evaluates text"""
    import typing

    class Hinted: ...

    Hinted.__annotations__ = {"note": f"int(open({secret_file!r}).read())"}
    return typing.get_type_hints(Hinted)


def compiles_a_forward_again(secret_file: str) -> object:
    """.source of the attack's module: nnsight compiles the source of its forward"""
    import torch
    from nnsight.intervention.envoy import Envoy

    class Mine(torch.nn.Module):
        def forward(self, file: str) -> str:
            return open(file).read()

    envoy: Any = Envoy(Mine())
    source = str(envoy.source)
    return source and envoy(secret_file)


def loads_a_library(secret_file: str) -> object:
    """torch.ops.load_library: the error shows that the file was read"""
    import torch

    message = "nothing"
    try:
        torch.ops.load_library(secret_file)
    except OSError as error:
        message = str(error.__cause__)
    return f"REACHED {message}" if "file too short" in message or "ELF" in message else message
