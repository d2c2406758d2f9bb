"""Build an IMM or MMAE filter from a definition with `modes`; each mode is built as a separate model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kalman.filters.multiple_models import SEVERAL, MultipleModels
from kalman.filters.own_parameters import FIELD, find_key_parameters
from kalman.filters.state_layout import locate_fields
from kalman.models import checks
from kalman.models.definition import Definition
from kalman.models.learned_entries import learn_requests
from kalman.models.structure import Parameter
from kalman.types import Filter, ModelError

FLOOR = 1e-12
"""Default lower bound of a mode's probability."""
OWN = (
    *("filter", "modes", "transition", "imm", "mmae", "learn", "smoothing", "adaptive", "storage"),
    "sliding_log_likelihood",
)
"""Sections of a definition that its modes do not inherit."""
MODE_CHANCES = "initial.mode_probabilities"
SHARED = ("transition", MODE_CHANCES)
"""Learned parameters that belong to all modes together."""

Build = Callable[[Definition, Mapping[str, Any]], Filter]


def build_imm(definition: Definition, build: Build, learned: Mapping[str, Any]) -> MultipleModels:
    """Return the interacting multiple-model filter of a definition. Raises ModelError."""
    names, modes, start = _build_modes(definition, build, learned)
    section = definition.get("imm") or {}
    checks.check_keys("imm", section, ("floor",))
    M = len(modes)
    written = learned.get("transition", definition.get("transition"))
    if written is None:
        raise ModelError("transition", "is missing", "write a row for each mode, each of which sums to 1")
    transition = checks.parse_matrix("transition", written, M, M)
    for i, row in enumerate(transition):
        _check_probabilities(f"transition[{i}]", row)
    model = MultipleModels(names, modes, start, _parse_floor("imm", section, M), transition)
    return _add_key_parameters(definition, build, learned, model)


def build_mmae(definition: Definition, build: Build, learned: Mapping[str, Any]) -> MultipleModels:
    """Return the multiple-model adaptive estimator of a definition. Raises ModelError."""
    if definition.get("transition") is not None:
        raise ModelError("transition", "an mmae's modes stay as they are", "remove it, or use filter: imm")
    names, modes, start = _build_modes(definition, build, learned)
    section = definition.get("mmae") or {}
    checks.check_keys("mmae", section, ("window", "floor"))
    window = section.get("window")
    if window is not None:
        window = checks.parse_integer("mmae.window", window, 1, 1000)
    model = MultipleModels(names, modes, start, _parse_floor("mmae", section, len(modes)), None, window)
    return _add_key_parameters(definition, build, learned, model)


def list_known_parameters(model: MultipleModels) -> dict[str, Parameter]:
    """Return the learnable parameters by name: `R` where all modes share it, else `<mode>.R`, and the probabilities."""
    found: dict[str, Parameter] = {}
    each = [{p.name: p for p in _list_parameters(mode)} for mode in model.modes]
    for name, p in each[0].items():
        if all(own.get(name) == p for own in each):
            found[name] = p
    for mode, own in zip(model.names, each, strict=True):
        found |= {f"{mode}.{name}": p._replace(name=f"{mode}.{name}") for name, p in own.items()}
    if model.transition is not None:
        flat = tuple(a for row in model.transition for a in row)
        found["transition"] = Parameter("transition", "transition", flat)
    found[MODE_CHANCES] = Parameter(MODE_CHANCES, "chances", model.start)
    return found


def _list_parameters(mode: Filter) -> tuple[Parameter, ...]:
    return getattr(getattr(mode, "base", mode), "parameters", ())


def _add_key_parameters(
    definition: Definition, build: Build, learned: Mapping[str, Any], model: MultipleModels
) -> MultipleModels:
    """Return the model, with key-specific parameters if groups or keys learn parameters."""
    learn = definition.get("learn")
    if not isinstance(learn, Mapping) or learn.get("scope") not in ("group", "key"):
        return model
    known = list_known_parameters(model)
    names = [request.name for request in learn_requests(definition)]
    own = tuple(known[name] for name in names if name in known)
    asked = {
        mode: [
            name.removeprefix(f"{mode}.")
            for name in (p.name for p in own)
            if name not in SHARED
            if name.startswith(f"{mode}.") or not name.startswith(tuple(f"{one}." for one in model.names))
        ]
        for mode in model.names
    }
    _, modes, _ = _build_modes(definition, build, learned, asked)
    result = replace(model, modes=modes, own=own)
    return replace(result, copies=_map_copies(result))


def _map_copies(model: MultipleModels) -> tuple[tuple[int, int], ...]:
    """Map rows of the field `parameters` to the rows of the modes' states that repeat them."""
    found: list[tuple[int, int]] = []
    for name, mode, part in zip(model.names, model.modes, model.parts, strict=True):
        inner = find_key_parameters(mode)
        at = 0
        for p in model.own:
            place = inner.rows.get(p.name.removeprefix(f"{name}."))
            if place is not None and p.name not in SHARED:
                begin = part.start + locate_fields(mode.fields)[FIELD].start + place.start
                found += [(at + e, begin + e) for e in range(len(p.value))]
            at += len(p.value)
    return tuple(found)


