"""Stand-in for Delta tables and for the Spark session, in the simulated store.

A table is a log of commits, one file a version; a version is written by put-if-absent. A commit is checked against
those that came in between as Delta does it:

- appends do not conflict with each other; an append whose transaction (application, number) is not newer than the last
  one of that application is skipped when it begins, and refused if another came in between;
- an update, merge or delete conflicts with every commit since it read the table that changed rows that it may have
  read; of rows, Delta knows the partition and no more;
- a merge or update that changes nothing makes no commit.

Not modelled: changes of columns, and the removal of old files (VACUUM), which no rule of the protocol depends on.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pyarrow as pa
from delta.exceptions import (
    ConcurrentAppendException,
    ConcurrentDeleteReadException,
    ConcurrentTransactionException,
    MetadataChangedException,
)
from pyspark.errors import PySparkException
from pyspark.sql.types import LongType, StringType, StructField, StructType

from tests.protocol import world
from tests.protocol.memory_columns import UNKNOWN, Column, expr, lit
from tests.protocol.memory_frame import Frame, parse_schema

Rows = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Commit:
    """One version: the rows after it, and what it added and removed."""

    version: int
    operation: str
    rows: Rows
    schema: StructType
    partition_by: tuple[str, ...]
    table_id: str
    transactions: Mapping[str, int]
    added: Rows = ()
    removed: Rows = ()
    application: str | None = None
    metadata: str | None = None
    rewrote: bool = False
    by: str = ""


def _log(path: str, version: int) -> str:
    return f"{path}/_delta_log/{version:020d}.json"


def latest(path: str) -> Commit | None:
    """Return a table's last commit without a step of the scheduler."""
    here = world.current()
    version = here.newest.get(path)
    return None if version is None else here.files[_log(path, version)].detail


def commit_at(path: str, version: int) -> Commit:
    """Return a commit of a table.

    Raises:
        PySparkException: the table has no such version.
    """
    stored = world.current().files.get(_log(path, version))
    if stored is None:
        raise PySparkException(f"{path} has no version {version}")
    return stored.detail


def _short(path: str) -> str:
    return path.removeprefix(f"{world.ROOT}/")


def _mark(path: str) -> Callable[[Commit | None], Any]:
    def mark(commit: Commit | None) -> Any:
        return None if commit is None else (commit.version, hash(_content(path, commit.version)))

    return mark


def _content(path: str, version: int) -> bytes:
    return world.current().files[_log(path, version)].content


def read_latest(path: str) -> Commit | None:
    """Read a table's last commit, as one step."""
    return world.current().read(path, f"read {_short(path)}", lambda: latest(path), _mark(path))


@dataclass
class Change:
    """What a transaction wants to do: rows out, rows in, and what it has read (None: nothing, a blind append)."""

    operation: str
    removed: Rows = ()
    added: Rows = ()
    read: Column | None = None
    transaction: tuple[str, int] | None = None
    metadata: str | None = None
    rewrote: bool = False
    schema: StructType | None = None


def _maybe(condition: Column, row: Mapping[str, Any], partition_by: tuple[str, ...]) -> bool:
    """Tell if a row may meet a condition, of which only the row's partition is known."""
    known = {name: value if name in partition_by else UNKNOWN for name, value in row.items()}
    aliased = {**known, "t": known, "_other": UNKNOWN}
    return condition.value(aliased) is not False


def _refuse_conflict(change: Change, winner: Commit) -> None:
    if change.transaction is not None and winner.application == change.transaction[0]:
        raise ConcurrentTransactionException(f"{winner.application} committed version {winner.version}")
    if change.read is None:
        return
    if winner.rewrote:
        raise ConcurrentDeleteReadException(f"version {winner.version} rewrote files")
    for rows, error in (
        (winner.added, ConcurrentAppendException),
        (winner.removed, ConcurrentDeleteReadException),
    ):
        if any(_maybe(change.read, row, winner.partition_by) for row in rows):
            raise error(f"version {winner.version} changed rows that were read")


