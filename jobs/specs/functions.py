"""Functions that a model's spec names: the fields that may name them, and the modules that may contain them.

A spec that names a function runs the code of the function's module. So a spec may only name functions of modules in the
spec's own folder, or in the list that the owner of the installation sets.
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
    module = name.partition(":")[0]
    parts = module.split(".")
    above = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    modules = list_allowed_modules()
    if any(fnmatchcase(one, pattern) for one in above for pattern in modules if pattern != BESIDE):
        return None
    listed = (
        f"list it in {VARIABLE} (now {' '.join(modules)}), if everybody who writes specs may run its code"
    )
    if BESIDE not in modules or folder is None:
        return f"module {parts[0]} is not one whose functions a spec may name", listed
    importlib.invalidate_caches()
    beside = _find_file(PathFinder.find_spec(parts[0], [folder]))
    if parts[0] in sys.stdlib_module_names:
        return (
            f"module {parts[0]} is Python's own, whose functions a spec may not name",
            "write a module of your own",
        )
    # Spark also puts its copies of the workers' files on the driver's path.
    own = [entry for entry in sys.path if "userFiles-" not in entry]
    elsewhere = _find_file(PathFinder.find_spec(parts[0], own))
    if beside is None:
        if elsewhere is None and PathFinder.find_spec(parts[0], [os.getcwd()]) is None:
            return None  # the module does not exist, which the caller of the function reports
        return (
            f"module {parts[0]} is not in the folder of the spec, {folder}",
            f"put its file there, or {listed}",
        )
    if elsewhere not in (None, beside):
        return (
            f"module {parts[0]} is in the folder of the spec and at {elsewhere}",
            "rename the one of the spec",
        )
    return None


def _find_file(found: ModuleSpec | None) -> str | None:
    """Return the file of a module, or the folder of a package that has no file."""
    if found is None:
        return None
    places = [found.origin] if found.origin else list(found.submodule_search_locations or [])
    return os.path.realpath(places[0]) if places else None
