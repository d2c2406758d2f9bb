"""Write a report as self-contained HTML: the health of a model, two of its generations compared, or an index of all.

The files are `reports/<model>/health.html`, `reports/<model>/<new generation>.html` (and `.json`) and
`reports/index.html` in the warehouse; the next report of the same name replaces them. No report starts Spark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.core.command import timed
from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.progress import Progress
from jobs.core.report import Report, format_count
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.lineage.generations import Generation
    from jobs.storage.warehouse import Tables


@timed
def run(
    settings: Settings,
    model: Annotated[
        str | None, Option(help="A model's name, or the path of its spec; without it: an index.")
    ] = None,
    key: Annotated[
        list[str] | None, Option(help="Show this key too, as the estimates name it; may be repeated.")
    ] = None,
    compare: Annotated[
        bool,
        Option(
            "--compare",
            help="Compare two generations instead. Each option below implies this.",
        ),
    ] = False,
    generation: Annotated[
        str | None, Option(help="The new generation; by default the newest shadow, else the live one.")
    ] = None,
    against: Annotated[
        str | None, Option(help="The old generation; by default the new one's parent.")
    ] = None,
    snapshot: Annotated[
        str | None,
        Option(help="In place of --generation: the newest generation that began from this snapshot."),
    ] = None,
    history: Annotated[
        bool,
        Option(
            "--history",
            help="Compare the last run over history (or the run that --generation names) with the live generation.",
        ),
    ] = False,
) -> Report:
    """Write a model's health over time as an HTML page, or compare two of its generations; or write an index of all.

    Raises:
        UserError: there are no estimates, or no two generations to compare; or options that do not go together.
    """
    if snapshot is not None and history:
        raise UserError("--history names a run, and --snapshot a generation: give one of them")
    if snapshot is not None and generation is not None:
        raise UserError(
            "--snapshot and --generation both say which generation is the new one: give one of them"
        )
    comparing = compare or history or any(one is not None for one in (generation, against, snapshot))
    if comparing and key:
        raise UserError("--key is for the health of a model, and the other options for a comparison")
    if model is None:
        if comparing or key:
            raise UserError("--model is missing: without it there is only the index of all reports")
        return _report_index(settings)
    if not comparing:
        return _report_health(settings, model, key or [])
    return _report_comparison(settings, model, (generation, against, snapshot), history)


def _report_index(settings: Settings) -> Report:
    from jobs.insight.index import write_index
    from jobs.specs.loading import list_model_names

    path, entries = write_index(settings.warehouse, list_model_names(settings.models))
    return Report(
        [
            f"{format_count(len(entries), 'model')}: {', '.join(one.model for one in entries) or 'none'}",
            f"report: {path}",
        ],
        {"models": [one.model for one in entries], "report": path},
    )


def _report_health(settings: Settings, model: str, keys: list[str]) -> Report:
    from jobs.insight.health import gather
    from jobs.insight.health_page import build_health_page, judge_health
    from jobs.insight.index import write_index, write_page
    from jobs.specs.loading import describe_broken_spec, find_deployed_spec

    name, spec = find_deployed_spec(model, settings.models)
    health = gather(settings.warehouse, name, spec, keys)
    broken = describe_broken_spec(name, spec, settings.models)
    health = health._replace(other_version=broken or health.other_version)
    page = write_page(settings.warehouse, name, build_health_page(health))
    write_index(settings.warehouse, [name])
    colour, sentence = judge_health(health)
    degrees, scored = float(health.over_time.degrees.sum()), float(health.over_time.scored.sum())
    return Report(
        [
            f"{name}: {format_count(health.rows, 'row')} of {format_count(len(health.keys.key), 'key')}",
            sentence,
            f"report: {page}",
        ],
        {
            "model": name,
            "rows": health.rows,
            "keys": len(health.keys.key),
            "judged": colour != "neutral",
            "good": colour == "good",
            "nis_a_component": float(health.over_time.nis.sum()) / degrees if degrees else None,
            "coverage": float(health.over_time.inside.sum()) / scored if scored else None,
            "keys_outside": health.outside,
            "flags": {flag: int(counts.sum()) for flag, counts in health.over_time.flags.items()},
            "fates": [one._asdict() for one in health.fates],
            "shown": [one.key for one in health.examples],
            "report": page,
        },
    )


def _report_comparison(
    settings: Settings, model: str, named: tuple[str | None, str | None, str | None], history: bool
) -> Report:
    """Compare two generations; named: the new one, the old one, and the snapshot that the new one began from."""
    from jobs.insight.comparison_page import compare
    from jobs.specs.loading import load_spec
    from jobs.storage.warehouse import Tables
    from jobs.upgrades.decision import format_comparison

    generation, against, snapshot = named
    spec = load_spec(model, settings.models)
    warehouse = Tables(settings.warehouse)
    with Progress(f"report {spec.name}", None, quiet=settings.quiet) as progress:
        if history:
            new, old = _find_history_pair(warehouse, spec.name, generation, against)
        else:
            new, old = _find_pair(warehouse, spec.name, generation, against, snapshot)
        learned = {one.generation: _read_learned(warehouse, one) for one in (new, old)}
        progress.note(f"comparing {new.generation} with {old.generation}")
        comparison, page = compare(warehouse, spec, old, new)
    return Report(
        [
            f"{new.generation} (version {new.model_version}) against {old.generation} (version {old.model_version})",
            *(f"parameters of {name}: {text}" for name, (text, _) in learned.items() if text),
            *format_comparison(comparison),
            f"report: {page}",
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
        },
    )


def _read_learned(warehouse: Tables, generation: Generation) -> tuple[str, dict[str, Any]]:
    """Return the source of a generation's learned parameters as text, and the parameters; empty without any."""
    from jobs.snapshots.manifests import record
    from jobs.upgrades.migration.parameters import format_value
    from kalman.models.groups import GROUPS

    manifest = record(warehouse, generation.snapshot_id)
    if manifest is None or not manifest.parameters:
        return "", {}
    shared = {name: value for name, value in manifest.parameters.items() if name != GROUPS}
    values = ", ".join(f"{name} = {format_value(value)}" for name, value in shared.items())
    learn = manifest.model_spec().learn
    whose = {"key": "; each key has its own", "group": "; each group has its own"}
    also = "" if learn is None else whose.get(learn.scope, "")
    return f"{values}{also}, of snapshot {generation.snapshot_id}", manifest.parameters


