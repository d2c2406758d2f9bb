"""Folders of the warehouse through the file system that Spark uses for them."""

from __future__ import annotations

from typing import Any

from jobs.errors import RUN_FAILED, UserError
from jobs.tables import Warehouse


class Folder:
    """A folder of the warehouse, which may be there or not."""

    def __init__(self, warehouse: Warehouse, name: str) -> None:
        jvm: Any = warehouse.spark._jvm
        session: Any = warehouse.spark._jsparkSession
        self._path: Any = jvm.org.apache.hadoop.fs.Path(warehouse.path(name))
        self._files: Any = self._path.getFileSystem(session.sessionState().newHadoopConf())

    def exists(self) -> bool:
        """Tell if it is there."""
        return bool(self._files.exists(self._path))

    def remove(self, really: bool = True) -> bool:
        """Tell if it is there, and remove it with all that is in it, unless it is not meant.

        Raises:
            UserError: it cannot be removed.
        """
        there = self.exists()
        if there and really and not self._files.delete(self._path, True):
            raise UserError(
                f"{self._path} cannot be removed: look who may write there, and run maintain again",
                RUN_FAILED,
            )
        return there

    def rename(self, to: Folder) -> None:
        """Give it another name, at once.

        Raises:
            UserError: it cannot be renamed.
        """
        if not self._files.rename(self._path, to._path):
            raise UserError(
                f"{self._path} cannot be renamed: look who may write there, and run maintain again",
                RUN_FAILED,
            )
