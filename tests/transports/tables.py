"""The tables of docs/transports.md, made from what the classes declare; `python tables.py` writes the page anew."""

import re
import sys
from pathlib import Path

from deltabus.transports import registry
from deltabus.transports.filesystems import guarantees_of

PAGE = Path(__file__).parents[2] / "docs" / "transports.md"
TABLE = re.compile(r"<!-- (?P<kind>guarantees|options) ?(?P<name>[\w-]*) -->\n.*?<!-- end -->", re.S)

ROWS = {
    "file": "`file:///directory`",
    "memory": "`memory://name`",
    "s3": "`s3://bucket/prefix`",
    "hf": "`hf://buckets/namespace/name/prefix`",
    "nats": "`nats://host:port/topic`",
    "http": "`http://host:port/topic`, `https://`",
}
FILESYSTEMS = {
    "gs": "`gs://`, `gcs://`, `az://`, `abfs://`",
    "sftp": "`sftp://`, `ssh://`, `smb://`",
    "file": "`fsspec+file://`, `fsspec+local://`",
    "": "`fsspec+<protocol>://`, in general",
}


def guarantees_table():
    rows = [(shown, registry._load(scheme).guarantees) for scheme, shown in ROWS.items() if scheme in registry._TARGETS]
    rows += [(shown, guarantees_of(protocol)) for protocol, shown in FILESYSTEMS.items()]
    lines = [
        "| topic | conditional append | push | durable | atomic visibility | remark |",
        "|---|---|---|---|---|---|",
    ]
    for shown, given in rows:
        marks = (given.conditional_append, given.push, given.durable, given.atomic_visibility)
        lines.append(f"| {shown} | {' | '.join('yes' if mark else 'no' for mark in marks)} | {given.remark} |")
    return lines


def options_table(scheme):
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for option in registry._load(scheme).options:
        default = f"`{option.default}`" if option.default not in ("", None) else ""
        secret = "; never shown" if registry.is_secret(option.name, (option,)) else ""
        lines.append(f"| `{option.name}` | {default} | {option.help}{secret} |")
    return lines


def written(text):
    """The page's text with all its tables as they should be."""

    def table(match):
        lines = guarantees_table() if match["kind"] == "guarantees" else options_table(match["name"])
        marks = f"<!-- {match['kind']} {match['name']}".rstrip()
        return "\n".join([f"{marks} -->", *lines, "<!-- end -->"])

    return TABLE.sub(table, text)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
