#!/usr/bin/env bash
# scripts/judges.sh [JUDGE ...]: let real client packages judge a server of ours: openai 1.x and 3.x, anthropic,
# langchain-openai, instructor (all without arguments). Each lives in an environment of its own that is removed at the
# end: together they would hold each other at old versions. Not part of scripts/test: it fetches from PyPI.
set -euo pipefail

# shellcheck source=scripts/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

everyone=(openai1 openai3 anthropic langchain instructor)

# Prints what pip installs for judge $1.
package_of() {
  case "$1" in
    openai1) echo "openai<2" ;;
    openai3) echo "openai>=3" ;;
    langchain) echo "langchain-openai" ;;
    *) echo "$1" ;;
  esac
}

judges=("$@")
[[ ${#judges[@]} -eq 0 ]] && judges=("${everyone[@]}")
for judge in "${judges[@]}"; do
  if [[ " ${everyone[*]} " != *" $judge "* ]]; then
    say "there is no judge $judge; there are: ${everyone[*]}"
    exit 2
  fi
done

[[ -z "${MLXPAGED_SERVER:-}" ]] && ensure_venv run
scratch="$(mktemp -d)"
server=
finish() {
  [[ -n "$server" ]] && kill "$server" 2>/dev/null && wait "$server" 2>/dev/null
  rm -rf "$scratch"
}
trap finish EXIT

# MLXPAGED_SERVER names the program that serves, where it is not .venv's.
start_server() {
  # shellcheck disable=SC2086
  ${MLXPAGED_SERVER:-$venv/bin/mlxpaged} serve smollm2 --port 0 --ctx 2048 2>"$scratch/log" &
  server=$!
  until url="$(sed -n 's|.* is ready at \(http://[^/]*\)/v1 .*|\1|p' "$scratch/log")" && [[ -n "$url" ]]; do
    if ! kill -0 "$server" 2>/dev/null; then
      cat "$scratch/log" >&2
      exit 1
    fi
    sleep 0.2
  done
}

judge() {
  local name="$1" python="$scratch/$1/bin/python" satisfied=0
  "$(find_python)" -m venv "$scratch/$name" &&
    "$python" -m pip install --quiet --disable-pip-version-check "$(package_of "$name")" &&
    NO_PROXY="*" "$python" "$root/scripts/judges/${name%[13]}_client.py" "$url" || satisfied=1
  rm -rf "${scratch:?}/$name"
  return "$satisfied"
}

start_server
say "judging the server at $url"
failed=()
for name in "${judges[@]}"; do
  judge "$name" || failed+=("$name")
done
if [[ ${#failed[@]} -gt 0 ]]; then
  say "not satisfied: ${failed[*]}"
  exit 1
fi
say "all judges are satisfied: ${judges[*]}"
