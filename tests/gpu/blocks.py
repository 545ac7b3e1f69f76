"""Blocks that damage a GPU's state, or the CPU's where there is no GPU; a server must survive them."""

from __future__ import annotations

import ctypes
import os
import threading
import time

import torch
from nnsight import TransformersModel

from tests.runtime.replica import PROMPT, Sent

TOKENS = 8
_AWHILE = 1 << 32
"""Cycles of a GPU: some seconds."""
_FOR_EVER = 1 << 62


def generating(client: TransformersModel, tokens: int = TOKENS) -> bytes:
    """Save the ids of a greedy generation."""
    sent = Sent()
    with client.generate(PROMPT, max_new_tokens=tokens, do_sample=False, backend=sent) as tracer:
        logits = tracer.result.save()  # noqa: F841 - the saved value
    return sent.payload


def gradients(client: TransformersModel) -> bytes:
    """Save a gradient in the middle of the model."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        hidden = client.transformer.h[1].output
        with client.lm_head.output.sum().backward():
            logits = hidden.grad.save()  # noqa: F841
    return sent.payload


def indexing_outside(client: TransformersModel) -> bytes:
    """Read past the end of a tensor; a GPU detects it later, by an assertion that ends the context."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        weight = client.lm_head.weight
        places = torch.full((4,), weight.shape[0] + 1, device=weight.device)
        logits = weight[places].sum().save()  # noqa: F841
    return sent.payload


def writing_natively(client: TransformersModel) -> bytes:
    """Overwrite a weight through its address, which does not change torch's version counters."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        weight = client.lm_head.weight
        if weight.is_cuda:
            # Call the driver, in the context that torch has made current.
            torch.cuda.synchronize()
            driver = ctypes.CDLL("libcuda.so.1")
            address, size = ctypes.c_uint64(weight.data_ptr()), ctypes.c_size_t(weight.nbytes)
            assert driver.cuMemsetD8_v2(address, 0, size) == 0
            torch.cuda.synchronize()
        else:
            ctypes.memset(weight.data_ptr(), 0, weight.nbytes)
        logits = client.lm_head.output.save()  # noqa: F841
    return sent.payload


def writing_to_its_end(client: TransformersModel) -> bytes:
    """Overwrite weights until the runner is killed; the card still has writes in its queue then."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        weight = client.lm_head.weight
        print("begun")
        if weight.is_cuda:
            torch.cuda._sleep(_AWHILE)
        while True:
            weight.data.zero_()
    return sent.payload


def outliving_its_request(client: TransformersModel) -> bytes:
    """Answer, refuse to exit, and overwrite a weight until the runner is killed."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        weight = client.lm_head.weight

        def overwrite() -> None:
            while True:
                weight.data.zero_()

        os._exit = lambda code: time.sleep(3600)  # type: ignore[assignment, return-value]
        logits = client.lm_head.output.save()  # noqa: F841
        threading.Thread(target=overwrite, daemon=True).start()
    return sent.payload


def never_ending(client: TransformersModel) -> bytes:
    """Compute for ever; on a card, in one kernel."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        print("begun")
        if client.lm_head.weight.is_cuda:
            torch.cuda._sleep(_FOR_EVER)
            torch.cuda.synchronize()
        time.sleep(3600)
    return sent.payload


def reporting_settings(client: TransformersModel) -> bytes:
    """Save the settings that affect the bits of a matrix product, and a product."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        device = client.lm_head.weight.device
        settings = {
            "tf32": torch.backends.cuda.matmul.allow_tf32,
            "cudnn tf32": torch.backends.cudnn.allow_tf32,
            "precision": torch.get_float32_matmul_precision(),
            "card": str(torch.cuda.get_device_properties(device).uuid)
            if device.type == "cuda"
            else "",
        }
        settings.save()
        generator = torch.Generator().manual_seed(0)
        matrix = torch.randn(512, 512, generator=generator).to(device)
        product = (matrix @ matrix).save()  # noqa: F841
    return sent.payload
