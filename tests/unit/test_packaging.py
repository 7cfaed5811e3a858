"""What a user installs: a wheel built from the sdist, as an index would serve it."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
import yaml
from hatchling import build

import qworker
from qworker.backend import Backend
from qworker.backend.registry import GROUP
from qworker.cli.main import GROUP as COMMANDS
from tests.support.archives import unpack
from tests.support.exports import check_exports
from tests.support.pages import pages

# Building and starting interpreters takes its time on a busy machine.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = [Path(entry) for entry in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of this tree."""
    return _build(ROOT, "build_sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the sdist, and from nothing else."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    unpack(sdist, unpacked)
    return _build(next(unpacked.iterdir()), "build_wheel", tmp_path_factory.mktemp("wheel"))


def _build(source: Path, hook: str, target: Path) -> Path:
    # Build hooks work on the current directory, so they get a process of their own.
    code = f"import sys; from hatchling.build import {hook} as hook; print(hook(sys.argv[1]))"
    built = subprocess.run(
        [sys.executable, "-c", code, str(target)], cwd=source, capture_output=True, text=True, timeout=240, check=True
    )
    return target / built.stdout.split()[-1]


def _sources() -> set[str]:
    return {
        str(path.relative_to(ROOT / package.parent))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_a_wheel_built_from_the_sdist_has_every_file_of_every_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == _sources()


def test_every_package_of_the_tree_is_in_the_wheel_and_typed() -> None:
    on_disk = {
        Path("qworker"),
        *(p.relative_to(ROOT) for p in (ROOT / "backends").iterdir() if (p / "__init__.py").exists()),
    }
    assert set(PACKAGES) == on_disk
    assert all((ROOT / package / "py.typed").exists() for package in PACKAGES)


def test_the_sdist_has_every_file_of_the_tree_and_nothing_else(sdist: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    tree = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if not member.isdir()}
    assert {"LICENSE", "tests/install-tools.sh", "docs/index.md"} <= names
    assert names - tree == {"PKG-INFO"}
    assert tree - names == {".git-blame-ignore-revs", ".pre-commit-config.yaml"}


def test_a_wheel_runs_with_nothing_of_this_tree_on_the_path(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import qworker, qworker.backend.registry as registry; print(qworker.__file__); "
        "[registry.backend_class(s) for s in ('memory', 'file')]; print(' '.join(registry.schemes()))"
    )
    # The dependencies come from this environment, qworker from the wheel: its folder stands first.
    shown = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    ).stdout.splitlines()
    assert shown[0] == str(tmp_path / "site" / "qworker" / "__init__.py")
    assert {"memory", "file"} <= set(shown[1].split())


@pytest.mark.parametrize("scheme", sorted(PROJECT["project"]["entry-points"][GROUP]))
def test_each_scheme_loads_a_backend(scheme: str) -> None:
    (point,) = entry_points(group=GROUP, name=scheme)
    assert issubclass(point.load(), Backend)


def test_there_are_two_groups_of_entry_points() -> None:
    assert PROJECT["project"]["entry-points"].keys() == {GROUP, COMMANDS}


@pytest.mark.parametrize("script", sorted(PROJECT["project"]["scripts"].values()))
def test_each_script_loads(script: str) -> None:
    module, _, attribute = script.partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))


def test_every_exported_name_exists_and_is_sorted() -> None:
    assert sorted(qworker.__all__) == qworker.__all__
    for name in qworker.__all__:
        # A union of types has no name.
        assert getattr(getattr(qworker, name), "__name__", name) == name


@pytest.mark.parametrize("package", [package.name for package in PACKAGES])
def test_every_module_says_what_it_exports(package: str) -> None:
    # The pipeline needs the extra `spark`: tests/spark checks it.
    assert check_exports(package, leave_out=frozenset({"qworker.pipeline", "qworker.testing"}))


def test_the_version_is_one_everywhere() -> None:
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == qworker.__version__ == version("qworker-tasks")


def test_pages_name_the_wheel_of_this_version() -> None:
    wheels = [
        found for page in pages() for found in re.findall(r"qworker_tasks-([\d.]+)-py3", (ROOT / page).read_text())
    ]
    assert set(wheels) == {qworker.__version__}


def test_the_version_is_written_in_one_place(sdist: Path, wheel: Path) -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert sdist.name == f"qworker_tasks-{qworker.__version__}.tar.gz"
    assert wheel.name == f"qworker_tasks-{qworker.__version__}-py3-none-any.whl"


