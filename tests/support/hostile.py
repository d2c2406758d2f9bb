"""Texts that whoever writes data may choose as keys, names and units, and the elements of a page to compare."""

from __future__ import annotations

from html.parser import HTMLParser

HOSTILE = [
    "caf\u00e9",
    "$\\frac{$",
    "$x$ and \\$",
    "_hidden",
    "</td></table><script>alert(1)</script>",
    "' onerror='alert(1)",
    '" onload="alert(1)" x="',
    "&lt;b&gt;&#0;<!--",
    "]]><svg/onload=alert(1)>",
    "%s %(x)s {x} ${x} {0}",
    "javascript:alert(1)",
    "\u202eevil\u2066\u2067",
    "a\nb\r\tc\0d\x07\x1b[31m\x1b]0;x\x07\x9b2J\x85\u2028",
    "\U0001f600\U0001f468\u200d\U0001f469 \u6771\u4eac \u0e01\u0e34",
    "\u0634\u0631\u0642 \u05d0\u05d1",
    "e\u0301\u0302\u0303" * 20,
    "x" * 10_000,
    "$" * 10_000,
    "../../etc/passwd",
    "[red]x[/red] :bell: [/]",
    "",
    " ",
    "\ud800\udfff",
    "\ufffe\uffff\ufeff",
]


class _Skeleton(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[object] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        shown = [(name, value if name in ("class", "target", "style") else "") for name, value in attrs]
        self.found += [] if tag == "wbr" else [(tag, *shown)]

    def handle_endtag(self, tag: str) -> None:
        self.found.append(tag)

    def handle_comment(self, data: str) -> None:
        self.found.append("comment")

    def unknown_decl(self, data: str) -> None:
        self.found.append("declaration")


def list_elements(page: str) -> list[object]:
    """Return the elements of a page in order, with the names of their attributes, and the values that it sets."""
    parser = _Skeleton()
    parser.feed(page.encode().decode())
    parser.close()
    return parser.found
