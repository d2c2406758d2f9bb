"""What the repository promises as a whole: layers between the packages, models that load, a README."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jobs.specs.loading import load_spec
from kalman import build

ROOT = Path(__file__).resolve().parent.parent
MODELS = sorted((ROOT / "models").glob("*.yaml"))
SLOW_TO_IMPORT = {"pyspark", "numpy", "pandas", "scipy", "pyarrow", "delta", "matplotlib"}


def sources(folder: str) -> list[Path]:
    """Return the Python files below a folder of the repository."""
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path, module_level: bool = False) -> set[str]:
    """Return the modules that a file imports; with `module_level` only those that importing it brings in."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            # `from jobs import spec` imports the module jobs.specs.model_spec
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        if module_level and (_is_function(node) or _is_for_types(node)):
            continue
        waiting.extend(ast.iter_child_nodes(node))
    return found


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def tops(names: set[str]) -> set[str]:
    """Return the top-level packages of module names."""
    return {name.split(".")[0] for name in names}


# Layers: dags -> jobs -> kalman


@pytest.mark.parametrize("path", sources("kalman"), ids=lambda path: str(path.relative_to(ROOT)))
def test_kalman_is_numerics_alone(path: Path):
    foreign = tops(imports(path)) - set(sys.stdlib_module_names) - {"kalman", "numpy", "scipy"}
    assert not foreign


@pytest.mark.parametrize("path", sources("jobs"), ids=lambda path: str(path.relative_to(ROOT)))
def test_jobs_know_nothing_of_dags(path: Path):
    assert not tops(imports(path)) & {"dags", "kalman_dags", "airflow", "tests", "demo"}


@pytest.mark.parametrize("path", sources("dags"), ids=lambda path: str(path.relative_to(ROOT)))
def test_dags_parse_without_heavy_modules(path: Path):
    assert not tops(imports(path, module_level=True)) & (SLOW_TO_IMPORT | {"kalman"})


def test_what_dags_import_of_jobs_is_light():
    names = {
        name
        for path in sources("dags")
        for name in imports(path, module_level=True)
        if name.startswith("jobs.")
    }
    modules = sorted(name for name in names if (ROOT / Path(*name.split("."))).with_suffix(".py").is_file())
    assert modules, "the DAGs import nothing of jobs?"
    code = f"import sys, {', '.join(modules)}; print(*sorted({SLOW_TO_IMPORT!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), f"{modules}\n{done.stderr}"


def test_no_module_of_jobs_hides_one_of_python():
    # spark-submit puts the folder of its script first on sys.path
    assert not {path.stem for path in (ROOT / "jobs").iterdir()} & set(sys.stdlib_module_names)


def test_no_plugin_hides_a_package():
    # Airflow puts a plugin's file into sys.modules under its bare name
    names = {path.stem for path in (ROOT / "plugins").glob("*.py")}
    assert names and not names & {path.name for path in ROOT.iterdir()}


# Models


def test_there_are_models():
    assert MODELS


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_model_loads_and_builds(path: Path):
    spec = load_spec(path)
    assert spec.name == path.stem
    kernel = build(spec.definition())
    assert list(kernel.states) == spec.states
    assert kernel.measurements == len(spec.measurement)


# What a newcomer meets first


def test_readme_begins_with_its_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(
        r"\bmake ([a-z]+)", "\n".join(re.findall(r"^```.*?^```|`[^`\n]+`", text, re.M | re.S))
    )
    assert set(commands[:2]) == {"demo", "test"}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(commands) <= targets


def test_ci_runs_the_test_command_and_lint():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert "make test-all" in text and "make lint" in text


def test_make_test_leaves_out_nothing_that_test_all_does_not_run():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    default = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"][
        "ini_options"
    ]
    marks = default["addopts"][default["addopts"].index("-m") + 1]
    core = re.search(r"^CORE := \((.*?)\) and (.*)$", makefile, re.M)
    assert core is not None and core[2] == marks


def test_the_check_speaks_to_an_old_python():
    # By its syntax: a Python that is too old must get as far as saying so.
    ast.parse((ROOT / "jobs" / "spark" / "doctor.py").read_text(encoding="utf-8"), feature_version=(3, 6))
    assert tops(imports(ROOT / "jobs" / "spark" / "doctor.py")) <= set(sys.stdlib_module_names)
