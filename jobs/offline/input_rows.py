"""Read the rows of a file, a folder or a glob as one source. No Spark."""

from __future__ import annotations

from pathlib import Path

from jobs.core.errors import UserError
from jobs.ingestion.csv_parquet import FORMATS, check_format, read, read_schema
from jobs.ingestion.input_files import find_files
from jobs.ingestion.key_from_name import schema_with_key, with_key
from jobs.ingestion.raw_rows import Source, joined
from jobs.ingestion.text_lines import FORMATS as TEXT_FORMATS
from jobs.ingestion.text_lines import is_text, read_text
from jobs.specs.model_spec import ModelSpec


def files_of(input: str, spec: ModelSpec | None = None) -> list[Path]:
    """Return the files that an input names: a file, a folder or a glob. A single name is not looked for yet.

    Files of text lines are among them where the spec says how to read lines.

    Raises:
        UserError: it is a folder or a glob without .csv, .csv.gz, .parquet or .orc files.
    """
    endings = FORMATS if spec is None or spec.line_pattern is None else (*FORMATS, *TEXT_FORMATS)
    path = Path(input).expanduser()
    if (
        path.is_dir()
        and not path.name.lower().endswith(endings)
        or not path.exists()
        and set(input) & set("*?[")
    ):
        return [Path(one) for one in find_files([input], endings)]
    return [path]


def read_rows(spec: ModelSpec, input: str) -> Source:
    """Read the columns that a spec names from all files of an input, one file after the other.

    Raises:
        UserError: a file cannot be read, lacks a column, or has a column of another type than the files before it;
            there is no row.
    """
    sources: list[Source] = []
    for path in files_of(input, spec):
        if is_text(path):
            read_here = joined(read_text(spec, path, spec.file_columns), spec.file_columns)
        else:
            check_format(path)
            if spec.key_from_name is not None:
                schema_with_key(spec, read_schema(path, spec.file_columns), path)
            read_here = read(path, spec.file_columns)
        sources.append(with_key(spec, read_here, path))
        for name in spec.columns:
            kinds = [source.columns[name].type for source in (sources[0], sources[-1])]
            if kinds[0] != kinds[1]:
                raise UserError(
                    f"{path}: column '{name}' holds {kinds[1]}, and {kinds[0]} in the files before it; give them "
                    "one type"
                )
    if not sum(source.rows for source in sources):
        raise UserError(f"{input}: has no rows")
    return sources[0] if len(sources) == 1 else joined(sources, spec.columns)
