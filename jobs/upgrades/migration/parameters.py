"""Decide which learned parameters the next version of a model keeps, and record the origin of each value.

A learned parameter is carried over if its name and its meaning stay, that is, with the same process, time unit,
measured columns and units of the states. If a process becomes a part of a sum, its parameters are named after the part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

import kalman
from jobs.core.errors import UserError
from jobs.core.report import round_numbers
from jobs.specs.model_spec import ModelSpec
from jobs.upgrades.migration.state_map import StateMap, build_state_map, has_unchanged_units
from jobs.upgrades.migration.versions import MigrationStep
from kalman.building.values import collect_parameter_values
from kalman.models.groups import GROUPS, begin_states
from kalman.models.learned_entries import is_chosen, learn_requests

SHARED = ("transition", "initial.mode_probabilities")
"""Learned parameters that all modes share."""
DIGITS = 6
"""Number of significant digits of a parameter in a report."""


class Carried(NamedTuple):
    """The learned parameters that a path of versions carries over.

    parameters: parameters of the last version by name, including the parameters of groups. names: for each of these,
    its name in the first version. given_up: for each learned parameter that is not carried over, the reason, by its
    name in the first version.
    """

    parameters: dict[str, Any]
    names: dict[str, str]
    given_up: dict[str, str]


def carry_over_parameters(steps: Sequence[MigrationStep], learned: Mapping[str, Any]) -> Carried:
    """Return the first version's learned parameters that the last version keeps at its start."""
    values = {name: value for name, value in learned.items() if name != GROUPS}
    groups, given_up = learned.get(GROUPS), {}
    names = {name: name for name in values}
    for step in steps:
        states = build_state_map(step)
        kept: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for name, value in values.items():
            new = _convert_name(step, name)
            reason = _explain_drop(step, states, name, new) or _explain_unfit(step.new, new, value, kept)
            if reason is None:
                kept[new], origins[new] = value, names[name]
            else:
                given_up[names[name]] = reason
        renamed = {name: _convert_name(step, name) for name in values}
        groups = _convert_groups(step.new, groups, renamed, kept)
        values, names = kept, origins
    if GROUPS in learned and groups is None:
        given_up[GROUPS] = (
            f"version {steps[-1].new.version} does not learn by {', '.join(learned[GROUPS]['by'])}"
        )
    return Carried(values if groups is None else {**values, GROUPS: groups}, names, given_up)


def _find_policy(step: MigrationStep) -> str | None:
    rules = step.rules_spec.migrate
    return None if rules is None else rules.parameters


def _explain_drop(step: MigrationStep, states: StateMap, name: str, new: str) -> str | None:
    """Return why a step drops a learned parameter whose name the new model has; None if the step keeps it."""
    policy, version = _find_policy(step), step.new.version
    if policy is not None:
        return (
            None if policy == "keep" else f"migrate.parameters is spec in version {step.rules_spec.version}"
        )
    if not has_unchanged_units(states):
        return "a state changed its unit" if states.affine is not None else "a function maps the states"
    kind = name.rpartition(".")[2]
    # A value per state, or an entry of a matrix over the states, belongs to a place.
    if (is_chosen(name) or kind == "Q") and not _has_same_places(step, states):
        return "the states are others, or in another order"
    if kind == "R":
        if step.old.measurement != step.new.measurement:
            return "the measured columns changed"
    elif name in SHARED:
        if _list_mode_names(step.old) != _list_mode_names(step.new):
            return "the modes are others, or in another order"
    elif name.startswith("A[") and step.old.time_unit != step.new.time_unit:
        return f"the time unit changed from {step.old.time_unit} to {step.new.time_unit}"
    elif not is_chosen(name):
        if _find_kind(step.old, name) != _find_kind(step.new, new):
            there = _find_written_value(step.new, new) is not None
            return (
                f"it belongs to another process in version {version}"
                if there
                else f"version {version} has no such parameter"
            )
        if kind != "Q" and step.old.time_unit != step.new.time_unit:
            return f"the time unit changed from {step.old.time_unit} to {step.new.time_unit}"
    if new not in _list_learned(step.new) and _find_written_value(step.old, name) != _find_written_value(
        step.new, new
    ):
        return f"version {version} writes another value and does not learn it"
    return None


