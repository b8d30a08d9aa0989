# Sourced by run and test: makes and refreshes .venv in the repository root. Defines `root`, `venv` and `ensure_venv`.
# shellcheck shell=bash

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"

say() { printf 'mlxpaged: %s\n' "$*" >&2; }

# True when $1 is a Python that can run mlxpaged: 3.11 or newer and, on a Mac, native rather than under Rosetta.
usable() {
  "$1" -c 'import sys, platform
mac_ok = sys.platform != "darwin" or platform.machine() == "arm64"
sys.exit(not (sys.version_info >= (3, 11) and mac_ok))' 2>/dev/null
}

# Prints the first usable Python: MLXPAGED_PYTHON alone when it is set, else the usual names.
find_python() {
  local candidate candidates=(python3 python3.14 python3.13 python3.12 python3.11)
  [[ -n "${MLXPAGED_PYTHON:-}" ]] && candidates=("$MLXPAGED_PYTHON")
  for candidate in "${candidates[@]}"; do
    if command -v "$candidate" >/dev/null && usable "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  say "needs Python 3.11 or newer (on a Mac: the arm64 build)$(describe_found); set MLXPAGED_PYTHON=/path/to/python3.11"
  return 1
}

describe_found() {
  local name="${MLXPAGED_PYTHON:-python3}"
  if command -v "$name" >/dev/null; then
    printf '; found %s' "$("$name" -c 'import sys, platform; print(f"{sys.executable} {platform.python_version()} on {platform.machine()}")' 2>/dev/null || printf '%s, which does not start' "$name")"
  else
    printf '; found no %s' "$name"
  fi
}

make_venv() {
  if ! "$1" -m venv --clear "$venv"; then
    say "that Python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
    return 1
  fi
  printf '%s\n' "$root" >"$venv/root"
}

# ensure_venv run|test: .venv holds the package (test: with the dev extra). A stamp of pyproject.toml, written only
# after a finished install, makes the second call quick and an interrupted first one harmless.
ensure_venv() {
  local kind="$1" python="" want
  want="$(cksum <"$root/pyproject.toml") $root"
  [[ "$(cat "$venv/stamp-test" 2>/dev/null)" == "$want" ]] && usable "$venv/bin/python" && return
  if [[ "$kind" == run && "$(cat "$venv/stamp-run" 2>/dev/null)" == "$want" ]] && usable "$venv/bin/python"; then
    return
  fi
  # A moved folder leaves scripts in .venv that name the old place: such an environment is made anew.
  if ! usable "$venv/bin/python" || [[ "$(cat "$venv/root" 2>/dev/null)" != "$root" ]]; then
    python="$(find_python)"
  fi
  say "setting up .venv${python:+ with $python} (once; a minute or two, more on a slow line)"
  [[ -z "$python" ]] || make_venv "$python"
  if ! "install_for_$kind"; then
    say "the install failed (above); run the same command again once the cause is gone"
    return 1
  fi
  printf '%s\n' "$want" >"$venv/stamp-$kind"
}

# For a person who wants to chat: what pip has to say only where it fails.
install_for_run() {
  local log="$venv/install.log" ticker="" failed=0
  : >"$log"
  if [[ -t 2 && "${TERM:-dumb}" != dumb ]]; then
    show_progress "$log" &
    ticker=$!
    # shellcheck disable=SC2064
    trap "kill $ticker 2>/dev/null" EXIT
  fi
  pip_install "$root" --progress-bar off >"$log" 2>&1 || failed=1
  if [[ -n "$ticker" ]]; then
    trap - EXIT
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    printf '\r\033[K' >&2
  fi
  [[ "$failed" -eq 0 ]] || cat "$log" >&2
  return "$failed"
}

# For a log that others read: pip's own words, which on a terminal show its progress.
install_for_test() {
  local quiet=(--quiet)
  [[ -t 2 ]] && quiet=()
  pip_install "${root}[dev]" ${quiet[@]+"${quiet[@]}"} >&2
}

# pip_install TARGET [FLAGS]
pip_install() {
  PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip install "${@:2}" --editable "$1"
}

# One line that is written over every second: how long it takes and what pip is at. Ends with the script.
show_progress() {
  local log="$1" doing start="$SECONDS"
  while kill -0 $$ 2>/dev/null; do
    read -r doing < <(tail -n 1 "$log") || true
    printf '\r\033[K  %d s  %.60s' "$((SECONDS - start))" "$doing" >&2
    sleep 1
  done
}
