"""Each row of the README's feature table has tests that prove it, and a page."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# By feature: a file of tests, and a word in the names of those that prove it.
PROOFS = {
    "Retry policies": ("tests/unit/test_retry_policies.py", "class_of_an_error"),
    "Unlimited tries": ("tests/unit/test_retry_policies.py", "unlimited"),
    "Retry without a try": ("tests/unit/test_retry_policies.py", "does_not_count"),
    "Typed values": ("tests/unit/test_values.py", "arrives_and_comes_back"),
    "Checks at enqueue": ("tests/unit/test_values.py", "refused_when_it_is_enqueued"),
    "Options per call": ("tests/unit/test_call_options.py", "options_of_a_call"),
}


def features() -> dict[str, str]:
    """The features in the table, with their pages."""
    section = (ROOT / "README.md").read_text().split("\n## Features\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\) \|", section, re.MULTILINE))


def test_every_row_has_a_proof() -> None:
    section = (ROOT / "README.md").read_text().split("\n## Features\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(features())
    assert features().keys() == PROOFS.keys()


@pytest.mark.parametrize("feature", PROOFS)
def test_the_proof_of_a_row_exists(feature: str) -> None:
    file, word = PROOFS[feature]
    names = [node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")]
    assert any(name.startswith("test_") and word in name for name in names)
    assert (ROOT / features()[feature]).is_file()
