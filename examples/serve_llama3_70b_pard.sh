#!/bin/sh
# PARSE with Llama-3.3-70B-Instruct as target and AMD's PARD-Llama-3.2-1B as draft, which writes
# several tokens a forward.
#
#   TARGET=/models/Llama-3.3-70B-Instruct DRAFT=/models/PARD-Llama-3.2-1B \
#     examples/serve_llama3_70b_pard.sh
#
# TARGET and DRAFT are folders or Hugging Face names; PORT (30000) and PYTHON (python3) may be set.
# More flags for the server go behind the command and win over those here.
#
# NOT RUN YET. The flags are parsed and checked with these models' shapes by a test, without
# weights. Numbers below are computed from the models' shapes.
#
# Hardware: four GPUs of 80 GB (H100), or two of 141 GB (H200) with --tp-size 2.
# Memory:   weights 141 GB + 3 GB in bf16, 36 GB on each of four; KV 320 KiB a token for the target
#           and 32 KiB for the draft, a quarter of it on each. With the fraction below on 80 GB:
#           about 355,000 tokens of KV, which take 29 GB for the target and 3 GB for the draft on
#           each GPU; 12 GB are left.
#
# --tp-size 4                  Both models are spread over the four GPUs; it must divide the
#                              draft's 32 attention heads.
# --mem-fraction-static 0.85   What weights and both models' KV may take; the rest is for
#                              activations, logits and CUDA graphs.
# --context-length 32768       The same for both models. Both can do 131,072; raise it if you need
#                              to, each request then reserves a longer row of slot numbers.
# --attention-backend triton   With it PARSE's passes were measured as CUDA graphs; beside
#                              flashinfer and fa3 they are, too, but not measured yet (docs/gpus.md).
# --speculative-algorithm PARSE, --speculative-draft-model-path, --model-path, --port: as named.
#
# Drafts are as long as they pay, up to 128 tokens; --parse-draft-tokens would fix their length.
# Roofline, four H100, over plain decoding at 1, 8 and 16 requests, computed: 6.9x, 6.3x and 5.4x
# with drafts of 32, 16 and 16 where 0.92 of their tokens are accepted; stock EAGLE3 with
# 3 tokens a pass 2.7x, 2.4x and 2.1x. Take stock EAGLE3 where less is accepted and a head exists.
#
# Judges of this target, by docs/models.md: all. Here: likelihood.
# Numbers and code are the target's own choice; with --parse-verification token, every token.
set -eu

exec "${PYTHON:-python3}" -m sglang.launch_server \
  --model-path "${TARGET:?set TARGET to Llama-3.3-70B-Instruct}" \
  --speculative-algorithm PARSE \
  --speculative-draft-model-path "${DRAFT:?set DRAFT to PARD-Llama-3.2-1B}" \
  --port "${PORT:-30000}" \
  --tp-size 4 \
  --mem-fraction-static 0.85 \
  --context-length 32768 \
  --attention-backend triton \
  "$@"
