#!/bin/sh
# PARSE with Gemma-3-27B-it as target; Gemma-3-1B-it drafts on another server.
#
#   TARGET=/models/gemma-3-27b-it DRAFT_URL=http://10.0.0.2:30001 examples/serve_gemma3_27b.sh
#
# TARGET is a folder or a Hugging Face name, DRAFT_URL the address of a server with the draft model:
#
#   python3 -m sglang.launch_server --model-path google/gemma-3-1b-it --host 10.0.0.2 --port 30001 \
#     --stream-interval 4
#
# Why not in this server: the 1B has 262,144 rows in its vocabulary and the 27B 262,208, and PARSE
# refuses a draft model with another number of rows.
# PORT (30000) and PYTHON (python3) may be set. More flags for the server go behind the command and
# win over those here.
#
# NOT RUN YET. The flags are parsed and checked with this target's shape by a test, without
# weights. Numbers below are computed from the models' shapes.
#
# Hardware: one GPU of 141 GB (H200), or two of 80 GB with --tp-size 2; the draft server fits any
#           GPU of 8 GB.
# Memory:   weights 55 GB in bf16; KV 496 KiB a token, windows too: SGLang has one pool for Gemma 3.
#           With the fraction below on 141 GB: about 135,000 tokens of KV, which take 69 GB; 17 GB
#           are left.
#
# --mem-fraction-static 0.88   What weights and KV may take; the rest is for activations, logits and
#                              CUDA graphs.
# --context-length 32768       What the draft model has, too.
# --parse-draft-url            The server that drafts.
# --parse-segment line         Lines are where a draft is verified and may be cut.
# --parse-draft-tokens 128     A 1B draft goes wrong early in hard answers: short rounds.
# --attention-backend triton   fa3 and flashinfer are others for windows.
# --speculative-algorithm PARSE, --model-path, --port: as named.
#
# The judge is the default one, the likelihood: questions are refused with sliding windows.
set -eu

exec "${PYTHON:-python3}" -m sglang.launch_server \
  --model-path "${TARGET:?set TARGET to gemma-3-27b-it}" \
  --speculative-algorithm PARSE \
  --parse-draft-url "${DRAFT_URL:?set DRAFT_URL to the address of a server with gemma-3-1b-it}" \
  --port "${PORT:-30000}" \
  --mem-fraction-static 0.88 \
  --context-length 32768 \
  --attention-backend triton \
  --parse-segment line \
  --parse-draft-tokens 128 \
  "$@"
