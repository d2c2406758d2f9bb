"""The kinds of fuzz cases: each makes one input from a seed, gives it to the code, and judges what became of it."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import zlib
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from jobs import cli
from jobs.core.errors import INPUT_ERROR, UserError
from jobs.landing.messages import MessageChecker
from jobs.specs.loading import load_spec
from jobs.specs.model_spec import ModelSpec
from jobs.specs.source import Source
from jobs.state.kernel import check_numerics
from jobs.storage.quarantine import REASON
from tests.fuzz import rows
from tests.fuzz.damage import damaged
from tests.fuzz.judge import ANY, CLEAR, QUARANTINED, REFUSED, REJECT, Wrong, check_sentence, compare
from tests.fuzz.records import record_case
from tests.fuzz.rows import SPEC

MODELS = Path(__file__).resolve().parents[2] / "models"
FEW_BYTES = 2_000

Case = Callable[[random.Random, Path], str]


def spec_case(chance: random.Random, folder: Path) -> str:
    """A spec: sound ones with one value exchanged, damaged text, hostile YAML."""
    path = folder / "nile.yaml"
    text = chance.choice(sorted(MODELS.glob("*.yaml"))).read_bytes()
    how = chance.randrange(5)
    if how == 4:
        text = yaml.safe_dump(_changed(yaml.safe_load(text), chance)).encode()
    elif how == 0:
        text = damaged(text, chance)
    elif how == 1:
        text = yaml.safe_dump(_exchanged(yaml.safe_load(text), chance)).encode()
    elif how == 2:
        text += chance.choice(HOSTILE_YAML).encode("utf-8", "surrogatepass")
    else:
        text = chance.choice(HOSTILE_YAML).encode("utf-8", "surrogatepass")
    path.write_bytes(text)
    spec = load_spec(path)
    check_numerics(spec)
    spec.fingerprint()
    return CLEAR


HOSTILE_YAML = [
    f"version: {2**70}\n",
    "version: " + "9" * 5000 + "\n",
    "a: " + "[" * 5000,
    "a: " + "{a: " * 5000,
    "x: &a [*a]\n",
    "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else '1'] * 9)}]\n" for i in range(12)),
    "? !!binary aGk=\n: 1\n",
    "!!binary aGk=: 1\n",
    "a: !!set {b, c}\n",
    "a: !!timestamp 2001-99-01\n",
    "a: !!python/object/apply:os.system [id]\n",
    'description: "\\ud800"\n',
    'missing_values: ["\\0"]\n',
    'description: "\\UFFFFFFFF"\n',
    'description: "\\U00110000"\n',
    'a: "\\xZZ"\n',
    'a: "\\q"\n',
    "a: !<tag:yaml.org,2002:%FF> b\n",
    f"%YAML {'9' * 5000}.1\n---\na: 1\n",
    "\x00",
    "\ufeff\ufeff",
    "description: " + "x" * 300_000,
    "states: [" + "1," * 30_000 + "1]",
    "line_pattern: '(?P<x>['\n",
    "time_zone: /etc/passwd\n",
    "time_format: '%'\n",
    "- 1\n",
    "7: 1\n",
    "null: 1\n",
    "true: 1\n",
    "<<: {a: 1}\n",
    "<<: 7\n",
    "--- 1\n--- 2\n",
    "%YAML 9.9\n---\na: 1\n",
    "retention: {snapshots: 1e400}\n",
    "stream: {partitions: 99999999999999999999}\n",
    "stream: {partitions: -1}\n",
    "expiry: {after: 99999999999999999999d}\n",
    "airflow: {stream: {schedule: '* * * * * * * *'}}\n",
    "sinks: {functions: ['os:system']}\n",
]
ODD: list[Any] = [
    None, True, 0, -1, 2**70, 0.5, float("inf"), float("nan"), "", "x", "\u202e", "x" * 5000, [], [[]], [None], {},
    {"a": 1}, {1: 2}, [[1.0, 2.0]], [1] * 50, "pickle:loads", "99999999999999d", "../../etc/passwd", 1e308, -1e308,
    5e-324, [["x"]],
]  # fmt: skip


def _changed(spec: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return a sound spec with another text or number where any will do."""
    text = chance.choice(
        ["", "x" * 5000, "\u202e", "名前", "a: b", "'", "# no comment", "{{ 1 }}", "\x1b[31m"]
    )
    change = chance.choice(
        [{"description": text}, {"version": chance.randint(1, 2**31 - 1)}, {"missing_values": [text, "-"]}]
    )
    return {**spec, **change}


