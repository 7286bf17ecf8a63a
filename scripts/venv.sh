# Sourced by run.sh and test.sh, which set $root: makes the environment and sets $python.
# The active venv is used where there is one; otherwise .venv in the repository.

venv=${VIRTUAL_ENV:-$root/.venv}
python=$venv/bin/python

fail() { echo "$0: $1" >&2; exit 1; }

# A dangling link counts as missing: that is what an upgrade of the system's Python leaves.
if [[ ! -x $python ]]; then
    [[ -z ${VIRTUAL_ENV:-} ]] || fail "VIRTUAL_ENV is $venv but $python is not there; deactivate it"
    command -v python3 > /dev/null || fail "python3 is not on PATH; install Python 3.11 or newer"
    base=python3
else
    base=$python
fi
found=$("$base" -c 'import platform; print(platform.python_version())')
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed, $base is $found; install one or activate a venv of one"
if [[ $base == python3 ]]; then
    echo "making $venv with Python $found"
    python3 -m venv --clear "$venv" ||
        fail "python3 -m venv failed, see above (Debian, Ubuntu: apt install python3-venv)"
fi

# The stamp names the requirements that were installed, so that a second run starts at once.
stamp=$venv/requirements.sha256
wanted=$(sha256sum < "$root/requirements.txt")
if [[ ! -f $stamp || $(< "$stamp") != "$wanted" ]]; then
    "$python" -m pip --version > /dev/null 2>&1 || "$python" -m ensurepip > /dev/null 2>&1 ||
        fail "$venv has no pip; install it there (uv: uv pip install pip)"
    echo "installing requirements.txt into $venv (with CUDA's libraries this is several GB)"
    "$python" -m pip install --quiet --no-input --disable-pip-version-check \
        -r "$root/requirements.txt" || fail "pip could not install requirements.txt; see above"
    echo "$wanted" > "$stamp"
fi
