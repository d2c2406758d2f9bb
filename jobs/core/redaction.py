"""Remove secrets from the output of commands and from the tracebacks that they save.

There are three kinds of secrets: values of environment variables whose name means a secret, registered values (the
passwords in the file of Kafka's properties), and text that looks like a secret. A file that the user named by mistake
may contain many secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

HIDDEN = "***"
_NAMES = "secret|passw|token|access.?key|account.?key|private.?key|api.?key|fernet|credential|jaas|sql_alchemy_conn"
_NAMED = re.compile(_NAMES, re.I)
_LOOKS_SECRET = [
    (re.compile(pattern, flags), shown)
    for pattern, shown, flags in (
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", HIDDEN, re.S),
        # A user's password in an address.
        (r"(\b[a-z][a-z0-9+.-]*://[^\s/:@]*:)[^\s/@]+(?=@)", rf"\1{HIDDEN}", re.I),
        # NAME=value and NAME: value, in quotes or not. A lower-case word after a colon counts as plain English, not as
        # a secret.
        (rf"([\w.-]*(?:{_NAMES})[\w.-]*[\"']?=[\"']?)[^\s\"',;&]{{4,}}", rf"\1{HIDDEN}", re.I),
        (
            rf"((?i:[\w.-]*(?:{_NAMES})[\w.-]*)[\"']?:\s?[\"']?)(?=[^\s\"',;]*[0-9A-Z_+/=!$%^&-])[^\s\"',;]{{6,}}",
            rf"\1{HIDDEN}",
            0,
        ),
        (r"\b(Bearer|Basic) +[A-Za-z0-9._~+/=-]{8,}", rf"\1 {HIDDEN}", re.I),
        (r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*", HIDDEN, 0),  # JSON web tokens
        (r"(?<![A-Za-z0-9_-])[A-Za-z0-9_-]{43}=(?!=)", HIDDEN, 0),  # Fernet keys
        (
            r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
            HIDDEN,
            0,
        ),  # keys of AWS, Google, GitHub, GitLab, Slack, Stripe, others
        (r"\bAIza[A-Za-z0-9_-]{35}|\bya29\.[A-Za-z0-9_-]{20,}", HIDDEN, 0),
        (r"\b(?:gh[pousr]_|github_pat_|glpat-|xox[abprs]-)[A-Za-z0-9_-]{10,}", HIDDEN, 0),
        (r"\b[rs]k[_-](?:live|test|proj)[_-][A-Za-z0-9_-]{10,}", HIDDEN, 0),
    )
]
"""Patterns of secrets, and their replacements."""
_SHORTEST = 6
"""Minimum length of a hidden value, because shorter values also occur by chance."""

_registered: set[str] = set()


def is_secret(name: str) -> bool:
    """Return whether the name of a setting means that its value is a secret."""
    return _NAMED.search(name) is not None


def register_secret(name: str, value: str) -> None:
    """If a setting's name means a secret, hide its value from now on, and each quoted part of the value."""
    if is_secret(name):
        parts = [value, *re.findall(r"""["']([^"']+)["']""", value)]
        _registered.update(part for part in parts if len(part) >= _SHORTEST)


def redact_secrets(text: str) -> str:
    """Return a text in which all known secrets are hidden."""
    here = {value for name, value in os.environ.items() if len(value) >= _SHORTEST and is_secret(name)}
    for value in sorted(here | _registered, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    for pattern, shown in _LOOKS_SECRET:
        text = pattern.sub(shown, text)
    return text


def show_name(name: str, most: int = 60) -> str:
    """Return the name of a column, or a value, for a message: without secrets, on one line, and shortened."""
    text = redact_secrets(name)
    text = text if text.isprintable() else text.encode("unicode_escape").decode()
    return text if len(text) <= most else f"{text[: most - 3]}..."


def show_names(names: Sequence[str], most: int = 12) -> str:
    """Return the first names of a list of columns for a message, such as `a, b, ... (40 in all)`."""
    shown = ", ".join(map(show_name, names[:most]))
    return shown if len(names) <= most else f"{shown}, ... ({len(names):,} in all)"
