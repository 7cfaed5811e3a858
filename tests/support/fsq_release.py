"""fsq 0.2.5 as it was released for Python 2.7, and the same translated to Python 3, which every machine has."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.installed import installed

__all__ = ["install_fsq", "interpreters"]

# The release's programs are in its wheel alone.
WHEELS = ["fsq==0.2.5", "jsonrpclib-pelix==1.2.0"]
FOR_PYTHON2 = ["fsq==0.2.5", "jsonrpclib==0.1.7"]

# What fissix leaves to do, so that the release behaves under Python 3 as it does under Python 2.7. Each text is
# replaced wherever it stands in these files; one that is nowhere is an error.
FIXES: list[tuple[str, str, str]] = [
    # Bodies are bytes. A buffer of bytes has no descriptor, and says so.
    (
        "fsq/internal.py",
        "import os\n",
        "import io\nimport os\n\nclass StringIO(io.BytesIO):\n    fileno = property()\n\n",
    ),
    ("fsq/enqueue.py", "from io import StringIO", "from .internal import StringIO"),
    ("libexec/fsq/enqueue.py", "import io\n", "from fsq.internal import StringIO\n"),
    ("libexec/fsq/enqueue.py", "io.StringIO(sys.stdin.read())", "StringIO(sys.stdin.buffer.read())"),
    ("libexec/fsq/enqueue.py", "io.StringIO('')", "StringIO(b'')"),
    ("fsq/internal.py", "os.fdopen(n_fd)", "os.fdopen(n_fd, 'rb')"),
    ("fsq/push.py", "item.item.read()", "item.item.read().decode(_c.FSQ_CHARSET)"),
    # Binary files have no lines to be buffered by; each write is followed by a flush.
    ("fsq/internal.py", "mode, 1)", "mode)"),
    ("fsq/enqueue.py", "'wb', 1)", "'wb')"),
    # Programs that a scan starts have the locked file open.
    (
        "fsq/internal.py",
        "def _lock(fd, lock=False):\n",
        "def _lock(fd, lock=False):\n    os.set_inheritable(fd, True)\n",
    ),
    # Only an error that was made of a single argument had it as its message.
    ("fsq/internal.py", "if e.message:\n", "if 1 == len(e.args):\n"),
    ("fsq/internal.py", "' '.join([e.message, msg])", "' '.join([str(e.args[0]), msg])"),
    ("*", "e.message", "str(e)"),
    # Errors and names are printed as text.
    ("*", "e.strerror.encode(_CHARSET)", "e.strerror"),
    ("fsq/utility.py", "item_id = item.id.encode(_CHARSET)", "item_id = item.id"),
    # What is written into a pipe is bytes; the name of a pipe may be text.
    ("fsq/configure.py", "os.write(fd, '\\0')", "os.write(fd, b'\\0')"),
    ("fsq/configure.py", "trigger_path.encode(_c.FSQ_CHARSET)", "trigger_path"),
    # %ff is a byte of the charset, not a character.
    ("fsq/encode.py", "chr(int(encoding_trg, 16))", "bytes([int(encoding_trg, 16)])"),
    # The name of an error ends with its clause, and is used after it.
    (
        "fsq/enqueue.py",
        "                    if err.errno == errno.ENOENT:\n                        pass\n                raise",
        "                    unlinking = err\n                err = unlinking\n                raise",
    ),
    # Where jsonrpclib-pelix keeps the protocol's version.
    ("libexec/fsq/jsonrpcd.py", "jsonrpclib.config.version", "jsonrpclib.config.DEFAULT.version"),
]


def interpreters() -> list[str]:
    """What fsq can be run with here: this Python always, and a Python 2.7 where there is one."""
    return ["python3", "python2.7"] if _python2() else ["python3"]


def install_fsq(interpreter: str = "python3") -> tuple[str, Path]:
    """A Python and the folder that has fsq 0.2.5 for it."""
    if interpreter == "python3":
        made_of = repr((WHEELS, FIXES, sys.version))
        return sys.executable, installed("fsq", made_of, _translate)
    python = _python2()
    assert python, "no Python 2.7 found: install one, and name it in QWORKER_TEST_PYTHON2"
    return python, installed("fsq-python2", repr((FOR_PYTHON2, python)), functools.partial(_install_for, python))


@functools.cache
def _python2() -> str | None:
    pyenv = sorted(Path.home().glob(".pyenv/versions/2.7*/bin/python2.7"), reverse=True)
    for python in (os.environ.get("QWORKER_TEST_PYTHON2"), shutil.which("python2.7"), *map(str, pyenv)):
        # pyenv puts a stub on the path whether or not the version is selected.
        if (
            python
            and subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
        ):
            return python
    return None


def _install_for(python: str, folder: Path) -> None:
    _run(python, "-m", "pip", "install", "-q", "--target", str(folder), *FOR_PYTHON2)


def _translate(folder: Path) -> None:
    wheels = (
        "--only-binary=:all:",
        "--no-deps",
        "--python-version=27",
        "--implementation=py",
        "--abi=none",
        "--platform=any",
    )
    _run(sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", str(folder), *wheels, *WHEELS)
    shutil.rmtree(folder / "fsq" / "tests")
    parts = [folder / "fsq", folder / "libexec"]
    _run(sys.executable, "-m", "fissix", "--write", "--nobackups", "--no-diffs", *map(str, parts))
    sources = {path: path.read_text() for part in parts for path in part.rglob("*.py")}
    for where, old, new in FIXES:
        found = [
            path for path, text in sources.items() if old in text and where in ("*", str(path.relative_to(folder)))
        ]
        assert found, f"fsq has no {old!r} in {where}"
        for path in found:
            sources[path] = sources[path].replace(old, new)
    for path, text in sources.items():
        path.write_text(text)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