def _exchanged(value: Any, chance: random.Random) -> Any:
    """Return a document with one value, at whatever depth, exchanged for an odd one."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        return {**value, key: _exchanged(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.7:
        at = chance.randrange(len(value))
        return [*value[:at], _exchanged(value[at], chance), *value[at + 1 :]]
    return chance.choice(ODD)


def csv_case(chance: random.Random, folder: Path) -> str:
    """A CSV file whose rows are known, whole or damaged."""
    given, path = rows.some(chance), folder / "rows.csv"
    data = rows.as_csv(given, chance.choice(["\n", "\r\n"]))
    if chance.random() < 0.3:
        data = b"\xef\xbb\xbf" + data
    wanted: list[Any] | None = [row.right for row in given]
    if chance.random() < 0.6:
        head = data.index(b"\n") + 1
        data = data[:head] + damaged(data[head:], chance)
        wanted = rows.reference_csv(data, given)
    path.write_bytes(data)
    found = rows.read(path)
    if wanted is None:
        return QUARANTINED if any(row.values is None for row in found) else CLEAR
    return compare(wanted, found)


def json_lines_case(chance: random.Random, folder: Path) -> str:
    """A file of JSON lines whose rows are known, some lines damaged or exchanged for hostile ones."""
    lines, wanted = _documents(chance)
    path = folder / "rows.jsonl"
    kept = [(line, right) for line, right in zip(lines, wanted, strict=True) if line.strip()]
    path.write_bytes(b"\n".join(line for line, _ in kept) + chance.choice([b"", b"\n", b"\r\n"]))
    return compare([right for _, right in kept], rows.read(path))


HOSTILE_JSON = [
    b"{" * 3000,
    b"[" * 100_000,
    b'{"a":' * 3000,
    b'{"id": "a", "at": "2024-01-01T00:00:00Z", "x": ' + b"[" * 50_000,
    b'{"id": "a", "at": "2024-01-01T00:00:00Z", "x": ' + b"9" * 50_000 + b"}",
    b'{"id": "a", "at": ' + b"9" * 5000 + b', "x": 1}',
    b'{"id": "\\ud800", "at": "2024-01-01T00:00:00Z", "x": 1}',
    b'{"id": "a\\u0000b", "at": "2024-01-01T00:00:00Z", "x": 1}',
    b'{"id": "' + b"k" * 200_000 + b'", "at": "2024-01-01T00:00:00Z", "x": 1}',
    b'{"id": {"a": 1}, "at": [1], "x": {}}',
    b'{"id": true, "at": true, "x": true}',
    b'{"id": "a", "id": "b", "at": "2024-01-01T00:00:00Z", "x": 1, "x": 2}',
    b'{"id": "a", "at": "2024-01-01T00:00:00Z", "x": NaN}',
    b'{"id": "a", "at": "2024-01-01T00:00:00Z", "x": 1e999}',
    b'{"id": 123456789012345678901234567890, "at": "2024-01-01T00:00:00Z", "x": 1}',
    b'"text"',
    b"null",
    b"\xff\xfe{\x00}\x00",
    b"\x00" * 100,
    b"{}",
    b"{} {}",
]


def _documents(chance: random.Random) -> tuple[list[bytes], list[Any]]:
    """Return JSON documents, some of them damaged, and what is right for each."""
    given = rows.some(chance)
    lines = [rows.document(row) for row in given]
    known = {line.strip(): row.right for line, row in zip(lines, given, strict=True)}
    for at in range(len(lines)):
        if at and chance.random() < 0.3:  # the first one gives a new table's columns their types
            changed = damaged(lines[at], chance) if chance.random() < 0.6 else chance.choice(HOSTILE_JSON)
            lines[at] = changed.replace(b"\n", b" ").replace(b"\r", b" ")
    return lines, [rows.reference_object(line, known) for line in lines]


def json_array_case(chance: random.Random, folder: Path) -> str:
    """A file with one JSON array whose rows are known, whole, damaged or hostile."""
    given, path = rows.some(chance), folder / "rows.json"
    data = b"[" + b",\n".join(map(rows.document, given)) + b"]"
    if chance.random() < 0.5:
        path.write_bytes(data)
        return compare([row.right for row in given], rows.read(path))
    data = damaged(data, chance) if chance.random() < 0.7 else b"[" + chance.choice(HOSTILE_JSON) + b"]"
    path.write_bytes(data)
    found = rows.read(path)
    try:
        count = len(json.loads(data))
    except (ValueError, RecursionError, TypeError):
        # It is no array as a whole: whatever is read of it is judged row by row.
        return QUARANTINED if any(row.values is None for row in found) else CLEAR
    return compare([ANY] * count, found)


def gzip_case(chance: random.Random, folder: Path) -> str:
    """A CSV file in gzip, whole, damaged or cut; right is what Python's own reader of gzip finds, or a refusal."""
    given, path = rows.some(chance), folder / "rows.csv.gz"
    data = gzip.compress(rows.as_csv(given), chance.choice([1, 9]))
    if chance.random() < 0.3:
        path.write_bytes(data)
        return compare([row.right for row in given], rows.read(path))
    data = damaged(data, chance)
    path.write_bytes(data)
    try:
        plain = gzip.decompress(data)
    except (EOFError, OSError, zlib.error):
        plain = None
    try:
        found = rows.read(path)
    except UserError:
        if plain is not None and plain == rows.as_csv(given):
            raise Wrong("a sound file is refused") from None
        raise
    if plain is None:
        raise Wrong(f"{len(found)} rows were read from a damaged file")
    wanted = rows.reference_csv(plain, given)
    return compare(wanted, found) if wanted is not None else QUARANTINED


