"""The contract suite of commit 31528ec, as it was: only its imports lead to `tests.support.old_face` instead of qworker."""

from __future__ import annotations

import ast
import atexit
import importlib
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.old_code import FIRST, files_of_commit

__all__ = ["load_old_suite", "old_members"]

_PACKAGE = "suite_of_31528ec"
# What the suite needs of qworker.testing; the rest is for apps.
_MODULES = "administering base contract harness history leasing parting publishing reaping rules settling staging until waiting"


def load_old_suite() -> ModuleType:
    """The module `contract` of then.

    Raises:
        AssertionError: the commit is not in this copy of the repository.
    """
    folder = Path(tempfile.mkdtemp(prefix="qw-old-suite-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    package = folder / _PACKAGE
    package.mkdir()
    (package / "__init__.py").touch()
    texts = files_of_commit(FIRST, "qworker/testing")
    for name in _MODULES.split():
        text = texts[f"{name}.py"]
        text = re.sub(r"^from qworker\.testing\.clock import", "from tests.support.old_face import", text, flags=re.M)
        text = re.sub(r"^from qworker\.testing\.", f"from {_PACKAGE}.", text, flags=re.M)
        text = re.sub(r"^from qworker(\.\w+)* import", "from tests.support.old_face import", text, flags=re.M)
        (package / f"{name}.py").write_text(text)
    pytest.register_assert_rewrite(_PACKAGE)
    sys.path.insert(0, str(folder))
    return importlib.import_module(f"{_PACKAGE}.contract")


def old_members() -> list[str]:
    """The members of `Backend`, without its attributes."""
    tree = ast.parse(files_of_commit(FIRST, "qworker/backend.py")["backend.py"])
    (backend,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [node.name for node in backend.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
