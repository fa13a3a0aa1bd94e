#!/usr/bin/env bash
# A recipe's training step beside another program's, in turns on the same card:
#
#   benchmarks/compare.sh PEER.py NAME [--batch=N] --config=configs/gpt.py:full [--config.KEY=VALUE ...]
#
# PEER.py is run as `python PEER.py --steps 30 [--batch N] NAME` and ends with a line of JSON that has items_per_s and
# step_ms, of the same items. --batch is the examples of a step of both. Printed are the lines of both programs, three
# of each (ROUNDS=3, STEPS=30), and the ratio of their medians. The lab's program is compiled in the first round and kept
# for the others, as a user's is: compile_s is then what it takes to read it. PYTHON is the interpreter of the lab,
# PEER_PYTHON that of the other program.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }
peer=$1 name=$2; shift 2
python=${PYTHON:-python} other=${PEER_PYTHON:-${PYTHON:-python}} batch=() recipe=()
for given in "$@"; do
  case $given in
    --batch=*) batch=(--batch "${given#*=}"); recipe+=("--config.input.batch_size=${given#*=}") ;;
    *) recipe+=("$given") ;;
  esac
done
lines=$(mktemp) cache=$(mktemp -d); trap 'rm -rf "$lines" "$cache"' EXIT
for ((i = 0; i < ${ROUNDS:-3}; i++)); do
  "$python" -m benchmarks.step "--steps=${STEPS:-30}" "--cache=$cache" "${recipe[@]}" | tail -n 1 | tee -a "$lines"
  "$other" "$peer" --steps "${STEPS:-30}" "${batch[@]}" "$name" | tail -n 1 | tee -a "$lines"
done
"$python" - "$lines" <<'END'
import json, statistics, sys
rows = [json.loads(line) for line in open(sys.argv[1], encoding='utf-8')]
ours, theirs = rows[::2], rows[1::2]
pairs = ', '.join(f'{a["items_per_s"] / b["items_per_s"]:.3f}' for a, b in zip(ours, theirs))
middle = [statistics.median(r['items_per_s'] for r in side) for side in (ours, theirs)]
print(f'lab {middle[0]:,.1f}, peer {middle[1]:,.1f} {ours[0]["unit"]}/s (medians): ratio {middle[0] / middle[1]:.3f}; '
      f'in turns {pairs}')
END
