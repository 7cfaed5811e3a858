"""Directories that are no stores: what every directory backend makes of one that is missing, or cannot be used."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from qworker import Draft, State
from qworker.backend import Backend
from qworker.doctor import Health, examine
from qworker.errors import QueueNotFound, StoreNotFound
from qworker.parts import shares
from qworker.registry import open_backend

SCHEMES = ["file", "fsq", "mq", "sq", "vsqs"]


async def _parts(backend: Backend) -> None:
    async for _ in backend.browse_part("q", State.READY, shares(2)[0]):
        pass


LOOKS: dict[str, Callable[[Backend], Awaitable[object]]] = {
    "stats": lambda backend: backend.stats("q"),
    "browse": lambda backend: backend.browse("q", State.READY),
    "find": lambda backend: backend.find("q", "x"),
    "browse_parts": lambda backend: backend.browse_parts("q", State.READY, 2),
    "browse_part": _parts,
    "discard": lambda backend: backend.discard("q", []),
    "requeue": lambda backend: backend.requeue("q"),
    "remove": lambda backend: backend.remove("q", ["x"]),
    "purge": lambda backend: backend.purge("q"),
    "down": lambda backend: backend.down("q"),
    "up": lambda backend: backend.up("q"),
}


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_looking_into_a_directory_that_is_not_there_makes_none_and_names_it(scheme: str, tmp_path: Path) -> None:
    place = tmp_path / "above" / "spool"
    backend = open_backend(f"{scheme}://{place}")
    try:
        for name, look in LOOKS.items():
            with pytest.raises(StoreNotFound) as caught:
                await look(backend)
            assert isinstance(caught.value, QueueNotFound)
            assert f"there is no queue 'q', and no directory {place}:" in str(caught.value), name
            assert caught.value.queue == "q"
        assert await backend.queues() == []
        assert await backend.history_parts() == []
        assert await backend.message_history("q", "x") == []
        assert await backend.half_published("q") == []
        await backend.delete("q")
        assert backend.missing == str(place)
        assert backend.durability
        assert not place.parent.exists()
        # Whoever publishes makes it.
        (message_id,) = await backend.publish("q", [Draft(body=b"x")])
        assert backend.missing is None
        found = await backend.find("q", message_id)
        assert found is not None
        with pytest.raises(QueueNotFound, match="there is no queue 'other'"):
            await backend.stats("other")
    finally:
        await backend.aclose()


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_the_doctor_of_a_directory_that_is_not_there_makes_none(scheme: str, tmp_path: Path) -> None:
    place = tmp_path / "spool"
    checks = {check.name: check for check in await examine(f"{scheme}://{place}")}
    assert checks["reachable"].health is Health.OK
    assert "which is not there yet" in checks["reachable"].detail
    assert not place.exists()
