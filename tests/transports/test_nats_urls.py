"""Addresses of topics on NATS, and the names that they have there."""

import pytest

from deltabus.bus.errors import (
    UsageError,
)
from deltabus.transports import open_transport

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://host/run-7", "nats://host/run-7"),
        ("nats://host:4333/team/run-7", "nats://host:4333/team/run-7"),
        ("tls://host/run_7", "tls://host/run_7"),
        (f"nats://ann:{SECRET}@host/run", "nats://host/run"),
        (f"nats://{SECRET}@host/run?timeout=3", "nats://host/run?timeout=3"),
        (f"nats://host/run?token={SECRET}&replicas=3", "nats://host/run?replicas=3"),
        ("nats://[::1]:4222/run?servers=other:1,third", "nats://[::1]:4222/run?servers=other%3A1%2Cthird"),
    ],
)
def test_addresses_show_no_secret(url, shown):
    transport = open_transport(url)
    assert transport.url == shown
    settings = transport._connection._settings
    assert SECRET not in repr(settings)
    assert SECRET not in transport.url


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nats://host", "topic"),
        ("nats:///run", "server"),
        ("nats://host/", "topic"),
        ("nats://host/a.b", "topic"),
        ("nats://host/a//b", "topic"),
        ("nats://host/" + "a" * 129, "topic"),
        (f"nats://ann:{SECRET}@host/run?token={SECRET}", "several ways"),
        (f"nats://{SECRET}@host/run?token={SECRET}", "two tokens"),
        ("nats://host/run?nkey_file=a&creds_file=b", "several ways"),
        ("nats://host/run?replicas=7", "replicas"),
        ("nats://host/run?storage=tape", "storage"),
        ("nats://host/run?domain=a.b", "domain"),
        ("nats://host/run?inbox_prefix=a*", "inbox_prefix"),
        (f"nats://host/run?servers=ann:{SECRET}@b", "servers"),
        ("nats://host/run?max_bytes=much", "max_bytes"),
    ],
)
def test_bad_addresses_are_refused(url, told):
    with pytest.raises(UsageError, match=told) as caught:
        open_transport(url)
    assert SECRET not in str(caught.value).replace(f"'ann:{SECRET}@b'", "")


def test_topics_have_streams_of_their_own():
    names = ["a", "a/b", "a_b", "a-b", "a_records", "a/records", "b"]
    transports = [open_transport(f"nats://host/{name}") for name in names]
    streams = [name for t in transports for name in (t._streams.records, t._streams.blobs)]
    assert len(set(streams)) == 2 * len(names)
    assert not [name for name in streams if set(name) & set("./*> ")]


def test_keys_have_subjects_of_their_own():
    streams = open_transport("nats://host/run")._streams
    keys = ["a.b", "a/b", "a", "a.head", "a-b", "a=b", "a_b", "a/head"]
    assert len({streams.blob_subject(key) for key in keys}) == len(keys)
    assert streams.blob_subject("blobs/main/x.safetensors") == "deltabus.run.blob.blobs/main/x%safetensors.head"
