"""The report of a verb: lines for a person, and data for a program."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from jobs.core.errors import RUN_FAILED
from jobs.core.redaction import escape_unprintable, redact_secrets

REPORT_FILE = "KALMAN_REPORT_FILE"
"""Environment variable that names the file for a command's report. Airflow's operator sets the variable."""


_AS_IT_IS: dict[str, Any] = {"markup": False, "emoji": False}
"""Settings of a console that prints texts unchanged, because a key may be named `[red]` or `:bell:`."""


class PlainConsole(Console):
    """A console on which no text of a table controls the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text with unprintable characters escaped."""
        return super().render_str(escape_unprintable(text, None), **options)


def format_count(number: int, noun: str, ending: str = "s") -> str:
    """Return a number with its noun, such as `1 row` or `2,000 rows`."""
    return f"{number:,} {noun}" + ("" if number == 1 else ending)


def format_number(value: float | None, form: str, otherwise: str = "–") -> str:
    """Return a number as text; for None return `otherwise`."""
    return otherwise if value is None else format(value, form)


def round_numbers(value: Any, digits: int) -> Any:
    """Round all fractional numbers in a value, which may be nested, to so many significant digits."""
    if isinstance(value, Mapping):
        return {name: round_numbers(item, digits) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [round_numbers(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def format_names(names: Sequence[str], most: int = 3) -> str:
    """Return the first names of a list as text, such as `a, b, c and 6 others`."""
    if len(names) <= most + 1:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most:,} others"


def format_rate(count: float, seconds: float, noun: str = "rows") -> str:
    """Return a rate as text: per second, or per minute or hour if it is lower; below 10 with one decimal."""
    for unit, size in (("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        number = count * size / max(seconds, 1e-9)
        if number >= 1 or unit == "h":
            return f"{number:,.1f} {noun}/{unit}" if number < 10 else f"{number:,.0f} {noun}/{unit}"
    raise AssertionError


def format_span(seconds: float) -> str:
    """Return a duration as text, such as `3 h`: rounded down to the largest of d, h, min and s with at least two.

    Less than two minutes are in seconds; a negative duration is `0 s`.
    """
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(max(seconds, 0))} s"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one verb.

    Attributes:
        lines: text for a person.
        data: the same facts for a program, as numbers, texts, lists and mappings.
        renderable: a rich renderable, such as a table, which a person sees instead of `lines`.
        errors: sentences for standard error. If there are any, the command fails although the verb did its work.
        tables: rich renderables that a person sees below the lines.
        error_code: exit code of the command if there are errors.
    """

    lines: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    renderable: Any = None
    errors: list[str] = field(default_factory=list)
    tables: list[Any] = field(default_factory=list)
    error_code: int = RUN_FAILED

    def show(self, as_json: bool = False, stream: TextIO | None = None) -> None:
        """Print the report on standard output, as one JSON document or as text for a person."""
        out = stream or sys.stdout
        if as_json:
            print(json.dumps(convert_to_json(self.data), indent=2, allow_nan=False), file=out)
        else:
            for line in self.lines if self.renderable is None else ():
                print(escape_unprintable(redact_secrets(line), None), file=out)
            renderables = [*([] if self.renderable is None else [self.renderable]), *self.tables]
            if renderables:
                # A log has no width, and rich would wrap lines in it at 80 columns.
                console = PlainConsole(file=out, width=None if out.isatty() else 160, **_AS_IT_IS)
                for one in renderables:
                    console.print(one)
        out.flush()

    def save(self) -> None:
        """Write lines and data as JSON into the file that the environment variable `REPORT_FILE` names, if it is set.

        The caller may have ended and removed the folder of the file. This is not an error, as the command has done its
        work.
        """
        path = os.environ.get(REPORT_FILE)
        if path:
            text = json.dumps({"lines": self.lines, "data": convert_to_json(self.data)}, allow_nan=False)
            with suppress(OSError):
                Path(path).write_text(text, encoding="utf-8")


def show_again(look: Callable[[], Report], seconds: float, as_json: bool) -> Report:
    """Show a new report of `look` every `seconds` until Ctrl-C.

    On a terminal each report replaces the previous report; elsewhere they follow each other. Return the last report,
    which the command shows at its end.
    """
    report = look()
    try:
        if as_json or not sys.stdout.isatty():
            while True:
                report.show(as_json)
                time.sleep(seconds)
                report = look()
        with Live(
            report.renderable, console=PlainConsole(**_AS_IT_IS), auto_refresh=False, transient=True
        ) as live:
            while True:
                live.update(report.renderable, refresh=True)
                time.sleep(seconds)
                report = look()
    except KeyboardInterrupt:
        return report


def suggest_other_model(model: str) -> str:
    """Return what helps a model that does not fit its rows, as the end of a sentence."""
    return (
        f"`kalman-pipeline init --input FILE --name other` finds other structures, `kalman-pipeline compare --model "
        f"{model} --model other` tells which predicts better; against outliers write `robust` in the spec"
    )


def suggest_new_start(model: str) -> str:
    """Return the commands that begin a new generation from all rows that have landed."""
    return (
        f"`kalman-pipeline pretrain --model {model}`, then `kalman-pipeline stream --model {model} --adopt SNAPSHOT` "
        f"with the snapshot that it makes"
    )


def convert_to_json(value: Any) -> Any:
    """Convert a value to JSON's types: a number that is not finite becomes null, an unknown type becomes text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): convert_to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [convert_to_json(item) for item in value]
    for convert in ("tolist", "isoformat"):  # NumPy scalars and arrays; dates and times
        if hasattr(value, convert):
            result = getattr(value, convert)()
            return result if isinstance(result, str) else convert_to_json(result)
    return str(value)
