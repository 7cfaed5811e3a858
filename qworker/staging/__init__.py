"""Bulk publishing by many processes, exactly once: stage in parallel, seal, then publish (docs/pipeline/writing.md)."""

from __future__ import annotations

from qworker.staging.contract import HalfPublished, Manifest, Published, StagedPart, Staging, check_job, message_id

__all__ = ["HalfPublished", "Manifest", "Published", "StagedPart", "Staging", "check_job", "message_id"]
