"""Land each row of a user's Delta table once (`source: {kind: delta}`), from its start or the landed position."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.report import format_count
from jobs.landing.sources.checked_frames import read_checked_table, read_table_schema
from jobs.landing.sources.landing import Reader
from jobs.landing.target_table import prepare, record_start
from jobs.landing.values.keys import derive_key_types
from jobs.landing.written_pieces import ORIGIN, SOURCE
from jobs.spark.foreign_files import keep_own_files, read_own_files
from jobs.spark.queries import find_cause
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.foreign_files import refuse_foreign_vectors
from jobs.storage.measurements_table import KeyTypes
from jobs.storage.positions import commit_id
from jobs.storage.quarantine import POSITION
from jobs.storage.tables import measurements
from jobs.storage.warehouse import find_home, parse_actions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.errors import PySparkException
    from pyspark.sql import DataFrame


NOTHING = -1
"""Version number that means that no version has landed; the landing begins with the present rows of the table."""


class UserTable(NamedTuple):
    """A user's Delta table.

    path: name of the table in the spec.
    home: warehouse that contains the table.
    name: name of the table in that warehouse.
    id: id of the table.
    """

    path: str
    home: Warehouse
    name: str
    id: str

    def commit(self, version: int) -> str | None:
        """Return the commit id of a version; None if the log does not contain the version."""
        return None if version == NOTHING else commit_id(self.home, self.name, version)


class TableStart(NamedTuple):
    """Landed position of a table.

    table_id: id of the table.
    version: last landed version.
    commit: commit id of this version; None if unknown.
    checkpoint: name of the checkpoint of the query that lands the table.
    after: version after which this query began, or `NOTHING`.
    """

    table_id: str
    version: int
    commit: str | None
    checkpoint: str
    after: int

    def detail(self, path: str) -> dict[str, Any]:
        """Return the commit metadata that record this position."""
        return {"source_table": path, **self._asdict()}


def open_table(warehouse: Warehouse, spec: ModelSpec) -> UserTable:
    """Return the source table of a spec.

    Raises:
        UserError: the table does not exist, or is the model's measurements table.
    """
    assert spec.source is not None
    path = spec.source.table
    home, name = find_home(warehouse, path)
    if not home.exists(name):
        raise UserError(
            f"{path}: there is no such Delta table in {home.root}, and {spec.name} lands its rows"
        )
    if home.path(name).rstrip("/") == warehouse.path(measurements(spec.name)):
        raise UserError(f"{path}: is the table that {spec.name} lands rows in; name the table they come from")
    return UserTable(path, home, name, home.table_id(name))


def start_of(warehouse: Warehouse, spec: ModelSpec, table: UserTable) -> TableStart:
    """Return the position where the landing continues.

    The first landing begins at `source.start`, and this position is committed.

    Raises:
        UserError: the table does not continue at the landed position.
    """
    found = _find_newest(warehouse, spec, table)
    if found is None:
        return _record(
            warehouse, spec, table, _find_first_version(spec, table), _name_checkpoint(spec, table)
        )
    refuse_other(spec, table, found)
    following = found.version + 1
    if found.version != NOTHING and found.version < table.home.latest_version(table.name):
        if table.commit(following) is None:
            raise _build_refusal(
                spec,
                table,
                f"has landed up to version {found.version}, and its log no longer has version {following}",
            )
    return found


def refuse_other(spec: ModelSpec, table: UserTable, known: TableStart) -> None:
    """Raise an error if a table is not the table of a landed position.

    Raises:
        UserError: the table was recreated, or restored from a backup.
    """
    if known.table_id != table.id:
        raise _build_refusal(
            spec, table, f"was deleted and made anew (its id is {table.id} now, and was {known.table_id})"
        )
    if known.version == NOTHING:
        return
    latest = table.home.latest_version(table.name)
    if latest < known.version:
        raise _build_refusal(
            spec, table, f"ends at version {latest}, and version {known.version} has landed: it was put back"
        )
    if known.commit is not None and table.commit(known.version) not in (None, known.commit):
        raise _build_refusal(
            spec, table, f"was put back from a backup: version {known.version} is another commit than landed"
        )


def accept_loss(warehouse: Warehouse, spec: ModelSpec, table: UserTable) -> str | None:
    """Restart the landing after the present version of the table, or at `source.start` if the table was recreated.

    Returns:
        A text on the skipped rows; None before the first landing.
    """
    found = _find_newest(warehouse, spec, table)
    if found is None:
        return None
    number = warehouse.latest_version(measurements(spec.name)) + 1
    anew = found.table_id != table.id
    begin = _find_first_version(spec, table) if anew else table.home.latest_version(table.name)
    _record(warehouse, spec, table, begin, f"{_name_checkpoint(spec, table)}-{number}")
    if not anew:
        return f"table {table.path} lands after version {begin}; {_describe_skipped(table, found.version, begin)}"
    lost = "what the former one had left is lost"
    if begin == NOTHING:
        return f"table {table.path} was made anew: it lands from its first row; {lost}"
    left = format_count(table.home.row_count(table.name), "row")
    return f"table {table.path} was made anew: it lands after its version {begin}; {lost}, and {left} of this one"


def _describe_skipped(table: UserTable, landed: int, begin: int) -> str:
    """Return a text on the skipped rows, which are the rows of the versions after `landed` up to `begin`."""
    rows, changed, unknown = 0, [], []
    for version in range(landed + 1, begin + 1):
        content = table.home.read_commit(table.name, version)
        actions = [] if content is None else list(parse_actions(content))
        added = [one["add"] for one in actions if one.get("add", {}).get("dataChange")]
        counts = [json.loads(one.get("stats") or "{}").get("numRecords") for one in added]
        if any(one.get("remove", {}).get("dataChange") for one in actions):
            changed.append(version)
        elif content is None or None in counts:
            unknown.append(version)
        else:
            rows += sum(counts)
    said = [f"{format_count(rows, 'row')} that had not landed {'is' if rows == 1 else 'are'} left out"]
    if changed:
        said.append(f"what {_format_versions(changed)} changed or removed is not taken over")
    if unknown:
        said.append(
            f"how many rows {_format_versions(unknown)} had is not known, as the log does not say it any more"
        )
    return "; ".join(said)


def _format_versions(numbers: list[int]) -> str:
    """Return version numbers as words for a message."""
    if len(numbers) == 1:
        return f"version {numbers[0]}"
    if len(numbers) > 3 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"versions {numbers[0]} to {numbers[-1]}"
    shown = ", ".join(map(str, numbers[:5]))
    return f"versions {shown}" + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")


def suggest_table_restart(spec: ModelSpec) -> str:
    """Return the sentences that explain how to continue after the present rows of the table."""
    return (
        f"Nothing was skipped, and nothing of it has landed. To continue after what the table has now: "
        f"`kalman-pipeline ingest --model {spec.name} --accept-loss`"
    )


def _build_refusal(spec: ModelSpec, table: UserTable, why: str) -> UserError:
    return UserError(f"table {table.path} {why}. {suggest_table_restart(spec)}", RUN_FAILED)


def _find_first_version(spec: ModelSpec, table: UserTable) -> int:
    assert spec.source is not None
    return table.home.latest_version(table.name) if spec.source.start == "latest" else NOTHING


def _name_checkpoint(spec: ModelSpec, table: UserTable) -> str:
    return f"checkpoints/ingest-{spec.name}-{hashlib.sha256(table.id.encode()).hexdigest()[:10]}"


def _find_newest(warehouse: Warehouse, spec: ModelSpec, table: UserTable) -> TableStart | None:
    """Return the last landed position of a table, or of a former table at the same path; None if there is neither."""
    known = [one.detail for one in warehouse.read_log_entries(measurements(spec.name))]
    for name, value in (("table_id", table.id), ("source_table", table.path)):
        found: Any = next((one for one in known if "source_table" in one and one.get(name) == value), None)
        if found is not None:
            return TableStart(*(found.get(field) for field in TableStart._fields))
    return None


def _record(
    warehouse: Warehouse, spec: ModelSpec, table: UserTable, version: int, checkpoint: str
) -> TableStart:
    """Commit the start position of the landing, in a commit without rows."""
    start = TableStart(table.id, version, table.commit(version), checkpoint, version)
    record_start(warehouse, spec, table.id, start.detail(table.path))
    return start


_CHANGED_COLUMNS = ("DELTA_SCHEMA_CHANGED", "DELTA_STREAMING_INCOMPATIBLE_SCHEMA_CHANGE")
"""Prefixes of the names of Delta errors for columns that have changed since a query started."""
_FAILURES = (
    (
        ("DELTA_SOURCE_IGNORE_DELETE", "DELTA_SOURCE_TABLE_IGNORE_CHANGES"),
        "rows of it were changed, removed or overwritten, and measurements are only ever added to",
    ),
    (("DIFFERENT_DELTA_TABLE",), "it was deleted and made anew"),
    (
        _CHANGED_COLUMNS,
        "a column has the name of a former one, and another type than in rows that have not landed: drop that column, "
        "land, and add it again",
    ),
    (
        ("FILE_NOT_EXIST", "FILE_NOT_FOUND", "FileNotFoundException", "DELTA_VERSION_NOT_FOUND")
        + ("DELTA_STREAM_START_VERSION", "VersionNotFoundException"),
        "files of its commits that have not landed are gone, as VACUUM removes them",
    ),
)
"""Names of Delta errors, with the meaning of each group of names."""


_ANY_CHANGE = (
    "streaming.unsafeReadOnIncompatibleColumnMappingSchemaChanges",
    "streaming.unsafeReadOnIncompatibleSchemaChangesDuringStreamStart",
    "streaming.unsafeReadOnPartitionColumnChanges",
)
"""Delta settings with which a stream reads the present columns of a table, after any renames and drops.

