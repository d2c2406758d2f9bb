"""Refuse upgrades that would count rows twice, or not at all: to another source, or to other keys while rows wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.progress import Progress
from jobs.core.settings import Settings
from jobs.ingestion.topics import land
from jobs.lineage import compatibility, generations, start_point
from jobs.lineage.generations import Generation
from jobs.lineage.leases import stream_lock
from jobs.lineage.pausing import exclusive_stream
from jobs.lineage.promotion import Behind, promote
from jobs.lineage.start_point import origin
from jobs.migration.apply import rekeyed_lines, table_of
from jobs.migration.migrating import migrate
from jobs.migration.versions import known_versions, path_between
from jobs.snapshots.manifests import find
from jobs.snapshots.state_rows import STATE_ROWS
from jobs.snapshots.store import write
from jobs.specs.model_spec import ModelSpec
from jobs.streaming.driver import Driver
from jobs.streaming.exporting import export
from jobs.training.learning import Window
from jobs.training.pretraining import snapshot_at
from jobs.upgrades import repartition, upgrading
from jobs.upgrades.comparison.decision import lines_of
from jobs.upgrades.comparison.report import written
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.positions import Cut, said
from jobs.warehouse.tables import measurements

if TYPE_CHECKING:
    from jobs.snapshots.manifests import Manifest

BLUE_GREEN, STOP_START, RETRAIN, STATELESS = "blue-green", "stop-start", "retrain", "stateless"

REPARTITION = "repartition"

CATCH_UPS = 1
"""How often a shadow is driven again before the comparison, after a live generation that runs ahead meanwhile."""

LEVEL_SECONDS, LEVEL_POLL_SECONDS = 300.0, 0.2
"""How long a shadow may run beside a live generation to which rows keep coming, before it is as far."""

MODES = (BLUE_GREEN, STOP_START, RETRAIN, STATELESS, REPARTITION)


def refuse_other_source(warehouse: Warehouse, spec: ModelSpec, live: Generation) -> None:
    """Refuse a version that reads another source, as the state's position is one in the old source.

    Raises:
        UserError: it does.
    """
    made = compatibility.generation_built_with(warehouse, live, start_point.origin(warehouse, live))
    other = compatibility.other_source(made, spec)
    if other is not None:
        raise UserError(f"{spec.name} cannot be upgraded to version {spec.version}: {other}")


def refuse_other_keys(warehouse: Warehouse, spec: ModelSpec, live: Generation, shadow: bool) -> None:
    """Refuse a version with other keys in shadow, where it would take in the same rows, and while old rows wait.

    Raises:
        UserError: it has, and would.
    """
    known = known_versions(warehouse, spec)
    known[live.model_version] = start_point.origin(warehouse, live).model_spec()
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
    if live.topic is None and generations.progress_rank(warehouse, live) < newest:
        raise UserError(
            f"rows with the keys of version {live.model_version} have landed that {live.generation} has not taken in: "
            f"run `kalman-pipeline stream --model {spec.name}` first"
        )


class Upgrade:
    """One run of an upgrade."""

    def __init__(
        self,
        settings: Settings,
        warehouse: Warehouse,
        spec: ModelSpec,
        mode: str,
        progress: Progress,
        partitions: int | None = None,
        drain: bool = False,
    ) -> None:
        self.settings, self.warehouse, self.spec = settings, warehouse, spec
        self.mode, self.progress, self.partitions = mode, progress, partitions
        self.drain = drain

    def run(self, dry_run: bool, promote: bool) -> tuple[list[str], dict[str, Any]]:
        live = generations.named(self.warehouse, self.spec.name)
        if self.mode == REPARTITION:
            return self._repartition(live, dry_run, promote)
        if live.fingerprint == self.spec.fingerprint():
            said = f"generation {live.generation} is of version {live.model_version} already: nothing to do"
            return [said], {"generation": live.generation, "promoted": False, "upgraded": False}
        if live.model_version >= self.spec.version:
            raise UserError(
                f"the live generation {live.generation} is of version {live.model_version} and the spec of version "
                f"{self.spec.version}: raise the spec's version, or roll back (kalman-pipeline rollback)"
            )
        if self.mode != RETRAIN:
            upgrading.refuse_other_source(self.warehouse, self.spec, live)
        if dry_run:
            self._refuse_other_keys(live)
            return self._dry_run(live)
        if self.mode == BLUE_GREEN:
            self._refuse_other_keys(live)
            return self._prove(live, self._shadow(live), promote)
        with self._alone(live):
            self._refuse_other_keys(live)
            return self._at_once(live)

    def _refuse_other_keys(self, live: Generation) -> None:
        if self.mode in (BLUE_GREEN, STOP_START):
            upgrading.refuse_other_keys(self.warehouse, self.spec, live, self.mode == BLUE_GREEN)

    def _alone(self, live: Generation) -> AbstractContextManager[None]:
        """Hold the stream, which nobody drives."""
        why = f"an upgrade to version {self.spec.version} ({self.mode})"
        return exclusive_stream(self.warehouse, live, why, self.drain, self.progress.note)

    def _repartition(
        self, live: Generation, dry_run: bool, promote: bool
    ) -> tuple[list[str], dict[str, Any]]:
        """Hand the state over to a generation of the same version in the layout that is asked for."""
        layout = repartition.wanted(self.warehouse, self.spec, live, self.partitions)
        if not layout.reasons:
            there = f"{live.generation} has {live.partitions} state partitions of {live.blocks} blocks, as asked for"
            return [f"{there}: nothing to do"], {
                "generation": live.generation,
                "promoted": False,
                "upgraded": False,
                "partitions": live.partitions,
                "blocks": live.blocks,
            }
        if dry_run:
            return [*layout.reasons, "dry run: nothing was written"], {"dry_run": True}
        if not self.drain and repartition.is_driven(live):
            note = self.progress.note
            shadow = repartition.relayout(self.warehouse, live, layout, generations.SHADOW, note)
            lines, found = self._prove(live, shadow, promote)
            return [*layout.reasons, *lines], {
                **found,
                "partitions": shadow.partitions,
                "blocks": shadow.blocks,
            }
        with self._alone(live):
            made = repartition.relayout(self.warehouse, live, layout, told=self.progress.note)
        return [
            *layout.reasons,
            f"generation {made.generation} is live, with {made.partitions} state partitions of {made.blocks} blocks, "
            f"from snapshot {made.snapshot_id}; {live.generation} is retired",
            f"go on with `kalman-pipeline stream --model {self.spec.name}`",
        ], {
            "generation": made.generation,
            "snapshot": made.snapshot_id,
            "retired": live.generation,
            "partitions": made.partitions,
            "blocks": made.blocks,
            "upgraded": True,
            "promoted": True,
        }

    def _dry_run(self, live: Generation) -> tuple[list[str], dict[str, Any]]:
        if self.mode in (RETRAIN, STATELESS):
            said = f"dry run: version {self.spec.version} would begin without the states of {live.generation}"
            return [said], {"dry_run": True}
        manifest, change = self._migrated(live, dry_run=True)
        lines = [f"{live.generation} (version {live.model_version}) to version {self.spec.version}"]
        if manifest is not None:
            return [*lines, f"migrated before: snapshot {manifest.snapshot_id}"], {"dry_run": True}
        return [
            *lines,
            *(f"  {line}" for line in table_of(change)),
            *rekeyed_lines(change),
            "dry run: nothing was written but the export",
        ], {
            "dry_run": True,
            "change": change,
        }

    def _at_once(self, live: Generation) -> tuple[list[str], dict[str, Any]]:
        """Replace a generation that nobody drives; the next `stream` goes on with the new one."""
        manifest = self._snapshot(live)
        made = start_point.begin(self.warehouse, self.spec, manifest, behind=live)
        return [
            f"generation {made.generation} of version {made.model_version} is live, from snapshot "
            f"{manifest.snapshot_id} ({said(manifest.position)}); {live.generation} is retired",
            f"go on with `kalman-pipeline stream --model {self.spec.name}`",
        ], {
            "generation": made.generation,
            "snapshot": manifest.snapshot_id,
            "retired": live.generation,
            "upgraded": True,
            "promoted": True,
        }

    def _prove(self, live: Generation, shadow: Generation, promote: bool) -> tuple[list[str], dict[str, Any]]:
        """Let a shadow catch up, compare it with the live generation, and promote it if it is good."""
        self.progress.note(f"{shadow.generation} catches up in shadow")
        caught_up = self._drive(shadow)
        for _ in range(CATCH_UPS):  # the live one may be running
            if self._level(live, shadow):
                break
            caught_up += self._drive(shadow)
        self.progress.note(f"comparing {shadow.generation} with {live.generation}")
        found, report = written(self.warehouse, self.spec, live, shadow)
        lines = [
            f"{shadow.generation} (version {shadow.model_version}) shadows {live.generation} (version "
            f"{live.model_version}) from snapshot {shadow.snapshot_id}; {caught_up:,} rows now",
            *lines_of(found),
            f"report: {report}",
        ]
        data: dict[str, Any] = {
            "generation": shadow.generation,
            "snapshot": shadow.snapshot_id,
            "comparison": found.numbers,
            "good": found.good,
            "reasons": found.reasons,
            "report": report,
            "upgraded": True,
            "promoted": False,
        }
        if not promote:
            return [*lines, f"promote it with `kalman-pipeline promote --model {self.spec.name}`"], data
        if not found.good:
            raise UserError(
                "; ".join([f"{shadow.generation} was not promoted", *found.reasons])
                + f". It stays in shadow: `kalman-pipeline promote --model {self.spec.name}` promotes it nevertheless, "
                f"and `retire` gives it up; report: {report}",
                RUN_FAILED,
            )
        self._take_over(live, shadow)
        return [*lines, f"promoted {shadow.generation}; {live.generation} is retired"], {
            **data,
            "promoted": True,
        }

    def _shadow(self, live: Generation) -> Generation:
        """Return the shadow of this upgrade: the one that is there, or a new one."""
        for one in generations.all_of(self.warehouse, self.spec.name):
            mine = one.fingerprint == self.spec.fingerprint() and one.parent == live.generation
            if one.status == generations.SHADOW and mine:
                return one
        return start_point.begin(
            self.warehouse, self.spec, self._snapshot(live), generations.SHADOW, behind=live
        )

    def _snapshot(self, live: Generation) -> Manifest:
        """Return the snapshot from which the new version begins."""
        if self.mode == RETRAIN:
            return self._pretrained(live)
        if self.mode == STATELESS:
            return self._empty(live)
        manifest, _ = self._migrated(live)
        assert manifest is not None
        return manifest

    def _migrated(self, live: Generation, dry_run: bool = False) -> tuple[Manifest | None, dict[str, Any]]:
        source, _ = export(self.warehouse, live, told=self.progress.note)
        known = known_versions(self.warehouse, self.spec)
        note = self.progress.note
        manifest, change, _ = migrate(self.warehouse, source, known, self.spec.version, dry_run, note)
        return manifest, change

    def _pretrained(self, live: Generation) -> Manifest:
        """Train the new version on history up to where the old one has come, so that it goes on right behind it."""
        table = measurements(self.spec.name)
        if live.topic is None:
            cut = Cut(generations.progress_rank(self.warehouse, live), None)
        else:
            # The stream may be ahead of what has landed: land the rest, and take it up to the stream's offsets.
            land(self.warehouse, self.spec)
            position = generations.position_of(self.warehouse, live)
            cut = Cut(self.warehouse.latest_version(table), None, position)
        manifest, _, _ = snapshot_at(self.warehouse, self.spec, table, cut, Window(None, None), self.progress)
        return manifest

    def _empty(self, live: Generation) -> Manifest:
        """Write a snapshot without any key, at where the old version has come."""

        version = generations.progress_rank(self.warehouse, live)
        identity = f"{self.spec.name}-v{self.spec.version}-{version}-empty"
        found = find(self.warehouse, identity)
        if found is not None:
            return found
        made = replace(
            origin(self.warehouse, live),
            snapshot_id=identity,
            model_version=self.spec.version,
            fingerprint=self.spec.fingerprint(),
            parameters={},
            spec=self.spec.model_dump_json(by_alias=True),
            position=generations.position_of(self.warehouse, live),
            cut=None,
            learn_from=None,
            learn_to=None,
            generation=None,
            batch_id=None,
            parent=None,
            committed_at=None,
        )
        nothing = self.warehouse.spark.createDataFrame(
            [], f"key string, {STATE_ROWS}".replace("event_time bigint", "event_time timestamp")
        )
        return write(self.warehouse, made, nothing)

    def _level(self, live: Generation, shadow: Generation) -> bool:
        """Tell if a shadow has come as far as the live generation."""
        reached = generations.progress_rank
        return reached(self.warehouse, shadow) >= reached(self.warehouse, live)

    def _take_over(self, live: Generation, shadow: Generation) -> None:
        """Promote a shadow. Where rows keep coming it runs beside the live one, and takes over as soon as it is level.

        Raises:
            UserError: it has not come level in `LEVEL_SECONDS`.
        """
        name = self.spec.name
        try:
            promote(self.warehouse, name, shadow.generation)
            return
        except Behind:
            self.progress.note(f"{shadow.generation} runs beside {live.generation} until it is level")
        deadline = time.monotonic() + LEVEL_SECONDS
        with self._running(shadow) as ended:
            while True:
                late = time.monotonic() > deadline
                if late or ended.wait(LEVEL_POLL_SECONDS) or self._level(live, shadow):
                    try:
                        promote(self.warehouse, name, shadow.generation)
                        return
                    except Behind:
                        if late or ended.is_set():
                            raise

    @contextmanager
    def _running(self, shadow: Generation) -> Iterator[threading.Event]:
        """Drive a shadow as fast as rows come, in a thread, until the end; yield what tells that it has ended before.

        Where that made the rest fail, what ended it is raised.
        """
        stop, ended = threading.Event(), threading.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                self._drive(shadow, 0.0, stop)
            except BaseException as error:
                failed.append(error)
            finally:
                ended.set()

        thread = threading.Thread(target=run, name=f"drive {shadow.generation}", daemon=True)
        thread.start()
        try:
            yield ended
        except Exception:
            if failed:
                raise failed[0] from None
            raise
        finally:
            stop.set()
            thread.join()

    def _drive(
        self, shadow: Generation, seconds: float | None = None, stop: threading.Event | None = None
    ) -> int:
        """Take a shadow to the newest measurements, or drive it until it is to stop; return the rows it estimated."""
        with stream_lock(self.settings.warehouse, self.spec.name, shadow.generation):
            driver = Driver(self.settings, self.warehouse, self.spec, seconds, stop or threading.Event())
            return int(driver.drive(name=shadow.generation).data["rows"])