def _parse_floor(field: str, section: Mapping[str, Any], modes: int) -> float:
    floor = checks.parse_positive(f"{field}.floor", section.get("floor", FLOOR))
    if floor * modes >= 1.0:
        raise ModelError(
            f"{field}.floor",
            f"{floor!r} leaves the probabilities no room",
            "write a small one, such as 1e-12",
        )
    return floor


def _build_modes(
    definition: Definition,
    build: Build,
    learned: Mapping[str, Any],
    asked: Mapping[str, list[str]] | None = None,
) -> tuple[tuple[str, ...], tuple[Filter, ...], tuple[float, ...]]:
    """Return names, filters and initial probabilities of the modes; asked: key-specific parameters by mode."""
    if definition.get("adaptive") is not None:
        raise ModelError("adaptive", "modes are told apart by their fixed noise", "remove it")
    written = definition.get("modes")
    if not isinstance(written, (list, tuple)) or not written:
        raise ModelError("modes", "it is not a list of modes", "list them, each with process and observation")
    initial = definition.get("initial")
    probabilities = None
    if isinstance(initial, Mapping):
        probabilities = initial.get("mode_probabilities")
        initial = {name: value for name, value in initial.items() if name != "mode_probabilities"}
        if initial.get("diffuse"):
            raise ModelError(
                "initial.diffuse",
                "modes cannot be told apart while nothing is known of the state",
                "give a mean and a wide covariance",
            )
    shared = {name: value for name, value in definition.items() if name not in OWN} | {"initial": initial}
    for j, mode in enumerate(written):
        if not isinstance(mode, Mapping):
            raise ModelError(
                f"modes[{j}]", f"{mode!r} is not a mapping", "write process and observation under it"
            )
    names = _parse_mode_names(written)
    own = [
        {
            name.removeprefix(f"{mode}."): value
            for name, value in learned.items()
            if name not in SHARED
            if name.startswith(f"{mode}.") or not name.startswith(tuple(f"{other}." for other in names))
        }
        for mode in names
    ]
    requests = [(asked or {}).get(name) for name in names]
    sections = [{"learn": {"parameters": one, "scope": "key"}} if one else {} for one in requests]
    modes = tuple(
        _build_mode(j, shared | section, mode, build, values)
        for j, (mode, section, values) in enumerate(zip(written, sections, own, strict=True))
    )
    for j, mode in enumerate(modes):
        if getattr(mode, "periods", ()) != getattr(modes[0], "periods", ()):
            remedy = "give all modes the same, such as in the observation that they share"
            raise ModelError(f"modes[{j}].observation.wrap", "differs from that of the first mode", remedy)
    M = len(modes)
    probabilities = learned.get("initial.mode_probabilities", probabilities)
    if probabilities is None:
        return names, modes, (1.0 / M,) * M
    start = checks.parse_vector("initial.mode_probabilities", probabilities, M)
    _check_probabilities("initial.mode_probabilities", start)
    return names, modes, start


def _parse_mode_names(written: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of the modes."""
    names = tuple(str(mode.get("name") or f"mode_{j}") for j, mode in enumerate(written))
    for j, name in enumerate(names):
        if name in names[:j] or not name.isidentifier():
            problem = "is the name of two modes" if name in names[:j] else "cannot be a name"
            raise ModelError(
                f"modes[{j}].name", f"{name!r} {problem}", "use letters, digits and _, each name once"
            )
    return names


def _build_mode(
    j: int, shared: Mapping[str, Any], mode: Mapping[str, Any], build: Build, learned: Mapping[str, Any]
) -> Filter:
    """Return a mode's filter with its learned parameters; it inherits missing sections from the definition."""
    field = f"modes[{j}]"
    for name in (
        "states",
        "measurement",
        "control",
        "initial",
        "modes",
        "learn",
        "smoothing",
        "adaptive",
        "storage",
    ):
        if mode.get(name) is not None:
            raise ModelError(f"{field}.{name}", "modes share it or have none", "remove it here")
    own = {name: value for name, value in mode.items() if name != "name" and value is not None}
    if own.get("filter", "linear") in SEVERAL:
        raise ModelError(f"{field}.filter", "a mode is a single filter", "choose another, such as linear")
    try:
        found = build({**shared, "filter": "linear", "mode": True, **own}, learned)
    except ModelError as error:
        inside = error.field.replace("[", ".").split(".")[0] in {*own, "filter", "process", "observation"}
        where = f"{field}.{error.field}" if inside else error.field
        raise ModelError(where, error.problem, error.remedy) from error
    if list(found.fields)[:2] != ["mean", "covariance"]:
        raise ModelError(
            f"{field}.filter", "a mode must keep mean and covariance", "choose another filter or form"
        )
    if "gate" in found.fields:
        raise ModelError(
            f"{field}.robust.gate" if "robust" in own else "robust.gate",
            "a gated mode would say nothing of how likely it is",
            "use student_t or huber in modes",
        )
    return found


def _check_probabilities(field: str, values: tuple[float, ...]) -> None:
    if min(values) < 0.0 or abs(float(np.sum(values)) - 1.0) > 1e-9:
        raise ModelError(field, f"{list(values)} are not probabilities", "write numbers from 0 that sum to 1")
