"""What runs in the simulated world: the project's commands, each as a function that a process calls.

The real functions are called. A command's own module in `jobs/` would only start Spark, read options and print.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from jobs.batch import new_keys
from jobs.batch.batch_filter import Interval
from jobs.batch.pretraining import pretrain_snapshot
from jobs.core.progress import Progress
from jobs.core.settings import Settings
from jobs.insight.maintenance import Maintenance
from jobs.landing.file_landing import FileLanding, land_all
from jobs.landing.rejected import held
from jobs.landing.rejected.replay import replay as replay_rows
from jobs.lineage import generations, promotion
from jobs.lineage.generations import DeployedModel
from jobs.snapshots.manifests import Manifest
from jobs.snapshots.store import find_whole, verify, write
from jobs.spark.conf import STATE_FORMAT, build_spark_conf
from jobs.spark.warehouse import Warehouse
from jobs.specs.loading import load_spec
from jobs.specs.model_spec import ModelSpec
from jobs.storage.positions import Cut
from jobs.storage.tables import measurements
from jobs.streaming.driver import Driver
from jobs.streaming.exporting import export
from jobs.upgrades import context, modes
from jobs.upgrades import modes as replacing
from jobs.upgrades.context import UpgradeContext
from tests.protocol import world
from tests.protocol.memory_delta import Session
from tests.protocol.memory_state import FORMER
from tests.protocol.memory_stream import StreamFrame
from tests.protocol.standing_in import Event

MODEL = "m"

SPEC = """
name: m
version: {version}
key: [k]
time: t
time_format: epoch_seconds
measurement: [y]
filter: linear
states: [level]
process: {{kind: random_walk, variance: {variance}}}
observation: {{R: [[1.0]]}}
initial: {{mean: [0.0], covariance: [[1.0e4]]}}
{more}
"""


@cache
def spec_of(version: int = 1, more: str = "") -> ModelSpec:
    """Return the model's spec at a version, with further sections."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{MODEL}.yaml")
        path.write_text(SPEC.format(version=version, variance=float(version), more=more))
        return load_spec(str(path))


@cache
def session_settings() -> dict[str, str]:
    """Return the settings of every session."""
    return build_spark_conf()


def warehouse() -> Warehouse:
    """Return the warehouse as a new process sees it."""
    session: Any = Session(StreamFrame.load)
    for name, value in session_settings().items():
        session.conf.set(name, value)
    handle = SimpleNamespace(current=lambda: SimpleNamespace(pid=lambda: 1))
    session._jvm = SimpleNamespace(java=SimpleNamespace(lang=SimpleNamespace(ProcessHandle=handle)))
    return Warehouse(session, world.ROOT)


SETTINGS = Settings(world.ROOT, Path("."), "local", quiet=True)


def quiet() -> Progress:
    """Return a display of progress that shows nothing."""
    return Progress("", None, quiet=True)


def stream(
    spec: ModelSpec | None = None,
    adopt: str | None = None,
    name: str | None = None,
    seconds: float | None = None,
) -> None:
    """Drive a generation until it has caught up, as `stream` does."""
    stop: Any = Event()
    driver = Driver(
        SETTINGS, DeployedModel(spec or spec_of(), warehouse()), seconds, stop, display=lambda model: quiet()
    )
    driver.drive(adopt, name)


def former_stream(spec: ModelSpec) -> None:
    """Drive the live generation as a release before 0.3.0 does: in format 1, and without a hand-over."""
    stop: Any = Event()
    here = warehouse()
    here.spark.conf.set(STATE_FORMAT, "1")
    former = FORMER.set(True)
    try:
        Driver(SETTINGS, DeployedModel(spec, here), None, stop, display=lambda model: quiet()).drive()
    finally:
        FORMER.reset(former)


def stopped_stream(spec: ModelSpec | None = None) -> None:
    """Drive the live generation, and stop before its first micro-batch: as `stop` right after the start."""
    stop: Any = Event()
    stop.set()
    Driver(
        SETTINGS, DeployedModel(spec or spec_of(), warehouse()), None, stop, display=lambda model: quiet()
    ).drive()


def ingest(path: str, spec: ModelSpec | None = None) -> None:
    """Land a file, as `ingest` does."""
    _land(path, spec or spec_of(), history=False)


def _land(path: str, spec: ModelSpec, history: bool) -> None:
    list(land_all(FileLanding(warehouse(), spec, history=history), [path]))


