"""The parameters that a model has learned, read without Spark from its newest snapshot or a named snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import kalman
from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.report import format_count
from jobs.snapshots.manifests import GOOD, Manifest, read_manifests
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow
from jobs.storage.columns import parse_arrow_schema
from jobs.storage.table_rows import read_table
from jobs.storage.tables import SNAPSHOTS
from jobs.storage.warehouse import Tables

NONE = "none"
"""Value in place of a snapshot's name: use the parameter values in the spec."""
STATE = ("key", "state_index", "event_time", "mean", "covariance", "extras")
"""Columns of a snapshot's rows that a filter needs to continue from the state of a key."""


class LearnedParameters(NamedTuple):
    """The snapshot whose parameters apply; None if the values in the spec apply, for the `reason`."""

    manifest: Manifest | None
    reason: str | None = None

    @property
    def snapshot(self) -> str | None:
        """Return the snapshot's id."""
        return None if self.manifest is None else self.manifest.snapshot_id

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the learned parameters; an empty result means that the values in the spec apply."""
        return {} if self.manifest is None else self.manifest.parameters


class KeyParameters(NamedTuple):
    """The individual parameters of N keys: the texts of the keys, and the field `parameters` (p, N) of their states."""

    keys: pa.Array
    values: NDArray[np.float64]


def find_learned_parameters(root: str, spec: ModelSpec, wanted: str | None = None) -> LearnedParameters:
    """Return the parameters that a model has learned.

    Args:
        root: root of the warehouse.
        spec: spec of the model.
        wanted: a snapshot id; or `none` for the values in the spec; or None for the newest good snapshot of exactly
            this spec, where snapshots from which a stream can start are preferred to history-only snapshots.

    Raises:
        UserError: the named snapshot does not exist, has another spec, or cannot be read without Spark.
    """
    if wanted == NONE:
        return LearnedParameters(None, "as --snapshot none asks")
    try:
        found = read_manifests(Tables(root), spec.name)
    except UserError as error:
        if wanted is not None:
            raise
        return LearnedParameters(None, error.message)
    if wanted is not None:
        return LearnedParameters(_select_named(found, spec, wanted, root))
    fitting = [one for one in found if _is_fitting(one, spec)]
    if fitting:
        return LearnedParameters(max(fitting, key=attrgetter("preference")))
    others = len([one for one in found if one.status == GOOD])
    reason = f"no snapshot of version {spec.version} as the spec is now is in {root}"
    return LearnedParameters(None, f"{reason} ({others} are of others)" if others else reason)


def read_key_parameters(root: str, spec: ModelSpec, learned: LearnedParameters, width: int) -> KeyParameters:
    """Return the individual parameters of each key of a snapshot, `width` numbers per key.

    Raises:
        UserError: the snapshot's rows cannot be read, or rows are missing.
    """
    rows = read_snapshot_rows(root, spec, learned, ["key", "extras"])
    count = rows.num_rows
    found = arrow.look_up_entries(rows["extras"], "parameters").combine_chunks()
    numbers = found.flatten()
    if found.null_count or len(numbers) != count * width:
        raise UserError(
            f"snapshot {learned.snapshot} has no {width} parameters of each key: it is of another model",
            RUN_FAILED,
        )
    values = arrow.to_numpy(numbers).reshape(count, width).T
    return KeyParameters(rows["key"].combine_chunks(), np.ascontiguousarray(values))


def read_snapshot_rows(
    root: str,
    spec: ModelSpec,
    learned: LearnedParameters,
    columns: Sequence[str],
    wanted: Sequence[str] = (),
) -> pa.Table:
    """Return columns of a snapshot's rows: all rows that the manifest counts, or the rows of the wanted keys.

    A snapshot may have no keys, because an upgrade without states drops all keys.

    Args:
        root: root of the warehouse.
        spec: spec of the model.
        learned: the learned parameters with the snapshot to read.
        columns: names of columns, from `STATE`.
        wanted: texts of the keys to read; empty means all keys.

    Raises:
        UserError: the rows cannot be read, or rows are missing.
    """
    manifest = learned.manifest
    assert manifest is not None
    nothing = parse_arrow_schema(SNAPSHOTS).empty_table().select(columns)
    if not manifest.key_count:
        return nothing
    partition = {"model": spec.name, "snapshot_id": manifest.snapshot_id}
    among = ("key", list(wanted)) if wanted else None
    try:
        rows = read_table(root, "snapshots", columns, partition, manifest.snapshots_version, among)
    except UserError:  # Delta has dropped the version, but the newest version has the same rows
        rows = read_table(root, "snapshots", columns, partition, None, among)
    found = nothing if rows is None else rows
    if not wanted and found.num_rows != manifest.key_count:
        raise UserError(
            f"snapshot {learned.snapshot} is damaged: it has {format_count(found.num_rows, 'key')}, where "
            f"its manifest says "
            f"{manifest.key_count}: name another one, or pretrain again",
            RUN_FAILED,
        )
    return found


def _is_fitting(one: Manifest, spec: ModelSpec) -> bool:
    if one.status != GOOD or one.fingerprint != spec.fingerprint():
        return False
    try:
        kalman.build(spec.definition(), one.parameters)
    except kalman.ModelError:
        return False
    return True


def _select_named(found: list[Manifest], spec: ModelSpec, wanted: str, root: str) -> Manifest:
    one = next((each for each in found if each.snapshot_id == wanted), None)
    if one is None or one.status != GOOD:
        known = [
            each.snapshot_id
            for each in sorted(found, key=attrgetter("preference"))
            if _is_fitting(each, spec)
        ][-3:]
        have = f"it has {', '.join(known)}" if known else "it has none of the spec as it is now"
        raise UserError(f"--snapshot {wanted}: model {spec.name} has no such snapshot in {root} ({have})")
    if not _is_fitting(one, spec):
        raise UserError(
            f"--snapshot {wanted}: it is of version {one.model_version} of {spec.name} as its spec was then, and "
            f"the parameters of that model may not fit the spec of version {spec.version} as it is now: name a "
            f"snapshot of this spec, or migrate it (`kalman-pipeline migrate --model {spec.name}`)"
        )
    return one
