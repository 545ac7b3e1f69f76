"""`ndif model`: the module tree and properties of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import click

from ndif.cli.main import complete_models
from ndif.cli.output import console, duration, show_json
from ndif.cli.revisions import RevisionParam
from ndif.cli.server_client import ServerClient, with_server
from ndif.sizes import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text
    from rich.tree import Tree

_FACTS = (
    ("hidden size", "hidden_size"),
    ("layers", "layers"),
    ("heads", "heads"),
    ("vocabulary", "vocabulary"),
    ("context", "context_length"),
)
_UNKNOWN = "The module tree is unknown until the model is measured or loaded."


@click.command("model")
@click.argument("name", shell_complete=complete_models)
@click.option("--revision", type=RevisionParam(), help="Branch, tag or commit of the repository.")
@click.option(
    "--generation",
    metavar="GENERATION",
    help="nnsight generation whose paths are shown; default: the newest.",
)
@click.option("--trace", "as_trace", is_flag=True, help="Print only an example trace.")
@with_server
def command(
    server: ServerClient,
    as_json: bool,
    name: str,
    revision: str | None,
    generation: str | None,
    as_trace: bool,
) -> None:
    """Show a model's module tree, with the paths of modules in a trace, and the model's properties."""
    given = {"revision": revision, "generation": generation}
    query = urlencode({key: value for key, value in given.items() if value is not None})
    model = server.get(f"/models/{quote(name)}?{query}")
    if as_json:
        show_json(model)
        return
    if as_trace:
        click.echo(_trace(model, generation), nl=False)
        return
    console().print(_rendered(model, generation))


def _trace(model: Mapping[str, Any], generation: str | None) -> str:
    snippets = model["snippets"]
    wanted = generation or next(iter(snippets), None)
    if wanted not in snippets:
        hint = f" There are examples for nnsight {', '.join(snippets)}." if snippets else ""
        suffix = f" for nnsight {generation}" if generation else ""
        raise click.ClickException(
            f"There is no example trace of {model['repo_id']}{suffix}.{hint}"
        )
    return str(snippets[wanted])


def _rendered(model: Mapping[str, Any], generation: str | None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(line) for line in _facts(model)]
    tree = model["tree"]
    if tree is None:
        return Group(*parts, Text(_UNKNOWN))
    shown = str(generation if generation in tree["paths"] else model["generation"])
    parts.append(Text(f"Modules, as nnsight {shown} names them:"))
    return Group(*parts, _tree(tree, shown))


def _facts(model: Mapping[str, Any]) -> Iterator[str]:
    revision = f" ({model['revision']})" if model["revision"] else ""
    yield f"{model['repo_id']}{revision}: {model['task'] or 'task unknown'}, {model['state']}"
    if model["parameters"] is not None:
        size = f", {format_size(model['bytes'])} in {model['dtype']}" if model["bytes"] else ""
        yield f"{model['parameters']:,} parameters{size}"
    sizes = [f"{name} {model[key]:,}" for name, key in _FACTS if model[key] is not None]
    if sizes:
        yield ", ".join(sizes)
    about = [f"licence {model['license']}"] if model["license"] else []
    about += ["gated"] if model["gated"] else []
    about += [model["card"]] if model["card"] else []
    if about:
        yield ", ".join(about)
    served = [
        f"{generation} ({model['runtimes'].get(generation, 'NOT DEPLOYED')}"
        + (
            f", loaded in {duration(model['load_s'][generation])})"
            if generation in model["load_s"]
            else ")"
        )
        for generation in model["generations"]
    ]
    yield f"nnsight {', '.join(served) or 'none'}"


def _tree(node: Mapping[str, Any], generation: str) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    root = Tree(_label(node, generation))
    waiting = [(root, node)]
    while waiting:
        branch, module = waiting.pop()
        below = module["children"]
        waiting += [(branch.add(_label(child, generation)), child) for child in below]
        if module["omitted"]:
            branch.add(Text(f"{module['omitted']:,} more", style="dim"))
    return root


def _label(node: Mapping[str, Any], generation: str) -> Text:
    """Return a module's path, class and parameters, as a `Text` so that names are not parsed as markup."""
    from rich.text import Text

    path = node["paths"][generation]
    label = Text(_printable(path), style="bold")
    if node["number"] > 1:
        label.append(f" … {node['number']:,} alike: {_runs(node['indices'])}", style="cyan")
    label.append(f"  {_printable(node['class'])}", style="green")
    if node["count"]:
        label.append(f"  {node['count']:,}", style="dim")
    own = [
        f"{_printable(parameter['name'])} {'x'.join(map(str, parameter['shape'])) or 'scalar'}"
        for parameter in node["parameters"]
    ]
    if own:
        label.append(f"  {', '.join(own)}", style="dim")
    for value, name in node["renamed"].get(generation, {}).items():
        label.append(f"  .{value} is .{name}", style="yellow")
    return label


def _runs(indices: list[list[int]]) -> str:
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in indices)


def _printable(text: str) -> str:
    """Escape text of a repository that could move the terminal's cursor or reverse text."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()
