"""Learning of entries of F and H and of the initial distribution, beside a structure's parameters and R.

Learned values are written into the definition before the filter is built; during the search, F and H take them from
further control columns.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kalman.models import checks
from kalman.models.structure import Parameter
from kalman.types import ModelError

ENTRY = re.compile(r"([FH])\[(\d+)\]\[(\d+)\]")
INITIAL = ("initial.mean", "initial.covariance")
PRIOR = {"name": "initial.mean"}, {"name": "initial.covariance"}
LINKED = 1e-2
"""Initial correlation of zero entries where a full matrix is requested."""


class LearnRequest(NamedTuple):
    """One item of `learn.parameters`: its field, the parameter's name, and constraints of its value.

    form    of a covariance: full, diagonal, or None to keep the written zeros
    bounds  of a number: lowest and highest, None for none
    """

    field: str
    name: str
    form: str | None = None
    bounds: tuple[float | None, float | None] | None = None


def learn_requests(definition: Mapping[str, Any]) -> list[LearnRequest]:
    """Return the learn requests of a definition. Raises ModelError."""
    learn = definition.get("learn") or {}
    items = learn.get("parameters") or ()
    if not isinstance(items, (list, tuple)):
        raise ModelError("learn.parameters", f"{items!r} is not a list", "list names of parameters")
    found = [_request(f"learn.parameters[{i}]", item) for i, item in enumerate(items)]
    if learn.get("prior"):
        found += [LearnRequest("learn.prior", one["name"]) for one in PRIOR]
    for i, request in enumerate(found):
        if request.name in [other.name for other in found[:i]]:
            raise ModelError(request.field, f"{request.name} is named twice", "name each once")
    return found


def is_chosen(name: Any) -> bool:
    """Tell whether a name is an entry of F or H, or of the initial distribution."""
    return isinstance(name, str) and (name in INITIAL or ENTRY.fullmatch(name) is not None)


def parameters(definition: Mapping[str, Any]) -> list[Parameter]:
    """Return the requested entries of F and H, then the initial distribution, as written. Raises ModelError."""
    found = [
        _parameter(definition, request) for request in learn_requests(definition) if is_chosen(request.name)
    ]
    scope = (definition.get("learn") or {}).get("scope")
    for p in found:
        if scope == "key" or (scope == "group" and p.name not in INITIAL):
            whom = "or for groups" if p.name in INITIAL else "and not for groups or keys"
            problem = f"{p.name} is learned for all keys together, {whom}"
            raise ModelError("learn.scope", problem, "write pooled, or learn others")
    return sorted(found, key=lambda p: (p.name in INITIAL, p.name == INITIAL[1]))


def kept_to(parameter: Parameter, request: LearnRequest) -> Parameter:
    """Return a parameter with the requested form and bounds. Raises ModelError."""
    if request.form is not None:
        if parameter.kind != "covariance":
            raise ModelError(f"{request.field}.form", f"{request.name} is not a covariance", "remove it")
        return parameter._replace(value=_formed(request.form, parameter.value))
    if request.bounds is None:
        return parameter
    if parameter.kind not in ("real", "positive"):
        raise ModelError(f"{request.field}.bounds", f"{request.name} is not one number", "remove them")
    low, high = request.bounds
    value = parameter.value[0]
    if not isinstance(value, float) or not (low is None or low < value) or not (high is None or value < high):
        raise ModelError(
            f"{request.field}.bounds",
            f"{request.name} is {value}, not between them",
            "start it within the bounds, or widen them",
        )
    return parameter._replace(kind="bounded", bounds=request.bounds)


def substituted(
    definition: Mapping[str, Any], learned: Mapping[str, Any]
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return the definition with learned entries written into it, and the other learned parameters."""
    rest = {name: value for name, value in learned.items() if not is_chosen(name)}
    if len(rest) == len(learned):
        return definition, rest
    result = copy.deepcopy(dict(definition))
    for name, value in learned.items():
        if name in INITIAL:
            initial = dict(result.get("initial") or {})
            if initial.get("diffuse") is True:
                initial.pop("diffuse")
            initial[name.removeprefix("initial.")] = value
            result["initial"] = initial
        elif is_chosen(name):
            row, column = _place(result, f"parameters.{name}", name)
            row[column] = checks.number(f"parameters.{name}", value)
    return result, rest


