"""Find a model for files of measurements, and write its spec. No Spark.

The command finds the columns' roles, the key, the usual step, gaps and repeats, and the period of a season. It fits a
few structures on the first rows of a sample of keys. It ranks them by the predictive log-likelihood of the other rows,
writes the best as a spec with comments, and filters the files with it. Details: `docs/choosing.md`.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.core.command import command
from jobs.core.errors import UserError
from jobs.core.report import Report, format_count
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.choosing.model_finding import ModelFinding

QUICK = (8, 300)
"""Number of sampled keys, and of rows for each key, with --quick."""


@command
def run(
    settings: Settings,
    input: Annotated[str, Option(help="A .csv, .json, .jsonl, .parquet or .orc file, a folder, or a glob.")],
    name: Annotated[
        str | None, Option(help="The model's name; by default the name of the file or folder.")
    ] = None,
    output: Annotated[
        str | None, Option(help="Where to write the spec; by default NAME.yaml in the folder of models.")
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace the spec if it is there already.")] = False,
    time: Annotated[
        str | None,
        Option(
            help="The column of the time, or those that make it, as in DATE,TIME; by default it is found."
        ),
    ] = None,
    time_format: Annotated[
        str | None,
        Option(
            help="The format of the time, such as %d.%m.%Y or epoch_seconds, as in a spec; by default it is found."
        ),
    ] = None,
    time_zone: Annotated[str, Option(help="The time zone of times without an offset.")] = "UTC",
    key: Annotated[
        list[str] | None, Option(help="A key column; may be repeated; by default they are found.")
    ] = None,
    key_from_name: Annotated[
        str | None, Option(help="The file's name is a key: what to call its column.")
    ] = None,
    no_key: Annotated[
        bool, Option("--no-key", help="All rows of all files are one series; by default it is found.")
    ] = False,
    measurement: Annotated[
        list[str] | None, Option(help="A measured column; may be repeated; by default the first four.")
    ] = None,
    structure: Annotated[
        str | None, Option(help="Take this structure whatever the ranking, such as 'season robust'.")
    ] = None,
    keys: Annotated[int, Option(min=1, help="How many keys to fit the structures on.")] = 32,
    rows: Annotated[int, Option(min=50, help="How many of the last rows of each key to fit on.")] = 400,
    quick: Annotated[
        bool, Option("--quick", help=f"Fit on {QUICK[0]} keys and {QUICK[1]} rows of each: a first look.")
    ] = False,
    picture: Annotated[
        str | None, Option(help="Where to draw what was found; by default beside the spec, as .png.")
    ] = None,
    no_picture: Annotated[bool, Option("--no-picture", help="Draw nothing.")] = False,
) -> Report:
    """Find a model for files of measurements: write its spec, without Spark, and show how well it fits.

    Raises:
        UserError: a file cannot be read, has no time or no numbers, or too few rows; the spec is there already. Nothing
            is written then.
    """
    from jobs.choosing.columns import Wishes
    from jobs.choosing.finding import name_model
    from jobs.choosing.model_finding import find
    from jobs.choosing.spec_text import exists, format_spec, write_spec

    start = perf_counter()
    model = name or name_model(input)
    path = Path(output or Path(settings.models) / f"{model}.yaml")
    if re.fullmatch(r"[a-z][a-z0-9_]{0,63}", model) is None:
        raise UserError(f"--name {model}: use lower-case letters, digits and _, beginning with a letter")
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"--output {path}: the file's ending must be .yaml")
    if output is not None and not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; create it first")
    if path.exists() and not force:
        raise UserError(exists(path))
    sample = QUICK if quick else (keys, rows)
    wishes = Wishes(
        time, time_format, time_zone, key or [], key_from_name, measurement or [], structure, *sample, no_key
    )
    found = find(input, wishes)
    path.parent.mkdir(parents=True, exist_ok=True)  # the first model also makes the folder of models
    spec = write_spec(path, format_spec(model, input, found), force)
    drawn, note = (
        (None, None) if no_picture else _draw(Path(picture or path.with_suffix(".png")), spec.name, found)
    )
    return _report(
        model, input, path, drawn, [*found.notes, *([note] if note else [])], found, perf_counter() - start
    )


def _draw(path: Path, name: str, found: ModelFinding) -> tuple[Path | None, str | None]:
    """Return the picture's path, or the reason why there is none."""
    start = perf_counter()
    try:
        from jobs.choosing.picture import draw
    except ImportError:
        return None, "there is no picture: that needs matplotlib (pip install kalman-pipeline[demo])"
    try:
        draw(path, name, found)
    except OSError as error:
        return None, f"{path}: the picture cannot be written ({error.strerror or error})"
    found.seconds["draw"] = perf_counter() - start
    return path, None


