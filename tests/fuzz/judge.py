"""The judge of a fuzz case: it knows the right rows, and counts what became of them.

A case is *clear* if every row was accepted with its own values, *quarantined* if some rows were set aside with a reason
and all others were accepted with theirs, and *refused* if the whole input was, in a sentence. Everything else is a
failure: a row that is lost or has other values, an exception that is not a sentence, too much time.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jobs.core.errors import UserError
from kalman.types import ModelError

CLEAR, REFUSED, QUARANTINED = "clear", "refused", "quarantined"
MOST_SECONDS = 20.0
"""Processor time of a case. The machine that runs the tests may be slow, and the first case of a kind loads modules."""

ANY = object()
"""A row of which is only known that it must not be lost: it may be accepted or quarantined."""
REJECT = object()
"""A row that must be quarantined."""


class Checked(NamedTuple):
    """A row that was read: its values, None where it was quarantined, and the reason."""

    values: tuple[Any, ...] | None
    reason: str | None


class Wrong(AssertionError):
    """A case whose outcome is neither right nor a sentence."""


def judged(case: Callable[[], str]) -> str:
    """Run a case and return its outcome.

    Raises:
        Wrong: it took too long, or ended with an exception that is not a sentence.
    """
    began = time.process_time()
    try:
        outcome = case()
    except (UserError, ModelError) as error:
        check_sentence(str(error))
        outcome = REFUSED
    except Wrong:
        raise
    except Exception as error:
        raise Wrong(f"{type(error).__name__}: {str(error)[:300]}") from error
    seconds = time.process_time() - began
    if seconds > MOST_SECONDS:
        raise Wrong(f"took {seconds:.0f} s")
    return outcome


def check_sentence(text: str) -> None:
    """Check that a message is one or more lines that a person can read.

    Raises:
        Wrong: it is empty, very long, or has a traceback or control characters in it.
    """
    if not text.strip() or len(text) > 20_000:
        raise Wrong(f"a message of {len(text)} characters")
    if "Traceback" in text or re.search(r'File ".*", line \d+', text):
        raise Wrong(f"a traceback: {text[:200]}")
    if any(len(line) > 2_000 for line in text.splitlines()):
        raise Wrong(f"a line of {max(map(len, text.splitlines()))} characters")
    if re.search("[\x00-\x08\x0b-\x1f\x7f]", text):
        raise Wrong(f"a control character: {text[:200]!r}")


def compare(wanted: Sequence[Any], found: Sequence[Checked]) -> str:
    """Compare the rows that were read with the right ones, in order, and return the outcome.

    Raises:
        Wrong: a row is lost, doubled, or has other values.
    """
    if len(wanted) != len(found):
        raise Wrong(f"{len(wanted)} rows were sent, {len(found)} were accepted or quarantined")
    bad = 0
    for number, (right, row) in enumerate(zip(wanted, found, strict=True)):
        if row.values is None:
            bad += 1
            check_sentence(row.reason or "")
            if right is not ANY and right is not REJECT:
                raise Wrong(f"row {number} is quarantined ({row.reason}), and is {right}")
        elif right is REJECT:
            raise Wrong(f"row {number} is accepted as {row.values}, and is none")
        elif right is not ANY and not same(right, row.values):
            raise Wrong(f"row {number} is {right}, and was accepted as {row.values}")
    return QUARANTINED if bad else CLEAR


def same(right: tuple[Any, ...], found: tuple[Any, ...]) -> bool:
    """Tell whether two rows have the same values, to the bit; NaN stands for a missing measurement."""
    return len(right) == len(found) and all(
        (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))
        if isinstance(a, float) and isinstance(b, float)
        else type(a) is type(b) and a == b
        for a, b in zip(right, found, strict=True)
    )
