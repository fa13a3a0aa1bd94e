#!/usr/bin/env bash
# launch/local_cluster.sh N [--devices=D] -- COMMAND...: N processes of one run on this machine, which find each other on
# the loopback; with --devices, each has so many CPU devices. For example
#   launch/local_cluster.sh 2 --devices=4 -- launch/run.sh --config=configs/gpt.py --workdir=runs/gpt
# Every line is told with its process. SIGTERM and Ctrl-C are a SIGTERM for all of them. The exit code is 0 where all ended with 0, else
# that of the one that ended first for a reason of its own (7 says only that another was lost).
set -euo pipefail
if [ $((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1])) -lt 501 ]; then      # `wait -p`
  echo "error: $0 needs bash 5.1 or newer; this is $BASH_VERSION" >&2
  exit 2
fi

usage() {
  echo "error: $1; expected $0 N [--devices=D] -- COMMAND..." >&2
  exit 2
}

[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || usage "the number of processes is ${1:-missing}"
count=$1
shift
if [[ ${1:-} =~ ^--devices=([1-9][0-9]*)$ ]]; then
  export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=${BASH_REMATCH[1]}"
  shift
fi
[ "${1:-}" = -- ] || usage "-- is missing before the command"
shift
[ $# -gt 0 ] || usage 'no command'

for port in $(shuf -i 20000-32000 -n 50); do       # below the ports that the system gives to connections
  (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break
done
export JAX_COORDINATOR_ADDRESS=127.0.0.1:$port JAX_COORDINATOR_BIND_ADDRESS=127.0.0.1:$port JAX_NUM_PROCESSES=$count

running=()
trap 'kill -TERM "${running[@]}" 2>/dev/null || true' TERM INT      # a script's jobs don't get Ctrl-C
for ((i = 0; i < count; i++)); do
  JAX_PROCESS_ID=$i "$@" > >(sed -u "s/^/[$i] /") 2>&1 &
  running+=($!)
done

code=0
while [ ${#running[@]} -gt 0 ]; do
  ended='' got=0
  wait -n -p ended "${running[@]}" || got=$?
  [ -n "${ended:-}" ] || continue                  # a signal came, not an end
  for i in "${!running[@]}"; do
    [ "${running[$i]}" != "$ended" ] || unset "running[$i]"
  done
  if [ "$code" = 0 ] || [ "$code" = 7 ] && [ "$got" != 0 ]; then
    code=$got
  fi
done
exit "$code"
