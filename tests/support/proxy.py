"""A TCP proxy before a Redis that loses answers and requests: by resetting connections, and by going silent."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Self

__all__ = ["Fate", "LossyProxy", "random_fates"]


class Fate(Enum):
    """What becomes of some bytes, and of their connection."""

    PASS = "they are passed on"
    RESET = "they are lost, and the connection is reset"
    CUT = "the first half is passed on, and the connection is reset"
    SILENCE = "they are lost, and so is all that follows, in both directions: a black hole"


def random_fates(seed: int, share: float) -> Callable[[bytes], Fate]:
    """Return a function that lets a share of what passes go wrong. A black hole is rarer, because it takes time."""
    draw = random.Random(seed)
    faults = [Fate.RESET, Fate.CUT, Fate.RESET, Fate.CUT, Fate.RESET, Fate.SILENCE]
    return lambda _: draw.choice(faults) if draw.random() < share else Fate.PASS


class LossyProxy:
    """A proxy whose connections can be cut after the server has worked, and before its answer arrives.

    Args:
        path: the server's socket.
        lose: called for each answer of the server: True resets the connection instead of passing it on.

    Attributes:
        fate: called for all bytes in both directions.
        fates: how often each fate has been met.
        hold: called for each request: True holds it back until `deliver`, and the connection gets no answer any more.
        held: the requests that are held back.
    """

    def __init__(self, path: str, lose: Callable[[bytes], bool] = lambda _: False) -> None:
        self.lose = lose
        self.fate: Callable[[bytes], Fate] = lambda _: Fate.PASS
        self.fates: Counter[Fate] = Counter()
        self.port = 0
        self.resets = 0
        self.silent = False
        self.hold: Callable[[bytes], bool] = lambda _: False
        self.held: list[bytes] = []
        self._path = path
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._pairs: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._server is not None
        self._server.close()
        while self._serving:
            self.reset_all()
            await asyncio.wait(self._serving, timeout=0.1)

    def url(self, options: str = "") -> str:
        """For a backend."""
        return f"redis://127.0.0.1:{self.port}/0{options}"

    def reset_all(self) -> None:
        """End every connection without a word of farewell."""
        for writer in tuple(self._pairs):
            writer.transport.abort()
        self._pairs.clear()

    async def deliver(self) -> None:
        """Deliver the requests that were held back, as the network does when their connection is long gone."""
        requests, self.held = self.held, []
        for request in requests:
            reader, writer = await asyncio.open_unix_connection(self._path)
            writer.write(request)
            assert await reader.read(65536), "it is answered"
            writer.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_unix_connection(self._path)
        except OSError:
            writer.transport.abort()
            return
        self._pairs |= {writer, server_writer}
        hole = asyncio.Event()
        onward = asyncio.ensure_future(self._forward(reader, server_writer, hole, answers=False))
        back = asyncio.ensure_future(self._forward(server_reader, writer, hole, answers=True))
        await asyncio.wait([onward, back], return_when=asyncio.FIRST_COMPLETED)
        for each in (writer, server_writer):
            each.transport.abort()
            self._pairs.discard(each)
        for task in (onward, back):
            task.cancel()
        await asyncio.gather(onward, back, return_exceptions=True)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hole: asyncio.Event, *, answers: bool
    ) -> None:
        try:
            while data := await reader.read(65536):
                if self.silent or hole.is_set():
                    # Taken, and never heard of again.
                    continue
                self.fates[fate := self.fate(data)] += 1
                if fate is Fate.SILENCE:
                    hole.set()
                    continue
                if fate is Fate.RESET:
                    return
                if not answers and self.hold(data):
                    self.held.append(data)
                    hole.set()
                    continue
                if fate is Fate.CUT:
                    data = data[: len(data) // 2]
                if answers and self.lose(data):
                    self.resets += 1
                    return
                writer.write(data)
                await writer.drain()
                if fate is Fate.CUT:
                    return
        except ConnectionError:
            return
