# Sourced by launch/tpu_vm.sh: what the workers say, what that comes to, and what babysit does about it.

run_states() {      # HOST STATE COMMAND_ID, a worker a line; fails if one does not answer
  local out
  out=$(remote all all on_state 2>&1) || { echo "$out" >&2; return 1; }
  sed -n 's/.*lab-state //p' <<<"$out" | sort
}

outcome() {      # outcome STATES: running, partly, bare, none, or an exit code: the cause before what it made of others
  local states state
  states=$(awk 'NF {print $2}' <<<"$1" | sort -ur | tr '\n' ' ')
  case " $states" in
    " running ") echo running; return ;;
    *" running "*) echo partly; return ;;
    *" bare "*) echo bare; return ;;
    " none " | " ") echo none; return ;;
    " 0 ") echo 0; return ;;
  esac
  for state in $states; do
    case $state in
      0 | 7 | 75 | none | lost) ;;
      *) [ "$state" -ge 128 ] || { echo "$state"; return; } ;;      # from 128 on: killed, as by a lost connection
    esac
  done
  case " $states" in *" 75 "*) echo 75 ;; *) echo 7 ;; esac
}

trouble() {      # trouble CODE MESSAGE: waits before one more restart, or ends with CODE after too many in a row
  local delay=0
  troubles=$((troubles + 1))
  say "$2"
  [ "$troubles" -le "$retries" ] || { say "$retries restarts in a row did not help: giving up"; exit "$1"; }
  if [ "$troubles" -gt 1 ]; then
    delay=$((backoff << (troubles > 12 ? 10 : troubles - 2)))
    delay=$((delay < 600 ? delay : 600))
  fi
  sleep "$delay"
}

babysit() {
  local state states result ours='' began=0 partly=''      # ours: this command was started, or found running
  while :; do
    state=$(vm_state) || { trouble 1 "gcloud does not tell the state of $name"; continue; }
    case $state in
      READY | ACTIVE) ;;
      PREEMPTED | TERMINATED | SUSPENDED | FAILED | NOT_FOUND)
        ours=''
        trouble 1 "$name: $state; making it anew"
        [ "$state" = NOT_FOUND ] || delete_vm || continue
        create_vm || say "it could not be made"
        continue ;;
      *ING | ACCEPTED | WAITING_FOR_RESOURCES) note "$name: $state; waiting"; sleep "$poll"; continue ;;
      *) say "$name: $state, which someone has to look at"; return 1 ;;
    esac
    states=$(run_states) || { trouble 1 "a worker does not answer"; continue; }
    result=$(outcome "$states")
    [ "$result" = partly ] || partly=''
    case $result in
      running | partly)
        if [ -z "$ours" ]; then
          [ "$(awk '$2 == "running" {print $3}' <<<"$states" | sort -u)" = "$(command_id)" ] ||
            fail "$name is running another command; stop ends it"
          ours=yes began=$SECONDS
        fi
        note "$result"
        if [ "$result" = partly ]; then
          end_others
        elif [ $((SECONDS - began)) -ge "$steady" ]; then
          troubles=0
        fi
        sleep "$poll"; continue ;;
      bare) say "setting up"; setup || trouble 1 "setting up failed"; continue ;;
    esac
    if [ -n "$ours" ]; then
      case $result in
        0) say "done"; return ;;
        7 | 75) trouble "$result" "ended with exit code $result" ;;
        *)
          say "ended with exit code $result, which starting again does not mend"
          remote all all on_end "$result" || true
          return "$result" ;;
      esac
    fi
    say "starting"
    noted=''
    if start; then ours=yes began=$SECONDS; else trouble 1 "it could not be started on every worker"; fi
  done
}

end_others() {      # the workers that still run when one has ended, and no longer end by themselves
  [ -n "$partly" ] || partly=$SECONDS
  if [ $((SECONDS - partly)) -ge "$grace" ]; then
    say "ending the workers that are left"
    remote all all on_stop KILL || true
  fi
}
