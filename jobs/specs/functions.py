"""The functions that a model's definition names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

FIELDS = ("f", "h", "q", "jacobian", "noise_jacobian")
"""Fields of a process or an observation that name a function."""


def named_functions(definition: Any) -> Iterator[str]:
    """Yield every `module:function` in a definition, at any depth."""
    if isinstance(definition, Mapping):
        for field, value in definition.items():
            if field in FIELDS and isinstance(value, str):
                yield value
            else:
                yield from named_functions(value)
    elif isinstance(definition, (list, tuple)):
        for value in definition:
            yield from named_functions(value)
