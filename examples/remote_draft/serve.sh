#!/usr/bin/env bash
# Two servers with models of different vocabularies: the draft model behind an OpenAI API, and the target, which
# asks it for drafts. On two machines, start the first command on the one and set DRAFT_HOST to its address.
#
#   examples/remote_draft/serve.sh [TARGET [DRAFT [more flags of the target]]]
set -euo pipefail
TARGET=${1:-Qwen/Qwen3-8B}
DRAFT=${2:-HuggingFaceTB/SmolLM2-360M-Instruct}
DRAFT_HOST=${DRAFT_HOST:-127.0.0.1}
DRAFT_PORT=${DRAFT_PORT:-30001}
PORT=${PORT:-30000}

if [ "$DRAFT_HOST" = 127.0.0.1 ]; then
  python -m sglang.launch_server --model-path "$DRAFT" --host 127.0.0.1 --port "$DRAFT_PORT" \
    --stream-interval 4 ${DRAFT_FLAGS:-} &
  trap 'kill $!' EXIT
fi
python -m sglang.launch_server --model-path "$TARGET" --port "$PORT" --speculative-algorithm PARSE \
  --parse-draft-url "http://$DRAFT_HOST:$DRAFT_PORT" "${@:3}"
