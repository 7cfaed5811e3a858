"""What backend classes offer besides the contract: found by name, and absent where a class offers nothing."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from qworker.backend import registry
from qworker.backend.offers import doctor_of, follower_of, scan_of
from qworker.backend.registry import backend_class
from qworker.kit.doctor_check import Check, CheckStatus
from qworker.tools.doctor import run_checks
from qworker.url import BackendURL
from qworker_memory import MemoryBackend


@pytest.mark.parametrize("scheme", ["memory", "file", "fsq", "mq", "sq", "vsqs"])
def test_each_scheme_offers_what_its_class_has_by_name(scheme: str) -> None:
    found = backend_class(scheme)
    assert doctor_of(scheme) is (None if scheme == "memory" else found)
    assert scan_of(scheme) is (found if scheme == "fsq" else None)
    assert follower_of(scheme) is (found if scheme == "sq" else None)


class Examined(MemoryBackend):
    """A backend of another package, with a check of its own."""

    @classmethod
    async def doctor(cls, url: BackendURL) -> list[Check]:
        return [Check("disk", CheckStatus.WARN, f"{url.scheme}: is nearly full")]


@pytest.mark.parametrize(("backend", "told"), [("Examined", True), ("MemoryBackend", False)])
async def test_a_backend_of_another_package_may_offer_checks_and_needs_none(
    backend: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = EntryPoint("theirs", f"{__name__}:{backend}", registry.GROUP)
    monkeypatch.setattr(registry, "_installed", lambda: {"theirs": theirs})
    checks = await run_checks("theirs:")
    assert (Check("disk", CheckStatus.WARN, "theirs: is nearly full") in checks) is told
    assert scan_of("theirs") is follower_of("theirs") is None
