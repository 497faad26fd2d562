"""Set-up in a small checkout with one requirement, which pip finds in a directory: no network."""

import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BROUGHT_BY_TORCH = {"triton"}
sys.path.insert(0, str(ROOT / "requirements"))
import check  # noqa: E402  # a script beside the files that it reads, in no package

PACKAGE = "quantscope-probe"


def write_wheel(directory, version):
    """The smallest wheel that pip installs."""
    stem = f"quantscope_probe-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n"
    tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("quantscope_probe.py", f"version = {version!r}\n")
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
        wheel.writestr(f"{stem}.dist-info/WHEEL", tag)
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


class Checkout:
    """A checkout that needs one package, and the directory where pip looks for it."""

    def __init__(self, home):
        self.home = home
        self.wheels = home.parent / f"wheels-of-{home.name.replace(' ', '-')}"  # pip splits the list at spaces
        (home / "script").mkdir(parents=True)
        (home / "requirements").mkdir()
        shutil.copy(ROOT / "script" / "setup_env.sh", home / "script")
        shutil.copy(ROOT / "requirements" / "check.py", home / "requirements")
        write_wheel(self.wheels, "1.0")
        self.require("1.0")

    def require(self, version):
        (self.home / "requirements" / "constraints.txt").write_text(f"{PACKAGE}=={version}\n")
        (self.home / "requirements" / "runtime.txt").write_text(f"{PACKAGE}>={version}\n")
        (self.home / "requirements" / "test.txt").write_text(f"{PACKAGE}\n")

    def set_up(self, *arguments, **variables):
        """Run it without network, and with no environment active unless `variables` say so."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "VIRTUAL", "CONDA"))}
        plain_path = os.pathsep.join([str(Path(sys.base_prefix) / "bin"), "/usr/bin", "/bin"])
        offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)}
        environment = kept | {"PATH": plain_path} | offline | variables
        command = [str(self.home / "script" / "setup_env.sh"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    @property
    def python(self):
        return self.home / ".venv" / "bin" / "python"

    def installed(self):
        code = "import quantscope_probe; print(quantscope_probe.version)"
        return subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkout that has been set up once, and what that said."""
    checkout = Checkout(tmp_path_factory.mktemp("made") / "a checkout")  # a space in the path
    return checkout, checkout.set_up()


def test_the_first_call_makes_an_environment(made):
    checkout, first = made
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{checkout.python}\n"
    assert f"lacks {PACKAGE}>=1.0" in first.stderr
    assert checkout.installed() == "1.0"


def test_the_second_call_is_quick_and_silent(made):
    checkout, _ = made
    began = time.monotonic()
    second = checkout.set_up(PIP_FIND_LINKS="/nowhere")
    assert time.monotonic() - began < 1
    assert (second.returncode, second.stdout, second.stderr) == (0, f"{checkout.python}\n", "")


def test_processes_at_once_install_once(made):
    checkout, _ = made
    (checkout.home / ".venv" / ".quantscope-runtime").unlink()
    with ThreadPoolExecutor() as threads:
        calls = list(threads.map(lambda _: checkout.set_up(), range(3)))
    assert [(call.returncode, call.stdout) for call in calls] == [(0, f"{checkout.python}\n")] * 3
    assert sum("installing the packages" in call.stderr for call in calls) == 1


def test_changed_requirements_are_installed(made):
    checkout, _ = made
    write_wheel(checkout.wheels, "2.0")
    checkout.require("2.0")
    assert checkout.set_up().returncode == 0
    assert checkout.installed() == "2.0"


def test_an_active_environment_that_has_what_is_needed_is_used(made, tmp_path):
    checkout, _ = made
    other = Checkout(tmp_path / "other")
    active = {"VIRTUAL_ENV": str(checkout.python.parents[1]), "PATH": f"{checkout.python.parent}:/usr/bin:/bin"}
    answer = other.set_up(**active)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert Path(answer.stdout.strip()).parent == checkout.python.parent
    assert not other.python.exists()


def test_test_requirements_are_a_step_of_their_own(made):
    checkout, _ = made
    assert checkout.set_up().returncode == 0
    again = checkout.set_up("--test")
    assert (again.returncode, again.stdout) == (0, f"{checkout.python}\n")
    assert (checkout.home / ".venv" / ".quantscope-test").is_file()


