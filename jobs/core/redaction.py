"""Keep secrets out of what commands print and of the tracebacks that they keep.

Secret are the values of environment variables that are named so, and what a module has registered: the passwords in the
file of Kafka's properties.
"""

from __future__ import annotations

import os
import re

HIDDEN = "***"
_NAMED = re.compile(
    r"secret|passw|token|access.?key|account.?key|private.?key|fernet|credential|jaas|sql_alchemy_conn", re.I
)
_SHORTEST = 6
"""Shorter values would also be found where they mean nothing."""

_registered: set[str] = set()


def is_secret(name: str) -> bool:
    """Tell whether a setting of this name holds a secret."""
    return _NAMED.search(name) is not None


def register(name: str, value: str) -> None:
    """Hide a setting's value from now on, and each part of it in quotes, if the setting holds a secret."""
    if is_secret(name):
        parts = [value, *re.findall(r"""["']([^"']+)["']""", value)]
        _registered.update(part for part in parts if len(part) >= _SHORTEST)


def redacted(text: str) -> str:
    """Return a text without the secrets that are known."""
    here = {value for name, value in os.environ.items() if len(value) >= _SHORTEST and is_secret(name)}
    for value in sorted(here | _registered, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return text
