"""Learning of matrix entries and of the initial distribution, in addition to a structure's parameters and R.

The matrices are F of an explicit process, A of a continuous-time process, and H. Pooled learned values are written into
the definition before the filter is built. If groups or keys learn the entries, the entries are parameters of the
filter.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kalman.linalg.entries import Entry
from kalman.models import checks
from kalman.models.structure import Parameter, Values
from kalman.types import ModelError

ENTRY = re.compile(r"([FAH])\[(\d+)\]\[(\d+)\]")
KINDS = {"F": "explicit", "A": "continuous"}
"""For each process matrix with entries that can be learned, the kind of the process."""
INITIAL = ("initial.mean", "initial.covariance")
PRIOR = {"name": "initial.mean"}, {"name": "initial.covariance"}
LINKED = 1e-2
"""Initial correlation in place of zero covariances if a full matrix is to be learned."""


class LearnRequest(NamedTuple):
    """One item of `learn.parameters`: the item's field, the parameter's name, and constraints on the value.

    form    form of a covariance: full, diagonal, or None, which keeps the written zeros
    bounds  lowest and highest value of a number; None means no bound
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
    """Return whether a name is the name of a matrix entry, or belongs to the initial distribution."""
    return isinstance(name, str) and (name in INITIAL or parse_entry_name(name) is not None)


def parse_entry_name(name: str) -> tuple[str, int, int] | None:
    """Return matrix letter, row and column from the name of an entry; None for other names."""
    found = ENTRY.fullmatch(name)
    return None if found is None else (found[1], int(found[2]), int(found[3]))


def list_key_entries(definition: Mapping[str, Any], letters: str) -> tuple[Parameter, ...]:
    """Return the entries of these matrices that groups or keys learn, with written values. Raises ModelError."""
    learn = definition.get("learn")
    if not isinstance(learn, Mapping) or learn.get("scope") not in ("group", "key"):
        return ()
    return tuple(
        _parse_parameter(definition, request)._replace(kind="real", bounds=None)
        for request in learn_requests(definition)
        if (found := parse_entry_name(request.name)) is not None and found[0] in letters
    )


def insert_entries(
    letter: str, matrix: Sequence[Sequence[Entry]], values: Values
) -> Sequence[Sequence[Entry]]:
    """Return a matrix with those of its entries that are parameters set to the parameters' values."""
    places = [(found, values[name][0]) for name in values if (found := parse_entry_name(name)) is not None]
    if not any(found[0] == letter for found, _ in places):
        return matrix
    result = [list(row) for row in matrix]
    for (of, i, j), value in places:
        if of == letter:
            result[i][j] = value
    return result


def list_chosen_parameters(definition: Mapping[str, Any]) -> list[Parameter]:
    """Return the requested matrix entries, then the initial distribution, with written values. Raises ModelError."""
    found = [
        _parse_parameter(definition, request)
        for request in learn_requests(definition)
        if is_chosen(request.name)
    ]
    scope = (definition.get("learn") or {}).get("scope")
    for p in found:
        if scope == "key" and p.name in INITIAL:
            problem = f"{p.name} is learned for all keys together or for groups: a key begins once"
            raise ModelError("learn.scope", problem, "write pooled or group, or learn others")
    return sorted(found, key=lambda p: (p.name in INITIAL, p.name == INITIAL[1]))


def constrain_parameter(parameter: Parameter, request: LearnRequest) -> Parameter:
    """Return a parameter with the requested form and bounds. Raises ModelError."""
    if request.form is not None:
        if parameter.kind != "covariance":
            raise ModelError(f"{request.field}.form", f"{request.name} is not a covariance", "remove it")
        return parameter._replace(value=_apply_form(request.form, parameter.value))
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


def substitute_learned(
    definition: Mapping[str, Any], learned: Mapping[str, Any]
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return the definition with the learned entries inserted, and the other learned parameters."""
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
            row, column = _find_row(result, f"parameters.{name}", name)
            row[column] = checks.parse_number(f"parameters.{name}", value)
    return result, rest


def _request(field: str, item: Any) -> LearnRequest:
    if isinstance(item, str):
        return LearnRequest(field, item)
    checks.check_keys(field, item, ("name", "form", "bounds"))
    name = checks.require_key(field, item, "name")
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
        None if a is None else checks.parse_number(f"{field}.bounds[{i}]", a) for i, a in enumerate(bounds)
    )
    if (low is None and high is None) or (low is not None and high is not None and low >= high):
        raise ModelError(
            f"{field}.bounds",
            f"[{low}, {high}] leaves nothing out, or nothing in",
            "write two numbers, the lowest first; null is no bound",
        )
    return LearnRequest(field, name, form, (low, high))


def _parse_parameter(definition: Mapping[str, Any], request: LearnRequest) -> Parameter:
    if request.name not in INITIAL:
        row, column = _find_row(definition, request.field, request.name)
        if isinstance(row[column], str):
            raise ModelError(request.field, f"{request.name} comes from a column", "learn others")
        return constrain_parameter(
            Parameter(request.name, "real", (checks.parse_number(request.field, row[column]),)), request
        )
    initial = definition.get("initial")
    if not isinstance(initial, Mapping) or initial.get("diffuse"):
        raise ModelError(
            "initial.diffuse",
            "the initial distribution of keys is to be learned",
            "write a mean and a covariance to begin the search from",
        )
    n = len(definition.get("states") or ())
    if request.name == "initial.mean":
        mean = checks.parse_vector("initial.mean", checks.require_key("initial", initial, "mean"), n)
        return constrain_parameter(Parameter(request.name, "vector", mean), request)
    covariance = checks.parse_covariance(
        "initial.covariance", checks.require_key("initial", initial, "covariance"), n
    )
    return constrain_parameter(Parameter(request.name, "covariance", covariance), request)


def _find_row(definition: Mapping[str, Any], field: str, name: str) -> tuple[Any, int]:
    """Return the matrix row that contains an entry, and the column index of the entry."""
    found = parse_entry_name(name)
    assert found is not None
    letter, i, j = found
    section = "observation" if letter == "H" else "process"
    label, kind = f"{section}.{letter}", KINDS.get(letter)
    part = definition.get(section)
    matrix = part.get(letter) if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or matrix is None or (kind is not None and part.get("kind") != kind):
        remedy = f"use process: {{kind: {kind}}}" if kind else "write observation.H"
        raise ModelError(field, f"the model has no {label}", remedy)
    if i >= len(matrix) or j >= len(matrix[i]):
        raise ModelError(field, f"{label} has no entry [{i}][{j}]", "count rows and columns from 0")
    return matrix[i], j


def _apply_form(form: str, packed: Sequence[Any]) -> tuple[Any, ...]:
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