def _put(path: str, base: Commit, change: Change) -> int:
    """Put the next version of a table, after checking it against the versions since `base`."""
    last = latest(path)
    assert last is not None
    for version in range(base.version + 1, last.version + 1):
        _refuse_conflict(change, commit_at(path, version))
    gone = {id(row) for row in change.removed}
    rows = (*(row for row in last.rows if id(row) not in gone), *change.added)
    transactions = dict(last.transactions)
    if change.transaction is not None:
        transactions[change.transaction[0]] = change.transaction[1]
    thread = world.current().thread
    made = Commit(
        version=last.version + 1,
        operation=change.operation,
        rows=rows,
        schema=change.schema or last.schema,
        partition_by=last.partition_by,
        table_id=last.table_id,
        transactions=transactions,
        added=change.added,
        removed=change.removed,
        application=change.transaction and change.transaction[0],
        metadata=change.metadata,
        rewrote=change.rewrote,
        by="" if thread is None else thread.process.name,
    )
    _store(path, made)
    return made.version


def put_change(path: str, last: Commit, change: Change, metadata: Mapping[str, Any]) -> Commit:
    """Put the version after the last one, as delta-rs does; only within `do` of a write."""
    thread = world.current().thread
    gone = {id(row) for row in change.removed}
    made = replace(
        last,
        version=last.version + 1,
        operation=change.operation,
        rows=(*(row for row in last.rows if id(row) not in gone), *change.added),
        schema=change.schema or last.schema,
        transactions=dict(last.transactions) | dict([change.transaction] if change.transaction else []),
        added=change.added,
        removed=change.removed,
        application=change.transaction and change.transaction[0],
        metadata=change.metadata,
        by="" if thread is None else thread.process.name,
    )
    _store(path, made, metadata)
    return made


def _store(path: str, made: Commit, more: Mapping[str, Any] = MappingProxyType({})) -> None:
    here = world.current()
    info: dict[str, Any] = {
        "timestamp": int(here.clock.now().timestamp() * 1000),
        "operation": made.operation,
        "userMetadata": made.metadata,
        "txnId": f"{_short(path)}/{made.version}/{made.by}",
        **more,
    }
    lines: list[dict[str, Any]] = [{"commitInfo": info}]
    if made.version == 0:
        lines.append({"metaData": {"id": made.table_id}})
    if made.application is not None:
        number = made.transactions[made.application]
        lines.append({"txn": {"appId": made.application, "version": number}})
    # The rows' digest stands for the paths of the files that a commit names.
    digest = zlib.crc32(repr((made.added, made.removed)).encode())
    lines.append({"add": {"path": f"part-{digest:08x}", "dataChange": not made.rewrote}})
    here.put(_log(path, made.version), "\n".join(map(json.dumps, lines)).encode(), made)
    here.newest[path] = made.version


def commit(path: str, base: Commit, change: Change) -> int:
    """Commit a change, as one step, and return its version."""
    counts = f"+{len(change.added)} -{len(change.removed)}"
    name = "" if change.transaction is None else named(change.transaction)
    what = f"commit {_short(path)}: {change.operation.lower()} {counts}{name}"
    return world.current().write(
        path, what, lambda: _put(path, base, change), lambda: PySparkException("the answer was lost")
    )


def named(transaction: tuple[str, int]) -> str:
    name, number = transaction
    if not name.endswith(("by-epoch", "begin")):
        return f" as {name}"
    epoch, batch = divmod(number + 1, 2**32)
    return f" as {name.split('/')[0]}, epoch {epoch}, {f'micro-batch {batch - 1}' if batch else 'the fence'}"


def _table(path: str) -> Commit:
    base = read_latest(path)
    if base is None:
        raise PySparkException(f"{path} is not a Delta table")
    return base


def create(
    path: str,
    schema: StructType,
    partition_by: tuple[str, ...],
    rows: Rows = (),
    transaction: tuple[str, int] | None = None,
    metadata: str | None = None,
    if_absent: bool = False,
) -> None:
    """Write the first version of a table; with `if_absent`, one that another process has just made is kept.

    Raises:
        MetadataChangedException: another process has just made it.
    """
    here = world.current()
    made = Commit(
        version=0,
        operation="WRITE" if rows else "CREATE TABLE",
        rows=rows,
        schema=schema,
        partition_by=partition_by,
        table_id=f"table-{here.new_id()}",
        transactions={} if transaction is None else dict([transaction]),
        added=rows,
        application=transaction and transaction[0],
        metadata=metadata,
    )

    def put() -> int:
        if latest(path) is not None:
            if if_absent:
                return 0
            raise MetadataChangedException(f"{path} has just been made")
        _store(path, made)
        return 0

    what = f"commit {_short(path)}: make the table"
    if rows:
        what += f", +{len(rows)}" + ("" if transaction is None else named(transaction))
    here.write(path, what, put, lambda: PySparkException("the answer was lost"))