def pretrain(spec: ModelSpec | None = None, version: int | None = None) -> str:
    """Commit a snapshot of the measurements, as `pretrain` does; return its name."""
    here, chosen = warehouse(), spec or spec_of()
    table = measurements(MODEL)
    cut = Cut(here.latest_version(table) if version is None else version, None)
    manifest = pretrain_snapshot(
        DeployedModel(chosen, here), table, cut, Interval(None, None), quiet()
    ).manifest
    return manifest.snapshot_id


def export_state() -> str:
    """Export the live generation's state, as `export` does."""
    here = warehouse()
    return export(DeployedModel(spec_of(), here), generations.read_named(here, MODEL))[0].snapshot_id


def promote(name: str | None = None) -> None:
    """Promote a shadow."""
    promotion.promote(warehouse(), MODEL, name)


def rollback(name: str | None = None) -> None:
    """Roll back to the generation before."""
    promotion.roll_back(warehouse(), MODEL, name)


def retire(name: str | None = None) -> None:
    """Retire a shadow."""
    promotion.retire(warehouse(), MODEL, name)


class _Maintenance(Maintenance):
    """Without the steps that change no rows (compaction, VACUUM, comments) or only those of progress and `live`."""

    def _compact_and_vacuum(self) -> None:
        return

    def _remove_progress(self) -> None:
        return

    def _describe_tables(self) -> None:
        return


def maintain(spec: ModelSpec | None = None) -> None:
    """Remove what the retention plan allows, as `maintain --estimates` does."""
    _Maintenance(DeployedModel(spec or spec_of(), warehouse()), dry=False, with_estimates=True).run()


def replay(spec: ModelSpec | None = None) -> None:
    """Replay everything in quarantine that fits now, as `quarantine replay` does."""
    here = warehouse()
    if held.prepare_quarantine(here):
        replay_rows(here, spec or spec_of(), held.list_quarantined_rows(held.read_rejected(here, MODEL)))


def change_inputs() -> None:
    """Commit another version of the table of inputs, as any tool may do."""
    here = warehouse()
    here.create(f"inputs/{MODEL}", "k string, gain double")
    table: Any = here.read(f"inputs/{MODEL}")
    rows: Any = here.spark.createDataFrame([{"k": "a", "gain": 1.0}], table.schema)
    here.append(rows, f"inputs/{MODEL}")


def offer(spec: ModelSpec) -> None:
    """Offer the states of new keys to running streams, as `pretrain --history` does."""
    new_keys.offer_history_states(DeployedModel(spec, warehouse()), None, lambda text: None)


def land_history(path: str, spec: ModelSpec) -> None:
    """Land a file as history of new keys, as `ingest --history` does."""
    _land(path, spec, history=True)


def migrated(given: UpgradeContext) -> tuple[Manifest, dict[str, Any]]:
    """Stand in for `migrated`: really export and write a snapshot, with a state map that keeps every state."""
    source, _ = export(given.model, given.live)
    identity = f"{source.snapshot_id}-to-v{given.model.spec.version}"
    found = find_whole(given.model.warehouse, identity)
    if found is not None:
        return found, {"parameters": []}
    made = replace(
        source,
        snapshot_id=identity,
        model_version=given.model.spec.version,
        fingerprint=given.model.spec.fingerprint(),
        spec=given.model.spec.format_stored_text(),
        parent=source.snapshot_id,
        committed_at=None,
    )
    return write(given.model.warehouse, made, verify(given.model.warehouse, source)), {"parameters": []}


def upgrade(mode: str, drain: bool = False, to: int = 2) -> None:
    """Upgrade to a version, as `upgrade` does; the comparison of a shadow always comes out well."""
    here = warehouse()
    live = generations.read_named(here, MODEL)
    good: Any = SimpleNamespace(good=True, reasons=[], numbers={}, answer="better", rows_needed=None)
    given = UpgradeContext(
        SETTINGS,
        DeployedModel(spec_of(to), here),
        live,
        quiet(),
        lambda *arguments: (good, "report"),
        drain=drain,
    )
    with contextlib.ExitStack() as stack:
        for module in (modes, replacing, context):
            for name, instead in (
                ("migrate_live_state", migrated),
                ("find_migration_steps", lambda context: []),
                ("refuse_other_keys", lambda *arguments, **options: None),
                ("format_comparison", lambda comparison: []),
            ):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, instead))
        modes.upgrade(given, mode)
