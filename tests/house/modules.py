"""What the house tests share: every module of the package, found without naming any."""

import ast
import importlib.util
import pkgutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import deltabus

FOLDERS = ("bus", "transports", "codecs", "clients")


@dataclass(frozen=True)
class Module:
    name: str
    path: Path

    @property
    def is_package(self):
        return self.path.name == "__init__.py"

    @property
    def package(self):
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @cached_property
    def text(self):
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self):
        return ast.parse(self.text, str(self.path))


def folder_of(name):
    """The folder of the house that holds a module; None for a foreign one."""
    first, *rest = name.split(".")
    if first != "deltabus":
        return None
    return rest[0] if rest and rest[0] in FOLDERS else "clients"


def is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def all_modules():
    def fail(name):
        raise ImportError(f"package {name} cannot be imported")

    names = [m.name for m in pkgutil.walk_packages(deltabus.__path__, "deltabus.", onerror=fail)]
    return [Module(name, Path(importlib.util.find_spec(name).origin)) for name in ("deltabus", *names)]


MODULES = all_modules()