class DeltaTable:
    """`delta.tables.DeltaTable`, as far as the modules use it."""

    def __init__(self, session: Session, path: str) -> None:
        self._session, self._path = session, path
        self._base: Commit | None = None

    @classmethod
    def forPath(cls, session: Session, path: str) -> DeltaTable:
        return cls(session, path)

    @classmethod
    def isDeltaTable(cls, session: Session, path: str) -> bool:
        return read_latest(path) is not None

    @classmethod
    def createIfNotExists(cls, session: Session) -> _Builder:
        return _Builder()

    def alias(self, name: str) -> DeltaTable:
        return self

    def toDF(self) -> Frame:
        base = _table(self._path)
        return Frame(self._session, base.rows, base.schema)

    def update(self, condition: Any, set: Mapping[str, Any]) -> None:  # noqa: A002 (Delta's name)
        base, test = _table(self._path), expr(condition) if isinstance(condition, str) else condition
        removed = tuple(row for row in base.rows if test.value(row) is True)
        if removed:
            added = tuple({**row, **_values(set, row)} for row in removed)
            commit(self._path, base, Change("UPDATE", removed, added, test))

    def merge(self, source: Frame, condition: str) -> _Merge:
        return _Merge(self._session, self._path, source, condition)

    def detail(self) -> Frame:
        base = _table(self._path)
        schema = StructType([StructField("id", StringType()), StructField("numFiles", LongType())])
        return Frame(self._session, [{"id": base.table_id, "numFiles": base.version}], schema)

    def optimize(self) -> DeltaTable:
        return self

    def executeCompaction(self) -> None:
        commit(self._path, _table(self._path), Change("OPTIMIZE", read=lit(True), rewrote=True))


def _values(columns: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: (expr(value) if isinstance(value, str) else value).value(row) for name, value in columns.items()
    }


class _Builder:
    """`DeltaTable.createIfNotExists`."""

    def __init__(self) -> None:
        self._path, self._fields, self._partition_by = "", StructType([]), ()

    def location(self, path: str) -> _Builder:
        self._path = path
        return self

    def addColumns(self, fields: StructType) -> _Builder:
        self._fields = fields
        return self

    def partitionedBy(self, *names: str) -> _Builder:
        self._partition_by = names
        return self

    def property(self, name: str, value: str) -> _Builder:
        return self

    def execute(self) -> None:
        if read_latest(self._path) is None:
            create(self._path, self._fields, self._partition_by)


@dataclass
class _Merge:
    """`DeltaTable.merge`: the first clause that fits a pair decides."""

    session: Session
    path: str
    source: Frame
    condition: str
    matched: list[tuple[Column | None, Mapping[str, Any] | None]] = field(default_factory=list)
    fresh: list[tuple[Column | None, Mapping[str, Any] | None]] = field(default_factory=list)

    def whenMatchedUpdate(self, condition: str | Column | None, set: Mapping[str, Any]) -> _Merge:  # noqa: A002
        self.matched.append((_test(condition), set))
        return self

    def whenMatchedUpdateAll(self, condition: str | None = None) -> _Merge:
        self.matched.append((_test(condition), None))
        return self

    def whenNotMatchedInsert(self, condition: str | None, values: Mapping[str, Any]) -> _Merge:
        self.fresh.append((_test(condition), values))
        return self

    def whenNotMatchedInsertAll(self, condition: str | None = None) -> _Merge:
        self.fresh.append((_test(condition), None))
        return self

    def withSchemaEvolution(self) -> _Merge:
        return self

    def execute(self) -> None:
        base, on = _table(self.path), expr(self.condition)
        transaction = self.session.transaction()
        if transaction is not None and base.transactions.get(transaction[0], -(2**63)) >= transaction[1]:
            return
        removed: list[dict[str, Any]] = []
        added: list[dict[str, Any]] = []
        for given in self.source.rows:
            pairs = [(row, {**row, "t": row, "s": given}) for row in base.rows]
            found = [(row, pair) for row, pair in pairs if on.value(pair) is True]
            for row, pair in found:
                clause = _first(self.matched, pair)
                if clause is not None:
                    removed.append(row)
                    columns = clause[1]
                    added.append({**row, **(given if columns is None else _values(columns, pair))})
            if not found:
                pair = {"s": given, **given}
                clause = _first(self.fresh, pair)
                if clause is not None:
                    made = given if clause[1] is None else _values(clause[1], pair)
                    added.append({name: made.get(name) for name in base.schema.names})
        if removed or added:
            read = Column(lambda row: any(_kleene(on.value({**row, "s": one})) for one in self.source.rows))
            change = Change("MERGE", tuple(removed), tuple(added), read, transaction)
            commit(self.path, base, change)