def _find_history_pair(
    warehouse: Tables, model: str, run: str | None, against: str | None
) -> tuple[Generation, Generation]:
    """Return a run over history as a generation, and the generation to compare it with.

    Raises:
        UserError: the run does not exist, or no generation is live.
    """
    from jobs.batch.history_table import list_history_runs
    from jobs.lineage import generations
    from jobs.storage.tables import estimates_history

    runs = list_history_runs(warehouse, estimates_history(model))
    found = next((one for one in runs if run in (None, one.run)), None)
    if found is None:
        known = f"its last runs are {', '.join(one.run for one in runs[:3])}" if runs else "it has none"
        raise UserError(
            f"model {model} has no such run over its history ({known}): make one with "
            f"`kalman-pipeline estimate --model {model}`",
            RUN_FAILED,
        )
    old = generations.read_named(warehouse, model, against)
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


def _find_pair(
    warehouse: Tables, model: str, generation: str | None, against: str | None, snapshot: str | None
) -> tuple[Generation, Generation]:
    from jobs.lineage import generations
    from jobs.storage.tables import estimates

    known = generations.read_generations(warehouse, model)
    if not known or not warehouse.exists(estimates(model)):
        raise generations.no_live_estimates_error(warehouse, model, RUN_FAILED)
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
        new = generations.read_named(warehouse, model, generation)
    other = against or new.parent
    if other is None or other == new.generation:
        raise UserError(
            f"{new.generation} has no parent among the generations of {model}: name the one to compare it with by "
            f"--against",
            RUN_FAILED,
        )
    return new, generations.read_named(warehouse, model, other)


if __name__ == "__main__":
    run.main()
