"""Find the notation of the numbers in a table's columns, and read each value as missing, a number, or invalid."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.core.errors import UserError
from jobs.landing.raw_rows import RawRows, reject
from jobs.specs.files import Files
from jobs.specs.yaml_text import format_flow
from jobs.state.encoding import arrow

ABSENT = (
    *(
        "-",
        "--",
        "---",
        "n/a",
        "#n/a",
        "none",
        "nil",
        "?",
        ".",
        "..",
        "nan",
        "missing",
        "null",
        "na",
        "\\n",
        "n.a.",
    ),
    *("#div/0!", "#value!", "#ref!", "#num!", "unavailable", "unknown", "no data", "nodata"),
)
"""Texts, in lower case, that many programs write for a missing number."""
NUMERIC = 0.9
"""Minimum share of numbers among the distinct texts of a column of numbers."""
BLANKS = " \u00a0\u2007\u2009\u202f"
PLAIN_NUMBER = r"[+-]?(?:[0-9]+(?:[.][0-9]*)?|[.][0-9]+)(?:[eE][+-]?[0-9]+)?"
WORDS: tuple[dict[str, float], ...] = (
    {"true": 1.0, "false": 0.0},
    {"on": 1.0, "off": 0.0},
    {"yes": 1.0, "no": 0.0},
    {"open": 1.0, "closed": 0.0},
)
"""Pairs of words for the numbers 1 and 0."""

_MINUS = "\u2212"
_MARKS = {",": ",", ".": "[.]", " ": f"[{BLANKS}]", "'": "['\u2019]"}
_MONEY = "[$\u20ac\u00a3\u00a5\u20b9\u20bd\u20a9\u20ba\u20b4\u20aa\u20ab\u0e3f\u20a6\u20b1]"
_CURRENCY = (
    f"[A-Z]{{0,3}}{_MONEY}|Rs[.]?|kr[.]?|R|"
    "USD|EUR|GBP|CHF|JPY|CNY|INR|AUD|CAD|NZD|SEK|NOK|DKK|PLN|CZK|HUF|BRL|MXN|ZAR|KRW|TRY|RUB|SGD|HKD"
)
# A unit of letters may follow its number without a blank only if the unit is known, because texts such as 12a and 12b
# are usually names.
_TOUCHING = (
    "[nu\u00b5\u03bcmcdhkKMGT]?(?:m|g|s|l|L|A|V|W|Wh|VA|VAr|Hz|Pa|J|N|B|b|t|F|H|K|Bq|Sv|lx|lm|bar|eV|cal|mol)[23\u00b2\u00b3]?|"
    "[KMGT]i?B|ha|h|hr|hrs|min|sec|d|C|F|psi|dB|dBm|dBA|ppm|ppb|rpm|kn|kt|kts|mph|kph|ft|mi|lb|lbs|oz|gal|in|yd|kr|zl|"
    "pct|deg|px|pt|x"
)
_SYMBOL = f"(?:{_MONEY}|[%\u2030\u00b0\u00ba\u2103\u2109'\"\u03a9\u2126])"
_REST = r"(?:[^\s()]{0,14}[^\s()-])?"
_UNIT = rf"{_SYMBOL}{_REST}|(?<=[{BLANKS}-])[^\W\d_]{_REST}(?: [^\W\d_][^\s()]{{0,8}})?|(?:{_TOUCHING})(?:/{_REST})?"
_CORE = rf"(?:[0-9](?:[0-9.,'\u2019{BLANKS}]*[0-9])?[.,]?|[.,][0-9]+)(?:[eE][+-]?[0-9]+)?"
_TOKEN = re.compile(
    rf"(?P<open>[(]?)[{BLANKS}]*(?P<sign>[+-]?)[{BLANKS}]*(?P<before>{_CURRENCY})?[{BLANKS}]*(?P<sign2>[+-]?)"
    rf"(?P<open2>[(]?)(?P<core>{_CORE})(?P<close2>[)]?)(?P<after2>-?)[{BLANKS}]*(?P<unit>{_UNIT})?[{BLANKS}]*"
    rf"(?P<after>-?)(?P<close>[)]?)"
)
"""Pattern of a number as people write it: digits, with an optional sign, unit and brackets before or after them."""
_MARKED = re.compile(rf"[+-]?{_CORE}[{BLANKS}]*(?P<mark>[*\u2020\u2021#!^~?]{{1,3}})")
"""Pattern of a number that is followed by a mark, such as a footnote mark."""
_CONVENTIONS: tuple[tuple[str, str | None], ...] = (
    *((".", None), (",", None), (".", ","), (",", "."), (".", " "), (",", " "), (".", "'"), (",", "'")),
)
"""Pairs of decimal mark and thousands separator, the simplest pair first."""
_THREE = re.compile(r"[1-9][0-9]{0,2}[.,][0-9]{3}")
_TRIED = 200
_WORDS = 20
"""Maximum number of distinct texts, without plain numbers, in a column of words."""
_FROM = 5_000
"""Minimum number of rows for which Arrow reads numbers faster than Python."""


class Token(NamedTuple):
    """Parts of a written number: its digits and marks, its unit, and its notation of the negative sign."""

    core: str
    unit: str
    negative: str


class Writing(NamedTuple):
    """Notation of the numbers of a table.

    files   settings that a spec needs to read all columns
    notes   for a column name, another possible meaning of the column's texts, and the setting for that meaning
    refused for a column name, the reason why the column cannot be read as numbers
    words   for a column name, the number of each word in the column
    verbal  names of the columns that have only words
    """

    files: Files
    notes: dict[str, str]
    refused: dict[str, str]
    words: dict[str, dict[str, float]]
    verbal: frozenset[str]

    def added_to(self, written: Files, names: Collection[str] | None = None) -> Files:
        """Return the settings `written` with the settings for numbers added.

        Args:
            written: other settings.
            names: names of the columns whose units and words are added. None means all columns.
        """
        said = {
            name: getattr(self.files, name) for name in ("decimal", "thousands", "negative", "units", "words")
        }
        if names is not None:
            said["units"] = {name: unit for name, unit in self.files.units.items() if name in names}
            said["words"] = {
                word: number for name in names for word, number in self.words.get(name, {}).items()
            }
        return written.model_copy(update=said)


class NumberReader:
    """Reader of numbers in the notation that a spec sets."""

    def __init__(self, files: Files, unit: str | None = None) -> None:
        """Prepare to read numbers; `unit` may precede or follow a number, and None means that there is no unit."""
        self.unit = None if unit is None else _unify_mu(unit)
        self.negative = files.negative
        self.decimal = files.decimal
        self.thousands = _MARKS.get(files.thousands or "")
        digits = "[0-9]+"
        if self.thousands is not None:
            indian = "|[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}" if files.thousands == "," else ""
            digits = f"(?:[1-9][0-9]{{0,2}}(?:{self.thousands}[0-9]{{3}})+{indian}|[0-9]+)"
        point = _MARKS[self.decimal]
        self._number = re.compile(rf"[+-]?(?:{digits}(?:{point}[0-9]*)?|{point}[0-9]+)(?:[eE][+-]?[0-9]+)?")
        self._usual = f"^-?{digits}(?:{point}[0-9]+)?$"

    def __call__(self, text: str) -> str | None:
        """Return the number in Python's notation; None if the text is not a number."""
        text = text.strip(BLANKS).replace(_MINUS, "-")
        flips = False
        if self.negative == "parentheses" and (parts := re.fullmatch(r"([^()]*)\(([^()]+)\)([^()]*)", text)):
            text, flips = "".join(parts.groups()).strip(BLANKS), True
        if self.unit is not None:
            text = self._strip_unit(_unify_mu(text))
        if self.negative == "trailing" and text.endswith("-"):
            text, flips = text[:-1].strip(BLANKS), True
            if self.unit is not None:
                text = self._strip_unit(text)
        if self._number.fullmatch(text) is None or flips and text[0] in "+-":
            return None
        return ("-" if flips else "") + self._strip_marks(text)

    def read_usual(self, column: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
        """Return the numbers (double) that Arrow can read from a column, and a mask (N,) of the texts it has read."""
        pc = arrow.load_compute()
        if len(column) < _FROM:
            return pa.nulls(len(column), pa.float64()), np.zeros(len(column), bool)
        if self.decimal == ".":
            try:
                read = column.cast(pa.float64())
            except pa.ArrowInvalid:
                pass
            else:
                known = np.isfinite(arrow.to_numpy(read, 0.0))
                if known.all():  # both readers return the same finite numbers
                    return read, known
        fits = pc.match_substring_regex(column, self._usual)
        texts = pc.if_else(fits, column, pa.nulls(len(column), pa.string()))
        if self.thousands is not None:
            texts = pc.replace_substring_regex(texts, self.thousands, "")
        if self.decimal == ",":
            texts = pc.replace_substring(texts, ",", ".")
        return texts.cast(pa.float64()), arrow.to_numpy(fits, False)

    def _strip_marks(self, text: str) -> str:
        if self.thousands is not None:
            text = re.sub(self.thousands, "", text)
        return text.replace(self.decimal, ".")

    def _strip_unit(self, text: str) -> str:
        unit = self.unit or ""
        sign, rest = ("", text) if text[:1] not in ("+", "-") else (text[0], text[1:].lstrip(BLANKS))
        if rest.startswith(unit):
            return sign + rest[len(unit) :].strip(BLANKS)
        if rest.endswith(unit):
            return sign + rest[: -len(unit)].strip(BLANKS)
        return text


def _unify_mu(text: str) -> str:
    """Return a text with the Greek letter mu in place of the micro sign; Unicode has both characters."""
    return text.replace("\u00b5", "\u03bc")


def parse_token(text: str) -> Token | None:
    """Return the parts of a number in a text; None if the text is not a number."""
    found = _TOKEN.fullmatch(text.strip(BLANKS).replace(_MINUS, "-"))
    if found is None:
        return None
    part = found.groupdict(default="")
    brackets = (part["open"] + part["open2"], part["close"] + part["close2"])
    if brackets not in (("", ""), ("(", ")")) or part["before"] and part["unit"]:
        return None
    if part["core"][-1] in ".," and part["after2"]:
        return None  # a text such as 5,- is a price without a fraction
    trailing, signs = part["after"] + part["after2"], part["sign"] + part["sign2"]
    if len(trailing) + len(signs) + len(brackets[0]) > 1:
        return None
    negative = "parentheses" if brackets[0] else "trailing" if trailing else "minus"
    return Token(part["core"], part["before"] or part["unit"], negative)


def find_setting(text: str, files: Files, column: str) -> dict[str, Any] | None:
    """Return the settings to change in `files` so that a column's text is a number; None if no settings help."""
    token = parse_token(text)
    if token is None:
        if (marked := _MARKED.fullmatch(text)) is not None:
            return {"units": {column: marked["mark"]}}
        words = next((pair for pair in WORDS if text.strip(BLANKS).casefold() in pair), None)
        return None if words is None else {"words": words}
    form = _find_convention([token.core], files)
    if form is None:
        return None
    changed: dict[str, Any] = {} if form[0] == files.decimal else {"decimal": form[0]}
    changed |= {} if form[1] == files.thousands else {"thousands": form[1]}
    if token.negative not in ("minus", files.negative):
        changed["negative"] = token.negative
    if token.unit and files.units.get(column) != token.unit:
        changed["units"] = {column: token.unit}
    return changed


def _find_convention(cores: Sequence[str], files: Files) -> tuple[str, str | None] | None:
    named = (files.decimal, files.thousands)
    return next((form for form in (named, *_CONVENTIONS) if _compute_share(form, cores) == 1.0), None)


def _compute_share(form: tuple[str, str | None], cores: Sequence[str]) -> float:
    reader = NumberReader(_build_files(form))
    return sum(reader(core) is not None for core in cores) / len(cores) if cores else 1.0


def format_setting(changed: Mapping[str, Any]) -> str:
    """Return changed settings in the form in which a spec contains them, such as `files: {decimal: ','}`."""
    words = {
        word: int(value) if value == int(value) else value for word, value in changed.get("words", {}).items()
    }
    return f"files: {format_flow({**changed, 'words': words} if words else changed)}"


class _Column(NamedTuple):
    """Summary of the distinct texts of a column of numbers.

    cores     one example for each pattern of digits and marks
    units     number of texts with each unit; the empty unit counts the texts without a unit
    words     texts that are not numbers
    negatives notations of negative numbers
    forms     pairs of decimal mark and thousands separator with which nearly all texts are numbers
    """

    name: str
    cores: list[str]
    units: Counter[str]
    words: set[str]
    negatives: set[str]
    forms: list[tuple[str, str | None]]


_MOST_UNITS = 8
"""Maximum number of units in a column of numbers; a column with more units is a column of texts."""


def find_writing(columns: Mapping[str, pa.Array], missing: Sequence[str], separator: str = ",") -> Writing:
    """Return the notation of the numbers in a table's columns, derived from all cells.

    Args:
        columns: columns of the table; columns that are not text are ignored.
        missing: texts that mean a missing number.
        separator: separator of the fields. If texts such as 1,234 are the only evidence, the comma is a decimal comma
            if the separator is a semicolon.
    """
    absent = {text.casefold() for text in (*missing, *ABSENT)}
    texts = {name: column for name, column in columns.items() if pa.types.is_string(column.type)}
    seen = [one for name, column in texts.items() if (one := _look_at(name, column, absent)) is not None]
    form, notes = _choose(seen, separator)
    units: dict[str, str] = {}
    refused: dict[str, str] = {}
    for one in seen:
        named = sorted(one.units.keys() - {""})
        if form not in one.forms:
            example = next((core for core in one.cores if _compute_share(form, [core]) == 0.0), "")
            refused[one.name] = f"writes numbers otherwise than other columns, such as {example!r}"
        elif len(named) > 1:
            refused[one.name] = (
                f"holds numbers with several units, {named[0]!r} and {named[1]!r}; write all in one"
            )
        elif named:
            units[one.name] = named[0]
    words = {one.name: pair for one in seen for pair in WORDS if one.words and one.words <= pair.keys()}
    verbal = {one.name for one in seen if one.name in words and not one.units.total()}
    for name, column in columns.items():
        if pa.types.is_boolean(column.type):
            words[name] = WORDS[0]
            verbal.add(name)
    kept = [one.negatives for one in seen if one.name not in refused]
    negative = min(set[str]().union(*kept) - {"minus"}, default="minus")
    settings = {"decimal": form[0], "thousands": form[1], "negative": negative, "units": units}
    all_words = {word: number for pair in words.values() for word, number in pair.items()}
    files = Files.model_validate({**settings, "words": all_words})
    return Writing(files, notes, refused, words, frozenset(verbal))


def _look_at(name: str, column: pa.Array, absent: set[str]) -> _Column | None:
    """Return a summary of a column of numbers; None if the column contains other texts."""
    pc = arrow.load_compute()
    texts = pc.utf8_trim(column.drop_null().unique(), BLANKS)
    plain = arrow.to_numpy(pc.match_substring_regex(texts, f"^(?:{PLAIN_NUMBER})$"))
    pointed = texts.filter(pc.match_substring_regex(texts, r"^[+-]?(?:[0-9]+[.][0-9]*|[.][0-9]+)$"))
    three = arrow.to_numpy(pc.match_substring_regex(pointed, r"^[+-]?[1-9][0-9]{0,2}[.][0-9]{3}$"))
    cores = {}
    for mask in (three, ~three):
        if mask.any():
            core = pointed[int(mask.argmax())].as_py().lstrip("+-")
            cores[_reduce_digits(core)] = core
    rest = [
        text
        for text in texts.take(arrow.build_integers(np.flatnonzero(~plain))).to_pylist()
        if text.casefold() not in absent
    ]
    tried = rest[:: max(1, len(rest) // _TRIED)]
    total = int(plain.sum()) + len(rest)
    few = len(rest) <= _WORDS
    if not total or not few and sum(parse_token(text) is not None for text in tried) < 0.5 * len(tried):
        return None
    units, negatives, words = Counter[str]({"": int(plain.sum())}), set[str](), set[str]()
    for text in rest:
        token = parse_token(text)
        if token is None:
            words.add(text.casefold())
            continue
        cores.setdefault(_reduce_digits(token.core), token.core)
        units[token.unit] += 1
        negatives.add(token.negative)
    forms = [form for form in _CONVENTIONS if _compute_share(form, list(cores.values())) >= NUMERIC]
    are_words = any(words <= pair.keys() for pair in WORDS)
    with_unit = units.total() - units[""]
    if with_unit < 0.5 * units.total():
        units = Counter({"": units[""]})
    elif len(units) > _MOST_UNITS:
        return None  # these texts only contain digits, such as the weeks of a year
    good = units.total() + (len(words) if are_words else 0)
    return (
        _Column(name, list(cores.values()), units, words, negatives, forms)
        if forms and good >= NUMERIC * total
        else None
    )


def _reduce_digits(core: str) -> str:
    """Return the pattern of a number: each digit is replaced by the digit 1, except a 0 at the beginning."""
    return core[:1] + re.sub("[0-9]", "1", core[1:]) if core.startswith("0") else re.sub("[0-9]", "1", core)


def _choose(seen: Sequence[_Column], separator: str) -> tuple[tuple[str, str | None], dict[str, str]]:
    """Return the pair of decimal mark and thousands separator that fits most columns, and notes by column name.

    A column gets a note if another pair also fits and gives other numbers.
    """
    point, comma = (".", None), (",", None)
    preferred = list(_CONVENTIONS)
    if separator != ";":
        preferred.remove(comma)
        preferred.insert(preferred.index((".", ",")) + 1, comma)
    columns = [one for one in seen if one.cores]
    chosen = max(
        preferred, key=lambda form: (sum(form in one.forms for one in columns), -preferred.index(form))
    )
    fitting = [form for form in preferred if all(form in one.forms for one in columns)]
    notes: dict[str, str] = {}
    for one in columns:
        core = next((core for core in one.cores if _THREE.fullmatch(core)), None)
        mark = None if core is None else "," if "," in core else "."
        other = {(".", ","): comma, comma: (".", ","), point: (",", ".")}.get(chosen)
        told = mark == "," or mark == "." and separator == ";"
        if (
            core is not None
            and other in fitting
            and told
            and (mark == ",") == ("," in (chosen[1], chosen[0]))
        ):
            read, would = (NumberReader(_build_files(form))(core) for form in (chosen, other))
            changed = {"decimal": other[0]} | ({} if other[1] is None else {"thousands": other[1]})
            notes[one.name] = f"{core} is read as {read}; if it is {would}, set {format_setting(changed)}"
    return chosen, notes


def _build_files(form: tuple[str, str | None]) -> Files:
    return Files.model_validate({"decimal": form[0], "thousands": form[1]})


Floats = NDArray[np.float64]

_INFINITE = re.compile(r"[+-]?inf(?:inity)?", re.IGNORECASE)
_PLAIN = re.compile(PLAIN_NUMBER)
_OK, _NOT_A_NUMBER, _NOT_FINITE = 0, 1, 2
_REASONS = {_NOT_A_NUMBER: "not a number", _NOT_FINITE: "not finite"}
_NARROW = {pa.float32(): np.float32, pa.float16(): np.float16}


class NumberRules(NamedTuple):
    """Rules of a spec for numbers: their notation in files, and the texts and numbers that mean a missing value."""

    files: Files
    texts: frozenset[str]
    numbers: tuple[float, ...]


def build_rules(missing_values: Sequence[str], files: Files) -> NumberRules:
    """Return the rules of a spec; a number in `missing_values`, such as -999, also matches the text -999.0."""
    numbers: list[float] = []
    for text in (one.strip(BLANKS) for one in missing_values):
        written = NumberReader(files)(text) or (text if _PLAIN.fullmatch(text) else None)
        if written is not None and math.isfinite(float(written)) or _INFINITE.fullmatch(text):
            numbers.append(float(written or text))
    texts = frozenset(text.strip(" ").casefold() for text in missing_values)
    return NumberRules(files, texts, tuple(numbers))


def parse_numbers(
    names: Sequence[str],
    what: str,
    source: RawRows,
    rules: NumberRules,
    file: str,
    reason: NDArray[np.object_],
) -> Floats:
    """Return the numbers (d, N) in columns, NaN where missing; reject rows with invalid values.

    Args:
        names: names of the d columns.
        what: role of the columns, used in the reasons.
        source: N rows.
        rules: rules of the spec.
        file: name of the file that contains the rows, used in errors.
        reason: (N,) reason why each row is rejected; updated in place.

    Raises:
        UserError: the type of a column is not a type for numbers.
    """
    result = np.full((len(names), source.rows), np.nan)
    for row, name in enumerate(names):
        column = source.columns[name]
        kind = column.type
        if pa.types.is_string(kind):
            values, codes = _read_texts(column, rules, source.decimal, name)
        elif (
            arrow.is_number(kind)
            or pa.types.is_boolean(kind)
            and {"true", "false"} <= rules.files.words.keys()
        ):
            values = _read_stored(column, rules)
            codes = np.where(np.isinf(values), _NOT_FINITE, _OK)
        elif pa.types.is_null(kind):
            continue
        else:
            raise UserError(f"{file}: {what} column '{name}' holds {kind}; {_suggest_remedy(kind)}")
        for code, text in _REASONS.items():
            reject(reason, codes == code, f"{what} {name}: {text}")
        result[row] = values
    return result


def _suggest_remedy(kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return 'it must hold numbers, or set files: {words: {"true": 1, "false": 0}} in the spec'
    return "it must hold numbers"


def _read_stored(column: pa.Array, rules: NumberRules) -> Floats:
    """Return the numbers (N,) of a column that stores numbers or booleans, NaN where missing."""
    kind = column.type
    if pa.types.is_boolean(kind):
        of_true, of_false = (rules.files.words[word] for word in ("true", "false"))
        values = np.where(arrow.to_numpy(column, False), of_true, of_false)
        return np.where(arrow.to_numpy(column.is_null()), np.nan, values)
    values = arrow.to_numpy(column.cast(pa.float64(), safe=False), math.nan)
    narrow = _NARROW.get(kind, np.float64)
    with np.errstate(over="ignore"):
        missing = np.array([float(narrow(number)) for number in rules.numbers])
    if pa.types.is_decimal(kind):  # Arrow's cast may return a neighbour of the nearest double
        missing = np.unique([np.nextafter(missing, -np.inf), missing, np.nextafter(missing, np.inf)])
    return _blank_missing(values, missing)


def _blank_missing(values: Floats, missing: Sequence[float] | Floats) -> Floats:
    """Return values (N,) with NaN in place of missing values."""
    absent = np.isin(values, missing) if len(missing) else np.zeros(0, bool)
    return np.where(absent, np.nan, values) if absent.any() else values


def _read_texts(
    column: pa.Array, rules: NumberRules, decimal: str, name: str
) -> tuple[Floats, NDArray[np.int64]]:
    """Return the numbers (N,) of texts, NaN where missing or invalid, and a code (N,): `_OK` or the error."""
    files = rules.files
    thousands = None if files.thousands == decimal else files.thousands
    if (decimal, thousands) != (files.decimal, files.thousands):
        files = files.model_copy(update={"decimal": decimal, "thousands": thousands})
    reader = NumberReader(files, files.units.get(name))
    read, usual = reader.read_usual(column)
    values, codes = arrow.to_numpy(read, math.nan).copy(), np.full(len(column), _OK)
    places = np.flatnonzero(~usual)
    words = {word.casefold(): number for word, number in files.words.items()}
    texts, which = arrow.find_distinct_values(column.take(arrow.build_integers(places)))
    parsed = [_read_text(text, rules.texts, words, reader) for text in texts]
    values[places] = np.array([value for value, _ in parsed] + [math.nan])[which]
    codes[places] = np.array([code for _, code in parsed] + [_OK])[which]
    values = _blank_missing(values, rules.numbers)
    codes[np.isinf(values)] = _NOT_FINITE
    return values, codes


def _read_text(
    text: str, missing: frozenset[str], words: dict[str, float], reader: NumberReader
) -> tuple[float, int]:
    word = text.strip(" ").casefold()
    if word in missing:
        return math.nan, _OK
    if word in words:
        return words[word], _OK
    number = reader(text)
    if number is not None:
        return float(number), _OK
    if _INFINITE.fullmatch(word):
        return float(word), _OK
    return math.nan, _NOT_A_NUMBER
