"""Imports point inwards, and a process that moves bytes loads no torch."""

import ast
import subprocess
import sys

import pytest

from .modules import FOLDERS, MODULES, Module, folder_of, is_module

MAY_IMPORT = {
    "bus": {"bus"},
    "transports": {"transports", "bus"},
    "codecs": {"codecs", "bus"},
    "clients": set(FOLDERS),
}
ONLY_FROM_BUS = {"codecs": "deltabus.bus.errors"}
NO_TORCH = ("bus", "transports")


def imports_of(module):
    """Each imported module as (line, is relative, absolute name); `from package import module` names the module."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, False, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield node.lineno, node.level > 0, name if folder_of(base) and is_module(name) else base


def faults_of(module):
    here = folder_of(module.name)
    for line, relative, name in imports_of(module):
        there = folder_of(name)
        place = f"{module.name}, line {line}: {name}"
        # `import codecs` is the standard library's.
        if name.split(".")[0] in FOLDERS and name != "codecs":
            yield f"{place} is a bare folder name; import it as deltabus.{name}"
        elif there is None:
            if here in NO_TORCH and name.split(".")[0] == "torch":
                yield f"{place} is imported in {here}/, which serves processes without torch"
        elif there not in MAY_IMPORT[here]:
            yield f"{place} points outwards: {here}/ may import {sorted(MAY_IMPORT[here])}"
        elif there != here and here in ONLY_FROM_BUS and name != ONLY_FROM_BUS[here]:
            yield f"{place} is more than {ONLY_FROM_BUS[here]}, all that {here}/ may take from {there}/"
        elif there != here and relative:
            yield f"{place} is in another folder; import it absolutely"
        elif there == here and not relative and name.rpartition(".")[0] == module.package:
            yield f"{place} is in the same package; import it relatively"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_imports_point_inwards(module):
    assert not list(faults_of(module))


@pytest.mark.parametrize(
    ("name", "code", "fault"),
    [
        ("deltabus.bus.x", "import deltabus.codecs.schema", "points outwards"),
        ("deltabus.bus.x", "from deltabus import codecs", "points outwards"),
        ("deltabus.bus.x", "from deltabus import Publisher", "points outwards"),
        ("deltabus.bus.x", "def f():\n    import torch.nn", "without torch"),
        ("deltabus.bus.x", "from deltabus.bus.errors import DeltabusError", "relatively"),
        ("deltabus.transports.x", "from ..bus.errors import DeltabusError", "absolutely"),
        ("deltabus.transports.x", "from deltabus.codecs import schema", "points outwards"),
        ("deltabus.codecs.x", "from deltabus.bus import version", "more than"),
        ("deltabus.codecs.x", "from deltabus.bus import *", "more than"),
        ("deltabus.x", "import bus", "bare"),
        ("deltabus.x", "from clients.publisher import Publisher", "bare"),
        ("deltabus.x", "import codecs.schema", "bare"),
        ("deltabus.x", "from deltabus.publisher import Publisher", "relatively"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, name, code, fault):
    path = tmp_path / "x.py"
    path.write_text(code)
    (found,) = faults_of(Module(name, path))
    assert fault in found


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("deltabus.bus.x", "import codecs, json\nfrom .errors import DeltabusError"),
        ("deltabus.codecs.x", "from deltabus.bus.errors import DeltabusError\nfrom deltabus.bus import errors"),
        ("deltabus.transports.x", "from deltabus.bus.transport import Transport"),
        ("deltabus.cli.x", "from deltabus.publisher import Publisher\nfrom deltabus.codecs.schema import Schema"),
    ],
)
def test_a_right_import_is_let_through(tmp_path, name, code):
    path = tmp_path / "x.py"
    path.write_text(code)
    assert not list(faults_of(Module(name, path)))


def test_bus_and_transports_load_no_torch():
    names = [module.name for module in MODULES if folder_of(module.name) in NO_TORCH]
    assert {"deltabus.bus.message", "deltabus.transports.registry"} <= set(names)
    code = (
        "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "deltabus", *names], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
