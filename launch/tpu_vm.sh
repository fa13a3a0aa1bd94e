#!/usr/bin/env bash
# launch/tpu_vm.sh COMMAND --name=NAME [flags] [-- arguments of launch/run.sh]: one run on all hosts of a Cloud TPU
# slice, or of several. docs/tpu_vm.md goes through it; --help lists commands and flags.
set -euo pipefail

usage() {
  cat <<'END'
usage: launch/tpu_vm.sh COMMAND --name=NAME [flags] [-- arguments of launch/run.sh]

commands
  create   make the TPU VM, or with --queued or --slices the queued resource, and wait until it is ready
  setup    copy the project's tracked files to every worker and make the environment there; again after a change
  run      start `launch/run.sh ARGUMENTS --distributed` on every worker; it goes on without this machine
  logs     print the end of a worker's log
  status   print the state of the TPU and, for each worker, that of the run
  stop     ask the run to save and end, which it does with exit code 75
  babysit  create, set up, run, and start again what stopped, until it is done or can't be
  delete   delete the TPU VM or the queued resource with its TPU VMs

flags (* or from the environment: LAB_TPU_NAME, LAB_TPU_ZONE, ...)
  --name=NAME        * the TPU VM or queued resource
  --zone=ZONE        * gcloud's own default if empty
  --project=PROJECT  * gcloud's own default if empty
  --type=TYPE        * accelerator type, such as v5litepod-16
  --version=VERSION  * runtime version; by the type if empty
  --spot             cheaper, and may be taken away
  --queued           as a queued resource, which waits for its turn
  --slices=1         TPU slices of that type, as one queued resource
  --repo=FOLDER      the git checkout to copy; this one
  --dir=lab          the project's folder on the workers, below the home folder
  --prepare=COMMAND  what setup runs first on every worker, such as mounting a shared disk; it may run again
  --create_flag=FLAG one more flag for gcloud's create, such as --network=NETWORK; may be repeated
  --ssh_flag=FLAG    one more flag for gcloud's ssh and scp, such as --internal-ip; may be repeated
  --worker=0 --node=0 --lines=100 --follow   logs: which worker of which slice, how many lines, and whether to go on
  --yes              delete without asking
  --poll=30          babysit, create: seconds between two looks
  --retries=10       babysit: restarts in a row, none of which ran for --steady=600 seconds, before it gives up
  --backoff=10       babysit: seconds before the second of them; doubled for each further one, at most 600
  --grace=300        babysit: seconds that workers have to end by themselves when one has ended
  --dry_run          print the gcloud commands and run none
END
}

name=${LAB_TPU_NAME:-} zone=${LAB_TPU_ZONE:-} project=${LAB_TPU_PROJECT:-}
type=${LAB_TPU_TYPE:-} version=${LAB_TPU_VERSION:-}
repo=$(cd "$(dirname "$0")/.." && pwd) dir=lab prepare='' upload=''
spot='' queued='' slices=1 worker=0 node=0 lines=100 follow='' yes='' dry_run=''
poll=30 retries=10 steady=600 backoff=10 grace=300 troubles=0 noted=''
create_flags=() ssh_flags=() arguments=()
exec 3>&1      # where dry runs print, also out of $(...)
trap '[ -z "$upload" ] || rm -rf "$upload"' EXIT

fail() { echo "error: $*" >&2; exit 2; }
say() { printf '%s %s\n' "$(date +%FT%T)" "$*"; }
note() { [ "$noted" = "$*" ] || say "$*"; noted=$*; }      # said once while it stays so