This module checks the columns of the spec at each start, and does not read other columns. Rows that were written before
a column was renamed are read with the present name of the column, as in the table."""


class TableReader(Reader):
    """Reader of a user's table from the landed position."""

    restarts: tuple[str, ...] = _CHANGED_COLUMNS

    def __init__(
        self, warehouse: Warehouse, spec: ModelSpec, table: UserTable, start: TableStart, types: KeyTypes
    ) -> None:
        """Open a table at a landed position; `types` are the types of the key and id columns."""
        self._spec, self._table, self._start, self._types = spec, table, start, types
        self.checkpoint = Checkpoint(warehouse, start.checkpoint)
        self._opened = NOTHING

    def is_empty(self) -> bool:
        """Return whether a new query cannot begin yet, because the version after the position does not exist."""
        begins = self._start.after != NOTHING and self.checkpoint.find_last_planned() is None
        return begins and self._table.home.latest_version(self._table.name) <= self._start.after

    def rows(self) -> DataFrame:
        """Return the rows after the position as a stream of checked rows."""
        spec, types, path = self._spec, self._types, self._table.path
        _read_schema(spec, self._table)  # columns may have changed since the last query
        session = self._table.home.spark
        for name in _ANY_CHANGE:
            session.conf.set(f"spark.databricks.delta.{name}.enabled", "true")
        reader = session.readStream.format("delta")
        if self._start.after != NOTHING:
            reader = reader.option("startingVersion", self._start.after + 1)
        root = self._table.home.path(self._table.name)
        self._opened = self._table.home.latest_version(self._table.name)
        rows = reader.load(root)
        if not self._trusts_clones():
            rows = keep_own_files(rows, root, f"table {path}")
        return read_checked_table(rows, spec, types, path)

    def reached(self, batch: int) -> dict[str, Any]:
        """Return the position at the end of a micro-batch.

        Raises:
            UserError: a deletion vector in its commits is in a file outside the table's folder, or one of them is gone.
        """
        version = self.checkpoint.find_touched_version(batch)
        if version > self._start.version:
            if not self._trusts_clones():
                self._refuse_foreign_vectors(version)
            self._start = self._start._replace(version=version, commit=self._table.commit(version))
        return self._start.detail(self._table.path)

    def _trusts_clones(self) -> bool:
        return self._spec.source is not None and self._spec.source.clones

    def _refuse_foreign_vectors(self, version: int) -> None:
        """Refuse deletion vectors elsewhere among the rows after the position, up to a version."""
        (path, home, name, _), landed = self._table, self._start.version
        if landed == NOTHING:
            landed = min(self._opened, version)  # the query's first rows are of this version or a later one
            read_own_files(home, name, f"table {path}", clones=False, version=landed)
        refuse_foreign_vectors(home, name, f"table {path}", range(landed + 1, version + 1))

    def check(self) -> None:
        """Check that the table has not been replaced since the rows were read."""
        table = self._table
        refuse_other(self._spec, table._replace(id=table.home.table_id(table.name)), self._start)

    def add_origin(self, rows: DataFrame) -> DataFrame:
        """Return rows with the table's name as origin and source, and the micro-batch's end as position."""
        start, source = self._start, F.lit(f"delta:{self._table.path}")
        place = {"table": self._table.path, "table_id": start.table_id, "version": start.version}
        return rows.withColumns({ORIGIN: source, SOURCE: source, POSITION: F.lit(json.dumps(place))})

    def explain_error(self, error: PySparkException) -> str:
        """Return the meaning of a known Delta error in words; for other errors, return the cause."""
        text = str(error)
        for names, meaning in _FAILURES:
            if any(name in text for name in names):
                return f"{meaning}. {suggest_table_restart(self._spec)}"
        return find_cause(error)


def open_table_reader(warehouse: Warehouse, spec: ModelSpec, lossy: bool) -> tuple[Reader, str | None]:
    """Return the reader of a table, and a text on skipped rows, or None.

    Args:
        warehouse: warehouse of the model.
        spec: spec of the model.
        lossy: whether to restart the landing after lost rows (`accept_loss`).

    Raises:
        UserError: the table does not exist, a column is missing or unusable, or the table does not continue at its
            landed position.
    """
    table = open_table(warehouse, spec)
    types = prepare(warehouse, spec, derive_key_types(spec.naming_columns, _read_schema(spec, table)))
    note = accept_loss(warehouse, spec, table) if lossy else None
    return TableReader(warehouse, spec, table, start_of(warehouse, spec, table), types), note


def _read_schema(spec: ModelSpec, table: UserTable) -> pa.Schema:
    """Return the types of the spec's columns in the table.

    Raises:
        UserError: a column is missing, or its type is not suitable for the values that the spec expects.
    """
    remedy = (
        f". If it was renamed, rename it back, or give the spec of {spec.name} a new version with the new name; "
        "nothing has landed meanwhile"
    )
    return read_table_schema(spec, table.home.read(table.name), f"table {table.path}", remedy)
