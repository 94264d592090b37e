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
# weights; PARSE's passes on FlashInfer are tested on a CPU up to the kernel itself
# (docs/gpus.md). Numbers below are computed from the models' shapes.
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
# --parse-question llama3      A question with verdicts that are single tokens for Llama 3.
# --parse-segment line         Lines are where these models end a step.
# --parse-draft-tokens 128     A 1B draft goes wrong early in hard answers: short rounds.
# --parse-max-prefixes 16      About 60 rows of question for each prefix: at most 960 a pass.
# --parse-draft-parallel-tokens 8        What the draft was trained with; its config.json names the mask token
#                              (pard_token), or the server does not start.
# --parse-threshold 0.7        A guess. Measure accuracy and acceptance with your own tasks.
# --attention-backend flashinfer   triton and fa3 are the others PARSE can use; with these the host
#                                 waits for no block of the draft (docs/gpus.md).
# --speculative-algorithm PARSE, --speculative-draft-model-path, --model-path, --port: as named.
set -eu

exec "${PYTHON:-python3}" -m sglang.launch_server \
  --model-path "${TARGET:?set TARGET to Llama-3.3-70B-Instruct}" \
  --speculative-algorithm PARSE \
  --speculative-draft-model-path "${DRAFT:?set DRAFT to PARD-Llama-3.2-1B}" \
  --port "${PORT:-30000}" \
  --tp-size 4 \
  --mem-fraction-static 0.85 \
  --context-length 32768 \
  --attention-backend flashinfer \
  --parse-question llama3 \
  --parse-segment line \
  --parse-draft-tokens 128 \
  --parse-max-prefixes 16 \
  --parse-draft-parallel-tokens 8 \
  --parse-threshold 0.7 \
  "$@"
