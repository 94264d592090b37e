#!/bin/sh
# PARSE with a model of DeepSeek-V3's class (V3, V3.1, R1) as target; the MTP layer of its own
# checkpoint drafts, beside the prompt and earlier answers. No other model is needed.
#
#   TARGET=/models/DeepSeek-V3-0324 examples/serve_deepseek_v3_mtp.sh
#
# TARGET is a folder or a Hugging Face name; start-up refuses a copy without the layer's weights.
# PORT (30000) and PYTHON (python3) may be set. More flags for the server go behind the command and
# win over those here.
#
# NOT RUN YET. The flags are parsed and checked with this target's shape by a test, without
# weights. Numbers below are computed from the models' shapes.
#
# Hardware: eight GPUs of 141 GB (H200).
# Memory:   weights 685 GB in FP8 with the MTP layer, 86 GB on each of eight; KV 68 KiB a token, and
#           1 KiB for the layer's, all of it on each GPU: latent KV is not split. With the fraction
#           below: about 530,000 tokens, which take 38 GB; 17 GB are left.
#
# --tp-size 8                  The target is spread over the eight GPUs.
# --mem-fraction-static 0.88   What weights and KV may take; the rest is for activations, logits and
#                              CUDA graphs.
# --context-length 32768       The model can do 163,840; raise it if you need to.
# --parse-mtp own              The layer: it proposes 3 tokens where no text drafts.
# --parse-reuse-answers 1000   Earlier answers of the same scope (`cache_salt`) draft, too.
# --attention-backend fa3      flashinfer and triton are others for latent attention.
# --speculative-algorithm PARSE, --model-path, --port: as named.
#
# Leave out --enable-dp-attention, --moe-a2a-backend and --pp-size: PARSE refuses them.
# Passes of few rows run as the target's own CUDA graphs of decode steps, longer ones in pieces.
# Roofline, eight H200, over plain decoding at 1, 8 and 16 requests, computed: 3.5x, 4.1x and 5.6x
# with texts of 16, 128 and 64 where 0.92 of their tokens are accepted; stock EAGLE, with the same
# layer and 3 tokens a pass 1.8x, 1.3x and 1.3x. In PARSE the layer alone has 1.8x, 1.2x and 1.3x.
# The start compares such passes with those in pieces and logs it: without them take stock EAGLE.
#
# Judges of this target, by docs/models.md: all. Here: likelihood.
set -eu

exec "${PYTHON:-python3}" -m sglang.launch_server \
  --model-path "${TARGET:?set TARGET to DeepSeek-V3, V3.1 or R1}" \
  --speculative-algorithm PARSE \
  --parse-mtp own \
  --port "${PORT:-30000}" \
  --tp-size 8 \
  --mem-fraction-static 0.88 \
  --context-length 32768 \
  --attention-backend fa3 \
  --parse-reuse-answers 1000 \
  "$@"
