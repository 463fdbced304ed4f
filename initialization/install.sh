#!/usr/bin/env bash
# Installs Specter into a virtual environment: supplied wheels first, after their SHA-256 was checked, then the rest
# from an online package index at the versions of constraints.txt.
#
#   bash initialization/install.sh [--wheels DIR] [--venv DIR] [--python PYTHON] [--dry-run]
#
#   --wheels DIR     supplied wheels and their SHA256SUMS. Default: $SPECTER_WORK/specter-assets/wheels where that
#                    exists; otherwise everything comes from the index
#   --venv DIR       the environment to make or to complete. Default: .venv of the checkout, which make uses too
#   --python PYTHON  an interpreter of Python 3.11 or newer. Default: python3
#   --dry-run        check the wheels, print the commands, install nothing
#
# Exit codes: 0; 1 pip or venv failed; 2 arguments, interpreter or a wheel that fails its check.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=python3
wheels_dir=
dry_run=false

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

say() {
    printf '%s\n' "$1" >&2
}

# Runs a command, or only prints it.
run() {
    if $dry_run; then
        printf '%q ' "$@"
        printf '\n'
    else
        "$@" || { say "error: failed: $*"; exit 1; }
    fi
}

# Package name of a wheel or of a pinned line, as package indexes compare names.
normal() {
    printf '%s' "$1" | tr '[:upper:]' '[:lower:]' | sed -E 's/[-_.]+/-/g'
}

while (($#)); do
    case $1 in
        --wheels | --venv | --python)
            (($# >= 2)) || fail "$1 needs a value; see --help"
            case $1 in
                --wheels) wheels_dir=$2 ;;
                --venv) venv=$2 ;;
                --python) python=$2 ;;
            esac
            shift 2
            ;;
        --dry-run)
            dry_run=true
            shift
            ;;
        -h | --help)
            sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *) fail "unknown argument $1; see --help" ;;
    esac
done

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    fail "--python $python cannot be run; name an interpreter of Python 3.11 or newer"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "--python $python is Python $version; 3.11 is the least, name another one"

# Which wheels are supplied, and are they the ones that SHA256SUMS names?
wheels=()
if [[ -z $wheels_dir && -n ${SPECTER_WORK:-} && -d $SPECTER_WORK/specter-assets/wheels ]]; then
    wheels_dir=$SPECTER_WORK/specter-assets/wheels
fi
if [[ -n $wheels_dir ]]; then
    [[ -d $wheels_dir ]] || fail "--wheels $wheels_dir: no such folder"
    wheels_dir=$(cd "$wheels_dir" && pwd)
    [[ -f $wheels_dir/SHA256SUMS ]] || fail "$wheels_dir has no SHA256SUMS; extract the archive of wheels again"
    for wheel in "$wheels_dir"/*.whl; do
        [[ -e $wheel ]] || fail "$wheels_dir has no wheels; extract the archive of wheels again"
        grep -qFx -- "$(sha256sum "$wheel" | cut -d ' ' -f 1)  ${wheel##*/}" "$wheels_dir/SHA256SUMS" ||
            fail "${wheel##*/} is not what $wheels_dir/SHA256SUMS says; extract the archive of wheels again"
        say "${wheel##*/}: OK"
        wheels+=("$wheel")
    done
    named=$(grep -c . "$wheels_dir/SHA256SUMS")
    ((named == ${#wheels[@]})) ||
        fail "$wheels_dir/SHA256SUMS names $named wheels, ${#wheels[@]} are there; extract the archive of wheels again"
else
    say "no supplied wheels: everything comes from the package index"
fi

# The pins, with those of supplied packages replaced by the supplied version.
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
supplied=' '
for wheel in "${wheels[@]}"; do
    IFS=- read -r name number _ <<<"${wheel##*/}"
    supplied+="$(normal "$name") "
    printf '%s==%s\n' "$name" "$number" >>"$pins"
done
while IFS= read -r line; do
    pinned=$(normal "${line%%==*}")
    if [[ $supplied == *" $pinned "* ]]; then
        say "$pinned: the supplied wheel replaces the pin ${line##*==}"
    else
        printf '%s\n' "$line" >>"$pins"
    fi
done < <(grep -vE '^[[:space:]]*(#|$)' "$root/constraints.txt")

run "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --disable-pip-version-check)
if ((${#wheels[@]})); then
    run "${pip[@]}" --no-index --no-deps "${wheels[@]}"
fi
run "${pip[@]}" -c "$pins" torch
run "${pip[@]}" -c "$pins" "${wheels[@]}" -e "${root}[dev]"
run touch "$venv/.installed"
$dry_run || say "installed into $venv; make doctor says what this machine lacks"
