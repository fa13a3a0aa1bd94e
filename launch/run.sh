#!/usr/bin/env bash
# launch/run.sh --config=configs/pose.py --workdir=runs/pose [...]: python -m lab.main in its own environment, which is
# made first if it is missing. launch/run.sh sweep FILE and launch/run.sh plot RUNS are lab.sweep and lab.plot.
# LAB_EXTRAS=cuda or tpu installs what an accelerator needs.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
extras=${LAB_EXTRAS:-}
if [ -z "$extras" ] && [ -e /dev/nvidia0 ]; then
  extras=cuda
fi
module=lab.main
case ${1:-} in
  sweep | plot)
    module=lab.$1
    shift
    ;;
esac
make_environment "$extras"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$venv/bin/python" -m "$module" "$@"
