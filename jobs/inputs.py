"""Replace a model's table of key inputs by a file, in one commit: a stream sees the old rows or the new ones."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from typer import Option

from jobs.core.command import Model, command
from jobs.core.errors import UserError
from jobs.core.report import Report
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.specs.model_spec import ModelSpec
    from jobs.storage.warehouse import Tables


@command
def run(
    settings: Settings,
    model: Model,
    input: Annotated[
        str,
        Option(
            help="A .csv, .json, .jsonl or .parquet file with one row per key, a folder, or a glob: the whole table."
        ),
    ],
) -> Report:
    """Replace the model's table of inputs by a file; streams use it from their next micro-batch on.

    Raises:
        UserError: the spec has no inputs, or the file cannot be used; the table is then as it was.
    """
    import numpy as np
    import pyarrow as pa

    from jobs.landing.values.keys import convert_key
    from jobs.offline.key_inputs import read_inputs
    from jobs.state.encoding.arrow import build_numbers
    from jobs.state.kernel import load_checked_spec
    from jobs.storage.row_changes import replace_table
    from jobs.storage.warehouse import Tables, find_home

    started = time.monotonic()
    spec = load_checked_spec(model, settings.models)
    if spec.inputs is None:
        raise UserError(f"{spec.source_path}: {spec.name} takes no inputs: add `inputs` (docs/models.md)")
    found = read_inputs(spec, input)
    by = spec.inputs.key or spec.key
    warehouse = Tables(settings.warehouse)
    types = _find_key_types(warehouse, spec, by, input)
    reason = np.full(found.u.shape[1], None, dtype=object)
    keys = [
        convert_key(f"key {name}", key, types[name], reason) for name, key in zip(by, found.keys, strict=True)
    ]
    bad = np.flatnonzero(reason != None)  # noqa: E711 - elementwise
    if len(bad):
        raise UserError(f"{input}: row {int(bad[0]) + 1}: {reason[bad[0]]}, unlike in the measurements")
    names = [*by, *spec.inputs.columns.values()]
    table = pa.Table.from_arrays([*keys, *map(build_numbers, found.u)], names)
    home, name = find_home(warehouse, spec.inputs_table)
    version = replace_table(home, name, table)
    data = {
        "model": spec.name,
        "table": spec.inputs_table,
        "version": version,
        "keys": len(reason),
        "seconds": time.monotonic() - started,
    }
    return Report([f"{spec.inputs_table} version {version}: {len(reason):,} keys"], data)


def _find_key_types(warehouse: Tables, spec: ModelSpec, by: list[str], file: str) -> dict[str, str]:
    """Return the types of the key columns: of the measurements table if it exists, else of the file."""
    from jobs.landing.file_rows import list_input_files, read_columns_schema
    from jobs.landing.reading import ALWAYS_READ
    from jobs.landing.values.keys import derive_key_types
    from jobs.storage.table_rows import read_column_types
    from jobs.storage.tables import measurements

    have = read_column_types(warehouse.root, measurements(spec.name))
    if have:
        return {name: "string" if have[name] == "string" else "bigint" for name in by}
    columns = spec.list_file_columns(by)
    types = derive_key_types(columns, read_columns_schema(list_input_files(file, ALWAYS_READ)[0], columns))
    return dict(zip(by, types.values(), strict=True))


if __name__ == "__main__":
    run.main()
