"""Base of errors with messages for operators and users, and such messages for pydantic's errors."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_MAX_PROBLEMS = 10
_MAX_SHOWN = 80


class NdifError(Exception):
    """Base of errors whose message is for the operator or user who caused them.

    `str(error)` is a sentence, or one line per problem: the cause and the remedy. A handler shows this text
    and stops; a traceback would add nothing.
    """


class InvalidValue(NamedTuple):
    """One invalid value of a validated document."""

    location: tuple[int | str, ...]
    """Path of the value within the document; empty for the document itself."""
    reason: str
    """Rest of a sentence that begins with `place`, without its full stop."""
    is_unknown: bool
    """True if the value is a field that the document cannot have."""

    @property
    def place(self) -> str:
        """Return the path as a dotted name, such as `nodes.0.gpus`."""
        return ".".join(str(step) for step in self.location)

    @property
    def sentence(self) -> str:
        """Return `place` and `reason` as one sentence."""
        if not self.location:
            return f"{self.reason}."
        is_predicate = self.reason.startswith(("must ", "is "))
        return f"{self.place}{'' if is_predicate else ':'} {self.reason}."


def problems(error: ValidationError, *, show_values: bool = True) -> list[InvalidValue]:
    """Return the first ten problems of a pydantic error; `show_values=False` hides possible secrets."""
    details = error.errors(include_url=False)[:_MAX_PROBLEMS]
    return [
        InvalidValue(
            detail["loc"], _reason(detail, show_values), is_unknown=detail["type"] == _UNKNOWN_FIELD
        )
        for detail in details
    ]


def quoted(value: object) -> str:
    """Return the `repr` of a value, shortened to fit into a sentence."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = _MAX_SHOWN
    try:
        return short.repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number too long to show"


_UNKNOWN_FIELD = "extra_forbidden"
_REASONS = {
    "missing": "is missing",
    _UNKNOWN_FIELD: "is not a known field",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must be text that is not empty",
    "tuple_type": 'must be a list, like ["0.8"]',
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
}


def _reason(detail: ErrorDetails, show_value: bool) -> str:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "value_error":
        reason = str(context["error"]).removesuffix(".")
    elif kind == "string_too_short" and context["min_length"] > 1:
        reason = f"must have at least {context['min_length']} characters"
    elif kind in _REASONS:
        reason = _REASONS[kind].format(**context)
    else:
        message = detail["msg"].replace("Input should ", "must ", 1)
        reason = message[:1].lower() + message[1:]
    if not show_value or not reason.startswith("must "):
        return reason
    reason = f"{reason}, not {quoted(value)}"
    if kind == "string_type" and isinstance(value, int | float):
        reason += f": put it in quotes, {_in_quotes(detail['loc'], value)}"
    return reason


def _in_quotes(location: tuple[int | str, ...], value: Any) -> str:
    """Return the number as a YAML string: with its key, unless it is an element of a list."""
    key = f"{location[-1]}: " if location and isinstance(location[-1], str) else ""
    return f'{key}"{quoted(value)}"'
