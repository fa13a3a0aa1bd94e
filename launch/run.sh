#!/usr/bin/env bash
# launch/run.sh --config=configs/pose.py --workdir=runs/pose [...]: python -m lab.main in its own environment, which is
# made first if it is missing. LAB_EXTRAS=cuda or tpu installs what an accelerator needs.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
extras=${LAB_EXTRAS:-}
if [ -z "$extras" ] && [ -e /dev/nvidia0 ]; then
  extras=cuda
fi
make_environment "$extras"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$venv/bin/python" -m lab.main "$@"
