#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build what a bare GPU machine without a network needs to run a stock vLLM and vllm-pd, small enough for one transfer.
#
#     TOKENIZER=FOLDER make_kit.sh OUT [PROJECT]
#
# OUT becomes the kit; OUT.work keeps downloads and what is unpacked of them. TOKENIZER is the folder of a model, whose
# tokenizer is carried. PROJECT is a checkout of vllm-pd (default: the one around this script). Needs bash, binutils,
# unzip, xz, Python 3.11 with pip. A second call makes only the plugin anew, unless the rest has changed.
#
# Variables: VLLM (0.32.0) and NIXL (1.5.1) take other releases, SM=100 another architecture, XZ=-3 packs
# faster; DOWNLOADS is a folder of wheels that kits share; WITH_MOE=1 carries the kernels of mixtures of experts.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd)
project=$(cd "${2:-$here/../../..}" && pwd)
tokenizer=${TOKENIZER:?write TOKENIZER=FOLDER of a model with a tokenizer}
vllm=${VLLM:-0.32.0} nixl=${NIXL:-1.5.1} sm=${SM:-90} xz=${XZ:--6}
python=3.12 torch=2.11 cuda=13 # of the machine that the kit is for: fits.py compares
most_mb=58                     # more does not fit into one transfer of 64 MiB beside a checkout
work=$out.work
downloads=${DOWNLOADS:-$work/downloads} packages=packages-$(sha256sum "$here/requirements.txt" | cut -c1-12)
site=$work/site plugin=$work/plugin-site/site
kernels=(vllm/_C_stable_libtorch.abi3.so vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so)
[ -z "${WITH_MOE:-}" ] || kernels+=(vllm/_moe_C_stable_libtorch.abi3.so)
archives=(vllm.tar.xz packages.tar.xz plugin.tar.xz)
scripts=$(cat "$here/make_kit.sh" "$here/slim_fatbin.py" | sha256sum | cut -c1-12)
made_of="vllm $vllm, nixl $nixl, $packages, ${#kernels[@]} kernels for sm_$sm, xz $xz, scripts $scripts"

piece() { echo "$(basename "$1").xz"; } # piece KERNEL: its file in the kit
is_made() { # whether OUT has all pieces but the plugin, made of the same, and they are still unpacked here
    local name
    for name in vllm.tar.xz packages.tar.xz $(for one in "${kernels[@]}"; do piece "$one"; done); do
        [ -s "$out/$name" ] || return 1
    done
    [ -d "$site" ] && [ "$(cat "$out/made_of" 2>/dev/null)" = "$made_of" ]
}
fetch() { # fetch FOLDER PIP-ARGUMENTS: wheels for the other machine, not for this one; a folder is whole or not there
    local to=$downloads/$1 n platforms=()
    shift
    [ ! -d "$to" ] || return 0
    for n in 39 38 37 36 35 34 33 32 31 30 28 27 26 24 17 12 5; do
        platforms+=(--platform "manylinux_2_${n}_x86_64")
    done
    rm -rf "$to.part"
    python3.11 -m pip download -q --no-deps --only-binary=:all: --python-version "$python" --implementation cp \
        --abi "cp${python/./}" --abi abi3 --abi none "${platforms[@]}" --platform manylinux2014_x86_64 \
        --platform manylinux1_x86_64 -d "$to.part" "$@"
    mv "$to.part" "$to"
}
pack() { # pack NAME FOLDER MEMBERS: an archive, whole or not there; the same for the same files
    local name=$1 folder=$2
    shift 2
    tar -C "$folder" --owner=0 --group=0 --sort=name --mtime='1980-01-02 00:00Z' -cf - "$@" |
        xz -T0 "$xz" >"$out/$name.part"
    mv "$out/$name.part" "$out/$name"
}

