#!/bin/sh
# PARSE with Llama-3.3-70B-Instruct, Llama-3.2-1B-Instruct as draft, and an EAGLE-3 head that
# drafts where neither the prompt nor the draft model does.
#
#   TARGET=/models/Llama-3.3-70B-Instruct DRAFT=/models/Llama-3.2-1B-Instruct \
#     HEAD=/models/sglang-EAGLE3-LLaMA3.3-Instruct-70B examples/serve_llama3_70b_eagle3.sh
#
# HEAD is an EAGLE-3 head for this target, such as lmsys/sglang-EAGLE3-LLaMA3.3-Instruct-70B.
# All else, hardware too, is as in serve_llama3_70b.sh, which this script runs.
#
# NOT RUN YET, as serve_llama3_70b.sh.
# By the roofline, which the other header has, the draft model is ahead where 0.92 of its tokens are
# accepted; where it is not, the head has what stock EAGLE3 has, 2.7x, 2.4x and 2.1x.
# Without a draft model use stock EAGLE3, unless answers copy.
#
# Memory:   the head's weights, about 3 GB in bf16, spread over the GPUs; its KV, 4 KiB a token.
#
# --parse-eagle3-path          The head: it proposes 3 tokens where no other source drafts.
# SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN   The head has 2,048 positions, fewer than the context.
#                              Behind them it proposes worse; the text is the same.
set -eu

export SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1
exec "$(dirname "$0")/serve_llama3_70b.sh" \
  --parse-eagle3-path "${HEAD:?set HEAD to an EAGLE-3 head for Llama-3.3-70B-Instruct}" \
  "$@"
