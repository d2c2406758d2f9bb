"""Tables in folders with any name that a file system allows: each step finds the same folder, or the name is refused.

The table is what a careful person expects, and `names` draws others of the same kind.
"""

from __future__ import annotations

import os
import string
import subprocess
import sys
import uuid
from pathlib import Path
from urllib.parse import quote, unquote

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jobs.core.errors import UserError
from jobs.core.settings import parse_warehouse_root, refuse_misread
from jobs.lineage import live_rows
from jobs.storage.part_files import write_parts
from jobs.storage.row_changes import put_rows, replace_table
from jobs.storage.table_log import FileTable
from jobs.storage.table_rows import build_location
from jobs.storage.warehouse import Tables, find_home

TAKEN = [
    *("plain", "a b", " a", "a ", "ü", "e\u0301", "\u2028", "\u202e", "日本", "\U0001f40b", "x" * 200),
    *(
        "#x",
        "a?b",
        "a+b",
        "[x]",
        "a]",
        "a[b",
        "a:b",
        "C:",
        "'q'",
        '"q"',
        "{x}",
        "{a,b}",
        "*",
        "~",
        "$x",
        "$(x)",
    ),
    *("a;b", "a&b=c", "<x>", "|", "^", "`x`", "@", "...", "a.", "-", "--x", "=", "!", ",", "(x)", "key=a%2"),
    *("%", "%%", "100%", "%zz", "%2", "%x41", "file:", "s3a:", "_x", ".x", "x_delta_log"),
]
REFUSED = [
    *(
        "a%20b",
        "a%41b",
        "%25",
        "%2e%2e",
        "a%2Fb",
        "a%00",
        "%%41",
        "a\\b",
        "\\",
        "C:\\x",
        "a\nb",
        "a\tb",
        "\x1b[31m",
    ),
    *("\x7f", "a\rb", os.fsdecode(b"\xff"), "_delta_log"),
]
ROWS = pa.table({"a": [1, 2, 3], "b": ["x", "y", None]})


