import os
import sys

import pytest

from script.driver import environment


class WentOver(Exception):
    """What stands in for the program that os.execv would start."""


@pytest.fixture
def set_up(tmp_path, monkeypatch):
    """Puts a shell script in place of setup_env.sh."""
    monkeypatch.delenv(environment.INTERPRETER_VARIABLE)
    path = tmp_path / "setup_env.sh"
    monkeypatch.setattr(environment, "SET_UP", path)

    def execv(program, arguments):
        raise WentOver(program, arguments, os.environ[environment.INTERPRETER_VARIABLE])

    monkeypatch.setattr(environment.os, "execv", execv)

    def answers(text):
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    return answers


def test_the_program_starts_again_in_the_environment(set_up):
    set_up("echo /env/bin/python")
    with pytest.raises(WentOver) as over:
        environment.enter("script.driver.draw", ["both", "mxfp8"])
    arguments = ["/env/bin/python", "-m", "script.driver.draw", "both", "mxfp8"]
    assert over.value.args == ("/env/bin/python", arguments, "/env/bin/python")


def test_it_stays_where_it_already_is(set_up):
    set_up(f"echo {sys.executable}")
    environment.enter("script.driver.draw", [])
    set_up("exit 9")  # and does not ask a second time
    environment.enter("script.driver.draw", [])


def test_another_name_of_the_same_interpreter_is_no_endless_loop(set_up, monkeypatch):
    monkeypatch.setenv(environment.INTERPRETER_VARIABLE, "/env/bin/python")
    set_up("echo /env/bin/python")
    environment.enter("script.driver.draw", [])


def test_no_environment_ends_the_program(set_up):
    set_up("echo 'setup_env: no' >&2; exit 3")
    with pytest.raises(SystemExit) as stop:
        environment.enter("script.driver.draw", [])
    assert stop.value.code == 3
