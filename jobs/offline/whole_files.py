"""Read all rows of a file, a folder or a glob at once. No Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jobs.core.errors import UserError
from jobs.core.input_files import find_files, names_several, path_of
from jobs.core.report import plural
from jobs.landing.csv_parquet import FORMATS, check_columns, found_dialect, read
from jobs.landing.csv_records import COMMA
from jobs.landing.dialects import ANY, NAMES, header_words
from jobs.landing.raw_rows import Source, joined
from jobs.landing.shapes.wide_files import wide_words
from jobs.landing.text_lines import FORMATS as TEXT_FORMATS
from jobs.specs.files import Files
from jobs.specs.model_spec import ModelSpec


def files_of(input: str, spec: ModelSpec | None = None) -> list[Path]:
    """Return the files that an input names: a file, a folder or a glob. A single name is not looked for yet.

    Files of text lines are among them where the spec says how to read lines.

    Raises:
        UserError: it is a folder or a glob without .csv, .csv.gz, .parquet or .orc files, or no path.
    """
    endings = FORMATS if spec is None or spec.line_pattern is None else (*FORMATS, *TEXT_FORMATS)
    if names_several(input, endings):
        return [Path(one) for one in find_files([input], endings)]
    return [path_of(input)]


def read_all(input: str, columns: Sequence[str] | None, named: Files = ANY) -> Source:
    """Read the named columns, or all, of all files of an input, one file after the other.

    named: what the spec says of the dialect of CSV files.

    Raises:
        UserError: a file cannot be read, lacks a column, or has a column of another type than the files before it.
    """
    sources: list[Source] = []
    for path in files_of(input):
        source = read(path, columns, named)
        sources.append(source._replace(decimal=named.decimal))
        if columns is None:
            check_columns(path, list(source.columns), list(sources[0].columns))
        check_types(path, sources, list(sources[0].columns))
    return sources[0] if len(sources) == 1 else joined(sources, list(sources[0].columns))


def check_types(path: Path, sources: Sequence[Source], columns: Sequence[str]) -> None:
    """Check that the columns of the last of some sources, which is of the file `path`, have the types of the first.

    Raises:
        UserError: a column has another type.
    """
    for name in columns:
        first, last = (source.columns[name].type for source in (sources[0], sources[-1]))
        if first != last:
            raise UserError(
                f"{path}: column '{name}' holds {last}, and {first} in the files before it; give them one type"
            )


def dialects(spec: ModelSpec, paths: Sequence[str | Path]) -> list[str]:
    """Return in words how CSV files are written that are not written as most are: no line where all of them are."""
    found: Counter[str] = Counter()
    for path in map(Path, paths):
        if path.name.lower().endswith((".csv", ".csv.gz")):
            dialect = found_dialect(path, spec.file_columns, spec.files)
            words = [f"fields separated by {NAMES[dialect.separator]}"] if dialect.separator != COMMA else []
            words += header_words(dialect)
            words += [f"no header, columns {', '.join(dialect.names)}"] if dialect.names else []
            words += ["a comma before fractions"] if spec.files.decimal == "," else []
            words += [] if spec.files.wide is None else [wide_words(spec.files.wide)]
            if words:
                found["; ".join(words)] += 1
    return [f"read {plural(count, 'file')}: {words}" for words, count in sorted(found.items())]