def _has_same_places(step: MigrationStep, states: StateMap) -> bool:
    unit = np.eye(len(step.old.states))
    return states.affine is not None and np.array_equal(np.array(states.affine.T), unit)


def _list_mode_names(spec: ModelSpec) -> list[str]:
    modes = spec.definition().get("modes") or ()
    return [str(mode.get("name") or f"mode_{j}") for j, mode in enumerate(modes)]


def _explain_unfit(spec: ModelSpec, name: str, value: Any, others: Mapping[str, Any]) -> str | None:
    """Return why a model cannot have this value of a parameter; None if it can."""
    try:
        kalman.build(spec.definition(), {**others, name: value})
    except kalman.ModelError as error:
        return f"version {spec.version}: {error.problem}"
    return None


def _convert_groups(
    spec: ModelSpec, groups: Any, renamed: Mapping[str, str], kept: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the initial parameters of a version by group; None if the version has no groups."""
    if groups is None or spec.learn is None or spec.learn.scope != "group" or spec.learn.by != groups["by"]:
        return None
    own = [
        {renamed[name]: value for name, value in one.items() if renamed.get(name) in kept}
        for one in groups["parameters"]
    ]
    result = {**groups, "parameters": own}
    try:
        begin_states(kalman.build, spec.definition(), {**kept, GROUPS: result})
    except kalman.ModelError:
        return None
    return result if any(own) else None


def _convert_name(step: MigrationStep, name: str) -> str:
    """Return the name of an old parameter in the new version; its process may be part of a sum in either version."""
    old, new = _find_process(step.old), _find_process(step.new)
    if is_chosen(name) or old is None or new is None or (old["kind"] == "sum") == (new["kind"] == "sum"):
        return name
    whole, parts = (old, _list_parts(new)) if new["kind"] == "sum" else (new, _list_parts(old))
    same = [label for label, kind in parts if kind == whole["kind"]]
    if len(same) != 1 or name == "R":
        return name
    return f"{same[0]}.{name}" if new["kind"] == "sum" else name.removeprefix(f"{same[0]}.")


def _find_process(spec: ModelSpec) -> dict[str, Any] | None:
    found = spec.definition().get("process")
    return found if isinstance(found, dict) and "kind" in found else None


def _list_parts(process: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the name and the kind of each part of a sum."""
    parts = cast(list[dict[str, Any]], process["parts"])
    return [(str(part.get("name") or part["kind"]), str(part["kind"])) for part in parts]


def _find_kind(spec: ModelSpec, name: str) -> str | None:
    """Return the kind of the process of a parameter; a mode or part in the name selects its process."""
    process = _find_process(spec)
    for label, mode in zip(_list_mode_names(spec), spec.definition().get("modes") or (), strict=True):
        if name.startswith(f"{label}."):
            process, name = mode.get("process") or process, name.removeprefix(f"{label}.")
    while process is not None and process.get("kind") == "sum":
        part = next(
            (
                one
                for (label, _), one in zip(_list_parts(process), process["parts"], strict=True)
                if name.startswith(f"{label}.")
            ),
            None,
        )
        if part is None:
            return "sum"
        name, process = name.removeprefix(f"{part.get('name') or part['kind']}."), part
    return None if process is None else str(process["kind"])


def _list_learned(spec: ModelSpec) -> list[str]:
    return [request.name for request in learn_requests(spec.definition())]


def _find_written_value(spec: ModelSpec, name: str) -> Any:
    return collect_parameter_values(spec.definition()).get(name)


NOTHING = Carried({}, {}, {})
"""Result for a version that learns anew, to which no parameters are carried over."""


def carry_over_without_states(old: ModelSpec, new: ModelSpec, learned: Mapping[str, Any]) -> Carried:
    """Return the parameters carried over to a version that takes no states; none if the states have no map."""
    try:
        return carry_over_parameters([MigrationStep.forward(old, new)], learned)
    except UserError as error:
        return Carried({}, {}, dict.fromkeys(learned, error.message))


def list_retraining_changes(
    old: ModelSpec, new: ModelSpec, before: Mapping[str, Any], after: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Return the result of `list_parameter_changes` for a version that learns from history.

    after: learned parameters of the new version; None if it has not learned yet.
    """
    found = list_parameter_changes(old, new, before, after or {}, NOTHING, "from history")
    if after is None:
        for one in found:
            if one["to_learn"]:
                one |= {"after": None, "from": "is learned from history", "to_learn": False}
    return found


# Parameters in reports


def list_parameter_changes(
    old: ModelSpec,
    new: ModelSpec,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    carried: Carried,
    learned_how: str = "before",
) -> list[dict[str, Any]]:
    """Return every parameter of the two versions with its name, both values, and the origin of the new value.

    Args:
        old: spec of the first version.
        new: spec of the last version.
        before: learned parameters of the first version.
        after: learned parameters of the last version.
        carried: parameters that are carried over from the first version.
        learned_how: text that explains how the last version learned its other parameters.
    """
    was, now = _collect_values(old, before), _collect_values(new, after)
    found: list[dict[str, Any]] = []
    for name, value in now.items():
        origin = carried.names.get(name, name)
        learned = name in after
        if learned and carried.parameters.get(name) == after[name]:
            called = "" if origin == name else f" as {origin}"
            where = f"learned by version {old.version}{called}, carried over"
        elif learned:
            where = f"learned by version {new.version} {learned_how}"
        else:
            where = "the spec"
            if origin in before:
                where += f": not carried over, as {carried.given_up.get(origin, 'it is another one')}"
        found.append(
            {
                "name": name,
                "before": was.get(origin),
                "after": value,
                "from": where,
                "learned": learned,
                "to_learn": not learned and name in _list_learned(new),
            }
        )
    origins = {carried.names.get(name, name) for name in now}
    for name in (one for one in was if one not in origins):
        what = "learned, and given up" if name in before else "given up"
        reason = carried.given_up.get(name, f"version {new.version} has no such parameter")
        found.append(
            {"name": name, "before": was[name], "after": None, "from": f"{what}: {reason}"}
            | {"learned": False, "to_learn": False}
        )
    return found


def _collect_values(spec: ModelSpec, learned: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a model's parameters; for a mixture, only of the learned parameters."""
    shared = {name: value for name, value in learned.items() if name != GROUPS}
    found = {**collect_parameter_values(spec.definition(), shared), **shared}
    if GROUPS in learned:
        found[GROUPS] = f"{len(learned[GROUPS]['values']):,} of {', '.join(learned[GROUPS]['by'])}"
    return found


def format_parameters(model: str, changes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines with a table of all parameters before and after, and how to learn the missing parameters."""
    if not changes:
        return []
    cells = [
        (one["name"], format_value(one["before"]), format_value(one["after"]), str(one["from"]))
        for one in changes
    ]
    heads = ("parameter", "before", "after")
    widths = [max(len(head), *(len(row[i]) for row in cells)) for i, head in enumerate(heads)]
    lines = [
        f"{name:<{widths[0]}} {before:>{widths[1]}} {after:>{widths[2]}}  {where}"
        for name, before, after, where in [(*heads, "from"), *cells]
    ]
    missing = [str(one["name"]) for one in changes if one["to_learn"]]
    if missing:
        lines.append(
            f"not learned yet: {', '.join(missing)}; learn from history instead with `kalman-pipeline upgrade --model "
            f"{model} --mode retrain`"
        )
    return lines


def format_value(value: Any) -> str:
    """Return a parameter's value with few digits; `-` if there is no value."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return json.dumps(round_numbers(value, DIGITS))