parse() {
  local key value
  while [ $# -gt 0 ]; do
    key=${1%%=*}
    case $1 in
      --) shift; arguments=("$@"); return ;;
      --help | -h) usage; exit 0 ;;
      --spot | --queued | --follow | --yes | --dry_run) printf -v "${key#--}" yes; shift; continue ;;
      --*) ;;
      *) fail "unexpected argument $1; arguments of launch/run.sh go after --" ;;
    esac
    case $key in
      --name | --zone | --project | --type | --version | --slices | --repo | --dir | --prepare | --create_flag | \
        --ssh_flag | --worker | --node | --lines | --poll | --retries | --steady | --backoff | --grace) ;;
      *) fail "unknown flag $key; --help lists all, and arguments of launch/run.sh go after --" ;;
    esac
    case $1 in
      *=*) value=${1#*=}; shift ;;
      *) [ $# -gt 1 ] || fail "$key needs a value"; value=$2; shift 2 ;;
    esac
    case $key in
      --create_flag) create_flags+=("$value") ;;
      --ssh_flag) ssh_flags+=("$value") ;;
      *) printf -v "${key#--}" %s "$value" ;;
    esac
  done
}

check() {      # check COMMAND: the flags it needs, and numbers that are numbers
  local key
  case $name in '' | -*) fail "--name is missing, the name of the TPU VM or queued resource" ;; esac
  for key in slices lines retries steady backoff grace; do
    [[ ${!key} =~ ^[0-9]{1,9}$ ]] || fail "--$key=${!key}: expected a whole number"
  done
  [[ $poll =~ ^[0-9]+(\.[0-9]+)?$ ]] || fail "--poll=$poll: expected seconds"
  [ "$slices" -ge 1 ] || fail "--slices=$slices: expected 1 or more"
  case $1 in
    create | babysit) [ -n "$type" ] || fail "--type is missing, such as --type=v5litepod-16" ;;
  esac
  case $1 in
    run | babysit) [ ${#arguments[@]} -gt 0 ] || fail "$1 needs arguments of launch/run.sh after --" ;;
    *) [ ${#arguments[@]} -eq 0 ] || fail "$1 takes no arguments after --" ;;
  esac
  [ "$slices" -eq 1 ] || queued=yes
}

source "$(dirname "$0")/tpu_vm_worker.sh"
source "$(dirname "$0")/tpu_vm_babysit.sh"

# gcloud: every call goes through gc, every command of a worker through remote

gc() {      # gc VERB NAME ARGUMENTS...
  local group=tpu-vm
  [ -z "$queued" ] || group=queued-resources
  set -- compute tpus "$group" "$@" --quiet
  [ -z "$zone" ] || set -- "$@" "--zone=$zone"
  [ -z "$project" ] || set -- "$@" "--project=$project"
  if [ -n "$dry_run" ]; then
    { printf gcloud; printf ' %q' "$@"; echo; } >&3
  else
    gcloud "$@" </dev/null
  fi
}

connect() {      # connect ssh|scp WORKER NODE ARGUMENTS...
  local verb=$1 where=("--worker=$2")
  [ -z "$queued" ] || where+=("--node=$3")
  shift 3
  gc "$verb" "$@" "${where[@]}" ${ssh_flags[@]+"${ssh_flags[@]}"}
}

remote() {      # remote WORKER NODE FUNCTION ARGUMENTS...: one of the functions on_*, over there
  local at=("$1" "$2") command=bash script part
  shift 2
  script="set -euo pipefail; $(declare -f on_open "$1")"$'\n''on_open "$@"'
  for part in -c "$script" lab "$dir" "$@"; do
    command+=" '${part//\'/\'\\\'\'}'"      # for any shell; %q would need bash for line ends
  done
  connect ssh "${at[@]}" "$name" "--command=$command"
}

vm_state() {      # as gcloud names it, or NOT_FOUND
  local out format='value(state)'
  [ -z "$queued" ] || format='value(state.state)'
  if out=$(gc describe "$name" "--format=$format" 2>&1); then
    echo "${out##*$'\n'}"
  elif [[ $out == *NOT_FOUND* || $out == *"was not found"* ]]; then
    echo NOT_FOUND
  else
    echo "$out" >&2
    return 1
  fi
}

create_vm() {
  local runtime=$version what=("--accelerator-type=$type")
  if [ -z "$runtime" ]; then
    case $type in
      v5lite*) runtime=v2-alpha-tpuv5-lite ;;
      v5p*) runtime=v2-alpha-tpuv5 ;;
      v6e*) runtime=v2-alpha-tpuv6e ;;
      *) runtime=tpu-ubuntu2204-base ;;
    esac
  fi
  if [ -z "$queued" ]; then
    what+=("--version=$runtime")
  elif [ "$slices" -eq 1 ]; then
    what+=("--runtime-version=$runtime" "--node-id=$name")
  else
    what+=("--runtime-version=$runtime" "--node-count=$slices" "--node-prefix=$name")
  fi
  [ -z "$spot" ] || what+=(--spot)
  gc create "$name" "${what[@]}" ${create_flags[@]+"${create_flags[@]}"}
}

