#!/usr/bin/env bash
# Make .venv, or bring it up to date with pyproject.toml, and install qworker into it (editable).
#
#   .ci/venv.sh                     the package alone: all that `make demo` needs
#   .ci/venv.sh test check          also the extras and these dependency groups of pyproject.toml
#   .ci/venv.sh --no-spark test     without the extra `spark`, which is 400 MB
#   .ci/venv.sh --lowest test       the lowest versions that pyproject.toml allows, and the newest of what these depend on
#   .ci/venv.sh --with=REQ test     with this requirement too, such as pyspark==4.1.*
#   .ci/venv.sh --wheel             what a user has: a wheel of this tree, built by each call, and no extras
#   .ci/venv.sh --wheel=FILE        the same with this wheel
#
# Needs nothing but a python3 of at least 3.11 that can make virtual environments: $PYTHON names another one, $VENV another folder.
# What is installed for which pyproject.toml is kept in .venv/.installed, so that a second call costs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export PATH
venv=${VENV:-.venv}
stamp=$venv/.installed
spark=yes lowest="" wheel="" file="" with="" groups=()
for word in "$@"; do
    case $word in
        --no-spark) spark="" ;;
        --lowest) lowest=yes ;;
        --wheel) wheel=yes ;;
        --wheel=*) wheel=yes file=${word#--wheel=} ;;
        --with=*) with=${word#--with=} ;;
        *) groups+=("$word") ;;
    esac
done

say() { printf 'venv: %s\n' "$*"; }

die() {
    printf 'venv: %s\n' "$*" >&2
    exit 1
}

fits() { # fits PYTHON MODULE...: is it new enough, and does it have the modules?
    local python=$1
    shift
    "$python" - "$@" >/dev/null 2>&1 <<'PYTHON'
import importlib.util
import sys

sys.exit(sys.version_info < (3, 11) or any(importlib.util.find_spec(name) is None for name in sys.argv[1:]))
PYTHON
}

make_venv() {
    local python old_enough="" candidates=(python3 python3.14 python3.13 python3.12 python3.11 python)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for python in "${candidates[@]}"; do
        if fits "$python" venv ensurepip; then
            say "making $venv with $("$python" -V) ..."
            "$python" -m venv --clear "$venv"
            return
        fi
        fits "$python" && old_enough=${old_enough:-$python}
    done
    [ -n "$old_enough" ] || die "no Python of at least 3.11 found: install one, or name it: PYTHON=/path/to/python3 make ..."
    if fits "$old_enough" virtualenv; then
        say "making $venv with virtualenv ..."
        "$old_enough" -m virtualenv --quiet --clear "$venv"
    elif command -v virtualenv >/dev/null; then
        say "making $venv with virtualenv ..."
        virtualenv --quiet --clear --python "$old_enough" "$venv"
    else
        die "$old_enough cannot make virtual environments: install Debian's python3-venv, or virtualenv, and run this again"
    fi
}

# Everything that a set of groups means, one requirement a line: the package with its extras, then the groups.
requirements() {
    SPARK=$spark LOWEST=$lowest "$venv/bin/python" - "$@" <<'PYTHON'
import os
import re
import sys
import tomllib
from pathlib import Path

file = tomllib.loads(Path("pyproject.toml").read_text())
project, groups = file["project"], file["dependency-groups"]
extras = {name: needs for name, needs in project["optional-dependencies"].items() if name != "all"}
if not os.environ["SPARK"]:
    del extras["spark"]


def group(name):
    for entry in groups[name]:
        if isinstance(entry, str):
            yield entry
        else:
            yield from group(entry["include-group"])


wanted = sys.argv[1:]
unknown = [name for name in wanted if name not in groups]
if unknown:
    sys.exit(f"venv: no dependency group {unknown[0]!r} in pyproject.toml; there are: {', '.join(sorted(groups))}")
# The package alone for `make demo`, and with every extra for what checks and tests it. Docs need neither.
complete = bool({"test", "check"} & set(wanted))
print("-e")
print(f".[{','.join(extras)}]" if complete else ".")
for name in wanted:
    print("\n".join(group(name)))
if os.environ["LOWEST"]:
    for need in [*project["dependencies"], *(need for needs in extras.values() for need in needs)]:
        name, lowest = re.match(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\w.]+)", need).groups()
        print(f"{name}=={lowest}")
PYTHON
}

install() { "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input "$@"; }

"$venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || make_venv

if [ -n "$wheel" ]; then
    say "installing ${file:-the wheel of this tree} into $venv ..."
    if [ -z "$file" ]; then
        folder=$(mktemp -d)
        trap 'rm -rf "$folder"' EXIT
        "$venv/bin/python" -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir "$folder" .
        file=$(echo "$folder"/*.whl)
    fi
    "$venv/bin/python" -m pip uninstall -qq --disable-pip-version-check -y qworker-tasks 2>/dev/null
    install "$file"
    exit 0
fi

# What decides whether an installation is current: the project file, the version, the interpreter, what was asked for, and where this
# tree lies.
state=$({ cat pyproject.toml; grep ^__version__ qworker/__init__.py; "$venv/bin/python" -c 'import sys; print(sys.version)'; echo "$spark$lowest$with"; pwd; } | cksum)

missing=()
for group in package "${groups[@]}"; do
    grep -qxF "$group $state" "$stamp" 2>/dev/null || missing+=("$group")
done
[ ${#missing[@]} -gt 0 ] || exit 0

say "installing ${missing[*]} into $venv ..."
requested=$(requirements "${groups[@]}")
mapfile -t arguments <<<"$requested"
[ -z "$with" ] || arguments+=("$with")
# The distribution had the package's name once. Beside the new one it would bring each entry point a second time.
if "$venv/bin/python" -c 'from importlib.metadata import version; version("qworker")' 2>/dev/null; then
    "$venv/bin/python" -m pip uninstall -qq --disable-pip-version-check -y qworker
fi
install "${arguments[@]}"

touch "$stamp"
kept=$(grep -F " $state" "$stamp" || true)
{ [ -z "$kept" ] || printf '%s\n' "$kept"; printf "%s $state\n" "${missing[@]}"; } | sort -u >"$stamp.new"
mv "$stamp.new" "$stamp"
say "ready"
