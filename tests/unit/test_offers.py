"""What backend classes offer besides the contract: found by name, and absent where a class offers nothing."""

from __future__ import annotations

import pytest

from qworker.offers import doctor_of, follower_of, scan_of
from qworker.registry import backend_class


@pytest.mark.parametrize("scheme", ["memory", "file", "fsq", "mq", "sq", "vsqs"])
def test_each_scheme_offers_what_its_class_has_by_name(scheme: str) -> None:
    found = backend_class(scheme)
    assert doctor_of(scheme) is (None if scheme == "memory" else found)
    assert scan_of(scheme) is (found if scheme == "fsq" else None)
    assert follower_of(scheme) is (found if scheme == "sq" else None)
