"""The page on transports says what the classes declare."""

from deltabus.transports import registry

from . import tables


def test_the_page_shows_what_the_classes_declare():
    text = tables.PAGE.read_text(encoding="utf-8")
    assert tables.written(text) == text, f"run: python {tables.__file__}"


def test_every_transport_has_its_place_on_the_page():
    text = tables.PAGE.read_text(encoding="utf-8")
    shown = {match["name"] for match in tables.TABLE.finditer(text)}
    classes = {scheme: registry._load(scheme) for scheme in registry._TARGETS}
    there = {classes[name] for name in shown if name}
    assert there == set(classes.values())
    assert "" in shown
    for scheme in classes:
        assert f"{scheme}://" in text or scheme == "fsspec"
