"""A real client that sends attacks as researchers send blocks, in a fork for each server.

Usage: worker.py NAME FOLDER SOCKET FAMILY...; each connection to SOCKET gets a fork. Its first line is the
server's URL; then each line with a JSON object gets one as its answer. Every attack is a function of a
family. The worker writes each attack into modules from which a trace can read source, in two forms: with
its body as the block, and as a function that is sent with the block.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import signal
import socket
import sys
import textwrap
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

_SHOWN = 1 << 20
_OWN_PARAMETERS = ("model", "backend")
PROMPT = "The Eiffel Tower is in the city of"

_FORMS = """
{function}

def block_of_{name}({parameters}):
    with model.trace(PROMPT, backend=backend):
        begun = True  # a block cannot start with a `try`
{body}
    return returned

def call_of_{name}({parameters}):
    with model.trace(PROMPT, backend=backend):
        returned = {name}({arguments}).save()
    return returned
"""


class _Untyped(ast.NodeTransformer):
    """Removes annotations, whose names the generated modules do not import."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)


class _Returns(ast.NodeTransformer):
    """Saves the function's return values."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node  # nested functions keep their return statements

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        value = node.value or ast.Constant(None)
        save = ast.Call(ast.Attribute(value, "save", ast.Load()), [], [])
        return ast.fix_missing_locations(
            ast.copy_location(ast.Assign([ast.Name("returned", ast.Store())], save), node)
        )


def written_out(function: Any) -> str:
    """Return the source of one attack's two forms."""
    source = textwrap.dedent(inspect.getsource(function))
    [definition] = _Untyped().visit(ast.parse(source)).body
    ast.fix_missing_locations(definition)
    assert isinstance(definition, ast.FunctionDef)
    names = [argument.arg for argument in definition.args.args]
    assert ast.get_docstring(definition), f"{function.__name__} does not say how it attacks"
    body = [_Returns().visit(statement) for statement in definition.body[1:]]
    return _FORMS.format(
        function=ast.unparse(definition),
        name=function.__name__,
        parameters=", ".join(dict.fromkeys(["model", "backend", *names])),
        arguments=", ".join(names),
        body=textwrap.indent(ast.unparse(ast.Module(body, [])), " " * 8),
    )


def write_module(family: ModuleType, folder: Path) -> str:
    """Write a module with the forms of every attack of `family`; return its name."""
    functions = [
        function
        for name, function in vars(family).items()
        if inspect.isfunction(function)
        and function.__module__ == family.__name__
        and not name.startswith("_")
    ]
    name = f"blocks_of_{family.__name__.rpartition('.')[2]}"
    text = f"PROMPT = {PROMPT!r}\n" + "\n".join(map(written_out, functions))
    (folder / f"{name}.py").write_text(text)
    return name


def as_text(value: Any) -> str:
    """Return a result as text in which a secret can be found."""
    import torch

    if isinstance(value, torch.Tensor):
        value = bytes(value.detach().contiguous().flatten().view(torch.uint8).tolist()[:_SHOWN])
    return repr(value)[:_SHOWN]


def main() -> None:
    """Import the client, write the blocks, print a line, fork for each connection."""
    name, folder, address, *families = sys.argv[1:]
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    out, sys.stdout = sys.stdout, sys.stderr  # nnsight prints
    sys.path.insert(0, folder)
    import nnsight
    from nnsight import TransformersModel
    from nnsight.intervention.backends.remote import RemoteBackend, RemoteError
    from nnsight.schema.config import CONFIG
    from nnsight.schema.response import ResponseModel

    CONFIG.APP.REMOTE_LOGGING = False
    blocks = {}
    for family in families:
        written = write_module(importlib.import_module(family), Path(folder))
        module = importlib.import_module(written)
        nnsight.register(module)
        blocks[family.rpartition(".")[2]] = module
    model = TransformersModel(name, task="text-generation")
    # This asks the hub, which is the first server; forks need no hub afterwards.
    model_key = model.to_model_key()

    class RecordingBackend(RemoteBackend):
        """A backend that records everything sent to the user."""

        def __init__(self) -> None:
            super().__init__(model_key)
            self.logs: list[str] = []

        def note(self, response: ResponseModel) -> bool:
            """See `RemoteBackend`."""
            if response.status.value in ("LOG", "STREAM"):
                self.logs.append(f"{response.description} {response.data!r}"[:_SHOWN])
            return super().note(response)

    def serve(orders: TextIO) -> None:
        """Run the blocks of one connection against the server that its first line names."""
        CONFIG.API.HOST = json.loads(orders.readline())["url"]
        print(json.dumps({"pid": os.getpid()}), file=orders, flush=True)
        for line in orders:
            print(json.dumps(answer_to(json.loads(line))), file=orders, flush=True)

    def answer_to(order: dict[str, Any]) -> dict[str, Any]:
        backend = RecordingBackend()
        answer: dict[str, Any] = {"result": None, "error": None}
        started = time.perf_counter()
        try:
            function = getattr(blocks[order["family"]], f"{order['form']}_of_{order['name']}")
            wanted = [*inspect.signature(function).parameters]
            given = {name: order["targets"][name] for name in wanted if name not in _OWN_PARAMETERS}
            try:
                answer["result"] = as_text(function(model, backend, **given))
            except Exception as error:
                # Either the server's error, or a client error caused by malformed data of its own runner.
                is_remote = isinstance(error, RemoteError)
                answer["error"] = (str(error) if is_remote else f"in the client: {error!r}")[
                    :_SHOWN
                ]
        except Exception:
            answer["failed"] = traceback.format_exc()
        answer["seconds"] = time.perf_counter() - started
        answer["logs"] = "\n".join(backend.logs)[:_SHOWN]
        return answer

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", file=out, flush=True)
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            try:
                serve(connection.makefile("rw"))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)  # skips torch's exit handlers, which take seconds
        connection.close()


if __name__ == "__main__":
    main()