def parquet_case(chance: random.Random, folder: Path) -> str:
    """A Parquet file whose rows are known, whole or damaged; right is what pyarrow reads of it, or a refusal."""
    given, path = rows.some(chance), folder / "rows.parquet"
    texts = {name: _stored_texts([str(row.texts[name]) for row in given], chance) for name in rows.COLUMNS}
    out = io.BytesIO()
    pq.write_table(
        pa.table(texts), out, compression=chance.choice(["snappy", "none", "zstd"]), write_page_checksum=True
    )
    data = out.getvalue()
    if chance.random() < 0.3:
        path.write_bytes(data)
        return compare([row.right for row in given], rows.read(path))
    path.write_bytes(damaged(data, chance))
    found = rows.read(path)
    reference = pq.read_table(path)
    known = {tuple(str(row.texts[name]) for name in rows.COLUMNS): row.right for row in given}
    listed = zip(*(map(_text, reference.column(name).to_pylist()) for name in rows.COLUMNS), strict=True)
    return compare([known.get(one, ANY) for one in listed], found)


def _stored_texts(texts: list[str], chance: random.Random) -> pa.Array:
    """Return a column of texts in one of the types that writers of Parquet give it."""
    kind = chance.choice([pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), None])
    return pa.array(texts).dictionary_encode() if kind is None else pa.array(texts).cast(kind)


