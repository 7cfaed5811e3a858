"""`qworker install` on `fsq:`, for the entry point."""

from __future__ import annotations

import os

from qworker.files import store_errors
from qworker.installing import InstallOptions
from qworker.url import BackendURL
from qworker_file.fsq.layout import Install, QueueExists, install, uninstall
from qworker_file.fsq.options import FsqOptions, check_host, root_of
from qworker_file.fsq.reenqueue import open_root

__all__ = ["install_queue"]


def install_queue(url: BackendURL, queue: str, options: InstallOptions) -> None:
    """Install a queue as the standard says.

    Raises:
        InvalidURL: an option of the URL is not known.
        UsageError: an owner or a mode makes no sense.
        QueueExists: it is there.
    """
    owners = {"user": options.owner, "group": options.group, "mode": options.mode}
    given = {f"{what}_{name}": value for name, value in owners.items() if value for what in ("item", "queue")}
    constants = FsqOptions.from_url(url).constants.changed(**given)
    directory = root_of(url, constants)
    hosts = tuple(check_host(host) for host in options.hosts)
    how = Install(down=options.down, triggered=options.triggered, hosts=hosts)
    with store_errors(f"install {queue!r}"):
        os.makedirs(directory, 0o775, exist_ok=True)
        root = open_root(str(directory))
        try:
            install(root, queue, constants, how)
        except QueueExists:
            if options.force:
                uninstall(root, queue, constants)
                install(root, queue, constants, how)
            elif not options.ignore_exists:
                raise
        finally:
            os.close(root)
