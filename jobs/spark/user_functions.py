"""Find the files of the functions that a spec names as `module:function`, and send the files to Spark's workers.

Specs, fingerprints and the data sent to workers contain only the names of the functions.
"""

from __future__ import annotations

import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.specs.functions import list_functions
from kalman.models.named import find, find_module_file

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def list_function_files(names: Iterable[str], folder: str | None) -> list[Path]:
    """Return the files with the modules of the named functions, except modules of installed packages.

    A package is zipped in a temporary folder. If a module imports other modules from its folder, these are not
    included; the modules must then be made a package.

    Raises:
        ModelError: a function does not exist.
    """
    files: dict[Path, None] = {}
    for name in names:
        find(name, folder)
        file = find_module_file(name, folder)
        if file is not None and not _is_installed(file):
            files[file] = None
    return [_zip_package(file) if file.is_dir() else file for file in files]


def ship(spark: SparkSession, definition: Mapping[str, Any]) -> None:
    """Send the files of a definition's functions to the session's workers.

    Raises:
        ModelError: a function does not exist.
    """
    ship_named(spark, list_functions(definition), definition.get("folder"))


def ship_named(spark: SparkSession, names: Iterable[str], folder: str | None) -> None:
    """Send the files of the named functions to the session's workers, as `ship` does.

    Raises:
        ModelError: a function does not exist.
    """
    for file in list_function_files(names, folder):
        spark.sparkContext.addPyFile(str(file))


def _is_installed(file: Path) -> bool:
    """Return whether a file is installed in the Python environment that the workers share."""
    own = Path(__file__).resolve().parents[2]
    paths = sysconfig.get_paths()
    places = [Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    places += [own / "kalman", own / "jobs"]
    return any(file.resolve().is_relative_to(place) for place in places)


def _zip_package(package: Path) -> Path:
    place = Path(tempfile.mkdtemp(prefix="kalman-functions-"))
    archive = shutil.make_archive(str(place / package.name), "zip", package.parent, package.name)
    return Path(archive)