def _text(value: Any) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def message_case(chance: random.Random, folder: Path) -> str:
    """Messages of a topic: JSON values whose rows are known, damaged and hostile ones, keys of any bytes."""
    lines, wanted = _documents(chance)
    values: list[bytes | None] = list(lines)
    keyed = chance.random() < 0.5
    if keyed:  # by the message's key, so that a row without an id may be right
        wanted = [ANY] * len(values)
    keys = [chance.choice([None, b"k", b"\xff\xfe", b"", b"\x00", b"k" * 100_000]) for _ in values]
    for at in range(len(values)):
        if chance.random() < 0.1:
            values[at], wanted[at] = chance.choice(
                [(None, REJECT), (b"", REJECT), (chance.randbytes(50), ANY)]
            )
    source: dict[str, Any] = {"kind": "kafka", "topic": "fuzz"}
    spec = SPEC
    if keyed:
        spec = ModelSpec.model_validate(
            {**json.loads(SPEC.model_dump_json(by_alias=True)), "key": ["device"]}
        )
        source["message_key"] = "device"
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(values, pa.binary()),
            pa.array(keys, pa.binary()),
            pa.array([0] * len(values), pa.int32()),
            pa.array(range(len(values)), pa.int64()),
        ],
        ["value", "key", "partition", "offset"],
    )
    types = {name: "string" for name in spec.key}
    checked = MessageChecker(spec, Source.model_validate(source), types)(batch)
    if keyed:
        index = checked.schema.get_field_index("device")
        checked = checked.rename_columns(
            [name if at != index else "id" for at, name in enumerate(checked.schema.names)]
        )
        for reason, key, found in zip(
            checked.column(REASON).to_pylist(), keys, checked.column("id").to_pylist(), strict=True
        ):
            if reason is None and (key is None or found != key.decode()):
                raise Wrong(f"the key {key!r} was accepted as {found!r}")
    return compare(wanted, rows.rows_of(checked))


OPTIONS = "--model --input --output --models --as-of --trigger --json --quiet -- -q -x --help --model= --from --every"
VALUES = [
    *(
        "=",
        "",
        " ",
        "absent",
        "../../etc/passwd",
        "/dev/zero",
        "/dev/null",
        "x" * 300,
        "x" * 5000,
        "\u202e",
        "\udcff",
    ),
    *(
        "\x1b[31m",
        "a\nb",
        "--keys=-1",
        "--steps=99999999999999999999",
        "--batch=1e9",
        "--to-version=-1",
        "2024-13-01",
    ),
    *("{{ 1 }}", "$(id)", "'", '"', "*", "[", "--metrics-port=99999", "--share=1000%", "--warehouse=/proc"),
    *("--warehouse=ftp://x", "--warehouse="),
]
WORDS = [*OPTIONS.split(), *VALUES]
VERBS = [*cli.VERBS, "nonsense"]
ABSENT = ["absent", "x" * 300, "\udcff", "a/b", "\u202e", "/dev/zero.yaml"]


def command_case(chance: random.Random, folder: Path) -> str:
    """A command line of hostile words about a model that is not there: refused before Spark starts."""

    words = [
        chance.choice(VERBS),
        "--model",
        chance.choice(["absent", "x" * 300, "\udcff", "a/b", "\u202e", "/dev/zero.yaml"]),
    ]
    for _ in range(chance.randint(0, 4)):
        words.insert(chance.randint(0, len(words)), chance.choice(WORDS))
    words = [f"--models={folder}", f"--warehouse={folder / 'warehouse'}", *words]
    out, said = io.StringIO(), io.StringIO()
    before = os.getcwd()
    os.chdir(folder)
    try:
        with redirect_stdout(out), redirect_stderr(said):
            code = cli.app(args=words, standalone_mode=False)
    except SystemExit as ended:
        code = ended.code
    finally:
        os.chdir(before)
    if code == INPUT_ERROR or code == 1:
        lines = said.getvalue().splitlines()
        if code == 1 and any("traceback in" in line for line in lines):
            raise Wrong(f"{words}: {said.getvalue()[:300]}")
        if not lines and not out.getvalue():
            raise Wrong(f"{words}: nothing is said, with exit code {code}")
        check_sentence(said.getvalue() or out.getvalue())
        return REFUSED
    if code not in (0, None):
        raise Wrong(f"{words}: exit code {code}")
    return CLEAR


