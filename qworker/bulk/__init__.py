"""Bulk publishing by many processes, exactly once: stage in parallel, seal, then publish (docs/pipeline/writing.md)."""

from __future__ import annotations

from qworker.bulk.contract import (
    BulkWriter,
    IncompleteLoad,
    LoadDone,
    Manifest,
    StagedPartition,
    check_load,
    message_id,
)

__all__ = ["BulkWriter", "IncompleteLoad", "LoadDone", "Manifest", "StagedPartition", "check_load", "message_id"]
