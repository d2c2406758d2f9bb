"""Find settings that read texts in which no usual format reads a time, for the sentence that refuses them.

Nothing here decides how rows are read: a text that fits none of the usual formats stays refused until a format is
named. Every format and rewritten text that is named has been tried on the texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import tzinfo
from itertools import product
from typing import NamedTuple

from jobs.core.errors import show_name
from jobs.core.time_readings import USUAL_FORMATS, TimeReading, find_forms
from jobs.core.times import MONTH_NAME, TimeParser, load_zone

ENOUGH = 0.95
"""The minimum share of texts that a setting must read."""
_TOKEN = re.compile(
    rf"(?P<b>(?<![A-Za-z]){MONTH_NAME}(?![A-Za-z]))|(?P<a>(?<![A-Za-z])(?i:mon|tue|wed|thu|fri|sat|sun)[a-z]*[.]?)"
    r"|(?P<p>(?<![A-Za-z])[AaPp][.]?[Mm][.]?(?![A-Za-z]))|(?P<z>(?<=[0-9 ])[+-][0-9]{2}:?[0-9]{2}$)"
    r"|(?P<Z>(?<![A-Za-z])[A-Z]{3,5}$)|(?P<number>[0-9]+)|(?P<other>.)",
    re.DOTALL,
)
_WORDS = {
    "week": re.compile(r"(?i)(?<![a-z])(kw|cw|wk|w|week|woche|sem|semana|semaine|uge|uke|vecka)(?![a-z])"),
    "quarter": re.compile(r"(?i)(?<![a-z0-9])(q|qtr|quarter|quartal|trim|trimestre|t)(?![a-z])"),
}
_DATES = {
    "b": ("dY", "Yd", "dy", "yd", "Y"),
    "week": ("VG", "GV"),
    "quarter": ("qY", "Yq"),
    "": ("dmY", "mdY", "Ymd", "dmy", "mdy", "ymd"),
}
"""The directives of a date's numbers, in the order of the text: beside a month's name, beside a word, and alone."""
_CLOCKS = ("", "H", "HM", "HMS", "HMSf")
_CLOCK = re.compile(r"%[HI](?:[^%/]{0,3}%M| ?(?:%p|[hH]\b|Uhr|時))")
"""Pattern of a time of day in a format; an hour alone needs a word behind it."""
_NUMBERS = re.compile("[0-9]{4}|[0-9][^0-9]+[0-9]")
_ZONES = (
    "Europe/Berlin Europe/Helsinki Europe/Lisbon Europe/London Europe/Dublin Europe/Moscow America/New_York "
    "America/Chicago America/Denver America/Los_Angeles America/Anchorage America/Halifax America/St_Johns "
    "Pacific/Honolulu Asia/Shanghai Asia/Kolkata Asia/Jerusalem Asia/Tokyo Asia/Seoul Asia/Hong_Kong Asia/Karachi "
    "Asia/Jakarta Asia/Manila Africa/Johannesburg Africa/Nairobi Africa/Lagos Australia/Sydney Australia/Adelaide "
    "Australia/Perth Pacific/Auckland"
).split()
"""Time zones whose abbreviations are tried."""
_MONTHS = {
    "Jan": "jän(ner)?|januar|janv(ier)?|ene(ro)?|gen(naio)?|janeiro",
    "Feb": "februar|f[ée]v(r(ier)?)?|febrero|febbraio|fevereiro",
    "Mar": "märz?|mrz|maerz|mars|marzo|março|maart",
    "Apr": "avr(il)?|abr(il)?|aprile",
    "May": "mai|mayo|mag(gio)?|maio|mei",
    "Jun": "juni|juin|junio|giu(gno)?|junho",
    "Jul": "juli|juil(let)?|julio|lug(lio)?|julho",
    "Aug": "août|aout|ago(sto)?|augustus",
    "Sep": "septiembre|septembre|set(t(embre)?|embro)?",
    "Oct": "okt(ober)?|out(ubro)?|ott(obre)?|octobre|octubre",
    "Nov": "novembre|noviembre|novembro",
    "Dec": "dez(ember|embro)?|d[ée]c(embre)?|dic(iembre|embre)?",
}
_REWRITTEN = (
    (r"\s", " "),
    (r"\\?/Date\((-?[0-9]+)(?:[+-][0-9]{4})?\)\\?/", r"\1"),
    (r"(?<=[0-9])(?:st|nd|rd|th|er|º|°)(?![A-Za-z])", ""),
    (r"(?i)\b([ap])[.]?\s+m\b[.]?", r"\1m"),
    (r"\bME(S?)Z\b", r"CE\1T"),
    (r"(?<=[0-9][-/:])\s+(?=[0-9])", "0"),
    *((rf"(?i)\b(?:{words})\b[.]?", name) for name, words in _MONTHS.items()),
)
"""Notations that no format has: what they are replaced by."""


class _Setting(NamedTuple):
    """A format and, if the texts need it, a time zone; and the time that the first text then means."""

    form: str | None
    zone: str | None
    reading: TimeReading


def explain_texts(
    texts: Sequence[str], zone: tzinfo, write: Callable[[str | None, str | None], str]
) -> str | None:
    """Return how to read texts that no usual format reads; None if they do not look like times.

    A text that may not be shown as it is, because it is long or may hold a secret, gets no advice.

    Args:
        texts: texts that are not blank.
        zone: time zone of times without an offset.
        write: function that returns the words for a format (None: ISO 8601) and a time zone (None: unchanged).
    """
    texts = [text.strip() for text in texts]
    first = re.sub(r"\s", " ", texts[0])
    if not _NUMBERS.search(first) or show_name(first) != first:
        return None
    written = texts
    for pattern, by in _REWRITTEN:
        written = [re.sub(pattern, by, text) for text in written]
    if written != texts and (ways := _describe_ways(written, zone, USUAL_FORMATS, write)):
        return f"no format reads this notation; if it is written as '{written[0]}', {ways}"
    return _describe_ways(texts, zone, (), write)


def _describe_ways(
    texts: Sequence[str],
    zone: tzinfo,
    usual: Sequence[str],
    write: Callable[[str | None, str | None], str],
) -> str | None:
    """Return the settings that read texts, in words; None if there are none."""
    first = texts[0]
    number = float(first) if re.fullmatch("-?[0-9]{9,19}", first) else None
    forms = [None, *usual, *_build_forms(first)] if number is None else find_forms(number, number)[:1]
    found = _find_settings(texts, zone, forms)
    if not found:
        return None
    ways = " or ".join(f"{write(one.form, one.zone)} ({one.reading})" for one in found[:3])
    return f"{ways} reads it" + ", and only its source can say which is right" * (len(found) > 1)


def _find_settings(texts: Sequence[str], zone: tzinfo, forms: Sequence[str | None]) -> list[_Setting]:
    """Return the formats that read nearly all texts, each with the time zones that know an abbreviation in them."""
    found: list[_Setting] = []
    zones = _ZONES if re.search("[A-Z]{3,5}$", texts[0]) else ()
    for form in dict.fromkeys(forms):
        for name in (None, *zones):
            parser = TimeParser(form, zone if name is None else load_zone(name))
            micros = parser(texts[0])
            if micros is None or sum(parser(text) is not None for text in texts) < ENOUGH * len(texts):
                continue
            found.append(_Setting(form, name, TimeReading(form or "", micros)))
            if name is None:
                break
        if form is None and found:
            break
    return found


def _build_forms(text: str) -> Iterator[str]:
    """Yield the formats that a text may have, by the order of its names and numbers."""
    tokens = [(one.lastgroup or "", one[0]) for one in _TOKEN.finditer(re.sub(" +", " ", text))]
    kinds = [kind for kind, _ in tokens]
    beside = "b" if "b" in kinds else next((name for name, word in _WORDS.items() if word.search(text)), "")
    clocks = [one.replace("H", "I") if "p" in kinds else one for one in _CLOCKS]
    for date, clock in product(_DATES[beside], clocks):
        for codes in dict.fromkeys((date + clock, clock + date)):
            if len(codes) != kinds.count("number"):
                continue
            code = iter(codes)
            form = "".join(
                f"%{next(code)}"
                if kind == "number"
                else one.replace("%", "%%")
                if kind == "other"
                else f"%{kind}"
                for kind, one in tokens
            )
            if (not clock or _CLOCK.search(form)) and _is_format(form):
                yield form


def _is_format(form: str) -> bool:
    try:
        TimeParser(form, load_zone("UTC"))
    except ValueError:
        return False
    return True
