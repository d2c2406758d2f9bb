"""Problems of a model spec. Each problem has a file, a line, a field, a description and a remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import ErrorDetails, PydanticCustomError

from jobs.core.errors import UserError
from jobs.core.redaction import shorten_text

_KINDS = {
    list: "a list",
    dict: "a mapping",
    str: "text",
    bool: "true/false",
    int: "a number",
    float: "a number",
}
_WANTED = {
    "list_type": ("a list", "write it in brackets"),
    "string_type": ("text", "put it in quotes"),
    "int_type": ("a whole number", "write it without quotes and without a fraction"),
    "int_from_float": ("a whole number", "write it without a fraction"),
    "float_type": ("a number", "write it without quotes"),
    "bool_type": ("true or false", "write true or false"),
    "dict_type": ("a mapping", "write it as `field: value` lines or {field: value}"),
    "model_type": ("a mapping", "write it as `field: value` lines or {field: value}"),
    "model_attributes_type": ("a mapping", "write it as `field: value` lines or {field: value}"),
}


LONGEST = 500
"""Maximum length of a field, a problem or a remedy in a message, since each may quote the user's text."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in one field of one file."""

    file: str
    field: str
    problem: str
    remedy: str = ""
    line: int = 0

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        field, problem, remedy = (
            shorten_text(one, LONGEST) for one in (self.field, self.problem, self.remedy)
        )
        text = f"{f'{place}: {field}' if field else place}: {problem}{f'; {remedy}' if remedy else ''}"
        return " ".join(text.split())


class SpecError(UserError):
    """The refusal of a model spec: `problems` lists the problems, and the message has one line for each problem."""

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def invalid(problem: str, remedy: str, field: str = "") -> PydanticCustomError:
    """Return a validator's error with a problem, a remedy, and the path of the field within the section."""
    context = {"problem": problem, "remedy": remedy, "field": field}
    return PydanticCustomError("spec", "{problem}; {remedy}", context)


def suggest_key(known: Sequence[str], lead: str = "choose from") -> str:
    """Return the remedy for a name that is not a key column."""
    return f"{lead} {', '.join(known)}" if known else "leave it out: the model has no key columns"


def suggest_word(word: Any, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?` with the nearest known word, or an empty string; case does not matter."""
    by_case = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(str(word).casefold(), by_case, n=1, cutoff=0.6)
    return f"did you mean '{by_case[near[0]]}'?" if near else ""


def format_path(location: Sequence[str | int]) -> str:
    """Return a field's path as text, such as `process.F[0][1]`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def convert_to_problem(
    error: ErrorDetails,
    file: str,
    fields: Mapping[tuple[str, ...], Sequence[str]],
    describe: Mapping[str, str],
    lines: Mapping[tuple[str | int, ...], int],
) -> Problem:
    """Convert one of pydantic's errors to a problem with a remedy.

    Args:
        error: the error of pydantic.
        file: file of the spec.
        fields: names of each section's fields, by the section's path.
        describe: description of each field, by the field's path as text.
        lines: line of each field in the file, by the field's path.
    """
    location = tuple(error["loc"])
    kind, given, context = error["type"], error["input"], error.get("ctx") or {}
    field = format_path(location)
    remedy = ""
    if kind == "spec":
        inner = context["field"]
        field = ".".join(part for part in (field, inner) if part)
        location = (*location, inner) if inner else location
        problem, remedy = context["problem"], context["remedy"]
    elif kind == "missing":
        problem, remedy = "is missing", f"add it: {describe.get(field, 'it is required')}"
    elif kind in ("extra_forbidden", "invalid_key"):
        names = fields.get(tuple(str(part) for part in location[:-1]), ())
        hint = suggest_word(location[-1], names) if location else ""
        problem, remedy = "is not a field of a model spec", hint or f"fields here are {', '.join(names)}"
    elif kind in ("literal_error", "enum"):
        expected = [word.strip(" '") for word in str(context["expected"]).replace(" or ", ",").split(",")]
        problem = f"{_shorten_value(given)} is not known"
        remedy = " ".join(
            part for part in (suggest_word(given, expected), f"use one of {', '.join(expected)}") if part
        )
    elif kind in _WANTED:
        wanted, remedy = _WANTED[kind]
        if kind == "list_type" and isinstance(given, str | int | float):
            remedy = f"write [{given}]"
        what = "nothing" if given is None else _KINDS.get(type(given), "something else")
        problem = f"must be {wanted}, not {what}"
    elif kind == "too_short":
        problem, remedy = "is empty", describe.get(field, "give at least one entry")
    elif kind in ("greater_than_equal", "greater_than"):
        least = context.get("ge", context.get("gt"))
        problem, remedy = f"{_shorten_value(given)} is too small", f"give a number from {least}"
    elif kind in ("less_than_equal", "less_than"):
        most = context.get("le", context.get("lt"))
        problem, remedy = f"{_shorten_value(given)} is too large", f"give a number up to {most}"
    elif kind == "finite_number":
        problem, remedy = f"must be a finite number, not {given}", "give a number"
    else:
        message = error["msg"][:1].lower() + error["msg"][1:]
        problem, remedy = f"{_shorten_value(given)} is not valid: {message}", describe.get(field, "")
    line = 0 if kind == "missing" and len(location) == 1 else find_line(location, lines)
    return Problem(file, field, problem, remedy, line)


def find_line(location: Sequence[str | int], lines: Mapping[tuple[str | int, ...], int]) -> int:
    """Return the line of a field, or of the nearest enclosing field; 0 if unknown."""
    path = tuple(location)
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 0)


def _shorten_value(value: Any, limit: int = 60) -> str:
    return shorten_text(repr(value), limit)
