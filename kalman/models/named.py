"""Functions of a model, which are imported and pickled by their names `module:function`.

A module is searched on the Python path, then in the given folder. Only plain Python functions that the module defines
are valid, so a name cannot reach other code that the module imports. Before that, `jobs.specs.functions` checks which
modules a spec may name.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from kalman.types import ModelError

_private: dict[tuple[str, int], ModuleType] = {}
"""Modules loaded from files that a plain `import` would not find, by file and modification time."""


@dataclass(frozen=True)
class Named:
    """A function with the name `module:function`; folder: an additional folder to search for the module."""

    name: str
    folder: str | None = None

    def __reduce__(self) -> Any:  # the function is imported again after unpickling
        return Named, (self.name, self.folder)

    @cached_property
    def function(self) -> Callable[..., Any]:
        """Return the function. Raises ModelError."""
        return find(self.name, self.folder)

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def find(name: str, folder: str | None = None, field: str = "function") -> Callable[..., Any]:
    """Return the function `module:function`. Raises ModelError about `field`."""
    module_name, colon, attribute = name.partition(":") if isinstance(name, str) else ("", "", "")
    parts = [*module_name.split("."), *attribute.split(".")]
    if not colon or not all(part.isidentifier() for part in parts):
        raise ModelError(field, f"{name!r} does not name a function", "write module:function")
    try:
        value: Any = load(module_name, folder)
    except ModuleNotFoundError as error:
        if error.name is not None and not (module_name + ".").startswith(error.name + "."):
            raise ModelError(
                field, f"module {module_name} needs {error.name}, which is not there", "install it"
            ) from error
        places = "on the Python path" + (f" and in {folder}" if folder else "")
        raise ModelError(
            field, f"there is no module {module_name} (looked {places})", "put its file there"
        ) from error
    except Exception as error:
        raise ModelError(
            field, f"module {module_name} cannot be imported: {_format_first_line(error)}", "mend the module"
        ) from error
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        raise ModelError(
            field, f"module {module_name} has no function {attribute}", "name one that it defines"
        )
    top = module_name.partition(".")[0]
    if not isinstance(value, FunctionType) or value.__module__.partition(".")[0] != top:
        raise ModelError(
            field,
            f"{name} is not a plain Python function of {top}",
            f"write `def {parts[-1]}...` there, which may call it",
        )
    return value


def load(name: str, folder: str | None = None) -> ModuleType:
    """Import a module from the Python path, or else from `folder`.

    Two folders may have modules of the same name, because each file is a separate module.
    """
    places = [folder] if folder else []
    importlib.invalidate_caches()
    on_path = PathFinder.find_spec(name)
    found = on_path if _is_file(on_path) else PathFinder.find_spec(name, places)
    if "." in name or name in sys.builtin_module_names or not _is_file(found) or found is None:
        with _extend_path(places):
            return importlib.import_module(name)
    loaded = sys.modules.get(name)
    if found is on_path and (loaded is None or _is_same_file(loaded, found)):
        return importlib.import_module(name)
    return _load_file(name, str(found.origin))


def _load_file(name: str, file: str) -> ModuleType:
    """Load a file without an entry in `sys.modules`, which may contain another module of the same name."""
    key = (file, os.stat(file).st_mtime_ns)
    if key not in _private:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        before = sys.modules.get(name)
        sys.modules[name] = module  # code in the module may look itself up while it is loaded
        try:
            with _extend_path([os.path.dirname(file)]):  # for imports of modules in the same folder
                spec.loader.exec_module(module)
        finally:
            del sys.modules[name]
            if before is not None:
                sys.modules[name] = before
        _private[key] = module
    return _private[key]


def find_module_file(name: str, folder: str | None = None) -> Path | None:
    """Return the file (or package folder) of the module in `module:function`; None if there is no such file."""
    top = load(name.partition(":")[0].partition(".")[0], folder)
    file = getattr(top, "__file__", None)
    if file is None:
        return None
    return Path(file).parent if hasattr(top, "__path__") else Path(file)


@contextmanager
def _extend_path(places: list[str]) -> Iterator[None]:
    added = [place for place in places if place not in sys.path]
    sys.path.extend(added)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for place in added:
            if place in sys.path:
                sys.path.remove(place)


def _is_file(found: ModuleSpec | None) -> bool:
    """Return whether a module is a single file, not a package."""
    return found is not None and found.has_location and not found.submodule_search_locations


def _is_same_file(module: ModuleType, found: ModuleSpec) -> bool:
    file = getattr(module, "__file__", None)
    return file is None or os.path.realpath(file) == os.path.realpath(str(found.origin))


def _format_first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
