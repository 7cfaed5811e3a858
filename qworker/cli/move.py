"""`qworker move`: move queues from one backend to another while both are in use."""

from __future__ import annotations

from typing import TextIO

import click

from qworker.cli.options import Command, backend_from_url, json_option, run
from qworker.cli.output import Progress, echo, print_json, reporting
from qworker.errors import QworkerError, UsageError
from qworker.names import check_existing_queue, printable
from qworker.tools.move import MoveResult, move

__all__ = ["command"]


@click.command("move", cls=Command)
@click.argument("source")
@click.argument("target")
@click.argument("queues", type=check_existing_queue, nargs=-1, metavar="[QUEUE]...")
@click.option(
    "--include-failed", is_flag=True, help="Move failed messages too. They become ready at TARGET, with tries 0."
)
@click.option(
    "--id-map",
    type=click.File("w"),
    metavar="FILE",
    help="Write the old and the new id of each message whose id changes to FILE, one pair per line.",
)
@json_option
def command(
    source: str, target: str, queues: tuple[str, ...], include_failed: bool, id_map: TextIO | None, json: bool
) -> None:
    r"""Move messages from one backend to another.

    Moves every message of each QUEUE, or of all queues, with its id, tries and times. Workers can run at both ends. If
    the move is killed, run it again: nothing is lost. Messages that workers of SOURCE hold stay there. Run the move
    again when they have finished. Delayed messages keep their due time, and the move waits for those due within
    seconds.

    Protocols with their own form of ids (fsq, mq, rfq, vsqs) give messages new ids. Properties that a protocol cannot
    store travel in the body.

    \b
    Examples:
      qworker move file://./spool redis://localhost/0
      qworker move file://./spool redis://localhost/0 thumbs --include-failed
    """
    if source == target:
        raise UsageError("SOURCE and TARGET must be different")
    moved = run(_move(source, target, queues, include_failed, id_map))
    with reporting("what was moved is stored"):
        if json:
            print_json(moved)
        else:
            for one in moved:
                echo(_summary(one))


async def _move(
    source_url: str, target_url: str, queues: tuple[str, ...], include_failed: bool, id_map: TextIO | None
) -> list[MoveResult]:
    def renamed(old: str, new: str) -> None:
        if id_map is not None:
            try:
                print(printable(old), printable(new), file=id_map, flush=True)
            except OSError as error:
                raise QworkerError(
                    f"--id-map {id_map.name}: {error.strerror}: nothing is lost: move the rest with another file"
                ) from error

    async with backend_from_url(source_url) as source, backend_from_url(target_url, make=True) as target:
        names = list(queues) or await source.queues()
        with Progress("moved") as progress:
            return [
                await move(source, target, name, failed=include_failed, progress=progress.add, renamed=renamed)
                for name in names
            ]


def _summary(moved: MoveResult) -> str:
    parts = [f"{moved.ready:,} ready", f"{moved.delayed:,} delayed"]
    if moved.failed:
        parts.append(f"{moved.failed:,} failed")
    text = f"{moved.queue}: moved {', '.join(parts)}"
    if moved.cells:
        text += f", {moved.cells:,} {'cell' if moved.cells == 1 else 'cells'}"
    if moved.left_cells:
        text += f"; {moved.left_cells:,} cells stay, because the target has none"
    if moved.twice:
        text += f"; {moved.twice:,} can run twice, because their leases expired at the source"
    if moved.left_leased:
        text += f"; {moved.left_leased:,} are held by workers of the source"
    return text