def _long_field(chance: random.Random, folder: Path) -> str:
    first, last = rows.good(chance), rows.good(chance)
    long = rows.Row({**rows.good(chance).texts, "x": "9" * 140_000}, REJECT)
    (folder / "long.csv").write_bytes(rows.as_csv([first, long, last]))
    return compare([first.right, REJECT, last.right], rows.read(folder / "long.csv"))


def _wide(chance: random.Random, folder: Path) -> str:
    one = rows.good(chance)
    names = [*rows.COLUMNS, *(f"c{i}" for i in range(40_000))]
    line = ",".join(["k", str(one.texts["at"]), str(one.texts["x"]), *["1"] * 40_000])
    (folder / "wide.csv").write_text(",".join(names) + "\n" + (line + "\n") * 3)
    return compare([("k", *one.right[1:])] * 3, rows.read(folder / "wide.csv"))


def _bomb(chance: random.Random, folder: Path) -> str:
    head = rows.as_csv([rows.good(chance)])
    squeezed = zlib.compressobj(9, zlib.DEFLATED, 31)
    data = squeezed.compress(head) + squeezed.compress(b"\n" * 100_000_000) + squeezed.flush()
    (folder / "bomb.csv.gz").write_bytes(data)
    found = rows.read(folder / "bomb.csv.gz")
    return compare([ANY] * len(found), found)


def _endless(chance: random.Random, folder: Path) -> str:
    squeezed = zlib.compressobj(9, zlib.DEFLATED, 31)
    data = squeezed.compress(rows.as_csv([rows.good(chance)]) + chance.choice([b"", b"a,", b'"']))
    data += b"".join(squeezed.compress(chance.choice([b"1", b","]) * 100_000_000) for _ in range(3))
    (folder / "endless.csv.gz").write_bytes(data + squeezed.flush())
    rows.read(folder / "endless.csv.gz")
    raise Wrong("a row of 300 MB was read")


def _not_what_it_says(chance: random.Random, folder: Path) -> str:
    data = rows.as_csv(rows.some(chance))
    name = chance.choice(["rows.parquet", "rows.csv.gz", "rows.orc", "rows.json", "rows.jsonl"])
    (folder / name).write_bytes(data)
    found = rows.read(folder / name)
    return compare([ANY] * len(found), found)


def _empty(chance: random.Random, folder: Path) -> str:
    name = chance.choice(["rows.parquet", "rows.csv", "rows.csv.gz", "rows.orc", "rows.json", "rows.jsonl"])
    (folder / name).write_bytes(chance.choice([b"", b"\n", b"\x00", b"\xef\xbb\xbf", b" "]))
    return compare([ANY] * len(found), found) if (found := rows.read(folder / name)) else CLEAR


def _odd_path(chance: random.Random, folder: Path) -> str:
    name = chance.choice(["x" * 300 + ".csv", "absent.csv", "absent/rows.csv", "\udcff.csv"])
    rows.read(folder / name)
    raise Wrong(f"{name!r} was read")


# Files that were seen to freeze, crash or refuse what is sound: of a list, not of a seed's making.
HARD: list[Case] = [
    _long_field,
    _wide,
    _bomb,
    _endless,
    _not_what_it_says,
    _not_what_it_says,
    _empty,
    _empty,
    _odd_path,
    _odd_path,
]

KINDS: dict[str, Case] = {
    "specs": spec_case,
    "CSV": csv_case,
    "JSON lines": json_lines_case,
    "JSON arrays": json_array_case,
    "gzip": gzip_case,
    "Parquet": parquet_case,
    "messages": message_case,
    "command lines": command_case,
    "driver records": record_case,
}
