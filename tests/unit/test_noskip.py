"""A test that is skipped is a failure of the run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNS = "def test_runs():\n    pass\n"
WAYS = {
    "marked": f"import pytest\n{RUNS}\n@pytest.mark.skip(reason='no server')\ndef test_x():\n    pass\n",
    "conditional": f"import pytest\n{RUNS}\n@pytest.mark.skipif(True, reason='no server')\ndef test_x():\n    pass\n",
    "called": f"import pytest\n{RUNS}\ndef test_x():\n    pytest.skip('no server')\n",
    "fixture": (
        f"import pytest\n{RUNS}\n@pytest.fixture\ndef server():\n    pytest.skip('no server')\n\n"
        "def test_x(server):\n    pass\n"
    ),
    "module": "import pytest\npytest.skip('no server', allow_module_level=True)\n",
    "import": "import pytest\npytest.importorskip('no_such_server')\n",
}


def test_a_skipped_test_fails_with_its_reason_and_one_that_is_expected_to_fail_does_not(tmp_path: Path) -> None:
    for way, text in WAYS.items():
        (tmp_path / f"test_{way}.py").write_text(text)
    (tmp_path / "test_known.py").write_text("import pytest\n@pytest.mark.xfail\ndef test_x():\n    raise ValueError\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.support.noskip",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:anyio",
    ]
    # The settings of this project are not theirs.
    command += ["-c", "/dev/null", f"--rootdir={tmp_path}", "--continue-on-collection-errors", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 1
    assert re.search(r"^1 failed, 4 passed, 1 xfailed, 5 errors", done.stdout, re.MULTILINE), done.stdout
    for way in WAYS:
        assert re.search(rf"test_{way}.py.*: no test may be skipped: .*server", done.stdout), way
