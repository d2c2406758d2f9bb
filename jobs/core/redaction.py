"""Removal of secrets and of unprintable characters from the texts that commands show.

There are three kinds of secrets: values of environment variables whose name means a secret, registered values (the
passwords in the file of Kafka's properties), and text that looks like a secret. A file that the user named by mistake
may contain many secrets.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from urllib.parse import quote, unquote

HIDDEN = "***"
_NAMES = re.compile(
    r"secret(?!ar)|passw|passphrase|(?<!by|om|es|ur|nd|gh|ow|ll)pass(?![a-z])|token(?!i[sz])|fernet|credential"
    r"|(?<=[_.-])(?:pwd(?![a-z])|(?:pat|sas)$)|jaas|sql_alchemy_conn|airflow_conn|connection.?string|(?<![a-z])(?:dsn|jwt)(?![a-z])"
    r"|(?:access|account|api|auth|aws|client|encryption|master|private|s3|sas|shared|signing|storage).?key",
    re.I,
)
_KEY = re.compile(r"(?:^|[_.-])key$", re.I)
_PLACE = re.compile(r"[_.-](?:file|path|dir|location)$", re.I)

# The time of each pattern must not grow with the square of a text, so names are matched possessively, and from their
# first letter.
_QUOTE = r"\\*[\"']?"
_NAMED = re.compile(
    rf"(?<![\w.-])(--)?+([\w.-]++)(?(1)(?={_QUOTE}(?:[=:\s]|,\s))|(?={_QUOTE}[=:]))"  # NAME=, NAME: and --NAME
)
# A lower-case word after a colon counts as plain English, not as a secret.
_VALUE = re.compile(
    rf"{_QUOTE}={_QUOTE}([^\s\"',;&]{{4,}})"
    rf"|{_QUOTE}:\s?{_QUOTE}(?=[^\s\"',;0-9A-Z_+/=!$%^&-]{{0,99}}+[0-9A-Z_+/=!$%^&-])([^\s\"',;]{{6,}})"
    rf"|{_QUOTE},?\s+{_QUOTE}(?!-)([^\s\"',;]{{4,}})"
)
_USER = r"(?<=[a-z0-9+.-])://[^\s/:@\[\"']*+:(?!\d*[/?#,])"  # digits before these characters are a port
_ADDRESS = re.compile(rf"({_USER})([^\s/?#\"',]+(?=@)|[^\s\"'<>]{{1,99}}?(?=@))", re.I)
_WHOLE_ADDRESS = re.compile(rf"[a-z][a-z0-9+.-]*{_USER}(.+)@", re.I | re.S)


def _begin(width: int) -> str:
    """Return the pattern of a word's start, `width` characters back, also after a line break that a repr writes."""
    return rf"(?:(?<!\w.{{{width}}})|(?<=\\[nrt].{{{width}}}))"


# Each begins with a letter, which is looked for faster than the beginning of a word.
_KEYS = "|".join(
    (
        rf"eyJ{_begin(3)}[A-Za-z0-9_-]{{8,499}}\.[A-Za-z0-9_-]{{8,}}\.[A-Za-z0-9_-]*",  # web tokens
        rf"(?:AKIA|ASIA){_begin(4)}[A-Z0-9]{{16}}\b|AIza{_begin(4)}[\w-]{{35}}|ya29\.{_begin(5)}[\w-]{{20,}}",
        rf"(?:gh[pousr]_{_begin(4)}|github_pat_|glpat-|xox[abprs]-)[\w-]{{10,}}",
        rf"[rs]k[_-]{_begin(3)}(?:live|test|proj)[_-][\w-]{{10,}}",
    )
)
_LOOKS_SECRET = [
    (mark, re.compile(pattern), shown)
    for mark, pattern, shown in (
        (
            "-----",
            r"(?s)-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)",
            HIDDEN,
        ),
        ("http", r"(?i)(?<=http)(s?://)[^\s/:@?#\"',]{6,}(?=:?@|:x-oauth-basic@)", rf"\1{HIDDEN}"),
        ("://", f"(?i){_ADDRESS.pattern}", rf"\1{HIDDEN}"),
        ("=", rf"([Pp](?i:wd){_begin(3)}={_QUOTE})(?!/)[^\s\"',;&]{{4,}}", rf"\1{HIDDEN}"),
        ("ookie", rf"(ookie{_QUOTE}:\s?{_QUOTE})[^\s=;\"']{{1,99}}=[^\r\n\"']*", rf"\1{HIDDEN}"),
        (" ", rf"([Bb](?i:earer{_begin(6)}|asic{_begin(5)})) +[\w.~+/=-]{{8,}}", rf"\1 {HIDDEN}"),
        ("=", r"(?<![\w-])[A-Za-z0-9_-]{43,44}=(?!=)", HIDDEN),  # Fernet keys
        ("", _KEYS, HIDDEN),
    )
]
"""Texts that each secret of a kind has, the pattern of the secret, and its replacement."""
_LONGEST_READ = 4096
"""Number of characters of a value in which secrets are looked for, if a message shows only the value's beginning."""
_LONGEST_LINE = 1500
"""Maximum characters of a printed line, because an error may repeat an option's value of any length."""
_SHORTEST = 6
"""Minimum length of a hidden value, because shorter values also occur by chance."""

