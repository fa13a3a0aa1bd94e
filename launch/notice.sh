#!/usr/bin/env bash
# launch/notice.sh PID [PAUSE=2]: when Google's metadata server announces that this host is about to go, sends SIGTERM,
# once, to the process group that PID leads, or to PID alone if it leads none. Ends when they do. docs/tpu_vm.md
set -euo pipefail

server=http://metadata.google.internal/computeMetadata/v1/instance
target=${1:-} pause=${2:-2}
rounds=5      # without any answer, after which none is to come

say() { echo "notice: $(date -u +%FT%TZ): $*"; }

ask() {      # ask KEY: sets value, or fails; there, once it is known that a server is there
  local code=0
  value=$(curl -sf --noproxy '*' --max-time 5 -H 'Metadata-Flavor: Google' "$server/$1") || code=$?
  case $code in 0 | 22) there=yes ;; esac      # 22: it answers, with an error
  return "$code"
}

if ! [[ $target =~ ^[1-9][0-9]*$ && $target != 1 && $pause =~ ^[0-9]+(\.[0-9]+)?$ ]]; then      # -1 would be everyone
  echo "usage: launch/notice.sh PID [PAUSE]" >&2
  exit 2
fi
if kill -0 -- "-$target" 2>/dev/null; then target=-$target; fi
kill -0 -- "$target" || exit 2
command -v curl >/dev/null || { say "no curl here, so nothing tells when this host is about to go"; exit; }

declare -A last=() answered=()
there='' round=0 troubled=''
while kill -0 -- "$target" 2>/dev/null; do
  round=$((round + 1)) failed=''
  for key in preempted maintenance-event 'upcoming-maintenance?alt=json'; do
    if ! ask "$key"; then
      case $key in
        upcoming*) [ -n "$failed" ] || answered[$key]=yes ;;      # an error can mean that nothing was ever planned
        *) failed=yes ;;
      esac
      continue
    fi
    case $key=$value in
      preempted=TRUE | maintenance-event=TERMINATE_ON_HOST_MAINTENANCE) state=goes ;;
      upcoming*ONGOING*) state=goes value=ONGOING ;;      # PENDING may stand there for days
      maintenance-event=MIGRATE_ON_HOST_MAINTENANCE) state=moves ;;
      *) state=stays ;;
    esac
    before=${answered[$key]-} answered[$key]=yes
    [ "$state" != "${last[$key]-stays}" ] || continue
    last[$key]=$state
    what="${key%\?*} is $value"
    if [ "$state" = moves ]; then
      say "$what: the host moves, and what runs on it goes on"
    elif [ "$state" = goes ] && [ -z "$before" ] && [ "$key" != preempted ]; then
      # this may last for hours, in which each run that begins would be ended, and started again
      say "$what since before the run began, which goes on until the host goes"
    elif [ "$state" = goes ]; then
      say "$what: the host is about to go, and the run gets SIGTERM, to save and end"
      kill -s TERM -- "$target" || true
      exit
    fi
  done
  if [ -z "$there" ] && [ "$round" -ge "$rounds" ]; then
    say "no metadata server answers, so nothing tells when this host is about to go"
    exit
  elif [ -n "$there" ] && [ -n "$failed" ] && [ -z "$troubled" ]; then
    say "the metadata server fails, and is asked again"
    troubled=yes
  fi
  sleep "$pause"
done