def _report(
    model: str,
    input: str,
    spec: Path,
    picture: Path | None,
    notes: list[str],
    found: ModelFinding,
    seconds: float,
) -> Report:
    paths = {"spec": str(spec), "picture": None if picture is None else str(picture)}
    lines = [
        f"{format_count(found.parsed.reason.size, 'row')} of {format_count(len(found.table.files), 'file')} "
        f"in {seconds:.1f} s",
        *_format_columns(found),
        *_format_structures(found),
        *(f"note: {note}" for note in notes),
        f"spec         {spec}",
        *([f"picture      {picture}"] if picture else []),
        f"next         kalman-pipeline filter --model {shlex.quote(str(spec))} --input {shlex.quote(input)} --output "
        "estimates.parquet",
    ]
    seen = {"notes": notes, "seconds": round(seconds, 3)}
    return Report(lines, {"model": model, "input": input, **paths, **_build_data(found), **seen})


def _format_columns(found: ModelFinding) -> list[str]:
    from jobs.choosing.rhythm import format_span
    from jobs.landing.file_rows import describe_dialect

    written = describe_dialect(found.table.files[0], found.files)
    rhythm, keys, season = found.rhythm, found.keys, found.season
    times = [name or "(no name)" for name in found.roles.time.columns]
    refused = [(name, why) for name, why in found.roles.refused.items() if name not in keys.columns]
    pauses = (
        f", {format_count(rhythm.gaps, 'gap')} up to {format_span(rhythm.longest)}" if rhythm.gaps else ""
    )
    repeats = (
        f", {format_count(rhythm.repeats, 'row')} repeat key and time of another" if rhythm.repeats else ""
    )
    waves = "none found" if season is None else f"{season.name}, {format_count(season.harmonics, 'harmonic')}"
    return [
        *([f"files        {'; '.join(written)}"] if written else []),
        f"time         {', '.join(times)} ({found.roles.time.time_format or 'ISO 8601'}), in {rhythm.unit}s",
        f"key          {', '.join(keys.columns)}: {format_count(keys.count, 'key')} ({keys.why})"
        if keys.columns
        else f"key          none ({keys.why})",
        f"measurement  {', '.join(one.name for one in found.measurements)}",
        *(f"  not {name}: {why}" for name, why in refused[:12]),
        *([f"  and {len(refused) - 12:,} other columns, which the spec lists"] if len(refused) > 12 else []),
        f"step         {format_span(rhythm.step)} ({rhythm.regular:.0%} of all){pauses}{repeats}",
        f"season       {waves}",
        *([f"rejected     {format_count(found.rejected, 'row')}"] if found.rejected else []),
    ]


def _format_structures(found: ModelFinding) -> list[str]:
    from jobs.choosing.spec_text import explain_choice

    ranking, filtered = found.choice.ranking, found.filtered
    return [
        f"structures by the log-likelihood of a held-out row ({format_count(ranking.keys, 'series', '')}, "
        f"{format_count(ranking.rows, 'row')}), against the best:",
        *(
            f"  {one.name:<20} {0.0 - one.behind:+.4f} +- {one.error:.4f}, best for {one.wins:.0%}"
            for one in ranking.scores
        ),
        *(f"  {name}: not compared: {reason}" for name, reason in found.choice.failed.items()),
        explain_choice(found),
        *_format_fit(found),
        *([] if _list_warnings(found) else filtered.fit.lines),
    ]


