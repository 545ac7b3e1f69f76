"""A logit lens and an ablation on a remote model.

Run it against a server: NDIF_HOST=http://HOST:PORT [HF_ENDPOINT=http://HOST:PORT/hub].
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from nnsight import TransformersModel
from nnsight.schema.config import CONFIG
from rich.console import Console
from rich.table import Table

PROMPT = "The Eiffel Tower is in the city of"
ABLATED = 0
REPEATS = 5


def logit_lens(model: TransformersModel, remote: bool) -> list[tuple[int, float]]:
    """Return the top token of each layer's output, and its probability."""
    with model.trace(PROMPT, remote=remote):
        lens = [].save()
        for layer in model.model.layers:
            logits = model.lm_head(model.model.norm(layer.output))[0, -1]
            probability, token = logits.softmax(-1).max(-1)
            lens.append((token.item(), probability.item()))
    return lens


def ablate(model: TransformersModel, remote: bool) -> torch.Tensor:
    """Return the last logits with one layer's MLP output set to zero."""
    with model.trace(PROMPT, remote=remote):
        model.model.layers[ABLATED].mlp.output[:] = 0
        logits = model.lm_head.output[0, -1].save()
    return logits


def seconds(run: Callable[[], object]) -> float:
    """Return the seconds that `run` takes, the median of five."""
    took = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def main() -> None:
    """Run both traces remotely and, with --local, on the same model in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="the model's name on the server")
    parser.add_argument(
        "--local", help="the model's folder, to run the same traces in this process too"
    )
    arguments = parser.parse_args()
    console = Console()
    CONFIG.APP.REMOTE_LOGGING = False
    transformers.utils.logging.disable_progress_bar()

    # Without weights: the architecture and the tokenizer are enough to write traces.
    model = TransformersModel(arguments.name, task="text-generation")
    decode = model.tokenizer.decode

    lens = logit_lens(model, remote=True)
    console.print(f"\nTop token after {PROMPT!r}, by layer:")
    table = Table()
    for heading in ("layer", "top token", "probability"):
        table.add_column(heading, justify="left" if heading == "top token" else "right")
    for layer, (token, probability) in enumerate(lens):
        table.add_row(str(layer), repr(decode(token)), f"{probability:.1%}")
    console.print(table)

    ablated = ablate(model, remote=True)
    console.print(
        f"With the MLP of layer {ABLATED} ablated, the model predicts {decode(ablated.argmax())!r};\n"
        f"unchanged, it predicts {decode(lens[-1][0])!r}."
    )

    traces = {"logit lens": logit_lens, "ablation": ablate}
    remote = {name: seconds(lambda t=trace: t(model, True)) for name, trace in traces.items()}
    if arguments.local:
        here = TransformersModel(arguments.local, task="text-generation", dispatch=True)
        local = {name: seconds(lambda t=trace: t(here, False)) for name, trace in traces.items()}
        if logit_lens(here, remote=False) != lens:
            raise SystemExit("The remote trace and the local one disagree.")
        console.print("The same traces in this process give the same values.")
    for name, took in remote.items():
        beside = f", {local[name] * 1e3:.0f} ms in this process" if arguments.local else ""
        console.print(f"{name}: {took * 1e3:.0f} ms remote{beside} (median of {REPEATS})")
    if decode(lens[-1][0]) != " Paris":
        raise SystemExit("The last layer should predict ' Paris'.")


if __name__ == "__main__":
    main()
