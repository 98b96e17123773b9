#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A real small model, its prompts prefilled by one engine and decoded by another:   bash scripts/demo.sh [OUTPUT_FOLDER]
#
# Does all the set-up itself (scripts/env.sh), the first time in some minutes; then it takes less than two. Ends with
# status 0 only where every answer equals the one with PD off, token by token, and nothing is left over. The last line says
# how long a running answer pauses while a chapter is prefilled, with PD and without; pause.png shows it. The results are
# also in OUTPUT_FOLDER (build/demo): demo.json, demo.png, pause.png, and servers.log with the servers' own lines.

set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit 1
. "$here/env.sh" || exit 1
exec python "$here/demo.py" "$@"
