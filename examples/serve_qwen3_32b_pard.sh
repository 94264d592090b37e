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
# weights; PARSE's passes on FlashInfer are tested on a CPU up to the kernel itself
# (docs/gpus.md). Numbers below are computed from the models' shapes.
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
# --parse-question qwen3_thinking   Asks about thoughts while they are unfinished; also right for
#                              requests that switch thinking off.
# --parse-segment line         Thoughts and answers have lines; each ends a possible cut.
# --parse-draft-tokens 256     Long thoughts: fewer passes, each over more prefixes.
# --parse-max-prefixes 16      About 60 rows of question for each prefix: at most 960 a pass.
# --parse-draft-parallel-tokens 8        What the draft was trained with; its config.json names the mask token
#                              (pard_token), or the server does not start.
# --parse-threshold 0.7        A guess. Measure accuracy and acceptance with your own tasks.
# --attention-backend flashinfer   triton and fa3 are the others PARSE can use; with these the host
#                                 waits for no block of the draft (docs/gpus.md).
# --speculative-algorithm PARSE, --speculative-draft-model-path, --model-path, --port: as named.
set -eu

exec "${PYTHON:-python3}" -m sglang.launch_server \
  --model-path "${TARGET:?set TARGET to Qwen3-32B}" \
  --speculative-algorithm PARSE \
  --speculative-draft-model-path "${DRAFT:?set DRAFT to PARD-Qwen3-0.6B}" \
  --port "${PORT:-30000}" \
  --mem-fraction-static 0.88 \
  --context-length 32768 \
  --attention-backend flashinfer \
  --reasoning-parser qwen3 \
  --parse-question qwen3_thinking \
  --parse-segment line \
  --parse-draft-tokens 256 \
  --parse-max-prefixes 16 \
  --parse-draft-parallel-tokens 8 \
  --parse-threshold 0.7 \
  "$@"
