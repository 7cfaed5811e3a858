"""The Parquet table of rejected rows, which the tasks write and the commit publishes.

<path>/.staged-<load>/<run>-<partition>.<attempt>.parquet     Spark ignores it
<path>/<load>-<step>-<partition>.parquet                      the columns of the row, and `reason`
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, cast

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from qworker.bulk import Manifest, StagedPartition
from qworker.errors import BackendError, UsageError
from qworker.pipeline.source.row_reader import SOURCE

__all__ = ["REASON_COLUMN", "RejectsFile", "RejectsTable"]

REASON_COLUMN = "reason"


class RejectsTable:
    """The rejects of one load.

    Args:
        path: A directory that all processes see, or a URI that Arrow can open (`s3://`, `gs://`, `hdfs://`). It is
            created if it does not exist.
        load: The load's name.

    Raises:
        UsageError: Arrow cannot open the path.
    """

    def __init__(self, path: str, load: str) -> None:
        self._load = load
        try:
            # Spark calls it s3a, and Arrow s3.
            uri = path.replace("s3a://", "s3://", 1)
            self._fs, self._path = (
                pafs.FileSystem.from_uri(uri) if "://" in uri else (pafs.LocalFileSystem(), uri.removeprefix("file:"))
            )
        except (pa.ArrowException, OSError, ValueError) as error:
            raise UsageError(f"the rejects cannot be written to {path!r}: {error}") from error
        self._staged = f"{self._path}/.staged-{load}"

    def file(self, run: str, part: int, attempt: str) -> RejectsFile:
        """Make the file of one attempt. Nothing is created before its first row."""
        return RejectsFile(self._fs, self._staged, f"{self._staged}/{run}-{part}.{attempt}.parquet")

    def publish(self, manifest: Manifest) -> None:
        """Publish the files of the attempts that count. It can be repeated.

        Raises:
            BackendError: A file is missing that was not published.
        """
        for part in manifest.partitions:
            if part.rejected:
                self._publish(manifest.step, part)
        self.discard(manifest.runs)

    def _publish(self, step: int, part: StagedPartition) -> None:
        source = f"{self._staged}/{part.run}-{part.partition}.{part.attempt}.parquet"
        target = f"{self._path}/{self._load}-{step}-{part.partition}.parquet"
        found, shown = self._fs.get_file_info([source, target])
        if found.type == pafs.FileType.File:
            self._fs.move(source, target)
        elif shown.type != pafs.FileType.File:
            raise BackendError(
                f"the rejects of partition {part.partition} of the load {self._load} are gone from {self._staged}"
            )

    def discard(self, runs: set[str]) -> None:
        """Remove the unpublished files of some runs."""
        selector = pafs.FileSelector(self._staged, allow_not_found=True)
        left = 0
        for entry in self._fs.get_file_info(selector):
            if entry.base_name.partition("-")[0] in runs:
                self._fs.delete_file(entry.path)
            else:
                left += 1
        if not left and self._fs.get_file_info(self._staged).type == pafs.FileType.Directory:
            self._fs.delete_dir(self._staged)


class RejectsFile:
    """The rejects of one attempt: a context manager that removes the file after an error."""

    def __init__(self, fs: pafs.FileSystem, folder: str, path: str) -> None:
        self._fs = fs
        self._folder = folder
        self._path = path
        self._writer: pq.ParquetWriter | None = None
        self.count = 0

    def write(self, batch: pa.RecordBatch, bad: Sequence[tuple[int, str]]) -> None:
        """Write some rows of a batch, with the reasons."""
        rows = batch.take(pa.array([number for number, _ in bad], pa.int32()))
        columns = _source(rows)
        columns[REASON_COLUMN] = pa.array([reason for _, reason in bad], pa.string())
        table = pa.table(columns)
        if self._writer is None:
            self._fs.create_dir(self._folder, recursive=True)
            self._writer = pq.ParquetWriter(self._path, table.schema, filesystem=self._fs)
        self._writer.write_table(table)
        self.count += len(bad)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
            if error is not None:
                self._fs.delete_file(self._path)


def _source(rows: pa.RecordBatch) -> dict[str, Any]:
    """Return the original columns of the rows: those that `load` has packed, or all columns."""
    if SOURCE not in rows.schema.names:
        return {name: rows.column(name) for name in rows.schema.names}
    source = cast("Any", rows.column(SOURCE))
    return {field.name: values for field, values in zip(source.type, source.flatten(), strict=True)}
