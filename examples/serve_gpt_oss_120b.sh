#!/bin/sh
# PARSE with gpt-oss-120b as target and gpt-oss-20b as draft.
#
#   TARGET=/models/gpt-oss-120b DRAFT=/models/gpt-oss-20b examples/serve_gpt_oss_120b.sh
#
# TARGET and DRAFT are folders or Hugging Face names; PORT (30000) and PYTHON (python3) may be set.
# More flags for the server go behind the command and win over those here.
#
# The draft has 3.6 of the target's 5.1 billion active weights, so it can win little.
# serve_gpt_oss_120b_texts.sh is the one to start with.
#
# NOT RUN YET. The flags are parsed and checked with these models' shapes by a test, without
# weights. Numbers below are computed from the models' shapes.
#
# Hardware: one GPU of 141 GB (H200), or two of 80 GB with --tp-size 2.
# Memory:   weights 65 GB + 14 GB in MXFP4; KV 72 KiB a token for the target and 48 KiB for the
#           draft, in full layers and windows of 128 together. With the fraction below on 141 GB:
#           45 GB of KV; 17 GB are left.
#
# --mem-fraction-static 0.88   What weights and both models' KV may take; the rest is for
#                              activations, logits and CUDA graphs.
# --context-length 32768       The same for both models, which can do 131,072.
# --reasoning-parser gpt-oss   Thoughts apart from the answer in the OpenAI API; not PARSE's.
# --tool-call-parser gpt-oss   Tool calls apart from the answer; not PARSE's.
# --attention-backend triton   SGLang serves gpt-oss with triton, fa3, trtllm_mha and some others.
# --speculative-algorithm PARSE, --speculative-draft-model-path, --model-path, --port: as named.
#
# Roofline, an H200, over plain decoding at 1, 8 and 16 requests, computed: 1.0x, 0.9x and 1.1x
# with drafts of 4, 4 and 8 where 0.92 of their tokens are accepted; stock EAGLE3 with
# 3 tokens a pass 1.5x, 1.1x and 1.1x. Take serve_gpt_oss_120b_texts.sh, or stock EAGLE3 with a
# head: only measured acceptance far above this one speaks for this draft (sglang-parse try).
#
# Judges of this target, by docs/models.md: likelihood, none. Here: likelihood.
set -eu

exec "${PYTHON:-python3}" -m sglang.launch_server \
  --model-path "${TARGET:?set TARGET to gpt-oss-120b}" \
  --speculative-algorithm PARSE \
  --speculative-draft-model-path "${DRAFT:?set DRAFT to gpt-oss-20b}" \
  --port "${PORT:-30000}" \
  --mem-fraction-static 0.88 \
  --context-length 32768 \
  --attention-backend triton \
  --reasoning-parser gpt-oss \
  --tool-call-parser gpt-oss \
  "$@"