FILES = ("qworker_tasks-0.2.0.tar.gz", "qworker_tasks-0.2.0-py3-none-any.whl")
DATED = "# Changelog\n\n## 0.2.0 - 2026-12-01\n\n## 0.1.0 - unreleased\n"
UNDATED = DATED.replace("2026-12-01", "unreleased")


@pytest.mark.parametrize(
    ("names", "changelog", "tag", "problem"),
    [
        (FILES, UNDATED, None, None),
        (FILES, DATED, "v0.2.0", None),
        (FILES, UNDATED, "v0.2.0", "must have the date"),
        (FILES, DATED, "v0.2.1", "the tag must be v0.2.0"),
        (FILES, DATED.replace("0.2.0", "0.3.0"), None, "must be that of 0.2.0"),
        ((*FILES, "notes.txt"), DATED, None, "notes.txt is not a file of a release"),
        ((*FILES, FILES[0].replace("2", "3")), DATED, None, "one sdist and one wheel"),
        (FILES[:1], DATED, None, "one sdist and one wheel"),
        ((), DATED, None, "one sdist and one wheel"),
    ],
)
def test_only_the_files_of_one_dated_release_can_be_published(
    names: tuple[str, ...], changelog: str, tag: str | None, problem: str | None
) -> None:
    check = runpy.run_path(str(ROOT / ".ci/check_release.py"))["problems"]
    found = list(check(names, changelog, tag, "https://docs.example.org"))
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_a_release_needs_the_address_of_its_site_and_a_dry_run_does_not() -> None:
    check = runpy.run_path(str(ROOT / ".ci/check_release.py"))["problems"]
    assert "Documentation in [project.urls]" in next(check(FILES, DATED, "v0.2.0", None))
    assert not list(check(FILES, UNDATED, None, None))


@pytest.mark.parametrize(
    ("line", "without_site", "with_site"),
    [
        (
            "see [retry](docs/howto/retries.md#a)",
            "see retry",
            "see [retry](https://x.example/stable/howto/retries.html#a)",
        ),
        (
            "[an inbox](examples/inbox/README.md)",
            "an inbox",
            "[an inbox](https://x.example/stable/examples/inbox/index.html)",
        ),
        ("[a](SECURITY.md), [b](#b)", "a, [b](#b)", "[a](https://x.example/stable/SECURITY.html), [b](#b)"),
        ("![the page](docs/a.png)\n\nnext", "next", "![the page](https://x.example/stable/a.png)\n\nnext"),
        (
            '<picture>\n<img src="docs/a.webp">\n</picture>\n\nnext',
            "next",
            '<picture>\n<img src="https://x.example/stable/a.webp">\n</picture>\n\nnext',
        ),
        ("[x](https://example.org)", "[x](https://example.org)", "[x](https://example.org)"),
    ],
)
def test_links_of_the_readme_work_on_a_package_index(line: str, without_site: str, with_site: str) -> None:
    readme_of_index = runpy.run_path(str(ROOT / ".ci/readme.py"))["readme_of_index"]
    assert readme_of_index(line, None) == without_site
    assert readme_of_index(line, "https://x.example/stable/") == with_site


def test_a_package_has_the_readme_and_none_of_its_links_is_relative(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    assert "Description-Content-Type: text/markdown" in text
    assert "# qworker\n" in text
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)|(?:src|srcset)=\"(?!https?:)", text.partition("# qworker\n")[2]) == []


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.name)
def test_a_workflow_pins_each_action_by_its_digest(workflow: Path) -> None:
    used = re.findall(r"uses: *(.*)", workflow.read_text())
    assert used
    assert [one for one in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)] == []


def test_a_release_is_published_only_by_a_tag_and_after_what_a_dry_run_does() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    publish = jobs.pop("publish")
    assert publish["if"] == "github.event_name == 'push'"
    assert set(publish["needs"]) == jobs.keys()
    # Only the job that publishes gets an identity, and it runs nothing of this tree.
    assert publish["permissions"] == {"id-token": "write"}
    assert all("id-token" not in job["permissions"] and "if" not in job for job in jobs.values())
    assert not any("run" in step or "checkout" in step["uses"] for step in publish["steps"])
    assert any(step.get("run") == 'make release TAG="$TAG"' for step in jobs["build"]["steps"])


def test_a_release_is_installed_on_each_python_that_it_names() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert jobs["install"]["strategy"]["matrix"]["python"] == named


def test_the_build_backend_is_the_one_that_the_project_names() -> None:
    assert PROJECT["build-system"]["build-backend"] == build.__name__
