#!/bin/sh
# PARSE with Gemma-3-27B-it as target and Gemma-3-1B-it as draft.
#
#   TARGET=/models/gemma-3-27b-it DRAFT=/models/gemma-3-1b-it examples/serve_gemma3_27b.sh
#
# TARGET and DRAFT are folders or Hugging Face names; PORT (30000) and PYTHON (python3) may be set.
# More flags for the server go behind the command and win over those here.
#
# NOT RUN YET. The flags are parsed and checked with these models' shapes by a test, without
# weights. Numbers below are computed from the models' shapes.
#
# Hardware: one GPU of 141 GB (H200), or two of 80 GB with --tp-size 2.
# Memory:   weights 55 GB + 2 GB in bf16; KV 496 KiB a token for the target and 26 KiB for the
#           draft, windows too: SGLang has one pool for Gemma 3. With the fraction below on 141 GB:
#           about 125,000 tokens of KV, which take 67 GB; 17 GB are left.
#
# --mem-fraction-static 0.88   What weights and both models' KV may take; the rest is for
#                              activations, logits and CUDA graphs.
# --context-length 32768       As many as the draft model has.
# --attention-backend triton   fa3 and flashinfer are others for windows.
# --speculative-algorithm PARSE, --speculative-draft-model-path, --model-path, --port: as named.
#
# Roofline, an H200, over plain decoding at 1, 8 and 16 requests, computed: 3.6x, 3.4x and 3.3x
# with drafts of 8, 8 and 8 where 0.92 of their tokens are accepted; stock EAGLE3 with
# 3 tokens a pass 2.6x, 2.3x and 2.0x. Take stock EAGLE3 where less is accepted and a head exists.
#
# Judges of this target, by docs/models.md: question, likelihood, none. Here: likelihood.
set -eu

exec "${PYTHON:-python3}" -m sglang.launch_server \
  --model-path "${TARGET:?set TARGET to gemma-3-27b-it}" \
  --speculative-algorithm PARSE \
  --speculative-draft-model-path "${DRAFT:?set DRAFT to gemma-3-1b-it}" \
  --port "${PORT:-30000}" \
  --mem-fraction-static 0.88 \
  --context-length 32768 \
  --attention-backend triton \
  "$@"
