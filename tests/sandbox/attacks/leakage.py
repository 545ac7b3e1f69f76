"""Attacks on data of earlier requests: each case first leaves a secret, then looks for it."""

# These are attacks; the usual style rules do not apply.
# ruff: noqa: PTH123

from __future__ import annotations

from typing import Any


def leaves_it_on_the_model(model: Any, secret: str) -> object:
    """An attribute of the model."""
    model._module.note = [secret]
    return True


def looks_at_the_model(model: Any) -> object:
    """the model's attributes"""
    return model._module.note


def leaves_it_in_a_buffer(model: Any, secret: str) -> object:
    """A buffer of the model."""
    import torch

    model._module.register_buffer("note", torch.tensor(list(secret.encode()), dtype=torch.uint8))
    return True


def looks_at_buffers(model: Any) -> object:
    """the model's buffers"""
    return bytes(dict(model._module.named_buffers())["note"].tolist())


def leaves_it_in_weights(model: Any, secret: str) -> object:
    """A corner of the weights."""
    import torch

    coded = torch.tensor(list(secret.encode()), dtype=torch.float32)
    model._module.transformer.wte.weight.data[0, : len(coded)] = coded
    return True


def looks_at_weights(model: Any) -> object:
    """a corner of the weights"""
    row = model._module.transformer.wte.weight.data[0].tolist()
    return bytes(int(abs(number)) % 256 for number in row)


def leaves_it_in_a_module(secret: str) -> object:
    """An attribute of a Python module."""
    import torch

    torch.note = secret
    return True


def looks_at_a_module() -> object:
    """the module's attributes"""
    import torch

    return torch.note


def leaves_it_in_the_environment(secret: str) -> object:
    """An environment variable."""
    import os

    os.environ["NOTE"] = secret
    return True


def looks_at_the_environment() -> object:
    """the environment"""
    import os

    return os.environ["NOTE"]


def leaves_it_in_objects(secret: str) -> object:
    """An object that a module keeps."""
    import threading

    threading.excepthook.__dict__ if hasattr(threading.excepthook, "__dict__") else None
    threading._note = {"note": [secret]}
    return True


def looks_at_all_objects() -> object:
    """gc.get_objects"""
    import gc

    return [
        candidate["note"]
        for candidate in gc.get_objects()
        if type(candidate) is dict and type(candidate.get("note")) is list
    ]


def leaves_it_in_a_frame(secret: str) -> object:
    """A local variable of a thread that continues."""
    import threading
    import time

    def hold() -> None:
        note = secret
        time.sleep(30)
        del note

    threading.Thread(target=hold, daemon=True).start()
    return True


def looks_at_all_frames() -> object:
    """sys._current_frames"""
    import sys

    return [
        frame.f_locals.get("note") or frame.f_back.f_locals.get("note", "")
        for frame in sys._current_frames().values()
        if frame.f_back
    ]


def leaves_it_in_a_file(secret: str, left_folder: str) -> object:
    """A temporary file."""
    with open(f"{left_folder}/note", "w") as file:
        file.write(secret)
    return True


def looks_at_files(left_folder: str) -> object:
    """temporary files"""
    with open(f"{left_folder}/note") as file:
        return file.read()


def leaves_it_in_a_descriptor(secret: str) -> object:
    """A pipe that stays open."""
    import os

    reading, writing = os.pipe()
    os.dup2(reading, 199)
    os.write(writing, secret.encode())
    return True


def looks_at_descriptors() -> object:
    """open descriptors"""
    import os

    return os.read(199, 100)


def leaves_it_in_the_tokenizer(model: Any, secret: str) -> object:
    """A token."""
    model.tokenizer.add_tokens([secret])
    return True


def looks_at_the_tokenizer(model: Any) -> object:
    """the tokenizer's words"""
    return sorted(model.tokenizer.get_added_vocab())
