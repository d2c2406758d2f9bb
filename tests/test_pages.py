"""The commands of the pages: each parses as it stands, and those that can run here are run, block by block."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import typer
from deltalake import DeltaTable, write_deltalake

from jobs.cli import app
from jobs.core.command import PROGRAM, hoist_global_options
from tests.conftest import MASTER

ROOT = Path(__file__).resolve().parent.parent
DECISIONS = ROOT / "docs" / "decisions"
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent != DECISIONS),
]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.M | re.S)
HERE_DOCUMENT = re.compile(r"<<-?'?(\w+)'?([^\n]*)\n.*?^\1$", re.M | re.S)


def blocks(page: Path) -> list[str]:
    """Return the blocks of commands of a page, in order."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def commands(block: str) -> list[list[str]]:
    """Return the arguments of each `kalman-pipeline` command of a block."""
    text = HERE_DOCUMENT.sub(r"\2", block).replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        at = re.search(rf"(?:^|[\s(]){PROGRAM} ", line)
        if at is None or line.lstrip().startswith("#"):
            continue
        words = shlex.split(line[at.end() :].rstrip(" )"), comments=True)
        found.append([word for word in words if word not in ("|", "&")])
    return found


ALL = [
    pytest.param(words, id=f"{page.stem}-{' '.join(words)[:60]}")
    for page in PAGES
    for block in blocks(page)
    for words in commands(block)
]


@pytest.mark.parametrize("words", ALL)
def test_a_command_of_a_page_has_the_options_that_it_names(words: list[str]):
    group: Any = typer.main.get_command(app)
    context = group.make_context(PROGRAM, hoist_global_options(words))
    while getattr(group, "commands", None):
        name, *rest = [*context._protected_args, *context.args]
        group = group.commands[name]
        context = group.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_pasted_block_leaves_no_warehouse_behind(page: Path):
    for block in blocks(page):
        if re.search(r"\bexport KALMAN_(MODELS|WAREHOUSE)", block):
            assert block.startswith("(") and block.endswith(")\n"), block


def paste(block: str, folder: Path, home: Path) -> str:
    """Run a block as a user who pastes it into a shell in `folder`; return what it printed.

    `/tmp` and the folder from which the pages of the project's root name files are those of the test.
    """
    text = block.replace("/tmp/", f"{home}/")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "KALMAN_MASTER": MASTER,
    }
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(
        f"{block}\n{done.stderr}\n{done.stdout}"
    )  # what the user saw, for the report of a test that fails later
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def root_copy(folder: Path) -> Path:
    """Return a folder with the specs and fixtures of the project's root, for pages that begin there."""
    for name in ("models", "tests", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_no_page_reads_a_table_in_a_way_that_may_end_a_script_with_134():
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.ipynb")]
    reads = re.compile(
        r"DeltaTable\([^\n]*\)\.(to_pandas|to_pyarrow_table|to_pyarrow_dataset)\((?!.*filesystem=)"
    )
    shown = [f"{page}: {found[0]}" for page in pages for found in reads.finditer(page.read_text("utf-8"))]
    assert [one for one in shown if "DeltaTable(...)" not in one] == [], "see docs/readers.md"


def test_the_alerts_of_the_page_are_read_and_the_script_ends_with_0(tmp_path: Path):
    text = (ROOT / "docs" / "your-own-data.md").read_text("utf-8")
    block = next(one for one in text.split("<<'PYTHON'\n")[1:] if "DeltaTable" in one).split("\nPYTHON")[0]
    at = pa.array(range(8), pa.timestamp("us", "UTC"))
    texts = {name: [f"{name}{one}" for one in range(8)] for name in ("key", "rule", "status")}
    write_deltalake(tmp_path / "warehouse" / "alerts" / "weather", pa.table({**texts, "event_time": at}))
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == [f"key{one}" for one in range(6)]


def test_the_first_result_of_the_readme(tmp_path: Path):
    first = next(block for block in blocks(ROOT / "README.md") if "filter --model" in block)
    out = paste(first, tmp_path, tmp_path)
    assert "6 rows of 2 keys" in out
    kitchen = (tmp_path / "estimates.csv").read_text().splitlines()
    assert len(kitchen) == 7 and (tmp_path / "rooms.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.spark
def test_the_tour_of_the_readme_ends_with_estimates_and_a_picture(tmp_path: Path):
    tour = next(block for block in blocks(ROOT / "README.md") if "stream --model nile" in block)
    out = paste(tour, root_copy(tmp_path), tmp_path)
    assert "estimated 20 rows" in out
    assert DeltaTable(str(tmp_path / "warehouse" / "estimates" / "nile")).to_pandas().shape[0] == 20
    assert (tmp_path / "nile.html").read_text().count("data:image/png") == 1


@pytest.mark.slow
def test_your_own_data(tmp_path: Path):
    printed = [paste(block, tmp_path, tmp_path) for block in blocks(ROOT / "docs" / "your-own-data.md")]
    data, first, live, ahead, alert, quarantine, upgrade = printed
    assert data == "" and "structures by the log-likelihood" in first
    assert (tmp_path / "weather.html").exists() and (tmp_path / "live.png").stat().st_size > 20_000
    assert "estimated 2,228 rows" in live
    assert "72 forecasts of 3 keys" in ahead and "latest states of weather-" in ahead
    assert ahead.splitlines()[-3].startswith('"EWR",2013-08-01 04:00:00.000000Z,1,')
    assert "raised" in alert and " hot " in alert
    assert "quarantined 1 row" in quarantine and "landed 1 row of weather" in quarantine
    assert "estimated 3 rows" in quarantine
    assert "of version 2 is live" in upgrade and "estimated 2,217 rows" in upgrade


SELF_CONTAINED = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks(page))
    if block.startswith("(export KALMAN_MODELS")
]


@pytest.mark.slow
@pytest.mark.parametrize("block", SELF_CONTAINED)
def test_an_example_to_paste(block: str, tmp_path: Path):
    paste(block, root_copy(tmp_path), tmp_path)
