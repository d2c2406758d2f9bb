"""The id of a snapshot that `pretrain` makes, and the source position that the snapshot reflects.

The id contains the id of the measurements table, because a table that replaces another one has the same name.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from jobs.batch.batch_filter import Interval
from jobs.lineage.generations import DeployedModel
from jobs.snapshots.manifests import record
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.positions import (
    CommitMark,
    Cut,
    build_delta_position,
    build_topic_position,
    commit_mark,
    find_landed_position,
)

if TYPE_CHECKING:
    from jobs.lineage.inputs_table import Version
    from jobs.specs.sections import Inputs


class TableVersion(NamedTuple):
    """A version of a measurements table: the table's id, and the mark of the version's commit if known."""

    table: str
    mark: CommitMark | None

    @classmethod
    def of(cls, warehouse: Warehouse, table: str, version: int) -> Self:
        """Return the ids of a version of a table."""
        return cls(warehouse.table_id(table), commit_mark(warehouse, table, version))

    @property
    def ids(self) -> tuple[str, str | None]:
        """Return the id of the table and the id of the commit."""
        return self.table, self.mark and self.mark.id


def find_earlier_id(warehouse: Warehouse, snapshot_id: str, now: TableVersion) -> str | None:
    """Return the id that an earlier release gave a snapshot; None if the snapshot belongs to another table or commit.

    The id of an earlier release does not name a commit, but a snapshot that is older than the commit belongs to another
    one.
    """
    found = record(warehouse, snapshot_id)
    if found is None or found.position.get("id", now.table) != now.table:
        return None
    if found.position.get("commit") not in (None, now.ids[1]):
        return None
    made, landed = found.committed_at, now.mark and now.mark.at
    return None if made is not None and landed is not None and made < landed else snapshot_id


def snapshot_id(
    spec: ModelSpec,
    table: str,
    cut: Cut,
    window: Interval,
    version: Version | None = None,
    of_table: TableVersion | None = None,
) -> str:
    """Return the id of a snapshot: a digest of everything that decides its content.

    of_table: the version of the table; None gives the id of earlier releases, which did not distinguish tables of the
    same name.
    """
    inputs = {
        "fingerprint": spec.fingerprint(),
        "learn": spec.learn and spec.learn.model_dump(exclude=spec.learn.left_out),
        "table": table,
        "version": cut.version,
        "before": cut.before,
        **({} if of_table is None else {"of": of_table.ids}),
        **({} if cut.place is None else {"place": cut.place}),
        "window": [window.first, window.last] if spec.learn else None,
        **({} if spec.inputs is None or version is None else _describe_inputs(spec.inputs, version)),
    }
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    return f"{spec.name}-v{spec.version}-{cut.version}-{digest[:10]}"


def _describe_inputs(inputs: Inputs, version: Version) -> dict[str, Any]:
    """Return the part of a snapshot's id that identifies the inputs of its keys."""
    return {"inputs": inputs.model_dump(), "inputs_version": version._asdict()}


def find_position(
    model: DeployedModel[Warehouse], table: str, version: int, of_table: TableVersion
) -> dict[str, Any]:
    """Return the position in the model's source that corresponds to a version of the measurements."""
    if model.spec.streamed_source is None:
        return build_delta_position(table, version, *of_table.ids)
    topic = model.spec.streamed_source.topic
    landed = find_landed_position(model.warehouse, table, topic, version) or build_topic_position(topic, {})
    return {**landed, "measurements": version}
