"""A notifier that writes its message into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from airflow.sdk import BaseNotifier, Context


class FileNotifier(BaseNotifier):
    """Append `text`, a template, to the file `path`; `more` is a template, too."""

    template_fields = ("text", "more")

    def __init__(self, path: str, text: str, more: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.path, self.text, self.more = path, text, more

    def notify(self, context: Context) -> None:
        """Write the message."""
        with Path(self.path).open("a") as file:
            file.write(f"{self.text}\n")
