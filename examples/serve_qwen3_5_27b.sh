#!/bin/sh
# PARSE with Qwen3.5-27B as target; Qwen3.5-0.8B drafts on another server, and the MTP layer of the
# target's own checkpoint. Hybrid models are no draft models in the target's own server.
#
#   TARGET=/models/Qwen3.5-27B DRAFT_URL=http://10.0.0.2:30001 examples/serve_qwen3_5_27b.sh
#
# TARGET is a folder or a Hugging Face name; start-up refuses a copy without the layer's weights.
# DRAFT_URL is the address of a server with the draft model:
#
#   python3 -m sglang.launch_server --model-path Qwen/Qwen3.5-0.8B --host 10.0.0.2 --port 30001 \
#     --stream-interval 4
#
# PORT (30000) and PYTHON (python3) may be set. More flags for the server go behind the command and
# win over those here.
#
# NOT RUN YET. The flags are parsed and checked with this target's shape by a test, without
# weights. Numbers below are computed from the models' shapes.
#
# Hardware: one GPU of 141 GB (H200), or two of 80 GB with --tp-size 2; the draft server fits any
#           GPU of 8 GB.
# Memory:   weights 56 GB in bf16; KV 64 KiB a token in the 16 layers with full attention, and 4 KiB
#           for the MTP layer's; the state of the 48 others, 147 MiB for each running request, as
#           much again for its copy, and for each that the prefix cache keeps.
#
# --mem-fraction-static 0.85   What weights, KV and states may take; the rest is for activations,
#                              logits and CUDA graphs.
# --context-length 32768       The model can do 262,144; raise it if you need to.
# --max-running-requests 32    Each has a state of its own.
# --reasoning-parser qwen3     Thoughts apart from the answer in the OpenAI API; not PARSE's.
# --parse-draft-url            The server that drafts.
# --parse-mtp own              The layer: it proposes 3 tokens where nothing else drafts.
# --attention-backend triton   For the layers with full attention.
# --speculative-algorithm PARSE, --model-path, --port: as named.
#
# Passes of hybrids run in pieces; where a draft does not pay PARSE decodes plainly.
# Roofline, an H200, over plain decoding at 1, 8 and 16 requests, computed: 6.8x, 6.2x and 4.9x
# with texts of 128, 32 and 16 where 0.92 of their tokens are accepted, if they are in time; stock
# EAGLE, with the same layer and 3 tokens a pass 2.4x, 2.1x and 1.9x. In PARSE the layer alone has
# 1.5x, 1.4x and 1.4x. For new text, where nothing else drafts, take stock EAGLE.
#
# Judges of this target, by docs/models.md: head, likelihood, none. Here: likelihood.
set -eu

exec "${PYTHON:-python3}" -m sglang.launch_server \
  --model-path "${TARGET:?set TARGET to Qwen3.5-27B}" \
  --speculative-algorithm PARSE \
  --parse-draft-url "${DRAFT_URL:?set DRAFT_URL to the address of a server with Qwen3.5-0.8B}" \
  --parse-mtp own \
  --port "${PORT:-30000}" \
  --mem-fraction-static 0.85 \
  --context-length 32768 \
  --max-running-requests 32 \
  --attention-backend triton \
  --reasoning-parser qwen3 \
  "$@"
