"""Read the rows of a file, a folder or a glob as one source. No Spark."""

from __future__ import annotations

from jobs.core.errors import UserError
from jobs.landing.checking import take_columns
from jobs.landing.csv_parquet import check_format, read, read_schema
from jobs.landing.key_from_name import schema_with_key, with_key
from jobs.landing.raw_rows import Source, joined
from jobs.landing.text_lines import is_text, read_text
from jobs.offline.whole_files import check_types, files_of
from jobs.specs.model_spec import ModelSpec


def read_rows(spec: ModelSpec, input: str) -> Source:
    """Read the columns of a spec, by its names, from all files of an input, one file after the other.

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
                schema_with_key(spec, read_schema(path, spec.file_columns, spec.files), path)
            read_here = read(path, spec.file_columns, spec.files)
        written = read_here._replace(decimal=spec.files.decimal)
        sources.append(with_key(spec, written, path))
        check_types(path, sources, [*sources[0].columns])
    if not sum(source.rows for source in sources):
        raise UserError(f"{input}: has no rows; give a file with rows below its header")
    rows = sources[0] if len(sources) == 1 else joined(sources, list(sources[0].columns))
    return take_columns(spec, rows)
