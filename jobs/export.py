"""Export a stream's state at the end of a micro-batch to a snapshot, without disturbing the stream.

Spark's state reader reads the state of a committed micro-batch from the checkpoint, so the stream may keep running, in
this process or another. The snapshot has the position at the micro-batch's end and the format of a pretrained snapshot.
The same micro-batch gives the same snapshot; a crash leaves nothing visible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from jobs.core.command import Model, Monitor, Profile, timed
from jobs.core.errors import ALREADY_RUNNING, UserError
from jobs.core.progress import Progress
from jobs.core.report import Report
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.snapshots.manifests import Manifest
    from jobs.spark.warehouse import Warehouse
    from jobs.specs.model_spec import ModelSpec


@timed
def run(
    settings: Settings,
    model: Model,
    generation: Annotated[str | None, Option(help="A generation; by default the live one.")] = None,
    batch: Annotated[int | None, Option(min=0, help="A committed micro-batch; by default the last.")] = None,
    needed: Annotated[bool, Option("--needed", help="Exit code 3 if nothing is live.")] = False,
    profile: Profile = False,
    monitor: Monitor = False,
) -> Report:
    """Take a snapshot of a stream's state at the end of a micro-batch; the stream is not disturbed.

    With `--monitor` the states of the rules of the model's monitor are exported, to the table `rule_states/MODEL`.

    Raises:
        UserError: no such generation or micro-batch, or one that ends within a version of the measurements.
    """
    from jobs.lineage.generations import DeployedModel, find_live, read_named
    from jobs.spark.conf import build_short_command_conf
    from jobs.spark.session import open_warehouse
    from jobs.specs.loading import load_spec
    from jobs.streaming.exporting import export
    from jobs.supervision.batch_profile import VerbProfiler

    profiler = VerbProfiler(profile)
    spec = load_spec(model, settings.models)
    name = spec.name

    warehouse = open_warehouse(settings, f"export {name}", build_short_command_conf())
    if needed and generation is None and find_live(warehouse, name) is None:
        raise UserError(f"model {name} has no live generation", ALREADY_RUNNING)
    if monitor:
        if generation is not None or batch is not None:
            raise UserError(
                "--monitor exports the rules' states at their last micro-batch: leave out the others"
            )
        _ = warehouse.spark  # PySpark's columns need a session
        return _report_rules(warehouse, spec)
    with Progress(f"export {name}", None, quiet=settings.quiet) as progress:
        source = read_named(warehouse, name, generation)
        manifest, made = export(DeployedModel(spec, warehouse), source, batch, progress.note)
    return profiler.added_to(_report(manifest, made))


def _report_rules(warehouse: Warehouse, spec: ModelSpec) -> Report:
    from jobs.downstream.rule_exports import export_rules
    from jobs.storage.tables import rule_states

    found = export_rules(warehouse, spec)
    lines = [
        f"export {found.id}: the states of {found.keys:,} keys, at micro-batch {found.batch} of {found.query}, in "
        f"{rule_states(spec.name)}"
    ]
    if not found.made:
        lines.append("it had already been made")
    lines.append(
        f"begin changed rules with it: `kalman-pipeline monitor --model {spec.name} --adopt {found.id}`"
    )
    data = {"model": spec.name, "export": found.id, "query": found.query, "batch": found.batch}
    return Report(lines, {**data, "keys": found.keys, "made": found.made})


def _report(manifest: Manifest, made: bool) -> Report:
    from jobs.storage.positions import describe

    where = describe(manifest.position)
    if manifest.generation is not None:
        where += f", the end of micro-batch {manifest.batch_id} of {manifest.generation}"
    lines = [f"snapshot {manifest.snapshot_id}: {manifest.key_count:,} keys, {manifest.rows:,} rows, {where}"]
    if not made:
        lines.append("it had already been committed")
    return Report(
        lines,
        {
            "model": manifest.model,
            "model_version": manifest.model_version,
            "made": made,
            "snapshot": manifest.snapshot_id,
            "generation": manifest.generation,
            "batch": manifest.batch_id,
            "keys": manifest.key_count,
            "rows": manifest.rows,
            "version": manifest.version,
            "position": manifest.position,
        },
    )


if __name__ == "__main__":
    run.main()