def _kleene(value: Any) -> bool:
    return value is not False


def _test(condition: str | Column | None) -> Column | None:
    return expr(condition) if isinstance(condition, str) else condition


def _first(clauses: list[tuple[Column | None, Any]], pair: Mapping[str, Any]) -> tuple[Any, Any] | None:
    return next((one for one in clauses if one[0] is None or one[0].value(pair) is True), None)


class _Conf:
    """A session's settings."""

    def __init__(self) -> None:
        self._kept: dict[str, str] = {}

    def set(self, name: str, value: Any) -> None:
        self._kept[name] = str(value)

    def get(self, name: str, default: Any = None) -> Any:
        return self._kept.get(name, default)

    def unset(self, name: str) -> None:
        self._kept.pop(name, None)


class _Context:
    """A Spark context: its properties, which are those of the one thread that runs jobs."""

    defaultParallelism = 2

    def __init__(self) -> None:
        self._properties: dict[str, str | None] = {}

    def setLocalProperty(self, name: str, value: str | None) -> None:
        self._properties[name] = value

    def getLocalProperty(self, name: str) -> str | None:
        return self._properties.get(name)


class _Reader:
    """`spark.read` and `spark.readStream`."""

    def __init__(self, session: Session, make: Callable[[Session, str, dict[str, str]], Any]) -> None:
        self._session, self._make, self._options = session, make, dict[str, str]()

    def format(self, name: str) -> _Reader:
        assert name == "delta", name
        return self

    def option(self, name: str, value: Any) -> _Reader:
        self._options[name] = str(value)
        return self

    def load(self, path: str) -> Any:
        return self._make(self._session, path, self._options)


def _load(session: Session, path: str, options: Mapping[str, str]) -> Frame:
    version = options.get("versionAsOf")
    if version is None:
        base = _table(path)
    else:
        base = world.current().read(
            path, f"read {_short(path)} version {version}", lambda: commit_at(path, int(version)), _mark(path)
        )
    return Frame(session, base.rows, StructType(list(base.schema.fields)))  # `StructType.add` changes it


class Session:
    """A Spark session of one process."""

    def __init__(self, stream: Callable[..., Any] | None = None) -> None:
        self.conf, self.sparkContext, self._stream = _Conf(), _Context(), stream
        self._jvm: Any = None

    def transaction(self) -> tuple[str, int] | None:
        """Return the transaction that the session's settings give a merge."""
        application = self.conf.get("spark.databricks.delta.write.txnAppId")
        if application is None:
            return None
        return application, int(self.conf.get("spark.databricks.delta.write.txnVersion"))

    @property
    def read(self) -> _Reader:
        return _Reader(self, _load)

    @property
    def readStream(self) -> _Reader:
        assert self._stream is not None
        return _Reader(self, self._stream)

    def createDataFrame(self, rows: Any, schema: Any = None) -> Frame:
        if isinstance(rows, pa.Table):
            kinds = {"int64": "bigint", "double": "double", "string": "string"}
            names = [(one.name, kinds.get(str(one.type), "timestamp")) for one in rows.schema]
            return Frame(self, rows.to_pylist(), parse_schema(", ".join(f"{n} {k}" for n, k in names)))
        wanted = parse_schema(schema) if isinstance(schema, str) else schema
        return Frame(self, ({name: row.get(name) for name in wanted.names} for row in rows), wanted)

    def range(self, number: int) -> Frame:
        return Frame(self, ({"id": one} for one in range(number)), parse_schema("id bigint"))
