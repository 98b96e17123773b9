#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What runs on a bare GPU machine, in the root of a checkout of vllm-pd, with the kit in the folder KIT
# (and KIT2).
#
#     bash KIT/device.sh CHAPTER...
#
#     first     what is there, do the carried kernels work, transfers (about 90 s)
#     smoke     one stock engine answers; finds the arguments with which engines start here (40 s, or 100)
#     checks    gpu_check with all its parts (LIMIT, default 330 s)
#     speed     a model of real shape with dummy weights: pauses with and without disaggregation (LIMIT, default 300 s)
#     nixl      the same beside upstream's NixlConnector
#
# Each chapter ends by itself within its LIMIT, and leaves its figures in OUT (default: build/gpu). A later chapter goes on
# where an earlier one, in an earlier call, has ended: DEST (default: /tmp/kit) keeps what was unpacked.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
DEST=${DEST:-/tmp/kit} OUT=${OUT:-build/gpu} GPU_LOGS=$PWD/build/gpu_logs
mkdir -p "$OUT" "$GPU_LOGS" "$DEST"
began=$SECONDS
say() { printf '== %4d s  %s\n' $((SECONDS - began)) "$*"; }
eval "$(python3 "$here/unpack.py" "$here" "$DEST")" || exit 1
export VLLM_CACHE_ROOT=$DEST/cache TRITON_CACHE_DIR=$DEST/cache/triton TORCHINDUCTOR_CACHE_DIR=$DEST/cache/inductor
export CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")")}
say "unpacked"

model() { # model SHAPE [--bare]: a folder with a model of that shape, made once
    [ -f "$DEST/models/$1/config.json" ] || python3 "$here/make_model.py" "$DEST/models/$1" --tokenizer "$here/tokenizer" \
        --shape "$@" || exit 1
    echo "$DEST/models/$1"
}
engine_arguments() { cat "$DEST/engine_args" 2>/dev/null; } # found by `smoke`
keep() { tar -cJf "$OUT/logs.tar.xz" -C "$(dirname "$GPU_LOGS")" "$(basename "$GPU_LOGS")"; }

first() {
    timeout 100 python3 "$here/preflight.py" 2>&1 | tee "$GPU_LOGS/preflight.log"
    say "preflight"
    timeout 60 python3 "$here/transfer_rate.py" --json "$OUT/transfer_rate.json" 2>&1 | tee "$GPU_LOGS/transfer_rate.log"
    say "transfer rate"
    timeout 130 python3 scripts/lab/gpu_check.py --part bits --part order --budget-s 120 --out "$GPU_LOGS/bits"
    cp "$GPU_LOGS/bits/gpu_check.json" "$OUT/bits_order.json"
    say "bits and order"
}

answers() { # answers SECONDS ARGUMENT...: whether a stock engine starts with these arguments and answers
    local limit=$1 server number=0 path=$GPU_LOGS/smoke-$#.log
    shift
    python3 -m vllm.entrypoints.cli.main serve "$(model small)" --port 8123 --dtype float16 --max-model-len 2048 \
        --gpu-memory-utilization 0.4 --max-num-seqs 16 --enforce-eager "$@" >"$path" 2>&1 &
    server=$!
    while [ $number -lt "$limit" ] && kill -0 $server 2>/dev/null; do
        if curl -sf -m 20 localhost:8123/v1/completions -H 'Content-Type: application/json' \
            -d '{"model": "'"$DEST"'/models/small", "prompt": [1000, 2000, 3000], "max_tokens": 8, "temperature": 0}'; then
            kill $server && wait $server 2>/dev/null
            return 0
        fi
        sleep 1
        number=$((number + 1))
    done
    kill $server 2>/dev/null && wait $server 2>/dev/null
    tail -25 "$path"
    return 1
}

smoke() {
    local arguments
    for arguments in "" "--attention-backend TRITON_ATTN" '--attention-backend TRITON_ATTN --compilation-config={"custom_ops":["none"]}'; do
        say "a stock engine with: ${arguments:-its defaults}"
        # shellcheck disable=SC2086
        if answers 60 $arguments; then
            echo "$arguments" >"$DEST/engine_args"
            say "works"
            return 0
        fi
    done
    return 1
}

checks() {
    [ -f "$DEST/engine_args" ] || { say "no engine has started: see smoke"; return 1; }
    local limit=${LIMIT:-330} extra=() argument
    for argument in $(engine_arguments); do extra+=("--engine-arg=$argument"); done
    timeout $((limit + 20)) python3 scripts/lab/gpu_check.py --model "$(model small)" --budget-s "$limit" --prompts "${PROMPTS:-50}" \
        --out "$GPU_LOGS/checks" ${extra[@]+"${extra[@]}"} ${PARTS:-}
    cp "$GPU_LOGS/checks/gpu_check.json" "$OUT/gpu_check.json"
    say "checks"
}

together() {
    mkdir -p "$VLLM_CACHE_ROOT" && cp -r "$here/modelinfos" "$VLLM_CACHE_ROOT/"
    model small >/dev/null &
    python3 -X importtime -c "import vllm.v1.engine.core, vllm.v1.worker.gpu_worker" >"$GPU_LOGS/imports.log" 2>&1 &
    sleep 3
    (while sleep 15; do cp "$GPU_LOGS/together/gpu_check.json" "$OUT/" && keep; done) 2>/dev/null &
    local limit=${LIMIT:-180} copies=$!
    timeout $((limit + 12)) python3 scripts/lab/gpu_check.py --model "$DEST/models/small" --budget-s "$limit" --at-once \
        --part b1 --part runner-v2 --part death --prompts 50 --out "$GPU_LOGS/together"
    kill $copies
    cp "$GPU_LOGS/together/gpu_check.json" "$OUT/gpu_check.json"
    say "together"
}

bench() { # bench NAME ARM...
    [ -f "$DEST/engine_args" ] || { say "no engine has started: see smoke"; return 1; }
    local name=$1 arms=() arm
    shift
    for arm in "$@"; do arms+=(--arm "$arm"); done
    # shellcheck disable=SC2046
    timeout "${LIMIT:-300}" python3 -m vllm_pd.cli bench serve "$(model "${SHAPE:-8b}" --bare)" "${arms[@]}" --rounds 1 \
        --duration-s "${SECONDS_EACH:-15}" --stream 8 --long-tokens 6000 --long-every-s 2 --answer-tokens 200 --warm-up 1 \
        --timeout-s 120 --log "$GPU_LOGS/${name}_engines.log" --picture "$OUT/$name.png" --output "$OUT/$name.json" -- --dtype bfloat16 --load-format dummy --max-model-len 8192 \
        --max-num-seqs 32 --kv-cache-memory-bytes 8589934592 --gpu-memory-utilization 0.4 $(engine_arguments) \
        >"$GPU_LOGS/$name.log" 2>&1
    tail -40 "$GPU_LOGS/$name.log"
    say "$name"
}
speed() { bench speed pd single mixed-rr alone; }
nixl() { bench nixl pd-first nixl; }

for chapter in "$@"; do
    "$chapter" || say "$chapter failed"
    keep
done
