# Sourced by the other scripts. Makes .venv in the project's root if it is missing or its pins have changed, with the
# extras given: `make_environment test`. The newest Python that works is taken; a name on the PATH may be a shim that
# does not run. LAB_VENV puts the environment elsewhere.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${LAB_VENV:-$root/.venv}

find_python() {
  local name
  for name in python3.13 python3.12 python3.11 python3; do
    if "$name" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  echo "error: no Python 3.11, 3.12 or 3.13 with its venv module; on Debian: apt-get install python3 python3-venv" >&2
  return 2
}

is_made() {      # is_made FILE STAMP: whether the environment is there, with what the stamp stands for
  [ -x "$venv/bin/python" ] && [ "$(cat "$1" 2>/dev/null)" = "$2" ]
}

make_environment() {
  local extras=$1 python stamp done_
  done_="$venv/.lab${extras:+-$extras}"        # what was installed with these extras
  stamp="$(cat "$root/pyproject.toml" "$root/constraints.txt" | sha256sum | cut -d' ' -f1) $root"
  if is_made "$done_" "$stamp"; then
    return
  fi
  python=$(find_python) || return
  mkdir -p "$venv"
  exec 9>"$venv.lock"
  if ! flock -n 9; then                        # of two starts at once, one makes it
    echo "waiting for another start, which makes the environment in $venv" >&2
    flock 9
  fi
  if is_made "$done_" "$stamp"; then           # by one that has ended since
    exec 9>&-
    return
  fi
  echo "making the environment in $venv with $("$python" --version); about a minute" >&2
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then      # missing, or left half made
    "$python" -m venv --clear "$venv"
  fi
  # a caller's `make_environment || ...` would switch `set -e` off in here
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv -c "$root/constraints.txt" || return
  # to bytecode now: where PYTHONDONTWRITEBYTECODE is set, as in many containers, each start would compile all modules
  # anew, and to import TensorFlow take 18 s in place of 6
  VIRTUAL_ENV=$venv UV_PYTHON_DOWNLOADS=never "$venv/bin/uv" pip install --quiet --compile-bytecode \
    -e "$root${extras:+[$extras]}" -c "$root/constraints.txt" || return
  echo "$stamp" > "$done_"
  exec 9>&-
}
