#!/bin/sh
# PARSE with Qwen3-235B-A22B-FP8 as target and Qwen3-30B-A3B as draft: 3 of 22 billion active
# weights, and answers nearer to the target's than those of Qwen3-1.7B (serve_qwen3_235b.sh).
#
#   TARGET=/models/Qwen3-235B-A22B-FP8 DRAFT=/models/Qwen3-30B-A3B \
#     examples/serve_qwen3_235b_30b.sh
#
# TARGET and DRAFT are folders or Hugging Face names; PORT (30000) and PYTHON (python3) may be set.
# More flags for the server go behind the command and win over those here.
#
# NOT RUN YET. The flags are parsed and checked with these models' shapes by a test, without
# weights. Numbers below are computed from the models' shapes.
#
# Hardware: four GPUs of 141 GB (H200).
# Memory:   weights 236 GB in FP8 + 61 GB in bf16, 74 GB on each of four; KV 188 KiB a token for the
#           target and 96 KiB for the draft, a quarter of it on each. With the fraction below on
#           141 GB: about 680,000 tokens of KV, which take 33 GB for the target and 17 GB for the
#           draft on each GPU; 17 GB are left.
#
# --tp-size 4                  Both models are spread over the four GPUs. Not 8: an expert's width of
#                              1,536 in eight parts is no multiple of its FP8 blocks of 128. Nor
#                              is one of the draft's, 768, in four parts: take the draft in bf16.
# --mem-fraction-static 0.88   What weights and both models' KV may take; the rest is for
#                              activations, logits and CUDA graphs.
# --context-length 32768       The same for both models; longer prompts need YaRN for both.
# --reasoning-parser qwen3     Thoughts apart from the answer in the OpenAI API; not PARSE's.
# --attention-backend triton   With it PARSE's passes were measured as CUDA graphs; beside
#                              flashinfer and fa3 they are, too, but not measured yet (docs/gpus.md).
# --speculative-algorithm PARSE, --speculative-draft-model-path, --model-path, --port: as named.
#
# Leave out --moe-a2a-backend: PARSE refuses it. --ep-size works without.
#
# Drafts are as long as they pay, up to 128 tokens; --parse-draft-tokens would fix their length.
# Roofline, four H200, over plain decoding at 1, 8 and 16 requests, computed: 1.3x, 1.4x and 1.6x
# with drafts of 4, 8 and 8 where 0.92 of their tokens are accepted; stock EAGLE3 with
# 3 tokens a pass 1.9x, 1.6x and 1.7x. Take stock EAGLE3, or
# serve_qwen3_235b.sh, unless 30B-A3B is accepted far more often.
#
# Judges of this target, by docs/models.md: all. Here: likelihood.
# Numbers and code are the target's own choice; with --parse-verification token, every token.
set -eu

exec "${PYTHON:-python3}" -m sglang.launch_server \
  --model-path "${TARGET:?set TARGET to Qwen3-235B-A22B-FP8}" \
  --speculative-algorithm PARSE \
  --speculative-draft-model-path "${DRAFT:?set DRAFT to Qwen3-30B-A3B}" \
  --port "${PORT:-30000}" \
  --tp-size 4 \
  --mem-fraction-static 0.88 \
  --context-length 32768 \
  --attention-backend triton \
  --reasoning-parser qwen3 \
  "$@"
