#!/usr/bin/env bash
# Build the site of this tree into site/latest, and that of the newest tag v* into site/stable. Without a tag, `stable` does not
# exist, and site/index.html leads to `latest`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export DOCS_VERSIONS=yes NO_MKDOCS_2_WARNING=1
mkdocs=$PWD/.venv/bin/mkdocs out=$PWD/site

rm -rf "$out"
"$mkdocs" build --strict --quiet --site-dir "$out/latest"
versions='{"version": "latest", "title": "latest", "aliases": []}'
first=latest

tag=$(git tag --list 'v*' --sort=-version:refname | head -1)
if [ -n "$tag" ]; then
    tree=$(mktemp -d)
    trap 'git worktree remove --force "$tree"' EXIT
    git worktree add --quiet --detach "$tree" "$tag"
    (cd "$tree" && "$mkdocs" build --strict --quiet --site-dir "$out/stable")
    versions="{\"version\": \"stable\", \"title\": \"${tag#v} (stable)\", \"aliases\": []}, $versions"
    first=stable
fi
printf '[%s]\n' "$versions" >"$out/versions.json"
printf '<!doctype html><meta http-equiv="refresh" content="0; url=%s/index.html"><a href="%s/index.html">qworker</a>\n' "$first" "$first" >"$out/index.html"
