#!/usr/bin/env bash
# launch/test.sh [pytest arguments]: the tests, on the CPU, in an environment that is made first if it is missing; a
# file a process, on up to four cores (-n 0: in this process).
set -euo pipefail
source "$(dirname "$0")/environment.sh"
make_environment test
cd "$root"
exec "$venv/bin/python" -m pytest -n auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder "$@"
