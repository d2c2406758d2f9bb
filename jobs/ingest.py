"""Land files, topics of Kafka, a Delta table or made-up rows; rejected rows go to quarantine with the reason.

Landing is idempotent, and a retry after a crash completes the missing commits (`jobs.landing`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from jobs.core.command import Model, command
from jobs.core.errors import INPUT_ERROR, UserError
from jobs.core.progress import BytesRead, Progress, format_megabytes
from jobs.core.report import Report, format_count
from jobs.core.settings import Settings
from jobs.core.times import AVAILABLE_NOW, trigger_seconds

if TYPE_CHECKING:
    from jobs.landing.file_landing import Landed
    from jobs.specs.model_spec import ModelSpec


@command
def run(
    settings: Settings,
    model: Model,
    input: Annotated[
        list[str] | None,
        Option(help="A file, a folder or a glob; may be repeated. Without any: the source of the spec."),
    ] = None,
    trigger: Annotated[
        str, Option(help="available-now, or a number: look again every so many seconds, until stopped.")
    ] = AVAILABLE_NOW,
    history: Annotated[
        bool,
        Option(
            "--history",
            help="Land the files as history of new keys: pretrain makes their states, which running streams import.",
        ),
    ] = False,
    accept_loss: Annotated[
        bool,
        Option(
            "--accept-loss",
            help="Continue from what the topic or table of the spec holds now, although it lost rows before they "
            "landed, or was made anew.",
        ),
    ] = False,
    changed: Annotated[
        Literal["refuse", "append", "new"],
        Option(
            help="What to do with a landed file whose content has changed. refuse: report an error; append: land the "
            "rows added at its end; new: land it whole, as another file."
        ),
    ] = "refuse",
) -> Report:
    """Land files, or the source of the spec, in the model's measurements table; rows that do not fit go to quarantine.

    Raises:
        UserError: a file cannot be read, lacks a column, or has landed with another content; nothing has been landed
            then.
    """
    from jobs.specs.loading import load_spec

    spec = load_spec(model, settings.models)
    seconds = trigger_seconds(trigger)
    if history and (not input or seconds is not None):
        raise UserError("--history lands files once: give --input, and no --trigger")
    if accept_loss and input:
        raise UserError("--accept-loss is for a topic or a table: leave out --input")
    if changed != "refuse" and not input:
        raise UserError("--changed is for files: give --input")
    if not input:
        from jobs.landing.sources.choice import land_source

        return land_source(settings, spec, seconds, accept_loss)
    if seconds is not None:
        from jobs.landing import folder_watch

        return folder_watch.run(settings, spec, input, seconds, changed)
    return _land_files(settings, spec, input, changed, history)


def _land_files(settings: Settings, spec: ModelSpec, input: list[str], changed: str, history: bool) -> Report:
    from contextlib import closing

    from jobs.core.input_files import find_files
    from jobs.landing.file_landing import FileLanding, land_all, needs_workers, read_file_size
    from jobs.landing.file_rows import describe_dialects
    from jobs.landing.reading import list_endings
    from jobs.landing.workers import Workers
    from jobs.storage.warehouse import Tables

    files = find_files(input, list_endings(spec))
    size = sum(read_file_size(path) for path in files)
    landed: list[Landed] = []
    with (
        closing(Workers(settings.master)) as workers,
        Progress(f"ingest {spec.name}", len(files), settings.quiet, "file") as progress,
    ):
        if needs_workers(size, len(files)):
            workers.start()  # start while the files are checked
        progress.note(f"checking {format_megabytes(size)}")
        landing = FileLanding(Tables(settings.warehouse), spec, changed, history, workers)
        for some in land_all(landing, files, on_read=BytesRead(progress, size)):
            landed += some
            progress.advance(len(some), f"{sum(one.rows for one in landed):,} rows")
    return _report(spec, landed, history, describe_dialects(spec, files))


def _report(spec: ModelSpec, landed: list[Landed], history: bool, written: list[str]) -> Report:
    from jobs.landing.remarks import build_row_data, describe_rows
    from jobs.landing.values.rejected import explain_reason
    from jobs.landing.written_pieces import RowCounts
    from jobs.specs.sections import PRETRAINED

    new = [one for one in landed if one.version is not None]
    counts = RowCounts()
    for one in new:
        counts.add(one.counts)
    counts.examples = {reason: text for one in landed for reason, text in one.counts.examples.items()}
    reasons = dict(sum((Counter(one.reasons) for one in landed), Counter[str]()))
    known = sum(one.before for one in landed)
    versions = sorted({one.version for one in new if one.version is not None})
    commits = f" in {format_count(len(versions), 'commit')}" if len(new) > 1 else ""
    of_history = " of history" if history else ""
    lines = [
        f"landed {format_count(counts.rows, 'row')}{of_history} of {format_count(len(new), 'file')} for "
        f"{spec.name}{commits}"
    ]
    lines += written
    if known:
        lines.append(f"skipped {format_count(known, 'file')} that had already landed")
    lacking = [one.path for one in new if one.counts.absent.total()]
    spans = [one.counts.span for one in new]
    in_parts = any(one.counts.parts > 1 for one in new)
    lines += describe_rows(spec, counts, reasons, spans, in_parts, lacking)
    lost = [one for one in landed if one.reasons and not one.rows]
    notes = [one.note for one in landed if one.note is not None]
    lines += [f"note: {note}" for note in notes]
    if history and spec.stream.new_keys != PRETRAINED:
        lines.append(
            f"note: the streams of {spec.name} treat them like any other rows, unless its spec says "
            f"stream.new_keys: {PRETRAINED}"
        )
    if versions:
        lines.append(f"the measurements table is at version {versions[-1]}")
    return Report(
        lines,
        {
            "model": spec.name,
            "files": len(landed),
            "files_landed": len(new),
            "files_landed_before": known,
            "files_changed": len(notes),
            **build_row_data(counts, reasons),
            "files_rejected": [one.path for one in lost],
            "commits": len(versions),
            "version": versions[-1] if versions else None,
        },
        errors=[_explain_all_rejected(spec, one, explain_reason) for one in lost],
        error_code=INPUT_ERROR,
    )


def _explain_all_rejected(
    spec: ModelSpec, one: Landed, explained: Callable[[ModelSpec, str, str | None], str]
) -> str:
    """Return the sentence about a file with only rejected rows."""
    first = max(one.reasons, key=lambda reason: one.reasons[reason])
    return (
        f"{one.path}: every row was rejected ({format_count(sum(one.reasons.values()), 'row')}, now in "
        f"quarantine), most for "
        f"{explained(spec, first, one.counts.examples.get(first))}; then land them with "
        f"`kalman-pipeline quarantine replay --model {spec.name}`"
    )


if __name__ == "__main__":
    run.main()
