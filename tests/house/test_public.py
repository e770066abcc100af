"""What a module offers is what it says it offers, and says what it does."""

import ast
import importlib
import inspect
import re

import pytest

from .modules import MODULES, Module, folder_of

MOST_LINES = 500
_WITHOUT_DOCSTRING = {"overload", "setter", "deleter"}

each_module = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)


def is_public(name):
    return not name.startswith("_") or name == "__version__"


def top_level(nodes):
    """The statements of a module's body, those under `if`, `try` and `with` included."""
    for node in nodes:
        yield node
        for field in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from top_level(getattr(node, field, []))


def names_in(target):
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, ast.Tuple | ast.List):
        return [name for element in target.elts for name in names_in(element)]
    return names_in(target.value) if isinstance(target, ast.Starred) else []


def defined_in(module):
    """The public names that a module defines, and those that it hands on if it is a package or does nothing else."""
    names, handed_on = set(), set()
    for node in top_level(module.tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(name for target in node.targets for name in names_in(target))
        elif isinstance(node, ast.AnnAssign):
            names.update(names_in(node.target))
        elif type(node).__name__ == "TypeAlias":
            names.add(node.name.id)
        elif isinstance(node, ast.ImportFrom) and (node.level or folder_of(node.module)):
            handed_on.update(alias.asname or alias.name for alias in node.names)
    names = {name for name in names if is_public(name)}
    hands_on = module.is_package or (not names and "__all__ = [" in module.text)
    return names | {name for name in handed_on if is_public(name)} if hands_on else names


def public_definitions(nodes, owner=None):
    """Each public class, function and method, with the class that it stands in."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and is_public(node.name):
            marks = {getattr(mark, "attr", getattr(mark, "id", "")) for mark in node.decorator_list}
            if not marks & _WITHOUT_DOCSTRING:
                yield owner, node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, node)


def inherited_docstring(module, owner, node):
    """What the method of a base class says, for a method that fulfils its contract."""
    if owner is None or not owner.bases:
        return None
    found = getattr(importlib.import_module(module.name), owner.name, None)
    return inspect.getdoc(getattr(found, node.name, None))


def docstring_faults(module):
    for owner, node in public_definitions(top_level(module.tree.body)):
        name = f"{owner.name}.{node.name}" if owner else node.name
        docstring = ast.get_docstring(node) or inherited_docstring(module, owner, node) or ""
        first = docstring.partition("\n")[0]
        if not re.fullmatch(r"\S.*[.!?]", first) or re.search(r"[.!?] [A-Z]", first):
            yield f"{name}, line {node.lineno}: the docstring's first line is not one sentence: {first!r}"


@each_module
def test_all_is_what_is_public(module):
    imported = importlib.import_module(module.name)
    names = imported.__all__ if defined_in(module) else getattr(imported, "__all__", [])
    assert len(set(names)) == len(names)
    assert set(names) == defined_in(module)
    assert [name for name in names if not hasattr(imported, name)] == []


@each_module
def test_what_is_public_has_a_docstring_that_begins_with_one_sentence(module):
    assert not list(docstring_faults(module))


@each_module
def test_files_stay_short(module):
    assert len(module.text.splitlines()) <= MOST_LINES


def test_public_names_are_found_wherever_they_stand(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        "from a import b\nfrom .c import d\nif b:\n    A = 1\nelse:\n    B: int = 2\ntry:\n    def c(): pass\n"
        "except E:\n    _hidden = 3\nclass F: inner = 4\n(G, [H]) = I = 5\nasync def j(): pass\n"
    )
    assert defined_in(Module("deltabus.x", path)) == {"A", "B", "c", "F", "G", "H", "I", "j"}


@pytest.mark.parametrize("docstring", ["", '"""No stop"""', '"""One. Two."""', '"""Two\n    lines."""'])
def test_a_poor_docstring_is_found(tmp_path, docstring):
    path = tmp_path / "x.py"
    path.write_text(f"class A:\n    'Fine.'\n    def f(self):\n        {docstring}\n        return 1\n")
    (found,) = docstring_faults(Module("deltabus.x", path))
    assert found.startswith("A.f, line 3")
