"""The Makefile's environments: what was interrupted is made anew, by the same command."""

import os
import subprocess

import pytest
from conftest import ROOT

# Stands for python3, and for the pip that its venv makes: writes down each call, and fails at the FAILth.
FAKE = """#!/bin/sh
[ "$1" != -c ] || exit 0
echo "$@" >> calls
[ "$(wc -l < calls)" != "$FAIL" ] || exit 1
[ "$2" != venv ] || { rm -rf "$4" && mkdir -p "$4/bin" && cp fake "$4/bin/pip" && cp fake "$4/bin/python"; }
"""


@pytest.fixture
def folder(tmp_path):
    subprocess.run(["cp", "-r", ROOT / "Makefile", *ROOT.glob("requirements*"), tmp_path], check=True)
    return tmp_path


@pytest.mark.parametrize("target, calls", [(".venv", 4), (".venv-lab", 3), (".venv-gpu", 2)])
def test_an_interrupted_installation_begins_anew(target, calls, folder):
    for name in ("fake", "npm"):
        (folder / name).write_text(FAKE)
        (folder / name).chmod(0o755)

    def made(fail: int) -> tuple[int, list[str]]:
        environment = os.environ | dict(FAIL=str(fail), PATH=f"{folder}:{os.environ['PATH']}")
        (folder / "calls").write_text("")
        done = subprocess.run(["make", target, "PYTHON=./fake"], cwd=folder, env=environment)
        return done.returncode, (folder / "calls").read_text().splitlines()

    for fail in range(1, calls + 1):
        code, called = made(fail)
        assert code and len(called) == fail and called[0] == f"-m venv --clear {target}"
    code, called = made(0)
    assert code == 0 and len(called) == calls and made(0) == (0, [])


def test_a_wrong_python_is_named_before_anything_is_made(folder):
    python = '#!/bin/sh\nexec python3 -c "import sys; sys.version_info = (3, 9); $2"\n'
    (folder / "python").write_text(python)
    (folder / "python").chmod(0o755)
    done = subprocess.run(["make", "demo", "PYTHON=./python"], cwd=folder, capture_output=True, text=True)
    said = "Python 3.11 to 3.14 is needed, but ./python is 3.9; name another one: make demo PYTHON=python3"
    assert done.returncode and done.stderr.startswith(said) and not (folder / ".venv-lab").exists()
