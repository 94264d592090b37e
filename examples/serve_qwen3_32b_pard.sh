#!/bin/sh
# PARSE with Qwen3-32B as target and AMD's PARD-Qwen3-0.6B as draft, which writes several tokens a
# forward. Its makers measured it with thinking off.
#
#   TARGET=/models/Qwen3-32B DRAFT=/models/PARD-Qwen3-0.6B examples/serve_qwen3_32b_pard.sh
#
# TARGET and DRAFT are folders or Hugging Face names; PORT (30000) and PYTHON (python3) may be set.
# More flags for the server go behind the command and win over those here.
#
# NOT RUN YET. The flags are parsed and checked with these models' shapes by a test, without
# weights. Numbers below are computed from the models' shapes.
#
# Hardware: one GPU of 141 GB (H200), or two of 80 GB with --tp-size 2.
# Memory:   weights 66 GB + 1 GB in bf16; KV 256 KiB a token for the target and 112 KiB for the
#           draft. With the fraction below on 141 GB: about 150,000 tokens of KV, which take 39 GB
#           for the target and 17 GB for the draft; 17 GB are left.
#
# --mem-fraction-static 0.88   What weights and both models' KV may take; the rest is for
#                              activations, logits and CUDA graphs.
# --context-length 32768       The same for both models; longer prompts need YaRN for both.
# --reasoning-parser qwen3     Thoughts apart from the answer in the OpenAI API; not PARSE's.
# --attention-backend triton   With it PARSE's passes were measured as CUDA graphs; beside
#                              flashinfer and fa3 they are, too, but not measured yet (docs/gpus.md).
# --speculative-algorithm PARSE, --speculative-draft-model-path, --model-path, --port: as named.
#
# Drafts are as long as they pay, up to 128 tokens; --parse-draft-tokens would fix their length.
# Roofline, an H200, over plain decoding at 1, 8 and 16 requests, computed: 6.6x, 5.7x and 4.2x
# with drafts of 32, 16 and 8 where 0.92 of their tokens are accepted; stock EAGLE3 with
# 3 tokens a pass 2.6x, 2.3x and 2.1x. Take stock EAGLE3 where less is accepted and a head exists.
#
# Judges of this target, by docs/models.md: all. Here: likelihood.
# Numbers and code are the target's own choice; with --parse-verification token, every token.
set -eu

exec "${PYTHON:-python3}" -m sglang.launch_server \
  --model-path "${TARGET:?set TARGET to Qwen3-32B}" \
  --speculative-algorithm PARSE \
  --speculative-draft-model-path "${DRAFT:?set DRAFT to PARD-Qwen3-0.6B}" \
  --port "${PORT:-30000}" \
  --mem-fraction-static 0.88 \
  --context-length 32768 \
  --attention-backend triton \
  --reasoning-parser qwen3 \
  "$@"
