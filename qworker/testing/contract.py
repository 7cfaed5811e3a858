"""The backend contract as a test suite. Subclass `BackendContract`, and add a fixture `harness`.

    from qworker.testing.contract import BackendContract
    from qworker.testing.harness import Harness

    class TestMine(BackendContract):
        @pytest_asyncio.fixture
        async def harness(self, tmp_path):
            async with Harness.fake(f"mine://{tmp_path}") as harness:
                yield harness

The suite also runs without a file: `pytest -p qworker.testing --qworker-url mine:///tmp/queues`.

The classes have no `Test` prefix, so that only subclasses are collected. If a backend cannot keep a rule, it declares
this in `Backend.deviations`, by the names of `qworker.testing.rules.RULES`. Then the suite proves the deviation.

It needs the extra `testing`. Without it, the import raises `MissingExtra`.
"""

from __future__ import annotations

from qworker.extras import not_installed

try:
    from qworker.testing.contract_admin import AdministeringContract
    from qworker.testing.contract_browse import BrowsingContract
    from qworker.testing.contract_bulk import BulkContract
    from qworker.testing.contract_cancel import CancellingContract
    from qworker.testing.contract_cells import CellsContract
    from qworker.testing.contract_history import HistoryContract
    from qworker.testing.contract_lease import LeasingContract
    from qworker.testing.contract_max_body import MaxBodyContract
    from qworker.testing.contract_parts import PartingContract
    from qworker.testing.contract_publish import PublishingContract
    from qworker.testing.contract_reap import ReapingContract
    from qworker.testing.contract_retention import KeepingContract
    from qworker.testing.contract_settle import SettlingContract
    from qworker.testing.contract_unique import UniqueContract
    from qworker.testing.contract_wait import WaitingContract
except ModuleNotFoundError as error:
    raise not_installed(error, "the contract suite") from error

__all__ = ["BackendContract"]


class BackendContract(
    PublishingContract,
    UniqueContract,
    LeasingContract,
    SettlingContract,
    ReapingContract,
    CancellingContract,
    KeepingContract,
    MaxBodyContract,
    AdministeringContract,
    BrowsingContract,
    PartingContract,
    WaitingContract,
    CellsContract,
    BulkContract,
    HistoryContract,
):
    """The tests of all rules of `qworker.backend`."""
