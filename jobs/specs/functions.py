"""Functions that a model's spec names: the fields that may name them, and the modules that may contain them.

A spec that names a function runs the code of the function's module. So a spec may only name functions of modules in the
list that the owner of the installation sets. A listed module is found on the Python path; the spec's own folder is
searched only if the list has `.`.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from jobs.core.input_files import is_within

FIELDS = ("f", "h", "q", "jacobian", "noise_jacobian")
"""Fields of a process or an observation that name a function."""

VARIABLE = "KALMAN_FUNCTIONS"
"""Environment variable that lists the modules whose functions specs may name. An entry is a name, a pattern, or `.` for
the folder of the spec.
"""
DEFAULT = ". kalman_*"
BESIDE = "."


def list_functions(definition: Any) -> Iterator[str]:
    """Yield the name of every `module:function` in a definition, at any depth."""
    if isinstance(definition, Mapping):
        for field, value in definition.items():
            if field in FIELDS and isinstance(value, str):
                yield value
            else:
                yield from list_functions(value)
    elif isinstance(definition, (list, tuple)):
        for value in definition:
            yield from list_functions(value)


def list_function_fields(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the place and the name of every `module:function` in sections of a spec, for any use of the function."""
    if isinstance(value, Mapping):
        for field, item in value.items():
            inner = f"{place}.{field}" if place else str(field)
            if field in (*FIELDS, "function", "merge") and isinstance(item, str) and ":" in item:
                yield inner, item
            elif field == "functions" and isinstance(item, list):
                yield from ((f"{inner}[{i}]", str(one)) for i, one in enumerate(item))
            else:
                yield from list_function_fields(item, inner)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from list_function_fields(item, f"{place}[{i}]")


def list_allowed_modules() -> list[str]:
    """Return the modules whose functions a spec may name: names, patterns such as `kalman_*`, and `.`."""
    return re.split(r"[\s,]+", (os.environ.get(VARIABLE) or DEFAULT).strip())


def find_refusal(name: str, folder: str | None) -> tuple[str, str] | None:
    """Return the problem and the remedy for a `module:function` that a spec in `folder` must not name, or None.

    The check imports no module.
    """
    parts = name.partition(":")[0].split(".")
    above = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    modules = list_allowed_modules()
    listed = (
        f"list it in {VARIABLE} (now {' '.join(modules)}), if everybody who writes specs may run its code"
    )
    importlib.invalidate_caches()
    if any(fnmatchcase(one, pattern) for one in above for pattern in modules if pattern != BESIDE):
        return None if BESIDE in modules or folder is None else _find_misplaced(parts, folder)
    if BESIDE not in modules or folder is None:
        return f"module {parts[0]} is not one whose functions a spec may name", listed
    if parts[0] in sys.stdlib_module_names:
        return (
            f"module {parts[0]} is Python's own, whose functions a spec may not name",
            "write a module of your own",
        )
    beside = _list_places(PathFinder.find_spec(parts[0], [folder]))
    # Spark also puts its copies of the workers' files on the driver's path.
    own = [entry for entry in sys.path if "userFiles-" not in entry]
    elsewhere = _list_places(PathFinder.find_spec(parts[0], own))
    if not beside:
        if not elsewhere and PathFinder.find_spec(parts[0], [os.getcwd()]) is None:
            return None  # the module does not exist, which the caller of the function reports
        return (
            f"module {parts[0]} is not in the folder of the spec, {folder}",
            f"put its file there, or {listed}",
        )
    others = [place for place in elsewhere if place not in beside]
    if others:
        return (
            f"module {parts[0]} is in the folder of the spec and at {others[0]}",
            "rename the one of the spec",
        )
    return None


def _find_misplaced(parts: list[str], folder: str) -> tuple[str, str] | None:
    """Return the problem and the remedy for a listed module that is not, or not only, outside the spec's folder.

    The folder may be, or be part of, a package on the path, so the places of all packages above the module count.
    """
    module, real = parts[0], os.path.realpath(folder)
    found = PathFinder.find_spec(module)
    if found is None:  # an editable installation has a finder of its own
        found = next(filter(None, (one.find_spec(module, None) for one in sys.meta_path)), None)
    if found is None and PathFinder.find_spec(module, [folder]) is not None:
        why, remedy = "it is not on the Python path", f"install {module}"
    elif any(is_within(place, real) for place in _list_all_places(found, parts[1:])):
        why, remedy = "the folder of the spec is on the Python path", "start the command in another folder"
    else:
        return None  # the caller of the function reports a module that does not exist
    return (
        f"module {module} is beside the spec, and {why}",
        f"{remedy}, or list . in {VARIABLE}, if everybody who writes specs may run code",
    )


def _list_all_places(found: ModuleSpec | None, inner: list[str]) -> Iterator[str]:
    """Yield the real files and folders of a package, and of the modules `inner` within it, each within the last."""
    while found is not None:
        folders = list(found.submodule_search_locations or [])
        yield from map(os.path.realpath, filter(None, [found.origin, *folders]))
        # By its last name, because a package without a file would look for the package above it among loaded modules.
        found = PathFinder.find_spec(inner[0], folders) if inner and folders else None
        inner = inner[1:]


def choose_search_folder(folder: str | None) -> str | None:
    """Return the folder of a spec if its functions may be in it, or None: the list has only modules on the path."""
    return folder if BESIDE in list_allowed_modules() else None


def _list_places(found: ModuleSpec | None) -> list[str]:
    """Return the file of a module, or the folders of a package that has no file; an empty list without a module."""
    if found is None:
        return []
    places = [found.origin] if found.origin else list(found.submodule_search_locations or [])
    return [os.path.realpath(place) for place in places]
