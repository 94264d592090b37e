#!/bin/sh
# Two PARSE servers behind SGLang's router: a session goes back to the server that has its KV.
# Arguments are flags for both servers. Ctrl-C ends all three.
#
#   PORT     the router's port (default 30000); the servers take PORT + 100 and PORT + 200
#   PYTHON   the Python that has SGLang, sglang-parse and sglang-router (default python3)
set -eu

PORT=${PORT:-30000}
PYTHON=${PYTHON:-python3}
FIRST="http://127.0.0.1:$((PORT + 100))"
SECOND="http://127.0.0.1:$((PORT + 200))"

started=
trap 'trap - EXIT; kill $started 2>/dev/null; wait' EXIT
trap 'exit 130' INT TERM

for url in "$FIRST" "$SECOND"; do
  "$PYTHON" -m sglang.launch_server --host 127.0.0.1 --port "${url##*:}" \
    --speculative-algorithm PARSE --enable-cache-report "$@" &
  started="$started $!"
done

"$PYTHON" -m sglang_router.launch_router --host 127.0.0.1 --port "$PORT" \
  --worker-urls "$FIRST" "$SECOND" --policy cache_aware \
  --prometheus-host 127.0.0.1 --prometheus-port "$((PORT + 10))" &
started="$started $!"
wait $!
