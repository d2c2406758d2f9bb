"""Refuse upgrades that would count rows twice, or not at all: to another source, or to other keys while rows wait."""

from __future__ import annotations

from jobs import choice, compatibility, generations
from jobs.errors import UserError
from jobs.generations import Generation
from jobs.spec import ModelSpec
from jobs.tables import Warehouse, measurements
from jobs.versions import known_versions, path_between


def refuse_other_source(warehouse: Warehouse, spec: ModelSpec, live: Generation) -> None:
    """Refuse a version that reads another source, as the state's position is one in the old source.

    Raises:
        UserError: it does.
    """
    made = compatibility.made_generation(warehouse, live, choice.origin(warehouse, live))
    other = compatibility.other_source(made, spec)
    if other is not None:
        raise UserError(f"{spec.name} cannot be upgraded to version {spec.version}: {other}")


def refuse_other_keys(warehouse: Warehouse, spec: ModelSpec, live: Generation, shadow: bool) -> None:
    """Refuse a version with other keys in shadow, where it would take in the same rows, and while old rows wait.

    Raises:
        UserError: it has, and would.
    """
    known = known_versions(warehouse, spec)
    known[live.model_version] = choice.origin(warehouse, live).model_spec()
    steps = path_between(known, live.model_version, spec.version)
    if not any(step.keys is not None for step in steps):
        return
    if shadow:
        raise UserError(
            f"version {spec.version} of {spec.name} has other keys, so it cannot take in the same rows in shadow: let "
            f"version {live.model_version} take in all that has its keys, stop it, and run `kalman-pipeline upgrade "
            f"--model {spec.name} --mode stop-start`"
        )
    newest = warehouse.latest_version(measurements(spec.name))
    if live.topic is None and generations.reached(warehouse, live) < newest:
        raise UserError(
            f"rows with the keys of version {live.model_version} have landed that {live.generation} has not taken in: "
            f"run `kalman-pipeline stream --model {spec.name}` first"
        )