make_pieces() { # all but the plugin
    local wheel name libraries plugins kernel library
    rm -rf "$site" "$work/kernels" "$out"/{made_of,vllm.tar.xz,packages.tar.xz} "$out"/*.abi3.so.xz
    mkdir -p "$site"
    fetch "vllm-$vllm" "vllm==$vllm"
    fetch "nixl-$nixl" "nixl==$nixl" "nixl-cu$cuda==$nixl"
    fetch "$packages" -r "$here/requirements.txt"

    # vLLM: its Python, three small libraries, and the kernels that an engine with a dense 16-bit model uses. Left out
    # are those of other models, and FlashAttention 2: its 308 MB have code for sm_80 and PTX, none for sm_90.
    wheel=$(ls "$downloads/vllm-$vllm"/*.whl)
    unzip -q -o "$wheel" -d "$site" -x '*.so' vllm/vllm-rs 'vllm/third_party/deep_gemm/*' \
        'vllm/third_party/fmha_sm100/*'
    unzip -q -o "$wheel" -d "$site" vllm/spinloop.abi3.so vllm/fs_io_C.abi3.so vllm/cumem_allocator.abi3.so

    for wheel in "$downloads/$packages"/*.whl "$downloads/nixl-$nixl"/*.whl; do unzip -q -o "$wheel" -d "$site"; done
    libraries=$site/nixl_cu$cuda.libs plugins=$site/.nixl_cu$cuda.mesonpy.libs
    rm -rf "$site"/nixl_ep* "$site/nixl_cu$cuda.scripts" "$site"/*.data "$site/pycountry/locales"
    find "$site/mistral_common/data" -type f -size +200k -delete # tokenizers
    # NIXL's plugins for storage and for other networks, and what only they need
    find "$libraries/nixl" "$plugins/plugins" -name 'lib*.so' ! -name libplugin_UCX.so -delete
    rm -f "$libraries"/lib{aws,azure,s2n,xml2,curl,gusli,prometheus}* "$libraries"/ucx/{libucx_perftest*,libuct_ib*} \
        "$libraries"/ucx/*.la "$plugins"/lib{obj_utils,nixl_test_utils,nixl_capi}*
    find "$site" -name '*.pyi' -delete
    find "$site" -name '*.so*' -type f -exec strip --strip-debug {} + 2>/dev/null || true # some are no ELF files

    pack vllm.tar.xz "$work" site/vllm "site/vllm-$vllm.dist-info"
    pack packages.tar.xz "$work" --exclude=site/vllm --exclude="site/vllm-$vllm.dist-info" --exclude=__pycache__ site
    for kernel in "${kernels[@]}"; do
        library=$work/kernels/$kernel name=$(piece "$kernel")
        unzip -q -o "$downloads/vllm-$vllm"/*.whl "$kernel" -d "$work/kernels"
        python3.11 "$here/slim_fatbin.py" "$library" "$library.slim" --sm "$sm"
        mv "$library.slim" "$library"
        xz -T0 "$xz" -c "$library" >"$out/$name.part"
        mv "$out/$name.part" "$out/$name"
    done
    echo "$made_of" >"$out/made_of"
}

mkdir -p "$downloads"
is_made || make_pieces

# The plugin by itself: a changed project needs only this piece anew.
rm -rf "$plugin" "$work/plugin" && mkdir -p "$plugin"
python3.11 "$project/scripts/build_wheel.py" --target plugin --out "$work/plugin"
unzip -q "$work"/plugin/*.whl -d "$plugin"
pack plugin.tar.xz "$work/plugin-site" site

mkdir -p "$out/tokenizer"
cp "$tokenizer"/{tokenizer.json,tokenizer_config.json} "$out/tokenizer/"
xz -f "$xz" "$out/tokenizer/tokenizer.json"
cp "$here"/{device.sh,fits.py,unpack.py,preflight.py,transfer_rate.py,make_model.py,check_requires.py} "$out/"

bytes() { # bytes FIND-ARGUMENTS: of those files that are unpacked on the other machine
    find "$site" "$plugin" "$work/kernels" -type f "$@" -printf '%s\n' | awk '{sum += $1} END {printf "%d", sum}'
}
unpacked_bytes=$(($(bytes) + $(bytes -name '*.py'))) # the byte code of a file is about as large as the file
files=()
for kernel in "${kernels[@]}"; do files+=("$(piece "$kernel")=site/$kernel"); done
python3.11 - "${files[@]}" >"$out/kit.json" <<END
import json, sys
print(json.dumps({"vllm": "$vllm", "python": "$python", "torch": "$torch", "cuda": "$cuda", "sm": $sm,
                  "unpacked_bytes": $unpacked_bytes, "archives": "${archives[*]}".split(),
                  "files": dict(one.split("=") for one in sys.argv[1:])}, indent=1))
END
made_mb=$(($(du -sb "$out" | cut -f1) / 1000000))
ls -l "$out"
echo "$out: $made_mb MB, $((unpacked_bytes / 1000000)) MB when unpacked"
[ "$made_mb" -lt $most_mb ] || echo "that is $most_mb MB or more: send it in two transfers; unpack.py takes both" >&2
