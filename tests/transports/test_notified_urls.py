"""The option `notify`: which URLs take it, which it takes, and what is never shown."""

from urllib.parse import quote, urlencode

import pytest

from deltabus.bus.errors import UnknownOptionError, UnknownSchemeError, UsageError
from deltabus.transports import open_transport
from deltabus.transports.notified import NotifiedTransport

SECRET = "hunter2"


@pytest.mark.parametrize("url", ["file:///data/run", "s3://bucket/run", "fsspec+memory://bucket/run"])
def test_stores_take_a_channel(url):
    nested = f"nats://ann:{SECRET}@broker:4222/team/run-7?{urlencode({'timeout': 3, 'ca_file': '/a&b'})}"
    plain = open_transport(url)
    for transport in (
        open_transport(f"{url}?notify={quote(nested, safe='')}"),
        open_transport(url, notify=nested),
        open_transport(f"{url}?notify=nats://broker/run-7&poll=30"),
    ):
        assert type(transport) is NotifiedTransport
        assert transport.url == plain.url
        assert transport._notifier.url.startswith("nats://broker")
        assert SECRET not in transport._notifier.url


@pytest.mark.parametrize("url", ["memory://run", "nats://host/run"])
def test_what_pushes_by_itself_takes_none(url):
    with pytest.raises(UnknownOptionError, match="no option 'notify'"):
        open_transport(url, notify="nats://broker/run")


@pytest.mark.parametrize(
    ("notify", "kind", "words"),
    [
        ("", UsageError, "'notify' is no URL"),
        ("broker:4222", UsageError, "'notify' is no URL"),
        (f"nats://ann:{SECRET}@broker", UsageError, "server and a topic"),
        (f"nats://ann:{SECRET}@bro[ker/run", UsageError, "malformed"),
        (f"nats://ann:{SECRET}@broker/run#x", UsageError, "#"),
        (f"nats://{SECRET}@broker/run?token={SECRET}", UsageError, "two tokens"),
        (f"nats://ann:{SECRET}@broker/run?replicas=3", UnknownOptionError, "no option 'replicas'"),
        (f"kafka://ann:{SECRET}@broker/run", UnknownSchemeError, r"kafka://.*nats://, tls://"),
        ("file:///data/run", UnknownSchemeError, r"file://.*nats://, tls://"),
    ],
)
def test_a_wrong_channel_is_refused_at_once(notify, kind, words):
    for arguments in (f"file:///data/run?{urlencode({'notify': notify})}", {}), ("/data/run", {"notify": notify}):
        with pytest.raises(kind, match=words) as caught:
            open_transport(arguments[0], **arguments[1])
        assert SECRET not in str(caught.value)


def test_errors_of_other_options_hide_the_channel():
    with pytest.raises(UnknownOptionError, match=r"'pol'.*notify \(") as caught:
        open_transport(f"file:///data/run?pol=1&notify=nats://ann:{SECRET}@broker/run")
    assert SECRET not in str(caught.value)
    with pytest.raises(UsageError, match="relative or on another machine") as caught:
        open_transport(f"file://data/run?notify=nats://ann:{SECRET}@broker/run")
    assert SECRET not in str(caught.value)
