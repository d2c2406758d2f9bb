"""Determine the arguments of a model's function from the function's signature when the model is loaded.

A function of x alone is called with x; a function with a parameter `u` also gets the row's inputs.
"""

import inspect
from collections.abc import Sequence

from kalman.models.named import Named
from kalman.types import ModelError

SHAPES = {"x": "(n, K)", "dt": "(K,)", "u": "(c, K)", "w": "(r, K)", "v": "(s, K)"}
"""Shape of each argument, for messages; n states, c inputs, K keys, r and s entries of the noises w and v."""

NOISES = ("w", "v")
"""Noise arguments, whose parameters must have these names: a parameter with another name is not a noise."""


def count_arguments(field: str, function: Named, allowed: Sequence[Sequence[str]], usual: int) -> int:
    """Return the number of arguments with which to call a function.

    A parameter with a default value counts only if it has the name of the argument. A function without a signature, or
    with `*arguments`, gets the `usual` number of arguments.

    Args:
        field: the field of the spec that names the function.
        function: the model's function.
        allowed: lists of arguments, each of which extends the previous list.
        usual: the default number of arguments, which is the length of one of these lists.

    Raises:
        ModelError: the function takes none of these lists.
    """
    try:
        parameters = list(inspect.signature(function.function).parameters.values())
    except (TypeError, ValueError):  # a function written in C may have no signature
        return usual
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        needed = sum(p.default is p.empty for p in places)
        return max(usual, needed) if needed <= len(allowed[-1]) else _refuse(field, function, allowed, usual)
    count = 0
    for place, parameter in enumerate(places):
        named = place < len(allowed[-1]) and parameter.name == allowed[-1][place]
        if parameter.default is not parameter.empty and not named:
            break
        count += 1
    last = allowed[-1][-1]
    if count == len(allowed[-1]) and last in NOISES and places[count - 1].name != last:
        return _refuse(field, function, allowed, usual)
    keyword_only = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters)
    if keyword_only or count not in [len(arguments) for arguments in allowed]:
        return _refuse(field, function, allowed, usual)
    return count


def _refuse(field: str, function: Named, allowed: Sequence[Sequence[str]], usual: int) -> int:
    signature = str(inspect.signature(function.function))
    lists = [f"({', '.join(arguments)})" for arguments in allowed]
    known = " or ".join([", ".join(lists[:-1]), lists[-1]] if len(lists) > 1 else lists)
    common = next(arguments for arguments in allowed if len(arguments) == usual)
    shapes = ", ".join(f"{name} {SHAPES[name]}" for name in allowed[-1])
    attribute = function.name.rpartition(":")[2].rpartition(".")[2]
    raise ModelError(
        field,
        f"{function.name} takes {signature}, and is called with {known}",
        f"write it as {attribute}({', '.join(common)}); the shapes are {shapes}",
    )
