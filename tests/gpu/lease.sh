#!/usr/bin/env bash
# A short lease of a GPU without a network: calls of at most six minutes, on one machine.
#
#   KIT=kit OUT=out bash tests/gpu/lease.sh kernel   # split-KV attention: right, and in what time
#   KIT=kit OUT=out bash tests/gpu/lease.sh right    # exact answers, every forward a replay
#   KIT=kit OUT=out bash tests/gpu/lease.sh fast     # sglang-parse bench
#
# KIT: the parts and unpack.sh of pack.py, stub/, the wheel of this package, and jit.tar of an earlier lease.
# OUT: gets logs, results.json and jit.tar, also of what was ended in time. SITE: /tmp/site.
set -uo pipefail
part=${1:?kernel, right or fast}
kit=$(realpath "${KIT:?}") out=$(realpath "${OUT:?}") site=${SITE:-/tmp/site}
work=$(mktemp -d) # OUT takes few files and no deep folders

unpack() {
  bash "$kit/unpack.sh" "$kit" "$site" # its import check fails where the stubs are missing
  [ -e "$site/env.sh" ] || return
  [ ! -e "$kit/jit.tar" ] || tar -xf "$kit/jit.tar" -C "$site"
  # SGLang imports these on every GPU; nothing here calls them.
  cp -r "$kit"/stub/. "$site"
  : >"$site/sgl_kernel/flash_ops.py"
  sed -i 's/not is_cuda()/True/' "$site/sglang/srt/layers/dual_gemm.py"
  python3 -m pip install -q --no-index --no-deps --target "$site" "$kit"/sglang_parse-*.whl
  ln -sfn "$PWD/examples" "$site/examples" # the demo pair is no part of the wheel
  touch "$site/unpacked"
}

# limited SECONDS COMMAND...: SIGINT ends pytest with its servers; SIGTERM would leave them.
limited() { timeout -s INT -k 10 "$@"; }

tests() {
  limited "$1" python3 -m pytest -q -p no:cacheprovider --basetemp "$work/$4" "$2" -k "$3" 2>&1 | tee "$out/$4.log"
}

[ -e "$site/unpacked" ] || unpack || exit
. "$site/env.sh"
export TRITON_CACHE_DIR=$site/.jit/triton
export PYTHONSAFEPATH=1 PYTHONPATH=$site:tests PYTHONUNBUFFERED=1 # not the checkout's package, which lacks its patches

case $part in
kernel)
  # Prints BEST: the constants that sglang_parse/attention/split_kv.py should have here.
  limited 110 python3 tests/gpu/split_kv_cost.py --seconds 90 2>&1 | tee "$out/kernel.log"
  ;;
right)
  tests 130 tests/gpu/test_servers.py "token_mode and flashinfer and auto and not disable and not overlap" exact
  tests 150 tests/gpu/test_real_sizes.py "replay and triton" replay
  ;;
fast)
  memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)
  target=qwen3_14b
  [ "$memory" -lt 130000 ] || target=qwen3_32b
  limited 330 python3 -m sglang_parse.cli bench --target $target --draft qwen3_0_6b --block-tokens 4.9 \
    --attention-backend triton --servers plain,eagle3@3,parse@1,parse@every:32,parse-one@every:32,parse-head@every:32 \
    --runs 1 --output "$work" 2>&1 | tee "$out/fast.log"
  cp "$work/results.json" "$out"
  ;;
esac
tar -czf "$out/$part-logs.tgz" -C "$work" --exclude models .
tar -cf "$out/jit.tar" -C "$site" .jit
