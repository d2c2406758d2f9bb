"""Requests of the API server that write to SQLite, one at a time.

A request keeps SQLite's write lock from its first write until the event loop calls its commit. The event loop itself
writes the audit log of the next request, and would wait for this lock, which it alone can release: until SQLite gives
up. So the next request that may write begins when the one before has committed. Requests of tasks write no audit log,
but keep the lock too, so they take part.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

READS = ("GET", "HEAD", "OPTIONS")
"""Methods of requests that write nothing."""

TURN_SECONDS = 30.0
"""The longest turn: a request that takes longer goes on beside the next one."""


class WriteTurns:
    """ASGI middleware that lets requests other than `READS` wait for each other, without blocking the event loop.

    Only the application's work takes a turn: neither a client that sends slowly nor one that reads slowly keeps it. A
    task's request waits for at most one request of a person, because the other ones wait for `people` first.
    """

    def __init__(self, app: Any) -> None:
        self.app, self.turn, self.people = app, asyncio.Lock(), asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request; one that has arrived is handled even if its client has left meanwhile."""
        if scope["type"] != "http" or scope["method"] in READS:
            return await self.app(scope, receive, send)
        body, answer = [await receive()], []
        while body[-1].get("more_body"):
            body.append(await receive())
        if body[-1]["type"] == "http.disconnect":
            return

        async def replay() -> Any:
            return body.pop(0) if body else await receive()

        async def keep(message: Any) -> None:
            answer.append(message)

        of_task = scope["path"].removeprefix(scope.get("root_path", "")).startswith("/execution/")
        async with nullcontext() if of_task else self.people, self.turn:
            work = asyncio.ensure_future(self.app(scope, replay, keep))
            try:
                await asyncio.wait({work}, timeout=TURN_SECONDS)
            except asyncio.CancelledError:
                work.cancel()
                raise
        await work
        for message in answer:
            await send(message)
