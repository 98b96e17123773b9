#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run the tests, fast ones first:   bash scripts/test.sh [pytest arguments]
#
# Without a path among the arguments every folder of tests/ runs in a pytest of its own, and the time of each is printed at the
# end. With a path below tests/, that is what runs. Does all the set-up itself (scripts/env.sh).

set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
. scripts/env.sh || exit 1

for argument in "$@"; do
    case $argument in
        tests | tests/* | ./tests* | /*) exec python -m pytest "$@" ;;
    esac
done
trap 'exit 130' INT

status=0
summary=
SECONDS=0
for folder in series unit proof transfer peers router upstream wheel dp e2e; do
    [ -d "tests/$folder" ] || continue
    echo "== tests/$folder"
    began=$SECONDS
    python -m pytest "tests/$folder" "$@"
    code=$?
    case $code in
        0) outcome=passed ;;
        5) outcome="no tests" ;; # all deselected
        *) outcome="FAILED ($code)" status=1 ;;
    esac
    summary+=$(printf '%-16s %-12s %5d s' "tests/$folder" "$outcome" $((SECONDS - began)))$'\n'
done
printf '%s%-16s %-12s %5d s\n' "$summary" total "" "$SECONDS"
exit $status
