"""What a look at the warehouse asks of its tables and files, whoever reads them.

`Warehouse` (`jobs.warehouse.delta`) answers with Spark, and `LocalTables` (`jobs.warehouse.local_tables`) without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from jobs.warehouse.files import WarehouseFiles


class Tables(Protocol):
    """The tables below one root, to be read."""

    @property
    def root(self) -> str:
        """The root: an absolute path, or a URI."""
        ...

    def path(self, table: str) -> str:
        """Return the location of a table or folder such as `measurements/nile`."""
        ...

    def exists(self, table: str) -> bool:
        """Tell if a table exists."""
        ...

    def latest_version(self, table: str) -> int:
        """Return the latest version of a table."""
        ...

    def table_id(self, table: str) -> str:
        """Return the id that Delta gave a table when it was made."""
        ...

    def column_names(self, table: str) -> list[str]:
        """Return the names of a table's columns."""
        ...

    def rows(self, table: str, where: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return the rows of a small table, those whose columns have the values of `where`, with times in UTC."""
        ...

    def row_count(self, table: str) -> int:
        """Return the number of rows of a table."""
        ...

    def group_counts(self, table: str, by: Sequence[str]) -> list[dict[str, Any]]:
        """Return how many rows (`count`) have each combination of values of some columns; null without a column."""
        ...

    def spark_files(self, folder: str) -> WarehouseFiles:
        """Return the files of a folder that Spark writes, whose checksums are verified on reading."""
        ...