def _format_fit(found: ModelFinding) -> list[str]:
    """Return the NIS and the coverage; of several keys by each key's own numbers, and the NIS also by the spec's."""
    inside = found.filtered.inside
    worst = found.names[found.series.keys[int(inside.argmin())]]
    covered = f"in their predicted 95 %: {inside.mean():.1%} of rows"
    keys = f"all {format_count(found.keys.count, 'key')}"
    own, of_spec = (
        "unknown" if one is None else f"{one:.3f}" for one in (found.filtered.ratio, found.filtered.of_spec)
    )
    if found.keys.count == 1:
        shown = own if found.choice.robust else of_spec  # robust NIS is tempered, as by pretrain
        fitted = f"fitted       1 key, NIS per measured component {shown} (1 is expected)"
        return [fitted, covered, *_list_warnings(found)]
    return [
        "NIS per measured component (1 is expected):",
        f"  {own:>8}  {format_count(len(found.series.keys), 'key')} with their own numbers, about as after pretrain",
        f"  {of_spec:>8}  {keys} with the spec's numbers, as filter reports it before pretrain",
        f"{covered}, the fewest ({inside.min():.1%}) of {worst}",
        *_list_warnings(found),
    ]


def _list_warnings(found: ModelFinding) -> list[str]:
    """Return a warning with the next step if the model does not fit by the rule of `pretrain`."""
    from jobs.offline.filtering import MANY

    filtered, count = found.filtered, len(found.series.keys)
    faults = {"the NIS is far from 1": filtered.far, "innovations are autocorrelated": filtered.dependent}
    why = [
        f"of {bad.sum():,} of {format_count(count, 'key')} {what}"
        for what, bad in faults.items()
        if bad.any() and bad.sum() >= MANY * count
    ]
    others = [one.name for one in found.choice.ranking.equals if one.name not in found.choice.names]
    other = (
        f"give --structure {shlex.quote(others[0])} and another --name, and `compare` both, or "
        if others
        else ""
    )
    text = f"Next: {other}edit the process (docs/models.md)"
    return [f"warning: the model does not fit: {'; '.join(why)}. {text}"] * bool(why)


def _build_data(found: ModelFinding) -> dict[str, Any]:
    rhythm = found.rhythm
    return {
        "files": len(found.table.files),
        "rows": int(found.parsed.reason.size),
        "rejected": found.rejected,
        "time": found.roles.time.written,
        "time_format": found.roles.time.time_format,
        "time_unit": rhythm.unit,
        "key": found.keys.columns,
        "key_from_name": found.keys.from_name,
        "keys": found.keys.count,
        "measurement": [one.name for one in found.measurements],
        "refused": found.roles.refused,
        "step_microseconds": rhythm.step,
        "regular": rhythm.regular,
        "gaps": rhythm.gaps,
        "longest_gap_microseconds": rhythm.longest,
        "repeats": rhythm.repeats,
        "season_microseconds": None if found.season is None else found.season.period,
        "structures": [one._asdict() for one in found.choice.ranking.scores],
        "failed": found.choice.failed,
        "chosen": found.choice.names,
        "sampled_keys": len(found.series.keys),
        "keys_with_a_zero": found.final.still,
        "nis_per_component": found.filtered.ratio,
        "nis_per_component_of_spec": found.filtered.of_spec,
        "inside": float(found.filtered.inside.mean()),
        "fits": not _list_warnings(found),
        **found.filtered.fit._asdict(),
        "phases": {phase: round(took, 3) for phase, took in found.seconds.items()},
    }


if __name__ == "__main__":
    run.main()
