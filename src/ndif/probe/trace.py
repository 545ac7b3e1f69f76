"""Program of one probe, for the interpreter of a runtime: `python -m ndif.probe.trace`.

The program reads a question as JSON from standard input, confines itself, sends one trace as any user's
client does, and prints the outcome as one line of JSON. It imports nnsight and torch; no module imports it.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ndif.probe.outcome import ProbeOutcome, Question, Value
from ndif.runtime.typed_json import from_json, to_json
from ndif.sandbox.confinement.client import confine_client
from ndif.schema.states import ProbeKind

_PROMPT = "The Eiffel Tower is in the city of"
_GENERATES = ("text-generation", None)
"""Tasks of models that predict the next token; None if the server does not know the task yet."""
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
_SAMPLES, _TOP = 64, 5
_GRACE_S = 5.0
_MAX_REASON = 500
"""Maximum length of an error message that is passed on."""
_EXACT_TOLERANCE, _HALF_TOLERANCE = 1e-3, 3e-2
"""Tolerances for a whole model on different devices, in dtypes of 32 and of 16 bits."""
_HALF_ROUNDING = 1e-2
"""Tolerance for one product in dtypes of 16 bits."""


def main() -> None:
    """Answer one question on standard input."""
    question = from_json(Question, sys.stdin.readline())
    # The parent ends this process in time, unless the parent was killed.
    signal.setitimer(signal.ITIMER_REAL, question.timeout_s + _GRACE_S)
    # The client and its libraries may print to standard output, which is for the answer alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # The client reads these once, at its import. They are set here and not by the parent, because other
    # processes of the same user can read a process's first environment, but not later changes.
    os.environ.update(
        NDIF_HOST=question.url,
        NDIF_API_KEY=question.key,
        HF_ENDPOINT=f"{question.url}/hub",
        HF_HOME=question.cache,
        HF_HUB_OFFLINE="0",
    )
    certificates = filter(None, map(os.environ.get, _CERTIFICATES))
    confine_client(Path(question.cache), map(Path, certificates))
    try:
        outcome = _probe(question)
    except Exception as error:  # a user's trace would fail with the same error
        outcome = ProbeOutcome(ProbeKind.ERROR, _sentence(error))
    print(to_json(outcome).decode(), file=answers, flush=True)


def _probe(question: Question) -> ProbeOutcome:
    import nnsight
    from nnsight import CONFIG

    CONFIG.APP.REMOTE_LOGGING = False
    newest = hasattr(nnsight, "TransformersModel")
    name, revision, task = question.repo_id, question.revision, question.task
    if newest:
        model = nnsight.TransformersModel(name, revision=revision, task=task)
    else:
        model = nnsight.LanguageModel(name, revision=revision or "main")
    if getattr(model, "tokenizer", None) is None:
        return ProbeOutcome(ProbeKind.UNSUPPORTED, "The model takes no text.")
    prepared = time.perf_counter()
    predicts = task in _GENERATES and hasattr(model, "lm_head")
    saved = _predict(model) if predicts else _output(model)
    took_s = time.perf_counter() - prepared
    value = _value(saved)
    problem = _why_wrong(saved, value if predicts else None)
    if problem is not None:
        return ProbeOutcome(ProbeKind.WRONG, problem, took_s)
    return ProbeOutcome(ProbeKind.OK, seconds=took_s, value=value)


def _predict(model: Any) -> dict[str, Any]:
    """Return scores of the next token, and the head's rows for the best scores."""
    count, samples = _TOP, _SAMPLES
    with model.trace(_PROMPT, remote=True):
        hidden = model.lm_head.input[0, -1].cpu().save()
        scores = model.lm_head.output[0, -1]
        shape = scores.new_tensor([scores.numel()]).long().cpu().save()
        is_finite = scores.isfinite().all().cpu().save()
        best = scores.topk(min(count, scores.numel()))
        values = best.values.cpu().save()
        tokens = best.indices.cpu().save()
        sampled = scores[:: max(1, scores.numel() // samples)][:samples].cpu().save()
        rows = model.lm_head.weight[best.indices].cpu().save()
        bias = model.lm_head.bias
        added = best.values * 0 if bias is None else bias[best.indices]
        added = added.cpu().save()
    return {
        "hidden": hidden,
        "shape": shape,
        "is_finite": is_finite,
        "values": values,
        "tokens": tokens,
        "sampled": sampled,
        "rows": rows,
        "added": added,
    }


def _output(model: Any) -> dict[str, Any]:
    """Return a sample of the first output tensor of a model without a known head."""
    samples, prompt = _SAMPLES, _PROMPT
    if (mask := getattr(model.tokenizer, "mask_token", None)) is not None:
        prompt = f"{prompt} {mask}"  # a fill-mask pipeline refuses text without a mask
    with model.trace(prompt, remote=True):
        value = model.output
        if not hasattr(value, "isfinite"):
            value = value[0]
        flat = value.reshape(-1)
        shape = flat.new_tensor(list(value.shape)).long().cpu().save()
        is_finite = flat.isfinite().all().cpu().save()
        sampled = flat[:: max(1, flat.numel() // samples)][:samples].cpu().save()
    return {"shape": shape, "is_finite": is_finite, "sampled": sampled}


def _value(saved: Mapping[str, Any]) -> Value:
    sampled = saved["sampled"]
    return Value(
        tuple(saved["shape"].tolist()),
        str(sampled.dtype).removeprefix("torch."),
        _EXACT_TOLERANCE if sampled.element_size() > 2 else _HALF_TOLERANCE,
        tuple(sampled.double().tolist()),
        tuple(saved["tokens"].tolist()) if "tokens" in saved else (),
    )


def _why_wrong(saved: Mapping[str, Any], prediction: Value | None) -> str | None:
    """Return a sentence if a value cannot be the output of its model, else None.

    A prediction includes the rows of the head for the best tokens. Their products with the hidden state,
    recomputed here, must equal the scores of these tokens.
    """
    if not bool(saved["is_finite"]):
        return "The value has numbers that are not finite."
    # The integers of a quantised head do not give the scores by multiplication.
    if prediction is None or not saved["rows"].is_floating_point():
        return None
    hidden, rows = saved["hidden"].double(), saved["rows"].double()
    values = saved["values"].double()
    if hidden.shape[-1:] != rows.shape[-1:] or values.shape != rows.shape[:1]:
        return "The value has another shape than its model."
    # A rounding error grows with the summands, not with the sum.
    summed = rows.norm(dim=-1) * hidden.norm()
    rounding = min(prediction.tolerance, _HALF_ROUNDING)
    allowed = rounding * values.abs() + _EXACT_TOLERANCE * summed
    differences = (rows @ hidden + saved["added"].double() - values).abs()
    worst = (differences - allowed).max().item()
    if not math.isnan(worst) and worst <= 0:
        return None
    return (
        "The predicted scores do not match the hidden state of the same answer: they differ by up to "
        f"{differences.max().item():.3g}."
    )


def _sentence(error: Exception) -> str:
    """Return the last line of an error's message, or the name of its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:_MAX_REASON]


if __name__ == "__main__":
    main()
