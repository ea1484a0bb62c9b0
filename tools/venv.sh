#!/usr/bin/env bash
# Make or refresh a virtual environment from a lock file, saying what happens while it does.
#   tools/venv.sh DIR LOCK_FILE "WHAT FOR" [pip options]
set -euo pipefail

dir=$1 lock=$2 purpose=$3
shift 3
python=${PYTHON:-python3}
log=$dir/setup.log

fail() {
  printf '\nerror: %s\n' "$*" >&2
  exit 1
}

command -v "$python" >/dev/null || fail "'$python' was not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "Python 3.11 or newer is needed, but '$python' is $("$python" -V 2>&1); name another: make PYTHON=/path/to/python3.11"
[[ -f $lock ]] || fail "$lock is missing: it lists the packages of $dir"

if ! "$dir/bin/python" -c '' 2>/dev/null; then
  echo "[1/3] making $dir ($purpose) with $("$python" -V)"
  "$python" -m venv --clear "$dir" || fail "could not make $dir; on Debian the package python3-venv may be missing"
else
  echo "[1/3] $dir is there ($purpose)"
fi

total=$(grep -c -E '^[A-Za-z0-9]' "$lock")
echo "[2/3] installing $total pinned packages from $lock; the log is $log"
# pip's own output goes to the log; one line a download shows that it moves.
# Bytecode is left to the first import: of a large library only a part is ever imported.
pip() { "$dir/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off --no-compile "$@"; }
if ! pip "$@" -r "$lock" 2>&1 | tee "$log" | awk -v total="$total" '
    /^(Collecting|Requirement already satisfied: )/ { n++ }
    /^ *Downloading .* \([0-9.]+ MB\)/ { big = $NF == "MB)" && substr($(NF - 1), 2) + 0 >= 20
      if (big) { name = $2; sub(/.*\//, "", name); printf "      %s %s %s\n", name, $(NF - 1), $NF; fflush() } }
    /^Collecting/ && n % 10 == 0 { printf "      %d of about %d\n", n, total; fflush() }
    /^Installing collected/ { print "      unpacking"; fflush() }'; then
  tail -n 25 "$log" >&2
  fail "pip could not install $lock (see above, and $log)"
fi

echo "[3/3] installing this project into it"
pip --no-deps --quiet --editable . >>"$log" 2>&1 || { tail -n 25 "$log" >&2; fail "could not install the project (see $log)"; }
