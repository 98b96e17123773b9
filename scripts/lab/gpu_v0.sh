#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What to run first with the patched wheel (engine V0) on a GPU: install it, ask doctor, check blocks and engines.
#
#     scripts/lab/gpu_v0.sh WHEEL MODEL [gpu_check's options]
#
# WHEEL comes from `python scripts/build_wheel.py --target cuda --out dist`. Needs Python 3.11, a driver for CUDA 12, a
# package index and 12 GB of disk: the wheel brings torch 2.7 for CUDA 12. MODEL is a folder with a small model.
# VENV=FOLDER takes an environment that has the wheel already. build/gpu_v0 gets the results. Without --part the parts are
# bits, order, stock, b1, death and serve: the others are of engine V1.
set -euo pipefail
wheel=${1:?a wheel of scripts/build_wheel.py --target cuda} model=${2:?a folder with a model}
shift 2
if [[ $model == *.whl ]]; then
    echo "WHEEL is more than one file ($wheel, $model ...): remove the older ones, or write the name of one" >&2
    exit 2
fi
wheel=$(realpath -m "$wheel") model=$(realpath -m "$model") # before the `cd`s
[ -z "${VENV:-}" ] || VENV=$(realpath -m "$VENV")
case " $*" in
    *" --part"*) parts=() ;;
    *) parts=(--part bits --part order --part stock --part b1 --part death --part serve) ;;
esac
cd "$(dirname "$0")/../.."
venv=${VENV:-$PWD/build/gpu_v0/venv}
if [ -z "${VENV:-}" ]; then
    python3.11 -m venv "$venv"
    "$venv/bin/python" -m pip install "$wheel"
    "$venv/bin/python" -m pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1
fi
(cd / && "$venv/bin/vllm-pd" doctor) # of the wheel, not of this checkout
exec "$venv/bin/python" scripts/lab/gpu_check.py --model "$model" --out build/gpu_v0 ${parts[@]+"${parts[@]}"} "$@"
