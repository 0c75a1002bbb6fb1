# Sourced by scripts/demo and scripts/test: `environment EXTRAS` makes or refreshes .venv. Run from the root of the
# checkout. torch goes first and alone, so that a CPU or CUDA build of your choice that is already there is kept.

environment() {
    local extras=$1 python wanted stamp=.venv/specdraft-stamp-$1
    wanted=$(cat pyproject.toml constraints.txt scripts/environment.sh | cksum)
    if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
    if [ ! -x .venv/bin/python ]; then
        python=${PYTHON:-$(command -v python3.11 || command -v python3)}
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "specdraft needs Python 3.11 or newer; $python is older. Set PYTHON=/path/to/python." >&2
            return 2
        }
        echo "Making .venv with $python" >&2
        "$python" -m venv .venv
    fi
    echo "Installing specdraft[$extras] into .venv (the first time takes some minutes)" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]" >&2
    echo "$wanted" >"$stamp"
}