def test_what_pip_can_not_find_is_one_line(made, tmp_path):
    checkout = Checkout(tmp_path / "checkout")
    shutil.copytree(made[0].home / ".venv", checkout.home / ".venv", symlinks=True)
    (checkout.home / ".venv" / ".quantscope-runtime").unlink()
    checkout.require("7.0")
    failed = checkout.set_up()
    assert (failed.returncode, failed.stdout) == (1, "")
    complaint = failed.stderr.splitlines()[-1]
    assert complaint.startswith("setup_env: could not install the packages: ERROR: ")
    assert PACKAGE in complaint
    assert not (checkout.home / ".venv" / ".quantscope-runtime").exists()


def test_no_network_is_said(made, tmp_path):
    checkout = Checkout(tmp_path / "checkout")
    shutil.copytree(made[0].home / ".venv", checkout.home / ".venv", symlinks=True)
    checkout.require("7.0")
    nobody = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    failed = checkout.set_up(**nobody)
    assert failed.returncode == 1
    assert "no connection to the package index" in failed.stderr.splitlines()[-1]


def test_no_python_is_said(tmp_path):
    checkout = Checkout(tmp_path / "checkout")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "cmp", "cat"):
        (tools / name).symlink_to(shutil.which(name))
    (tools / "python3").write_text("#!/bin/bash\nexit 127\n")  # as a shim without a Python behind it
    (tools / "python3").chmod(0o755)
    for arguments in ([], ["--interpreter"]):
        failed = checkout.set_up(*arguments, PATH=str(tools))
        assert (failed.returncode, failed.stdout) == (1, "")
        assert re.fullmatch(r"setup_env: no Python .*3\.10.* found on the PATH\. Install one.*\n", failed.stderr)


def test_an_interpreter_is_found_without_setting_up(tmp_path):
    checkout = Checkout(tmp_path / "checkout")
    answer = checkout.set_up("--interpreter")
    assert answer.returncode == 0
    assert Path(answer.stdout.strip()).is_file()
    assert not checkout.python.exists()


def test_wrong_usage(tmp_path):
    failed = Checkout(tmp_path / "checkout").set_up("--quick")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == "setup_env: unknown option --quick; allowed: --test, --interpreter, --help\n"


@pytest.mark.parametrize(
    ("version", "clauses", "holds"),
    [
        ("2.13.0+cpu", ">=2.6", True),
        ("2.6.0a0+df5bbc09d1.nv24", ">=2.6", True),
        ("2.5.1", ">=2.6", False),
        ("0.16.1", ">=0.14,<0.20", True),
        ("0.20", ">=0.14,<0.20", False),
        ("0.20.0rc0", ">=0.14,<0.20", False),
        ("1.10", ">=1.9", True),
        ("3", "==3.0.0", True),
        ("3.1", "!=3.1", False),
        ("1.0", "", True),
    ],
)
def test_versions(version, clauses, holds):
    assert check.satisfies(version, clauses) is holds


def test_a_clause_that_can_not_be_read_is_an_error():
    with pytest.raises(ValueError, match=r"~=1\.0"):
        check.satisfies("1.0", "~=1.0")


def pins():
    """{name: versions} of constraints.txt, markers left out."""
    found = {}
    for line in (ROOT / "requirements" / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split(";")[0].strip().split("==")
            found.setdefault(name, []).append(version)
    return found


def test_what_is_for_another_system_is_left_out(tmp_path):
    file = tmp_path / "some.txt"
    file.write_text(f'a>=1,<2 ; sys_platform == "{sys.platform}"\nb>=1 ; sys_platform == "other"\nc>=3\n')
    assert list(check.read_requirements(file)) == [("a", ">=1,<2"), ("c", ">=3")]


@pytest.mark.parametrize("file", ["runtime.txt", "test.txt"])
def test_every_requirement_is_pinned_within_its_range(file):
    pinned = pins()
    assert not BROUGHT_BY_TORCH & set(pinned)  # a pin would contradict that of torch's CUDA build
    for name, clauses in check.read_requirements(ROOT / "requirements" / file):
        if name in BROUGHT_BY_TORCH:
            continue
        versions = pinned[name.lower().replace("_", "-")]
        assert all(check.satisfies(version, clauses) for version in versions), name


def test_this_environment_holds_what_the_project_needs():
    assert list(check.lacking(ROOT / "requirements" / "runtime.txt")) == []
