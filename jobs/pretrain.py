"""Pretrain a model in batch: learn its parameters, filter every key to its latest state, commit a snapshot.

The snapshot's id is made of all that decides its content, so a run that is tried again gives the same snapshot and one
that has been committed is found. Killed at any moment before the manifest is committed, nothing is visible.
"""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any, cast

from jobs.core.errors import UserError
from jobs.core.progress import Progress
from jobs.core.report import Report, plural
from jobs.core.settings import Settings
from jobs.observability.verb_profile import VerbProfiler
from jobs.specs import sections
from jobs.specs.loading import load_spec
from jobs.specs.model_spec import ModelSpec
from jobs.training import new_keys
from jobs.training.pretraining import snapshot_at
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.positions import Cut, check_version, cut_at, parse_time, said
from jobs.warehouse.tables import need_measurements
from kalman.models.groups import GROUPS

if TYPE_CHECKING:
    from jobs.snapshots.manifests import Manifest
    from jobs.training.learning import Learned
    from jobs.training.new_keys import Offer


def run(
    settings: Settings,
    model: str,
    to_version: int | None = None,
    as_of: str | None = None,
    learn_from: str | None = None,
    learn_to: str | None = None,
    history: bool = False,
    profile: bool = False,
) -> Report:
    """Pretrain a model on its measurements up to a position and commit a snapshot.

    Args:
        settings: of the command.
        model: name or path of its spec.
        to_version: the position, a version of the measurements table; by default the newest.
        as_of: only what happened before this event time; the position is found from it.
        learn_from: learn from rows at or after this event time; by default from the spec's window.
        learn_to: learn from rows before this event time; by default up to the position.
        history: only the history that has landed for new keys, with the parameters that streams run with.
        profile: report where the time went.

    Raises:
        UserError: no measurements, no such version, nothing to learn from.
    """
    from jobs.spark.conf import short_rows_conf
    from jobs.spark.session import spark_session
    from jobs.training.learning import Window

    started, profiler = time.monotonic(), VerbProfiler(profile)
    spec = load_spec(model, settings.models, deep=True)
    before = None if as_of is None else parse_time(as_of, "--as-of")
    window = Window(
        None if learn_from is None else parse_time(learn_from, "--learn-from"),
        None if learn_to is None else parse_time(learn_to, "--learn-to"),
    )
    if window.first is not None and window.last is not None and window.first >= window.last:
        raise UserError("--learn-from must be before --learn-to")
    if history and (before, window.first, window.last) != (None, None, None):
        raise UserError("--history learns nothing and takes all history: give at most --to-version beside it")
    spark = spark_session(settings, f"pretrain {spec.name}", short_rows_conf())
    warehouse = Warehouse(spark, settings.warehouse)
    table = need_measurements(warehouse, spec.name)
    if history:
        with Progress(f"pretrain {spec.name}", None, quiet=settings.quiet) as progress:
            offers = new_keys.only_history(warehouse, spec, to_version, progress.note)
        return profiler.added_to(_offered(spec, offers, time.monotonic() - started))
    latest = check_version(warehouse, table, to_version)
    cut = Cut(latest, None) if before is None else cut_at(warehouse, table, latest, before)
    with Progress(f"pretrain {spec.name}", None, quiet=settings.quiet) as progress:
        manifest, learned, made = snapshot_at(warehouse, spec, table, cut, window, progress)
        offers = []
        if spec.stream.new_keys == sections.PRETRAINED and cut.before is None:
            offers = new_keys.offer(warehouse, spec, table, cut.version, progress.note)
    return profiler.added_to(_report(spec, manifest, learned, made, offers, time.monotonic() - started))


def _offered(spec: ModelSpec, offers: list[Offer], seconds: float) -> Report:
    return Report(
        [*new_keys.lines(offers), f"{seconds:.1f} s"],
        {
            "model": spec.name,
            "model_version": spec.version,
            "snapshots": [one.manifest.snapshot_id for one in offers],
            "keys": sum(one.manifest.key_count for one in offers),
            "rows": sum(one.manifest.rows for one in offers),
            "keys_offered": sum(one.keys for one in offers),
            "seconds": seconds,
        },
    )


def _report(
    spec: ModelSpec,
    manifest: Manifest,
    learned: Learned | None,
    made: bool,
    offers: list[Offer],
    seconds: float,
) -> Report:
    place = said(manifest.position)
    if manifest.cut is not None:
        place += f", before {manifest.cut:%Y-%m-%d %H:%M} UTC (history only: a stream cannot start from it)"
    lines = [
        f"snapshot {manifest.snapshot_id}: {plural(manifest.key_count, 'key')}, "
        f"{plural(manifest.rows, 'row')}, {place}"
    ]
    waiting = 0 if manifest.waiting is None else int(manifest.waiting["rows"])
    if waiting:
        lines.append(f"waiting for the watermark: {plural(waiting, 'row')}")
    if learned is not None:
        values = ", ".join(
            f"{name} = {json.dumps(_rounded(value, 6))}" + _error(learned, name)
            for name, value in learned.parameters.items()
            if name != GROUPS
        )
        end = "converged" if learned.converged else "stopped before it converged"
        lines.append(f"learned {values} from {learned.rows:,} rows ({learned.iterations} iterations, {end})")
        if learned.groups is not None:
            ended = f"{int(learned.groups.result.converged.sum()):,} converged"
            lines.append(
                f"and for each of {len(learned.groups.values):,} groups of {', '.join(learned.groups.by)} ({ended})"
            )
        if learned.held_out is not None:
            lines.append(f"log-likelihood of rows kept aside: {learned.held_out:.4f} a row")
    inputs = manifest.inputs
    if inputs is not None:
        lines.append(f"inputs of {inputs['table']} version {inputs['version']}")
        if inputs["left_out"]:
            lines.append(
                f"left out {inputs['left_out']:,} rows whose keys are not in it: they stay among the measurements, and "
                f"are in the next snapshot once their keys are in the table"
            )
    if not made:
        lines.append("it had been committed before: the same inputs give the same snapshot")
    lines += new_keys.lines(offers)
    lines.append(f"{seconds:.1f} s")
    return Report(
        lines,
        {
            "model": spec.name,
            "model_version": spec.version,
            "made": made,
            "keys_offered": sum(one.keys for one in offers),
            "snapshot": manifest.snapshot_id,
            "keys": manifest.key_count,
            "rows": manifest.rows,
            "waiting": waiting,
            "version": manifest.version,
            "cut": manifest.cut,
            "inputs": inputs,
            "parameters": manifest.parameters,
            "standard_errors": None
            if learned is None or learned.errors is None
            else _rounded(learned.errors, 17),
            "log_likelihood": None if learned is None else learned.log_likelihood,
            "converged": None if learned is None else learned.converged,
            "held_out": None if learned is None else learned.held_out,
            "seconds": seconds,
        },
    )


def _error(learned: Learned, name: str) -> str:
    """Return what to write behind a parameter of its standard error."""
    if learned.errors is None or name not in learned.errors:
        return ""
    return f" (standard error {json.dumps(_rounded(learned.errors[name], 3))})"


def _rounded(value: Any, digits: int) -> Any:
    """Return numbers with so many digits, and None for those that are not known."""
    if isinstance(value, dict):
        return {name: _rounded(item, digits) for name, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_rounded(item, digits) for item in cast(list[Any], value)]
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


if __name__ == "__main__":
    from jobs.cli import main

    main("pretrain")
