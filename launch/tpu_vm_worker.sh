# Sourced by launch/tpu_vm.sh, which sends these functions to the workers: they run there, in the home folder. A run
# holds the lock for as long as any of its processes lives.

on_open() {      # on_open FOLDER FUNCTION ARGUMENTS...: one of the functions below, for the project in that folder
  mkdir -p -- "$1" "${1%/}.run"
  dir=$(cd -- "$1" && pwd) run=$(cd -- "${1%/}.run" && pwd)
  exec 8>>"$run/lock"
  shift
  "$@"
}

on_setup() {      # on_setup PREPARE
  flock -n 8 || { echo "error: $(hostname): a run is going on; stop it first" >&2; return 2; }
  rm -f "$run/ready" "$run/pid"
  [ -z "$1" ] || bash -c "$1" 8>&-
  cd "$dir"
  if [ -e "$run/copied" ]; then      # what the last copy brought, and nothing else, goes
    tr '\n' '\0' < "$run/copied" | xargs -0 rm -f --
  fi
  tar -tzf ~/lab-upload.tar.gz | grep -v '/$' > "$run/copied"
  tar -xzf ~/lab-upload.tar.gz --no-same-owner
  source launch/environment.sh
  if ! find_python >/dev/null 2>&1; then      # the images of TPU VMs come with 3.10
    sudo apt-get -q -o DPkg::Lock::Timeout=600 update
    sudo apt-get -q -y -o DPkg::Lock::Timeout=600 install python3.11 python3.11-venv
  fi
  make_environment tpu,gcs 8>&-
  touch "$run/ready"
  echo "$(hostname): ready"
}

on_start() {      # on_start COMMAND_ID ARGUMENTS...
  flock -w 10 8 || { echo "error: $(hostname): a run is going on" >&2; return 2; }
  rm -f "$run/code" "$run/pid"      # the number of a run that has ended may be another's by now
  echo "$1" > "$run/command"
  shift
  cd "$dir"
  echo "--- $(hostname), started $(date -u +%FT%TZ)" >> "$run/log"
  # in a session of its own, which outlives this connection, and the exit code outlives a SIGTERM for all of it; the
  # watcher is in another and without the lock, so that it is no part of the run
  LAB_EXTRAS=tpu,gcs setsid bash -c 'asked= code=0 watcher=
    trap asked=yes TERM
    echo $$ > "$0/pid"
    if [ -e launch/notice.sh ]; then
      setsid launch/notice.sh $$ 8>&- &
      watcher=$!
    fi
    if [ -n "$asked" ]; then code=75; else launch/run.sh "$@" --distributed || code=$?; fi
    [ -z "$watcher" ] || kill -- "-$watcher" 2>/dev/null
    echo $code > "$0/code.new"
    mv "$0/code.new" "$0/code"' "$run" "$@" </dev/null >>"$run/log" 2>&1 &
}

on_state() {      # lab-state HOST bare|none|running|lost|CODE COMMAND_ID
  local state=none
  if ! flock -s -n 8; then state=running
  elif [ ! -e "$run/ready" ]; then state=bare
  elif [ -s "$run/code" ]; then state=$(cat "$run/code")
  elif [ -e "$run/command" ]; then state=lost
  fi
  echo "lab-state $(hostname) $state $(cat "$run/command" 2>/dev/null || echo -)"
}

on_stop() {      # on_stop SIGNAL
  for _ in {1..100}; do      # a run that starts has the lock before its number is told
    if flock -s -n 8 || { [ -s "$run/pid" ] && kill -s "$1" -- "-$(cat "$run/pid")" 2>/dev/null; }; then return; fi
    sleep 0.1
  done
  echo "error: $(hostname): something holds $run/lock, and no process of a run can be told to end; is setup going on?" >&2
  return 2
}

on_log() {      # on_log LINES FOLLOW
  [ -e "$run/log" ] || { echo "error: $(hostname): nothing was started here yet" >&2; return 2; }
  exec tail -n "$1" ${2:+-F} "$run/log"
}

on_end() {      # on_end CODE: the last lines of a worker that ended with it
  if [ "$(cat "$run/code" 2>/dev/null)" = "$1" ]; then tail -n 20 "$run/log" | sed "s/^/$(hostname): /"; fi
}
