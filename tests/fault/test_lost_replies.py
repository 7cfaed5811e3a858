"""C10: calls that happen and report failure, as those of a network file system do whose reply is lost."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.fault import harness
from tests.fault.harness import recover, strays

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

# Every third rename or link happens, and then reports EIO.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
static atomic_int calls;
static int lose(int result) {
    if (result == 0 && atomic_fetch_add(&calls, 1) % 3 == 2) { errno = EIO; return -1; }
    return result;
}
int rename(const char *a, const char *b) {
    int (*real)(const char *, const char *) = dlsym(RTLD_NEXT, "rename");
    return lose(real(a, b));
}
int renameat(int d, const char *a, int e, const char *b) {
    int (*real)(int, const char *, int, const char *) = dlsym(RTLD_NEXT, "renameat");
    return lose(real(d, a, e, b));
}
int link(const char *a, const char *b) {
    int (*real)(const char *, const char *) = dlsym(RTLD_NEXT, "link");
    return lose(real(a, b));
}
int linkat(int d, const char *a, int e, const char *b, int f) {
    int (*real)(int, const char *, int, const char *, int) = dlsym(RTLD_NEXT, "linkat");
    return lose(real(d, a, e, b, f));
}
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shim")
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def test_a_lost_reply_to_a_rename_or_link_neither_loses_nor_doubles(tmp_path: Path, shim: Path) -> None:
    url, ledger = f"file://{tmp_path}/spool", tmp_path / "ledger"
    env = {"LD_PRELOAD": str(shim)}
    for batch in (1, 20):
        done = harness.run("publish", url, ledger, 60, batch, env=env)
        assert done.returncode == 0, done.stderr[-2000:]
    worked = harness.run("work", url, ledger, 10, env=env)
    assert worked.returncode == 0, worked.stderr[-2000:]
    books = recover(url, ledger)
    assert len(books.acked) == 120
    assert books.duplicates == 0
    assert strays(tmp_path / "spool") == []
