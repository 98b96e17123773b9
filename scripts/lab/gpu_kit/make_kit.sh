#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build what a bare GPU machine without internet needs to run vLLM and vllm-pd: pieces that fit into small transfers.
#
#     make_kit.sh OUT [PROJECT]
#
# OUT becomes the folder with the pieces, OUT2 the one with FlashAttention 3, which the first transfer can do without. PROJECT is a checkout of vllm-pd (default: the one around this script). The
# machine must have Python 3.12 with torch 2.11 for CUDA 13, and the packages that requirements.txt names in its heading.
# Needs bash, Python 3.11 with pip, unzip, xz. VLLM=0.33.0 takes another release, SM=100 another architecture,
# XZ=-3 packs faster. About ten minutes of one core, most of it for packing.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd)
project=$(cd "${2:-$here/../../..}" && pwd)
vllm=${VLLM:-0.32.0} nixl=${NIXL:-1.5.1} sm=${SM:-90} xz=${XZ:--6}
work=$out.work
downloads=${DOWNLOADS:-$work/downloads}
site=$work/site
rm -rf "$site" && mkdir -p "$site" "$downloads"

fetch() { # fetch FOLDER PIP-ARGUMENTS: wheels for the other machine, not for this one
    local to=$1 n platforms=()
    shift
    for n in 39 38 37 36 35 34 33 32 31 30 28 27 26 24 17 12 5; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
    python3.11 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --abi cp312 --abi abi3 --abi none "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
        -d "$downloads/$to" "$@"
}
[ -d "$downloads/vllm-$vllm" ] || fetch "vllm-$vllm" "vllm==$vllm"
[ -d "$downloads/nixl-$nixl" ] || fetch "nixl-$nixl" "nixl==$nixl" "nixl-cu13==$nixl"
[ -d "$downloads/packages" ] || fetch packages -r "$here/requirements.txt"
python3.11 "$project/scripts/build_wheel.py" --target plugin --out "$work/plugin"

# vLLM: its Python, the kernels that every engine uses, FlashAttention 3. Left out: kernels of other models and GPUs.
wheel=$(ls "$downloads/vllm-$vllm"/*.whl)
unzip -q -o "$wheel" -d "$site" -x '*.so' 'vllm/vllm-rs' 'vllm/third_party/deep_gemm/*' 'vllm/third_party/fmha_sm100/*'
unzip -q -o "$wheel" -d "$site" vllm/spinloop.abi3.so vllm/fs_io_C.abi3.so vllm/cumem_allocator.abi3.so
kernels=(vllm/_C_stable_libtorch.abi3.so vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so)
[ -n "${WITH_MOE:-}" ] && kernels+=(vllm/_moe_C_stable_libtorch.abi3.so)
unzip -q -o "$wheel" -d "$work/whole" "${kernels[@]}"

for wheel in "$downloads/packages"/*.whl "$downloads/nixl-$nixl"/*.whl; do unzip -q -o "$wheel" -d "$site"; done
rm -rf "$site"/nixl_ep* "$site"/nixl_cu13.scripts "$site"/*.data "$site/pycountry/locales"
find "$site/mistral_common/data" -type f -size +200k -delete
# NIXL's plugins for storage and for other networks, and what only they need
find "$site/nixl_cu13.libs/nixl" "$site/.nixl_cu13.mesonpy.libs/plugins" -name 'lib*.so' ! -name libplugin_UCX.so -delete
rm -f "$site"/nixl_cu13.libs/lib{aws,azure,s2n,xml2,curl,gusli}* "$site"/nixl_cu13.libs/ucx/libucx_perftest* \
    "$site"/nixl_cu13.libs/ucx/*.la "$site"/nixl_cu13.libs/libprometheus* "$site"/nixl_cu13.libs/ucx/libuct_ib* "$site"/.nixl_cu13.mesonpy.libs/lib{obj_utils,nixl_test_utils,nixl_capi}*
find "$site" -name '*.pyi' -delete
find "$site" -name '*.so*' -type f -exec strip --strip-debug {} + 2>/dev/null || true

# The plugin by itself, so that a changed project needs only this piece anew.
mkdir -p "$work/plugin-site/site" && rm -rf "$work/plugin-site/site/"* && unzip -q -o "$work"/plugin/*.whl -d "$work/plugin-site/site"

pack() { # pack NAME FOLDER MEMBERS: an archive, unless a newer one is there
    local name=$1 folder=$2
    shift 2
    tar -C "$folder" --owner=0 --group=0 --sort=name -cf - "$@" | xz -T0 "$xz" >"$out/$name.part"
    mv "$out/$name.part" "$out/$name"
}
pack vllm.tar.xz "$work" site/vllm "site/vllm-$vllm.dist-info"
pack packages.tar.xz "$work" --exclude=site/vllm --exclude="site/vllm-$vllm.dist-info" --exclude=__pycache__ site
pack plugin.tar.xz "$work/plugin-site" site
files=
for kernel in "${kernels[@]}"; do
    name=$(basename "$kernel").xz
    python3.11 "$here/slim_fatbin.py" "$work/whole/$kernel" "$work/slim.so" --sm "$sm"
    [ -s "$out/$name" ] || [ -s "${out}2/$name" ] || { xz -T0 "$xz" -c "$work/slim.so" >"$out/$name.part" && mv "$out/$name.part" "$out/$name"; }
    files+="${files:+, }\"$name\": \"site/$kernel\""
done
rm -f "$work/slim.so"
printf '{"archives": ["vllm.tar.xz", "packages.tar.xz", "plugin.tar.xz"], "files": {%s}}\n' "$files" >"$out/kit.json"
cp "$here"/{unpack.py,check_requires.py,make_model.py,preflight.py,transfer_rate.py,device.sh} "$out/"
mkdir -p "$out/tokenizer" && cp "${TOKENIZER:?a folder with the tokenizer of a model}"/{tokenizer.json,tokenizer_config.json} "$out/tokenizer/"
xz -f "$xz" "$out/tokenizer/tokenizer.json"
# What is needed in the second transfer only: together they may be too much for one.
mkdir -p "${out}2" && mv -n "$out"/_vllm_fa3* "${out}2/"
du -sm "$out" "${out}2"
