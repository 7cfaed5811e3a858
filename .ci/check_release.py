"""Check that the files in dist/ are those of one release, and with a tag also that this release can be published.

python .ci/check_release.py dist              a dry run
python .ci/check_release.py dist v0.2.0       the tag that publishes it
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_FILE = re.compile(r"qworker_tasks-([\w.]+?)(\.tar\.gz|-py3-none-any\.whl)")
_ENTRY = re.compile(r"^## (\S+) - (.+)$", re.MULTILINE)


def problems(names: Iterable[str], changelog: str, tag: str | None, site: str | None) -> Iterator[str]:
    """Yield what is wrong with the files of a release.

    Args:
        names: The names of the files in dist/.
        changelog: The text of CHANGELOG.md.
        tag: The tag that publishes them. None: a dry run.
        site: The address of the documentation, to which the links of the README lead on the index.
    """
    found = [(name, _FILE.fullmatch(name)) for name in sorted(names)]
    yield from (f"{name} is not a file of a release: remove it" for name, match in found if match is None)
    versions = {match[1] for _, match in found if match is not None}
    if len(versions) != 1 or {match[2] for _, match in found if match is not None} != {
        ".tar.gz",
        "-py3-none-any.whl",
    }:
        yield "dist/ must have one sdist and one wheel of the same version: remove dist/ and build again"
        return
    (version,) = versions
    entry = _ENTRY.search(changelog)
    if entry is None or entry[1] != version:
        yield f"the newest entry of CHANGELOG.md must be that of {version}"
    elif tag is not None and not re.fullmatch(r"\d{4}-\d\d-\d\d", entry[2]):
        yield f"CHANGELOG.md must have the date of {version} (got {entry[2]!r})"
    if tag is not None and site is None:
        yield "pyproject.toml must have the address of the site as Documentation in [project.urls]"
    if tag is not None and tag != f"v{version}":
        yield f"the tag must be v{version} (got {tag!r})"


def main(folder: str, tag: str = "") -> int:
    """Print what is wrong, and return the exit status."""
    names = [path.name for path in Path(folder).iterdir()]
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    site = project.get("urls", {}).get("Documentation")
    found = list(problems(names, (_ROOT / "CHANGELOG.md").read_text(), tag or None, site))
    sys.stdout.write("\n".join(found or [f"{' and '.join(sorted(names))}: checked"]) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
