#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What runs on a bare GPU machine, in the root of a checkout of vllm-pd, with the kit in the folder KIT:
#
#     bash KIT/device.sh [CHAPTER...]         default: first together speed
#
#     first     do the carried kernels and NIXL work, the transfer rate, gpu_check's bits, order, rates and store-copies:
#               200 s on an H200
#     warm      the small model's weights, and vLLM's note of its class; the chapters below do it first, once
#     together  gpu_check with engines, side by side: stock, b1, runner-v2, store, death: 118 s on an H200 with another
#               pair in the place of store
#     speed     pauses with and without disaggregation, a model of real shape with dummy weights
#     nixl      the same beside upstream's NixlConnector
#     checks    gpu_check with engines, one after the other, for a machine with time; PARTS="b1 serve" are only these
#     smoke     when `together` fails: finds arguments with which a stock engine starts; later chapters use them
#
# Variables: LIMIT, seconds for each chapter with its end; OUT (build/gpu), the results, renewed every 15 s; DEST (/tmp/kit), what
# was unpacked and made, for later calls; PYTHON (python3). For speed and nixl: SHAPE (8b), SECONDS_EACH (15), EAGER=1 or
# DECODE_GRAPHS=1 (graphs of decode steps alone, without torch.compile: starts sooner than with vLLM's default), ARMS ("pd
# single mixed-rr alone" for speed, "pd-first nixl" for nixl). A chapter that starts removes its old results.
# The exit status: 0, or 1 where a chapter failed, or 2 where the kit does not fit this machine.
# shellcheck disable=SC2329  # chapters are called by their names
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3} DEST=$(realpath -m "${DEST:-/tmp/kit}") OUT=${OUT:-build/gpu} logs=build/gpu_logs
[ -f scripts/lab/gpu_check.py ] || { echo "start it in the root of a checkout of vllm-pd" >&2; exit 1; }
"$python" "$here/fits.py" "$here" "$DEST" || exit 2
mkdir -p "$OUT" "$logs" "$DEST"
say() { printf '== %4d s  %s\n' "$SECONDS" "$*"; }
variables=$("$python" "$here/unpack.py" "$here" "$DEST") || exit 1
eval "$variables"
say "unpacked"
export VLLM_CACHE_ROOT=$DEST/cache TRITON_CACHE_DIR=$DEST/cache/triton TORCHINDUCTOR_CACHE_DIR=$DEST/cache/inductor
nvcc=$(readlink -f "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")
export CUDA_HOME=${CUDA_HOME:-${nvcc%/bin/nvcc}} # whoever compiles kernels looks for nvcc there
export GPU_KIT_RUN=$$ # all processes below have it: see `end_all`
model=$DEST/models/small notes=$VLLM_CACHE_ROOT/modelinfos
grace_s=${GRACE_S:-10} # from TERM to KILL
ends_s=0 job=""        # of the chapter that runs: when its commands get TERM, in SECONDS, and its process
declare -A limits_s=([first]=370 [warm]=120 [together]=300 [speed]=300 [nixl]=300 [checks]=360 [smoke]=420)
declare -A results=([first]="transfer_rate transfers" [together]=together [speed]=speed [nixl]=nixl [checks]=checks)

left_s() { echo $((ends_s - SECONDS - ${1:-0})); } # left_s [RESERVE]
within() { # within SECONDS: so many, or what is left of the chapter, but at least 1: 0 would be no limit
    local seconds=$1 left
    left=$(left_s)
    [ "$seconds" -le "$left" ] || seconds=$left
    echo $((seconds > 1 ? seconds : 1))
}
limited() { # limited SECONDS COMMAND...: TERM to its group at the limit, or at the end of the chapter, then KILL
    local seconds
    seconds=$(within "$1")
    shift
    timeout -k "$grace_s" "$seconds" "$@"
}