def as_columns(definition: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    """Return the definition with entries of F and H that come from columns of their names, after the others."""
    if not names:
        return definition
    result = copy.deepcopy(dict(definition))
    result["control"] = [*(definition.get("control") or ()), *names]
    for name in names:
        row, column = _place(result, f"learn.{name}", name)
        row[column] = name
    B = result["process"].get("B") if isinstance(result.get("process"), Mapping) else None
    if B is not None:
        result["process"]["B"] = [[*row, *([0.0] * len(names))] for row in B]
    return result


def _request(field: str, item: Any) -> LearnRequest:
    if isinstance(item, str):
        return LearnRequest(field, item)
    checks.known(field, item, ("name", "form", "bounds"))
    name = checks.needed(field, item, "name")
    if not isinstance(name, str):
        raise ModelError(f"{field}.name", f"{name!r} is not a name", "write one such as Q or F[0][1]")
    form, bounds = item.get("form"), item.get("bounds")
    if form not in (None, "full", "diagonal"):
        raise ModelError(f"{field}.form", f"{form!r} is not known", "choose full or diagonal")
    if bounds is None:
        return LearnRequest(field, name, form)
    if not isinstance(bounds, (list, tuple)) or len(bounds) != 2:
        raise ModelError(f"{field}.bounds", f"{bounds!r} is not a pair", "write [lowest, highest]")
    low, high = (
        None if a is None else checks.number(f"{field}.bounds[{i}]", a) for i, a in enumerate(bounds)
    )
    if (low is None and high is None) or (low is not None and high is not None and low >= high):
        raise ModelError(
            f"{field}.bounds",
            f"[{low}, {high}] leaves nothing out, or nothing in",
            "write two numbers, the lowest first; null is no bound",
        )
    return LearnRequest(field, name, form, (low, high))


def _parameter(definition: Mapping[str, Any], request: LearnRequest) -> Parameter:
    if request.name not in INITIAL:
        row, column = _place(definition, request.field, request.name)
        if isinstance(row[column], str):
            raise ModelError(request.field, f"{request.name} comes from a column", "learn others")
        return kept_to(Parameter(request.name, "real", (checks.number(request.field, row[column]),)), request)
    initial = definition.get("initial")
    if not isinstance(initial, Mapping) or initial.get("diffuse"):
        raise ModelError(
            "initial.diffuse",
            "the initial distribution of keys is to be learned",
            "write a mean and a covariance to begin the search from",
        )
    n = len(definition.get("states") or ())
    if request.name == "initial.mean":
        mean = checks.vector("initial.mean", checks.needed("initial", initial, "mean"), n)
        return kept_to(Parameter(request.name, "vector", mean), request)
    covariance = checks.covariance("initial.covariance", checks.needed("initial", initial, "covariance"), n)
    return kept_to(Parameter(request.name, "covariance", covariance), request)


def _place(definition: Mapping[str, Any], field: str, name: str) -> tuple[Any, int]:
    """Return the row of F or H that holds an entry, and its column."""
    found = ENTRY.fullmatch(name)
    assert found is not None
    letter, i, j = found[1], int(found[2]), int(found[3])
    section, label = ("process", "process.F") if letter == "F" else ("observation", "observation.H")
    part = definition.get(section)
    matrix = part.get(letter) if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or matrix is None or (letter == "F" and part.get("kind") != "explicit"):
        remedy = "use process: {kind: explicit}" if letter == "F" else "write observation.H"
        raise ModelError(field, f"the model has no {label}", remedy)
    if i >= len(matrix) or j >= len(matrix[i]):
        raise ModelError(field, f"{label} has no entry [{i}][{j}]", "count rows and columns from 0")
    return matrix[i], j


def _formed(form: str, packed: Sequence[Any]) -> tuple[Any, ...]:
    result: list[Any] = list(packed)
    at = 0
    diagonal: list[float] = []
    while at < len(packed):
        i = len(diagonal)
        diagonal.append(packed[at + i])
        for j in range(i):
            if form == "diagonal":
                result[at + j] = 0.0
            elif result[at + j] == 0.0:
                result[at + j] = LINKED * (diagonal[i] * diagonal[j]) ** 0.5
        at += i + 1
    return tuple(result)
