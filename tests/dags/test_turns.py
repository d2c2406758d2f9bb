"""The turns of writing requests on SQLite: who waits for whom, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dags.kalman_dags.pages import turns
from dags.kalman_dags.pages.turns import WriteTurns

pytestmark = [pytest.mark.airflow, pytest.mark.core]

TASK = "/execution/task-instances/1/heartbeat"


class Server:
    """An application behind the middleware that lists what began and ended; a request takes 10 ms."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.running = self.most = 0
        self.handle = WriteTurns(self.work)

    async def work(self, scope: Any, receive: Any, send: Any) -> None:
        body = await receive()
        assert body["type"] == "http.request"
        self.began.append(scope["path"])
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(60 if scope["path"] == "/hangs" else 0.01)
        self.running -= 1
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": body["body"]})

    async def ask(
        self,
        path: str,
        method: str = "POST",
        sends: Any = None,
        reads: Callable[[], Awaitable[Any]] | None = None,
    ) -> bytes:
        """Send a request and return its answer; `sends` are the client's messages, None if it never sends one."""
        messages = [{"type": "http.request", "body": b"sent"}] if sends is None else list(sends)
        got = []

        async def receive() -> Any:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop(0)

        async def send(message: Any) -> None:
            if reads:
                await reads()
            got.append(message)

        await self.handle({"type": "http", "method": method, "path": path, "root_path": ""}, receive, send)
        return b"".join(message.get("body", b"") for message in got)


def run(test: Callable[[Server], Awaitable[None]]) -> None:
    """Run a test within two seconds."""

    async def limited() -> None:
        await asyncio.wait_for(test(Server()), 2)

    asyncio.run(limited())


def test_writers_run_one_after_another_and_readers_at_once() -> None:
    async def test(server: Server) -> None:
        assert await asyncio.gather(*(server.ask(f"/{one}") for one in range(5))) == [b"sent"] * 5
        assert server.most == 1 and server.began == [f"/{one}" for one in range(5)]
        await asyncio.gather(*(server.ask("/read", "GET") for _ in range(5)))
        assert server.most == 5

    run(test)


def test_a_client_that_sends_no_body_keeps_nobody_waiting() -> None:
    async def test(server: Server) -> None:
        held = asyncio.create_task(server.ask("/slow", sends=[]))
        half = [{"type": "http.request", "body": b"ha", "more_body": True}]
        more = asyncio.create_task(server.ask("/half", sends=half))
        await asyncio.sleep(0)
        assert await server.ask("/other") == b"sent"
        gone = [*half, {"type": "http.disconnect"}]
        assert await server.ask("/gone", sends=gone) == b""
        assert server.began == ["/other"]
        for one in (held, more):
            one.cancel()

    run(test)


def test_a_client_that_reads_slowly_keeps_nobody_waiting() -> None:
    async def test(server: Server) -> None:
        slow = asyncio.create_task(server.ask("/slow", reads=asyncio.Event().wait))
        await asyncio.sleep(0.05)
        assert await server.ask("/other") == b"sent"
        slow.cancel()

    run(test)


def test_a_heartbeat_waits_for_one_request_of_a_burst_and_is_run_though_its_client_left() -> None:
    async def test(server: Server) -> None:
        burst = [asyncio.create_task(server.ask(f"/{one}")) for one in range(40)]
        await asyncio.sleep(0)
        left = [{"type": "http.request", "body": b"beat"}, {"type": "http.disconnect"}]
        assert await server.ask(TASK, "PUT", sends=left) == b"beat"
        assert server.began.index(TASK) <= 2 and server.most == 1
        await asyncio.gather(*burst)
        assert len(server.began) == 41 and server.most == 1

    run(test)


def test_a_turn_ends_though_its_request_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_SECONDS", 0.05)

    async def test(server: Server) -> None:
        hangs = asyncio.create_task(server.ask("/hangs"))
        await asyncio.sleep(0)
        assert await server.ask("/other") == b"sent"
        assert server.running == 1 and not hangs.done()
        hangs.cancel()

    run(test)


def test_an_error_frees_the_turn_and_reaches_the_server() -> None:
    async def test(server: Server) -> None:
        async def fails(scope: Any, receive: Any, send: Any) -> None:
            raise ValueError("broken")

        server.handle.app = fails
        for _ in range(2):
            with pytest.raises(ValueError, match="broken"):
                await server.ask("/one")

    run(test)