delete_vm() {
  if [ -n "$queued" ]; then gc delete "$name" --force; else gc delete "$name"; fi
}

wait_ready() {
  local state
  [ -z "$dry_run" ] || return 0
  while :; do
    state=$(vm_state) || return 1
    note "$name: $state"
    case $state in
      READY | ACTIVE) return ;;
      FAILED | SUSPENDED | PREEMPTED | TERMINATED | NOT_FOUND) return 1 ;;
    esac
    sleep "$poll"
  done
}

setup() {      # the tracked files as they are now, committed or not
  local tree folder=${TMPDIR:-/tmp}/lab.XXXXXX
  if [ -z "$dry_run" ]; then
    tree=$(git -C "$repo" stash create) || fail "--repo=$repo: not a git checkout that can be copied"
    [ -n "$upload" ] || upload=$(mktemp -d "$folder") || return
    folder=$upload
    git -C "$repo" archive --format=tar.gz -o "$folder/lab-upload.tar.gz" "${tree:-HEAD}" || return
  fi
  connect scp all all "$folder/lab-upload.tar.gz" "$name:lab-upload.tar.gz" && remote all all on_setup "$prepare"
}

start() { remote all all on_start "$(command_id)" "${arguments[@]}"; }
command_id() { printf '%s\0' "${arguments[@]}" | cksum | tr ' ' -; }

status() {
  local state states host result
  state=$(vm_state)
  echo "$name: $state"
  case $state in READY | ACTIVE | '') ;; *) return ;; esac
  states=$(run_states)
  while read -r host result _; do
    case $result in
      '') continue ;;
      bare) result="not set up" ;;
      none) result="nothing started" ;;
      lost) result="ended without an exit code" ;;
      [0-9]*) result="exit code $result" ;;
    esac
    echo "$host: $result"
  done <<<"$states"
}

main() {
  local command=${1:-} answer=''
  case $command in
    create | setup | run | logs | status | stop | babysit | delete) ;;
    --help | -h) usage; return ;;
    '') fail "a command is missing; --help lists them" ;;
    *) fail "unknown command $command; --help lists them" ;;
  esac
  shift
  parse "$@"
  check "$command"
  [ -n "$dry_run" ] || command -v gcloud >/dev/null || fail "gcloud is not on the PATH; Google's Cloud SDK has it"
  case $command in
    create) create_vm; wait_ready ;;
    run)
      answer=$(run_states)
      case $(outcome "$answer") in
        running | partly) fail "a run is going on on $name; stop ends it, babysit watches it" ;;
        bare) fail "$name is not set up, or not wholly; setup does it" ;;
      esac
      start ;;
    logs) remote "$worker" "$node" on_log "$lines" "$follow" ;;
    stop) remote all all on_stop TERM ;;
    delete)
      if [ -z "$yes$dry_run" ]; then
        read -r -p "delete $name and all that is on its disks? [y/N] " answer || true
        [[ $answer == [yY]* ]] || fail "not deleted"
      fi
      delete_vm ;;
    babysit)
      if [ -n "$dry_run" ]; then vm_state; create_vm; setup; run_states; start; else babysit; fi ;;
    *) "$command" ;;
  esac
}

main "$@"
