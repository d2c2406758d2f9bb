"""What a verb hands back: lines for a person and data for a program."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live


def plural(number: int, what: str, ending: str = "s") -> str:
    """Return how many there are of something: `1 row`, `2,000 rows`."""
    return f"{number:,} {what}" + ("" if number == 1 else ending)


@dataclass(frozen=True, slots=True)
class Report:
    """Hold the outcome of one verb.

    Attributes:
        lines: what a person reads.
        data: the same for a program; numbers, text, lists and mappings.
        renderable: a rich renderable (a table, say) that a person sees in place of `lines`.
        problems: sentences, said on standard error, for which the command fails though it did its work.
        tables: rich renderables that a person sees below the lines.
    """

    lines: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    renderable: Any = None
    problems: list[str] = field(default_factory=list)
    tables: list[Any] = field(default_factory=list)

    def show(self, as_json: bool = False, stream: TextIO | None = None) -> None:
        """Print the report on standard output: one JSON document, or what a person reads."""
        out = stream or sys.stdout
        if as_json:
            print(json.dumps(plain(self.data), indent=2, allow_nan=False), file=out)
        else:
            for line in self.lines if self.renderable is None else ():
                print(line, file=out)
            shown = [*([] if self.renderable is None else [self.renderable]), *self.tables]
            if shown:
                # A log has no width of its own: what is read there is not cut to 80 columns.
                console = Console(file=out, width=None if out.isatty() else 160)
                for one in shown:
                    console.print(one)
        out.flush()


def show_again(look: Callable[[], Report], seconds: float, as_json: bool) -> Report:
    """Show what `look` reports every so many seconds until Ctrl-C: on a terminal in place, elsewhere one below another.

    Returns the last report, to be shown once more.
    """
    report = look()
    try:
        if as_json or not sys.stdout.isatty():
            while True:
                report.show(as_json)
                time.sleep(seconds)
                report = look()
        with Live(report.renderable, console=Console(), auto_refresh=False, transient=True) as live:
            while True:
                live.update(report.renderable, refresh=True)
                time.sleep(seconds)
                report = look()
    except KeyboardInterrupt:
        return report


def plain(value: Any) -> Any:
    """Turn `value` into what JSON can say: a number that is not finite into null, the unknown into text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    for convert in ("tolist", "isoformat"):  # NumPy scalars and arrays; dates and times
        if hasattr(value, convert):
            result = getattr(value, convert)()
            return result if isinstance(result, str) else plain(result)
    return str(value)
