"""What stands in deploy/ is what systemd understands, and what the command understands."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltabus.cli.app import app

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_understands_the_unit(tmp_path):
    unit = tmp_path / "deltabus.service"
    text = (DEPLOY / unit.name).read_text(encoding="utf-8")
    unit.write_text(text.replace("/opt/deltabus/bin/deltabus", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_their_options_exist():
    known = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    for name in ("deltabus.service", "Containerfile"):
        named = set(re.findall(r"(?<![a-z-])--[a-z][a-z-]+", (DEPLOY / name).read_text(encoding="utf-8")))
        options = {option for option in named if option not in {"--system", "--uid", "--no-cache-dir", "--from"}}
        assert len(options) > 2
        assert [option for option in options if option not in known] == []
