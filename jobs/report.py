"""Write the report on two generations of a model: a self-contained HTML file, and JSON.

They are `reports/<model>/<new generation>.html` and `.json` in the warehouse; the next report on the same generation
replaces them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.core.command import Model, command
from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.progress import Progress
from jobs.core.report import Report
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.lineage.generations import Generation
    from jobs.warehouse.delta import Warehouse


@command
def run(
    settings: Settings,
    model: Model,
    generation: Annotated[
        str | None,
        Option(help="The new one; by default the newest shadow, else the live one.", show_default=False),
    ] = None,
    against: Annotated[
        str | None,
        Option(help="The old one; by default the parent of the new one.", show_default=False),
    ] = None,
    snapshot: Annotated[
        str | None,
        Option(
            help="In place of --generation: the newest generation that began from this snapshot.",
            show_default=False,
        ),
    ] = None,
    history: Annotated[
        bool,
        Option(
            "--history",
            help="As the new one take the last run over history (or the one named by --generation), against the live "
            "generation.",
        ),
    ] = False,
) -> Report:
    """Compare two generations of a model, and write an HTML and a JSON report beside the tables.

    Raises:
        UserError: there are no two generations to compare.
    """
    from jobs.spark.conf import short_command_conf
    from jobs.spark.session import spark_session
    from jobs.specs.loading import load_spec
    from jobs.upgrades.comparison.decision import comparison_lines
    from jobs.upgrades.comparison.report import compare
    from jobs.warehouse.delta import Warehouse

    started = time.monotonic()
    if snapshot is not None and history:
        raise UserError("--history names a run, and --snapshot a generation: give one of them")
    if snapshot is not None and generation is not None:
        raise UserError(
            "--snapshot and --generation both say which generation is the new one: give one of them"
        )
    spec = load_spec(model, settings.models)
    warehouse = Warehouse(
        spark_session(settings, f"report {spec.name}", short_command_conf()), settings.warehouse
    )
    with Progress(f"report {spec.name}", None, quiet=settings.quiet) as progress:
        if history:
            new, old = _pair_with_history(warehouse, spec.name, generation, against)
        else:
            new, old = _pair(warehouse, spec.name, generation, against, snapshot)
        learned = {one.generation: _learned(warehouse, one) for one in (new, old)}
        progress.note(f"comparing {new.generation} with {old.generation}")
        comparison, page = compare(warehouse, spec, old, new)
    seconds = time.monotonic() - started
    return Report(
        [
            f"{new.generation} (version {new.model_version}) against {old.generation} (version {old.model_version})",
            *(f"parameters of {name}: {text}" for name, (text, _) in learned.items() if text),
            *comparison_lines(comparison),
            f"report: {page}",
            f"{seconds:.1f} s",
        ],
        {
            "model": spec.name,
            "generation": new.generation,
            "against": old.generation,
            "snapshots": {new.generation: new.snapshot_id, old.generation: old.snapshot_id},
            "parameters": {name: values for name, (_, values) in learned.items()},
            "good": comparison.good,
            "answer": comparison.answer,
            "reasons": comparison.reasons,
            "comparison": comparison.numbers,
            "report": page,
            "seconds": seconds,
        },
    )


def _learned(warehouse: Warehouse, generation: Generation) -> tuple[str, dict[str, Any]]:
    """Return what a report says of a generation's learned parameters, and these; nothing where it has none."""
    from jobs.migration.parameters import value_text
    from jobs.snapshots.manifests import record
    from kalman.models.groups import GROUPS

    manifest = record(warehouse, generation.snapshot_id)
    if manifest is None or not manifest.parameters:
        return "", {}
    shared = {name: value for name, value in manifest.parameters.items() if name != GROUPS}
    values = ", ".join(f"{name} = {value_text(value)}" for name, value in shared.items())
    learn = manifest.model_spec().learn
    whose = {"key": "; each key has its own", "group": "; each group has its own"}
    also = "" if learn is None else whose.get(learn.scope, "")
    return f"{values}{also}, of snapshot {generation.snapshot_id}", manifest.parameters


def _pair_with_history(
    warehouse: Warehouse, model: str, run: str | None, against: str | None
) -> tuple[Generation, Generation]:
    """Return a run over history as a generation, and the one to compare it with.

    Raises:
        UserError: there is no such run, or nothing is live.
    """
    from jobs.history.table import HistoryTable
    from jobs.lineage import generations
    from jobs.warehouse.tables import estimates_history

    runs = HistoryTable(warehouse, estimates_history(model)).runs()
    found = next((one for one in runs if run in (None, one.run)), None)
    if found is None:
        known = f"its last runs are {', '.join(one.run for one in runs[:3])}" if runs else "it has none"
        raise UserError(
            f"model {model} has no such run over its history ({known}): make one with "
            f"`kalman-pipeline estimate --model {model}`",
            RUN_FAILED,
        )
    old = generations.named(warehouse, model, against)
    new = generations.Generation(
        generation=found.run,
        model=model,
        model_version=found.model_version,
        fingerprint=found.fingerprint,
        snapshot_id=found.snapshot or "",
        checkpoint="",
        start_position={},
        partitions=0,
        blocks=0,
        status="history",
    )
    return new, old


def _pair(
    warehouse: Warehouse, model: str, generation: str | None, against: str | None, snapshot: str | None
) -> tuple[Generation, Generation]:
    from jobs.lineage import generations
    from jobs.warehouse.tables import estimates

    known = generations.all_of(warehouse, model)
    if not known or not warehouse.exists(estimates(model)):
        raise UserError(
            f"model {model} has no estimates to report on: start its stream with "
            f"`kalman-pipeline stream --model {model}`",
            RUN_FAILED,
        )
    shadows = [one for one in known if one.status == generations.SHADOW]
    if snapshot is not None:
        begun = [one for one in known if one.snapshot_id == snapshot]
        if not begun:
            have = ", ".join(f"{one.generation} from {one.snapshot_id}" for one in known)
            raise UserError(
                f"--snapshot {snapshot}: no generation of {model} began from it ({have})", RUN_FAILED
            )
        new = begun[-1]
    elif generation is None and shadows:
        new = shadows[-1]
    else:
        new = generations.named(warehouse, model, generation)
    other = against or new.parent
    if other is None or other == new.generation:
        raise UserError(
            f"{new.generation} has no parent among the generations of {model}: name the one to compare it with by "
            f"--against",
            RUN_FAILED,
        )
    return new, generations.named(warehouse, model, other)


if __name__ == "__main__":
    run.main()
