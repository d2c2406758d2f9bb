"""With which parameters a run filters, and from which states: those of a snapshot that reflects just the rows before.

A snapshot's states are taken only if they are what a pass over the rows before gives: it was made in batch, reflects
exactly the rows before an event time, and no such row has landed since. Otherwise the run reads the rows before its
interval itself.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.batch.batch_filter import Interval
from jobs.batch.history_rows import HistoryRows
from jobs.core.errors import UserError
from jobs.lineage.model import DeployedModel
from jobs.snapshots import manifests
from jobs.snapshots.learned import NONE
from jobs.snapshots.manifests import GOOD, Manifest
from jobs.storage.positions import DELTA, is_in_table, read_commits, to_micros

if TYPE_CHECKING:
    from jobs.lineage.inputs_table import Version
    from jobs.spark.warehouse import Warehouse
    from jobs.storage.positions import Commit


class HistoryStart(NamedTuple):
    """The snapshot whose parameters a run takes, None: the spec's values; and since when it reads rows.

    before: the event time up to which the snapshot's states reflect all rows, and from which rows are read; None: the
    states are not taken, and all rows are read
    """

    manifest: Manifest | None
    before: int | None

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the learned parameters."""
        return {} if self.manifest is None else self.manifest.parameters

    @property
    def identity(self) -> list[Any]:
        """Return what tells this start from every other."""
        one = self.manifest
        return [None if one is None else [one.snapshot_id, one.checksum], self.before]


class StartRequest(NamedTuple):
    """What a run is asked: its rows and interval, a snapshot (`none`: the spec's values; None: the best one)."""

    rows: HistoryRows
    interval: Interval
    snapshot: str | None
    inputs: Version | None


def find_start(model: DeployedModel[Warehouse], asked: StartRequest) -> HistoryStart:
    """Return the start of a run.

    Raises:
        UserError: the named snapshot does not exist, or is of another spec.
    """
    if asked.snapshot == NONE:
        return HistoryStart(None, None)
    fitting = [
        one
        for one in manifests.read_manifests(model.warehouse, model.name)
        if one.status == GOOD and one.fingerprint == model.spec.fingerprint()
    ]
    if asked.snapshot is not None:
        fitting = [one for one in fitting if one.snapshot_id == asked.snapshot]
        if not fitting:
            raise UserError(
                f"--snapshot {asked.snapshot}: model {model.name} has no such snapshot of its spec as it is now: name "
                f"another one, or `none` for the spec's values"
            )
    if not fitting:
        return HistoryStart(None, None)
    clean = _clean(model, asked, fitting)
    if clean:
        before, newest = max(clean, key=lambda pair: (pair[0], pair[1].snapshots_version))
        return HistoryStart(newest, before)
    # As `filter` chooses: one that a stream could start from before one that is history only.
    best = max(fitting, key=attrgetter("preference"))
    return HistoryStart(best, None)


def _clean(
    model: DeployedModel[Warehouse], asked: StartRequest, fitting: list[Manifest]
) -> list[tuple[int, Manifest]]:
    """Return the snapshots whose states stand for all rows before the interval, each with the time up to which."""
    first = asked.interval.first
    if first is None or not asked.rows.measurements or asked.rows.version is None or model.spec.id_columns:
        return []  # an id may repeat that of a row before the snapshot's end, whose ids it does not keep
    landed = read_commits(model.warehouse, asked.rows.name)
    found = []
    for one in fitting:
        version = _find_batch_version(model, one, asked)
        before = None if version is None else _find_reflected_end(one, landed, version)
        if version is None or before is None or before > first:
            continue
        later = [each for each in landed if version < each.version <= asked.rows.version]
        if all(each.known and (each.first is None or each.first >= before) for each in later):
            found.append((before, one))
    return found


def _find_batch_version(model: DeployedModel[Warehouse], one: Manifest, asked: StartRequest) -> int | None:
    """Return up to which version of the measurements a batch pass has made a snapshot; None: it was not made so."""
    position = one.position
    if (
        one.generation is not None
        or one.parent is not None
        or one.without_state
        or position["source"] != DELTA
    ):
        return None
    if (
        position["table"] != asked.rows.name
        or position.get("id", asked.rows.identity[2]) != asked.rows.identity[2]
    ):
        return None
    if not is_in_table(model.warehouse, position) or int(position["version"]) > (asked.rows.version or 0):
        return None
    if model.spec.inputs is not None:
        newest, made = asked.inputs, one.inputs
        if newest is None or made is None or any(made.get(k) != v for k, v in newest._asdict().items()):
            return None
    return int(position["version"])


def _find_reflected_end(one: Manifest, landed: list[Commit], version: int) -> int | None:
    """Return the event time such that a snapshot reflects the rows before it, and no others; None: not known."""
    if one.cut is not None:
        return to_micros(one.cut)
    if one.waiting is not None and one.waiting.get("rows"):
        return one.waiting["watermark"]
    upto = [each for each in landed if each.version <= version]
    if not upto or upto[0].version != 0 or not all(each.known for each in upto):
        return None
    return max((each.last + 1 for each in upto if each.last is not None), default=None)
