#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run the tests:   bash scripts/test.sh [--fast | --rest | --all] [pytest arguments]
#
#   --fast   only the series, the pure tests, the protocol, and one prompt through two engines
#   --rest   the others: real engines in all their shapes, V0, the step sync, the patched tree, several machines
#   --all    both, with the heavy proofs, which docs/testing.md lists, and all searches
#
# A search through the protocol's states that has passed is skipped until code that it sees changes. Every folder of tests/
# runs in a pytest of its own, in two lanes side by side; a table with the time of each is printed at the end, and build/tests
# has the outputs. A test that failed runs once more, alone, after everything else; if it passes then, it is listed as `flaky:`. A wrong answer, a leak or a crash is red at once (scripts/_tests/session.py).
# With a path below tests/ among the arguments, that is what runs, once, heavy or not. Does all the set-up itself (scripts/env.sh):
# tests/v1 and tests/v1_* get the environment of engine V1 (VLLM_PD_ENGINE=v1), everything else that of V0. Only another
# path, given alone, runs where VLLM_PD_ENGINE says. tests/v1 and another path can't be given together.

set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
v1='' others='' before=''
for argument in "$@"; do
    path=${argument#./}
    case $before:${path#"$PWD"/} in
        --ignore:* | --ignore-glob:* | --deselect:* | --rootdir:* | --confcutdir:* | --basetemp:* | --junit*xml:* | --log-file:* | -c:*)
            ;; # the value of an option
        *:tests/v1 | *:tests/v1/* | *:tests/v1_*) v1=$argument ;;
        *:tests | *:tests/) v1=tests/v1 others=$argument ;;
        *:tests/*) others=$argument ;;
        *:/*/tests/v1 | *:/*/tests/v1/* | *:/*/tests/v1_*) v1=$argument ;;
        *:/*) others=$argument ;;
    esac
    before=$argument
done
if [ -n "$v1" ] && [ -n "$others" ]; then
    echo "test.sh: $v1 and $others have different environments (engine V1 and V0): name one, or none for all tests" >&2
    exit 2
fi
if [ -n "$v1$others" ]; then
    [ -z "$v1" ] || export VLLM_PD_ENGINE=v1
    . scripts/env.sh || exit 1
    exec python -m pytest "$@"
fi
unset VLLM_PD_ENGINE
. scripts/env.sh || exit 1
exec python scripts/run_tests.py "$@"
