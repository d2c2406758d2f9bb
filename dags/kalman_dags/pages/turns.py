"""Requests of the API server that write to SQLite, one at a time.

A request keeps SQLite's write lock from its first write until the event loop calls its commit. The event loop itself
writes the audit log of the next request, and would wait for this lock, which it alone can release: until SQLite gives
up. So the next request that may write begins when the one before has committed.
"""

from __future__ import annotations

import asyncio
from typing import Any

READS = ("GET", "HEAD", "OPTIONS")
"""Methods of requests that write nothing."""


class WriteTurns:
    """ASGI middleware that lets requests other than `READS` wait for each other, without blocking the event loop."""

    def __init__(self, app: Any) -> None:
        self.app, self.turn = app, asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["method"] in READS:
            return await self.app(scope, receive, send)
        async with self.turn:
            await self.app(scope, receive, send)
