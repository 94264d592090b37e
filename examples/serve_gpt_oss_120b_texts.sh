#!/bin/sh
# PARSE with gpt-oss-120b as target and texts as drafts: what comes with a request (OpenAI's
# `prediction`), and earlier answers. There is no draft model.
#
#   TARGET=/models/gpt-oss-120b examples/serve_gpt_oss_120b_texts.sh
#
# TARGET is a folder or a Hugging Face name; PORT (30000) and PYTHON (python3) may be set.
# More flags for the server go behind the command and win over those here.
#
# NOT RUN YET. The flags are parsed and checked with this target's shape by a test, without
# weights. Numbers below are computed from the models' shapes.
#
# Hardware: one GPU of 80 GB (H100); more KV on one of 141 GB (H200).
# Memory:   weights 65 GB in MXFP4; KV 72 KiB a token in full layers and windows of 128 together.
#           With the fraction below on 80 GB: 7 GB of KV; 8 GB are left.
#
# --mem-fraction-static 0.9    What weights and KV may take; the rest is for activations, logits and
#                              CUDA graphs.
# --context-length 32768       The model can do 131,072; raise it if you need to.
# --reasoning-parser gpt-oss   Thoughts apart from the answer in the OpenAI API; not PARSE's.
# --tool-call-parser gpt-oss   Tool calls apart from the answer; not PARSE's.
# --parse-reuse-answers 1000   Earlier answers of the same scope (`cache_salt`) draft, too.
# --parse-verification token   A text never changes the answer, whatever it says.
# --attention-backend triton   SGLang serves gpt-oss with triton, fa3, trtllm_mha and some others.
# --speculative-algorithm PARSE, --model-path, --port: as named.
#
# Roofline, an H100, over plain decoding at 1, 8 and 16 requests, computed: 2.6x, 3.7x and 5.4x
# with texts of 8, 64 and 64 where 0.92 of their tokens are accepted; stock EAGLE3 with
# 3 tokens a pass 1.4x, 1.1x and 1.2x. Where no text fits, answers are decoded plainly.
#
# Judges of this target, by docs/models.md: likelihood, none. Here: none.
set -eu

exec "${PYTHON:-python3}" -m sglang.launch_server \
  --model-path "${TARGET:?set TARGET to gpt-oss-120b}" \
  --speculative-algorithm PARSE \
  --port "${PORT:-30000}" \
  --mem-fraction-static 0.9 \
  --context-length 32768 \
  --attention-backend triton \
  --reasoning-parser gpt-oss \
  --tool-call-parser gpt-oss \
  --parse-reuse-answers 1000 \
  --parse-verification token \
  "$@"
