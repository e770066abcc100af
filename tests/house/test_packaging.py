"""What is built holds every file, under one name and one version, from pinned dependencies."""

import importlib.metadata
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import deltabus

from .modules import FOLDERS, MODULES

ROOT = Path(__file__).parents[2]
# What torch brings along differs from machine to machine; torch pins it by itself.
BROUGHT_BY_TORCH = re.compile(r"nvidia-.*|cuda-.*|triton")


@pytest.fixture(scope="module")
def settings():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def files_of_the_house():
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def package_of(folder):
    parts = folder.relative_to(ROOT).parts
    return ".".join(("deltabus", *(parts[1:] if parts[0] == "clients" else parts)))


def test_every_folder_of_modules_is_a_package_that_is_mapped(settings):
    tools = settings["tool"]["setuptools"]
    folders = {path.parent for path in files_of_the_house() if path.suffix == ".py"}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []
    assert sorted(map(package_of, folders)) == sorted(tools["packages"])
    assert tools["package-dir"] == {package_of(ROOT / folder): folder for folder in FOLDERS}


def test_every_module_is_installed():
    there = {package_of(path.parent) + "." + path.stem for path in files_of_the_house() if path.suffix == ".py"}
    assert {name.removesuffix(".__init__") for name in there} == {module.name for module in MODULES}


def test_every_other_file_is_package_data(settings):
    patterns = [(p, glob) for p, globs in settings["tool"]["setuptools"]["package-data"].items() for glob in globs]
    data = [(package_of(path.parent), path) for path in files_of_the_house() if path.suffix != ".py"]

    def matches(pattern, item):
        return pattern[0] == item[0] and fnmatch(item[1].name, pattern[1])

    assert [item for item in data if not any(matches(pattern, item) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(matches(pattern, item) for item in data)] == []
    assert ("deltabus", ROOT / "clients/py.typed") in data


def test_files_that_the_metadata_names_exist(settings):
    project = settings["project"]
    named = [project["readme"], *project["license-files"], "CHANGELOG.md", "CONTRIBUTING.md", "constraints.txt"]
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_one_version(settings):
    version = settings["project"]["version"]
    assert str(Version(version)) == version
    assert importlib.metadata.version("deltabus") == version
    assert deltabus.__version__ == version
    assert "__version__" not in vars(deltabus), "the version is looked up when it is asked for, not at import"


def test_commands_exist(settings):
    for name, target in settings["project"]["scripts"].items():
        (found,) = importlib.metadata.entry_points(group="console_scripts", name=name)
        assert found.value == target
        assert callable(found.load())


def test_every_dependency_of_development_is_pinned(settings):
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert [str(pin) for pin in pins if not re.fullmatch(r"==[^*,+]+", str(pin.specifier))] == []
    names = [canonicalize_name(pin.name) for pin in pins]
    assert names == sorted(set(names))

    project = settings["project"]
    extras = [text for texts in project["optional-dependencies"].values() for text in texts]
    wanted = [Requirement(text) for text in (*project["dependencies"], *extras)]
    seen = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen or name == "deltabus" or BROUGHT_BY_TORCH.fullmatch(name):
            continue
        seen.add(key)
        wanted += [
            inner
            for inner in map(Requirement, importlib.metadata.requires(name) or [])
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in (*requirement.extras, ""))
        ]
    assert {name for name, _ in seen} == set(names)
