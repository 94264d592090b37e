#!/bin/sh
# PARSE with GLM-4.7-Flash as target; the MTP layer of its own checkpoint drafts, beside the prompt
# and earlier answers. No other model is needed.
#
#   TARGET=/models/GLM-4.7-Flash examples/serve_glm_4_7_flash.sh
#
# TARGET is a folder or a Hugging Face name; start-up refuses a copy without the layer's weights.
# PORT (30000) and PYTHON (python3) may be set. More flags for the server go behind the command and
# win over those here.
#
# NOT RUN YET. The flags are parsed and checked with this target's shape by a test, without
# weights. Numbers below are computed from the models' shapes.
#
# Hardware: one GPU of 80 GB.
# Memory:   weights 60 GB in bf16; KV 52 KiB a token, and 1 KiB for the MTP layer's.
#
# --mem-fraction-static 0.88   What weights and KV may take; the rest is for activations, logits and
#                              CUDA graphs.
# --context-length 32768       The model can do 202,752; raise it if you need to.
# --parse-mtp own              The layer: it proposes 3 tokens where no text drafts.
# --parse-reuse-answers 1000   Earlier answers of the same scope (`cache_salt`) draft, too.
# --attention-backend triton   flashinfer and fa3 are others for latent attention.
# --speculative-algorithm PARSE, --model-path, --port: as named.
#
# Passes of few rows run as the target's own CUDA graphs of decode steps, longer ones in pieces.
# Roofline, an H100, over plain decoding at 1, 8 and 16 requests, computed: 2.5x, 5.8x and 8.1x
# with texts of 16, 64 and 64 where 0.92 of their tokens are accepted; stock EAGLE, with the same
# layer and 3 tokens a pass 1.4x, 1.3x and 1.6x. In PARSE the layer alone has 1.4x, 1.3x and 1.6x.
# The start compares such passes with those in pieces and logs it: without them take stock EAGLE.
#
# Judges of this target, by docs/models.md: all. Here: likelihood.
set -eu

exec "${PYTHON:-python3}" -m sglang.launch_server \
  --model-path "${TARGET:?set TARGET to GLM-4.7-Flash}" \
  --speculative-algorithm PARSE \
  --parse-mtp own \
  --port "${PORT:-30000}" \
  --mem-fraction-static 0.88 \
  --context-length 32768 \
  --attention-backend triton \
  --parse-reuse-answers 1000 \
  "$@"
