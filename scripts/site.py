"""A hook of MkDocs: links from the guide to files of the repository, which the site lacks, become plain text."""

import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)]*)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return a page in which only links that stay inside the guide are links."""
    depth = page.file.src_uri.count("/")

    def kept(found: re.Match[str]) -> str:
        text, target = found.groups()
        return found.group(0) if target.count("../") <= depth else text

    return _LINK.sub(kept, markdown)
