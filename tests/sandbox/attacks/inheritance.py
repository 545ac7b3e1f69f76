"""Attacks through inherited methods: of a user's class or of `super()`, instead of the server's object."""

# These are attacks; the usual style rules do not apply.

from __future__ import annotations

from typing import Any


def writes_with_super(model: Any, canary_folder: str) -> object:
    """save_pretrained of the configuration, by super()"""
    settings = model.config
    return super(type(settings), settings).save_pretrained(canary_folder)


def writes_with_a_subclass(model: Any, canary_folder: str) -> object:
    """save_pretrained of a subclass of the configuration's class"""
    settings = model.config

    class Own(type(settings)):  # type: ignore[misc]
        pass

    return Own.save_pretrained(settings, canary_folder)


def writes_with_an_own_configuration(model: Any, canary_folder: str) -> object:
    """save_pretrained of a configuration made in the block"""
    return type(model.config)().save_pretrained(canary_folder)


def writes_with_getattribute(canary_folder: str) -> object:
    """object.__getattribute__ of a denied attribute"""
    import pandas

    frame = pandas.DataFrame({"a": [1]})
    return object.__getattribute__(frame, "to_csv")(f"{canary_folder}/new")


def formats_with_super(variable: str) -> object:
    """super().format"""
    import enum

    class Text(str):
        __slots__ = ()

        def walk(self, value: object) -> str:
            return super().format(value)

    return Text("{0.__globals__[sys].modules[os].environ}").walk(enum.unique)


def replaces_a_guard_with_an_enumeration(secret_file: str) -> object:
    """enum.global_enum, which writes into the module that the class names"""
    import contextlib
    import enum

    class Names(enum.Enum):
        private = 1

        def __call__(self, name: str) -> bool:
            return False

    Names.__module__ = "ndif.sandbox.protector.guards"
    with contextlib.suppress(KeyError):  # without a guard, there is nothing to replace
        enum.global_enum(Names)
    names = getattr(enum.unique, "__globals__")["__builtins__"]  # noqa: B009
    return names["open"](secret_file).read()
