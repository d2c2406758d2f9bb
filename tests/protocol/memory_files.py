"""Stand-in for `jobs.storage.object_files.ObjectFiles`: a folder of the simulated store.

A file is replaced as a whole, and `create` lets one of several callers through. Each call is one step of its process.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from jobs.storage.object_files import FileStamp
from tests.protocol import world


class MemoryFiles:
    """A folder, given by its path."""

    def __init__(self, root: Any) -> None:
        self.root = str(root).rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}".rstrip("/")

    def _short(self, path: str) -> str:
        return path.removeprefix(f"{world.ROOT}/")

    def read(self, name: str, most: int | None = None) -> bytes | None:
        path, files = self._path(name), world.current().files
        kept = world.current().read(
            path, f"read {self._short(path)}", lambda: files.get(path), lambda one: one and one.content
        )
        return None if kept is None else kept.content

    def read_first_line(self, name: str) -> bytes | None:
        kept = self.read(name)
        return None if kept is None else kept.splitlines()[0]

    def write(self, name: str, content: bytes) -> None:
        path, here = self._path(name), world.current()
        here.write(path, f"write {self._short(path)}", lambda: here.put(path, content))

    def create(self, name: str, content: bytes) -> bool:
        path, here = self._path(name), world.current()

        def link() -> bool:
            if path in here.files:
                return False
            here.put(path, content)
            return True

        return here.write(path, f"create {self._short(path)}", link)

    def remove(self, name: str) -> None:
        path, here = self._path(name), world.current()
        here.parts.pop(path, None)
        if path in here.files:
            here.write(path, f"remove {self._short(path)}", lambda: here.remove(path))

    def exists(self, name: str) -> bool:
        path = self._path(name)
        return world.current().read(
            path, f"look for {self._short(path)}", lambda: bool(_below(path, True)), lambda found: found
        )

    def seen(self, name: str) -> FileStamp | None:
        """Return what is seen of a file; no step, as only files of logs are asked for, which never change."""
        path, here = self._path(name), world.current()
        found = here.files.get(path) or here.parts.get(path)
        return None if found is None else FileStamp(str(hash(found.content)), len(found.content))

    def read_modified_time(self, name: str) -> datetime:
        return world.current().files[self._path(name)].written_at

    def rename(self, name: str, to: str) -> bool:
        source, target, here = self._path(name), self._path(to), world.current()

        def move() -> bool:
            found = _below(source, True)
            for path in found:
                kept = here.files[path]
                here.remove(path)
                here.put(target + path.removeprefix(source), kept.content, kept.detail)
            return bool(found)

        return here.write(source, f"rename {self._short(source)}", move)

    def remove_tree(self, name: str) -> bool:
        path, here = self._path(name), world.current()

        def clear() -> bool:
            for one in _below(path, True):
                here.remove(one)
            return True

        return here.write(path, f"remove folder {self._short(path)}", clear)

    def names(self, folder: str) -> list[str]:
        path = self._path(folder)

        def listed() -> list[str]:
            found = {one.removeprefix(f"{path}/").split("/")[0] for one in _below(path)}
            return sorted(one for one in found if not one.startswith("."))

        return world.current().read(path, f"list {self._short(path)}", listed, tuple)


def _below(path: str, itself: bool = False) -> list[str]:
    files = world.current().files
    return [one for one in files if one.startswith(f"{path}/") or itself and one == path]