_LONG = 16
"""Length from which a value is hidden wherever it occurs, unless it is lower-case words."""

_registered: set[str] = set()


def is_secret(name: str) -> bool:
    """Return whether the name of a setting means that its value is a secret."""
    return bool(_KEY.search(name) or _NAMES.search(name) and not _PLACE.search(name))


def register_secret(name: str, value: str) -> None:
    """If a setting's name means a secret, hide its value from now on, and each quoted part of the value."""
    if is_secret(name):
        _registered.update(_spell([value, *re.findall(r"""["']([^"']+)["']""", value)]))


def redact_secrets(text: str) -> str:
    """Return a text in which all known secrets are hidden.

    A short secret that could be a word is hidden where it stands alone, not within another word or a path.
    """
    known = _find_environment_secrets(tuple(os.environ.items())) | _registered
    for value in sorted(known, key=len, reverse=True):
        if value not in text:
            continue
        if re.search(r"[^\w.-]", value) or len(value) >= _LONG and re.search("[0-9A-Z]", value):
            text = text.replace(value, HIDDEN)
        else:
            before = r"(?:(?<![\w.\\-])(?:(?<!/)|(?<=://))|(?<=\\[nrt]))"
            text = re.sub(rf"{before}{re.escape(value)}(?![\w/-]|\.\w|\\(?![nrt'\"]))", HIDDEN, text)
    for mark, pattern, shown in _LOOKS_SECRET:
        if mark in text:
            text = pattern.sub(shown, text)
    parts, done = [], 0
    for start, end in _find_named_values(text):
        parts += text[done:start], HIDDEN
        done = end
    return "".join((*parts, text[done:]))


def _find_named_values(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each value in a text that stands beside a name that means a secret."""
    end = 0
    for found in _NAMED.finditer(text):
        name, start = found[2], found.start()
        # The first letter after a backslash may be a line break that a repr writes.
        means = _NAMES.search(name) or text[start - 1 : start] == "\\" and _NAMES.search(name[1:])
        value = _VALUE.match(text, found.end()) if means and start >= end else None
        if value is not None:
            end = value.end()
            yield value.span(value.lastindex or 0)


@lru_cache(1)
def _find_environment_secrets(variables: tuple[tuple[str, str], ...]) -> frozenset[str]:
    """Return the values of variables that are named like secrets, and the passwords in addresses of all variables."""
    found: list[str] = []
    for name, value in variables:
        if is_secret(name) and not (value.startswith("/") and os.path.exists(value)):  # the path of a file
            found += value, *(value[start:end] for start, end in _find_named_values(value))
        if "://" in value:
            found += (password for _, password in _ADDRESS.findall(value))
            found += _WHOLE_ADDRESS.findall(value)
    return frozenset(_spell(found))


def _spell(values: Iterable[str]) -> set[str]:
    """Return secrets as they are, and as a URL, JSON and the repr of a text write them; not the short ones."""
    found = {one for value in values for one in (value, unquote(value))}
    for value in tuple(found):
        found.update(quote(value, safe, errors="surrogateescape") for safe in ("", "/"))
        found.update((json.dumps(value)[1:-1], repr(value)[1:-1]))
        found.add(repr(f"{value}'\"")[1:-4])  # a repr escapes the apostrophe if the text has both quotes
    return {value for value in found if len(value) >= _SHORTEST}


def redact_beginning(text: str) -> str:
    """Return the beginning of a value without secrets, for a message that shows at most some hundred characters."""
    if len(text) <= _LONGEST_READ:
        return redact_secrets(text)
    # The end may be a part of a secret.
    return f"{redact_secrets(text[:_LONGEST_READ])[:-1024]}..."


def show_name(name: str, most: int = 60) -> str:
    """Return the name of a column, or a value, for a message: without secrets, on one line, and shortened."""
    return escape_unprintable(redact_beginning(name), most)


def show_names(names: Sequence[str], most: int = 12) -> str:
    """Return the first names of a list of columns for a message, such as `a, b, ... (40 in all)`."""
    shown = ", ".join(map(show_name, names[:most]))
    return shown if len(names) <= most else f"{shown}, ... ({len(names):,} in all)"


def escape_unprintable(text: str, limit: int | None = _LONGEST_LINE) -> str:
    """Return a line with unprintable characters escaped, shortened to `limit` characters (None: not shortened).

    So no text can control a terminal, reverse what follows it, or look like another line.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if limit is None else shorten_text(text, limit)


def shorten_text(text: str, most: int, mark: str = "...") -> str:
    """Return a text of at most `most` characters; a mark shows where it was cut."""
    return text if len(text) <= most else text[: most - len(mark)] + mark
