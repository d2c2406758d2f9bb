"""Stand-ins with the signature of the method that they replace."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def stand_in(method: Callable[..., Any], act: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `act` instead of `method`.

    Args:
        method: the replaced method. A call that does not fit its signature raises TypeError.
        act: gets `call`, which calls the method, and the method's arguments by name, so that it does not depend on the
            number of arguments.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def standing_in(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        return act(lambda: method(*given, **named), **bound.arguments)

    return standing_in
