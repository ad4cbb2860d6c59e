#!/bin/sh
# Mooncake's wheel needs three libraries of the system. Takes those that are there; else Debian's, where apt may be used.
# Usage: install-mooncake-libs.sh PYTHON, the Python of the environment that has the wheel.
set -eu
python=${1:?usage: install-mooncake-libs.sh PYTHON}
packages='libibverbs1 libnuma1 libcurl4'

works() { "$python" -c 'import mooncake.store' 2>&1; }

said=$(works) && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing the libraries that Mooncake needs ($packages) ..."
    export DEBIAN_FRONTEND=noninteractive
    log=$(mktemp)
    # shellcheck disable=SC2086 # several words
    { apt-get -q update && apt-get -q install -y --no-install-recommends $packages; } >"$log" 2>&1 || tail -n 5 "$log" >&2
    rm "$log"
    said=$(works) && exit 0
fi

{
    echo "Mooncake cannot be used: $(echo "$said" | tail -n 1)"
    echo "Its tests need the libraries libibverbs, libnuma and libcurl (Debian: apt-get install $packages)."
    echo 'To leave the tests out: make test PYTEST_ARGS="--ignore tests/mooncake"'
} >&2
exit 1