def made_by_every_step(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make, append, replace, merge and read tables below a root by all that the storage room has for it."""
    tables = Tables(root)
    tables.create("t", "a bigint, b string")
    log = FileTable(tables, "t")
    log.ready(ROWS.schema)
    assert log.commit(write_parts(log.path, "part", ROWS.to_batches()), ("app", 1)) == 1
    put_rows(tables, "t", ["a"], lambda there: [{"a": 3, "b": "z"}, {"a": 4, "b": str(len(there))}])
    assert sorted((row["a"], row["b"]) for row in tables.rows("t")) == [
        (1, "x"),
        (2, "y"),
        (3, "z"),
        (4, "3"),
    ]
    assert tables.latest_version("t") == 2 and tables.transactions("t") == {"app": 1}
    assert [replace_table(tables, "inputs/t", one) for one in (ROWS, ROWS.slice(1))] == [0, 1]
    assert tables.row_count("inputs/t") == 2
    for names in (["a", "b"], ["a"]):
        rows = [
            {
                **{"model": "m", "place": place, "generation": name, "last_batch": 7, "model_version": 1},
                **{"states": ["level"], "key_columns": None},
            }
            for place, name in enumerate(names)
        ]
        with monkeypatch.context() as patch:
            patch.setattr(live_rows, "build_live_rows", lambda *_, rows=rows: rows)
            patch.setattr(live_rows.generations, "read_generations", lambda *_: [])
            patch.setattr(live_rows.manifests, "read_manifests", lambda *_: [])
            assert live_rows.refresh_live_table(tables, "m") and not live_rows.refresh_live_table(tables, "m")
        assert sorted(tables.rows("live"), key=lambda row: row["place"]) == rows
    tables.files("").write("small", b"file")
    assert tables.files("").names("") == ["_locks", "inputs", "live", "small", "t"]


def check(base: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Check that a folder of this name is used as it is, or refused before anything is written; tell if it is used."""
    home = base / uuid.uuid4().hex
    home.mkdir()
    decoded = home / (unquote(name).replace("/", "") or "none")
    if decoded.name not in (name, ".", "..") and "\0" not in decoded.name:
        made_there = Path(os.fsencode(decoded).decode("utf-8", "replace"))
        made_there.mkdir()
    before = sorted(os.listdir(home))
    root = f"{home}/{name}"
    uri = f"file://{quote(os.fsencode(root))}"
    try:
        used = parse_warehouse_root(root)
    except UserError as error:
        for text in (uri, f"{home}/x/../{name}"):
            with pytest.raises(UserError, match="a warehouse cannot be at"):
                parse_warehouse_root(text)
        with pytest.raises(UserError, match="a Delta table cannot be at .* rename the folder"):
            build_location(root, "t")  # one that a spec names
        assert error.message.isprintable() and "rename the folder or choose another one" in error.message
        assert sorted(os.listdir(home)) == before, "nothing is written"
        return False
    assert used == root == parse_warehouse_root(uri)
    made_by_every_step(used, monkeypatch)
    assert sorted(os.listdir(home)) == sorted({*before, name}), "nothing is written beside it"
    assert all(not os.listdir(home / one) for one in before if one != name)
    return True


@pytest.mark.parametrize("name", TAKEN)
def test_a_warehouse_is_where_its_name_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert check(tmp_path, name, monkeypatch)


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_would_lead_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert not check(tmp_path, name, monkeypatch)


names = st.text(
    st.one_of(
        st.sampled_from(string.printable + "%%%%\\\\[]{}?#:;'\"äß€"),
        st.characters(blacklist_categories=("Cs",)),
        st.sampled_from([os.fsdecode(bytes([code])) for code in (0x80, 0xC3, 0xFF)]),
    ).filter(lambda one: one not in "/\0"),
    min_size=1,
    max_size=30,
).filter(lambda name: name not in (".", "..") and os.fsdecode(os.fsencode(name)) == name)


@settings(max_examples=40, deadline=None)
@given(name=names)
@example(name="a%2")
@example(name="%4a")
def test_any_name_is_used_or_refused(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.mktemp("odd")
    with pytest.MonkeyPatch.context() as monkeypatch:
        check(base, name, monkeypatch)


encoded = st.builds(
    lambda left, code, right: f"{left}%{code:02x}{right}",
    st.text(string.ascii_letters, max_size=3),
    st.integers(0, 255),
    st.text(string.ascii_letters, max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(name=encoded)
def test_a_name_that_decodes_to_another_is_always_refused(name: str) -> None:
    with pytest.raises(UserError, match="a Delta table cannot be at"):
        refuse_misread(f"/somewhere/{name}/t", "a Delta table")


def test_another_warehouses_rows_are_never_shown(tmp_path: Path) -> None:
    other = Tables(str(tmp_path / "my data"))
    other.create("t", "a bigint, b string")
    put_rows(other, "t", ["a"], lambda there: [{"a": 1, "b": "another's"}])
    with pytest.raises(
        UserError, match=r"cannot be at .*my%20data.* \(if .*/my data/t is meant, write that\)"
    ):
        Tables(f"{tmp_path}/my%20data").rows("t")


@pytest.mark.parametrize("verb", ["ingest", "status", "quarantine", "verify", "maintain"])
def test_verbs_refuse_at_once_and_make_no_folder(tmp_path: Path, verb: str) -> None:
    more = {
        "ingest": ["--model", "m", "--input", "x.csv"],
        "quarantine": ["list"],
        "verify": ["--model", "m"],
    }
    run = subprocess.run(
        [sys.executable, "-m", f"jobs.{verb}", *more.get(verb, []), "--warehouse", f"{tmp_path}/a%20b"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 2, run.stderr
    assert "a warehouse cannot be at" in run.stderr and "Traceback" not in run.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "root"),
    [
        ("file:///lake/my%20data/t", "/lake/my data"),
        ("file:/lake/%C3%A4/t/", "/lake/\u00e4"),
        ("/lake/my data/t", "/lake/my data"),
        ("/lake/a#b?c/t/", "/lake/a#b?c"),
        ("s3a://bucket/lake/t", "s3a://bucket/lake"),
        ("inputs/t", "/w"),
    ],
)
def test_a_table_that_a_spec_names_is_where_its_name_says(name: str, root: str) -> None:
    home, table = find_home(Tables("/w"), name)
    assert (home.root, table) == (root, "t" if root != "/w" else "inputs/t")