find_marked() { # into the array `pids`: the processes that chapters have started, whoever is their parent now
    local file
    pids=()
    while read -r file; do
        file=${file#/proc/}
        pids+=("${file%/environ}")
    done < <(env -u GPU_KIT_RUN grep -lszx "GPU_KIT_RUN=$$" /proc/[0-9]*/environ)
}
end_all() { # end_all [GRACE]: the chapter and them. vLLM swallows a SIGTERM that comes while it starts: KILL follows
    local pids signal=TERM until=$((SECONDS + ${1:-$grace_s}))
    [ -z "$job" ] || { kill -9 "$job" && wait "$job"; } 2>/dev/null # first, so that it starts nothing else
    while find_marked && [ ${#pids[@]} -gt 0 ]; do
        [ "$SECONDS" -lt $((until + 10)) ] || return 1
        [ "$SECONDS" -lt "$until" ] || signal=KILL
        kill -s $signal "${pids[@]}" 2>/dev/null
        sleep 1
    done
}

forget() { # forget CHAPTER: its results of an earlier call, which would pass for new
    local name
    for name in ${results[$1]:-}; do rm -f "$logs/$name/gpu_check.json" "$OUT/$name".{json,png}; done
}
keep() { # copies figures and logs to OUT; a cut leaves the former copies whole
    local file copy
    for file in "$logs"/*/gpu_check.json; do
        copy=$OUT/$(basename "$(dirname "$file")").json
        [ ! -f "$file" ] || { cp "$file" "$copy.part" && mv "$copy.part" "$copy"; }
    done
    tar -cJf "$OUT/logs.part" -C "$(dirname "$logs")" "$(basename "$logs")" 2>/dev/null
    mv "$OUT/logs.part" "$OUT/logs.tar.xz"
}

make_model() { # make_model SHAPE [--bare]: in DEST/models, once
    [ -f "$DEST/models/$1/config.json" ] ||
        "$python" "$here/make_model.py" "$DEST/models/$1" --tokenizer "$here/tokenizer" --shape "$@"
}
engine_arguments() { # into the array `extra`: what `smoke` has found
    extra=()
    [ ! -s "$DEST/engine_args" ] || mapfile -t extra <"$DEST/engine_args"
}

first() {
    local failed=0
    limited 100 "$python" "$here/preflight.py" 2>&1 | tee "$logs/preflight.log" || return 2 # no engine would start
    say "preflight"
    limited 60 "$python" "$here/transfer_rate.py" --json "$OUT/transfer_rate.json" 2>&1 |
        tee "$logs/transfer_rate.log" || failed=1
    say "transfer rate"
    limited 190 "$python" scripts/lab/gpu_check.py --part bits --part order --part rates --part store-copies --budget-s 180 \
        --out "$logs/transfers" || failed=1
    return "$failed"
}

warm() { # an engine that finds no note of its model's class inspects it in a process of its own: 20 s, in each engine
    local inspecting=""
    if [ -z "$(ls "$notes" 2>/dev/null)" ]; then
        "$python" -c 'from vllm.model_executor.models.registry import ModelRegistry
ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()' >"$logs/warm.log" 2>&1 &
        inspecting=$!
    fi
    make_model small || return 1
    [ -z "$inspecting" ] || wait "$inspecting" || say "no note of the model's class: see warm.log"
}

gpu_check() { # gpu_check NAME ARGUMENT...: with engines, within what is left of the chapter
    local name=$1 extra argument
    shift
    warm || return 1
    say "warm"
    engine_arguments
    for argument in ${extra[@]+"${extra[@]}"}; do set -- "$@" "--engine-arg=$argument"; done
    limited "$(left_s)" "$python" scripts/lab/gpu_check.py --model "$model" --budget-s "$(left_s 15)" \
        --out "$logs/$name" "$@"
}
together() { gpu_check together --at-once --part b1 --part runner-v2 --part store --part death; }
checks() {
    local part parts=()
    for part in ${PARTS:-b1 runner-v2 store death serve}; do parts+=(--part "$part"); done
    gpu_check checks "${parts[@]}"
}

bench() { # bench NAME ARM...
    local name=$1 arm arms=() extra steps=()
    shift
    for arm in "$@"; do arms+=(--arm "$arm"); done
    [ -z "${EAGER:-}" ] || steps=(--enforce-eager)
    [ -z "${DECODE_GRAPHS:-}" ] || steps=('--compilation-config={"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}')
    warm && make_model "${SHAPE:-8b}" --bare || return 1
    engine_arguments
    limited "$(left_s)" "$python" -m vllm_pd.cli bench serve "$DEST/models/${SHAPE:-8b}" "${arms[@]}" --rounds 1 \
        --duration-s "${SECONDS_EACH:-15}" --stream 8 --long-tokens 6000 --long-every-s 2 --answer-tokens 200 \
        --warm-up 1 --timeout-s 120 --log "$logs/${name}_engines.log" --picture "$OUT/$name.png" \
        --output "$OUT/$name.json" -- --dtype bfloat16 --load-format dummy --max-model-len 8192 --max-num-seqs 32 \
        --kv-cache-memory-bytes 8589934592 --gpu-memory-utilization 0.4 ${steps[@]+"${steps[@]}"} \
        ${extra[@]+"${extra[@]}"} >"$logs/$name.log" 2>&1
    local status=$?
    tail -40 "$logs/$name.log"
    return "$status"
}
# shellcheck disable=SC2086  # one word for each arm
speed() { bench speed ${ARMS:-pd single mixed-rr alone}; }
# shellcheck disable=SC2086
nixl() { bench nixl ${ARMS:-pd-first nixl}; }

answers() { # answers ARGUMENT...: whether a stock engine starts with these arguments and answers, within 120 s
    local until=$((SECONDS + 120)) log=$logs/smoke-$#.log status=1 server
    say "a stock engine with: ${*:-its defaults}"
    timeout -k "$grace_s" "$(within 120)" "$python" -m vllm.entrypoints.cli.main serve "$model" --port 8123 --dtype float16 \
        --max-model-len 2048 --gpu-memory-utilization 0.4 --max-num-seqs 16 --enforce-eager "$@" >"$log" 2>&1 &
    server=$!
    while [ "$status" != 0 ] && [ "$SECONDS" -lt "$until" ] && kill -0 "$server" 2>/dev/null; do
        sleep 1
        curl -sf -m 20 localhost:8123/v1/completions -H 'Content-Type: application/json' -d \
            '{"model": "'"$model"'", "prompt": [1000, 2000, 3000], "max_tokens": 8, "temperature": 0}' && status=0
    done
    kill "$server" 2>/dev/null # `timeout` passes it on, and sends KILL after the grace
    wait "$server"
    [ "$status" = 0 ] || tail -25 "$log"
    return "$status"
}
try() { # try ARGUMENT...: and note the arguments for later chapters
    answers "$@" || return 1
    : >"$DEST/engine_args"
    [ $# = 0 ] || printf '%s\n' "$@" >"$DEST/engine_args"
}
smoke() {
    warm || return 1
    try || try --attention-backend TRITON_ATTN ||
        try --attention-backend TRITON_ATTN '--compilation-config={"custom_ops":["none"]}'
}

run_chapter() { # run_chapter NAME: within its limit, with a copy of the results every 15 s
    local status kept_s=$SECONDS rest_s limit_s=${LIMIT:-${limits_s[$1]}}
    rest_s=$((limit_s - grace_s - 3)) # its commands get TERM then, KILL a grace later, and the rest is for what they leave
    ends_s=$((SECONDS + (rest_s > 1 ? rest_s : 1)))
    forget "$1"
    "$1" &
    job=$!
    while kill -0 "$job" 2>/dev/null && [ "$SECONDS" -lt $((ends_s + grace_s + 1)) ]; do
        sleep 1
        [ $((SECONDS - kept_s)) -lt 15 ] || { keep; kept_s=$SECONDS; }
    done
    kill -9 "$job" 2>/dev/null
    wait "$job" 2>/dev/null
    status=$? job=""
    rest_s=$((ends_s + grace_s - SECONDS))
    end_all $((rest_s < 0 ? 0 : rest_s < grace_s ? rest_s : grace_s)) || say "some processes of $1 do not end"
    keep
    return "$status"
}

trap end_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
[ $# -gt 0 ] || set -- first together speed
for chapter in "$@"; do
    [ -n "${limits_s[$chapter]:-}" ] || { echo "no chapter is named $chapter: ${!limits_s[*]}" >&2; exit 1; }
done
failed=0
for chapter in "$@"; do
    run_chapter "$chapter"
    status=$?
    if [ $status = 0 ]; then
        say "$chapter"
    else
        failed=1
        say "$chapter FAILED with $status"
        [ "$chapter $status" != "first 2" ] || { say "the preflight has failed: no other chapter is begun"; break; }
    fi
done
exit $failed
