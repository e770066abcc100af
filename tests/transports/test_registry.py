"""From a URL to its transport: schemes, options, secrets, and packages that add a scheme."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabus.bus.errors import MissingExtraError, UnknownOptionError, UnknownSchemeError, UsageError
from deltabus.transports import Address, Option, known_schemes, open_transport, registry
from deltabus.transports.file import FileTransport
from deltabus.transports.memory import MemoryTransport
from deltabus.transports.options import parse_flag, parse_seconds, parse_size, read_options

SECRET = "hunter2"

THIRD_PARTY = """
from deltabus.transports import Option
from deltabus.transports.memory import MemoryTransport

class CarrierTransport(MemoryTransport):
    options = (
        Option(name="pigeons", parse=int, default=1, help="how many"),
        Option(name="access_token", parse=str, default="", help="a secret by its name"),
        Option(name="pin", parse=int, default=0, help="a secret by declaration", secret=True),
    )

    @classmethod
    def from_address(cls, address, **options):
        transport = cls("carrier")
        transport.address, transport.given, transport.url = address, options, address.text
        return transport
"""


@pytest.fixture
def carrier(tmp_path, monkeypatch):
    """Installs a package that adds two schemes, one of which lacks its library, and that would replace file://."""
    (tmp_path / "pigeons.py").write_text(THIRD_PARTY)
    (tmp_path / "lame.py").write_text("import a_library_that_is_not_there\n")
    info = tmp_path / "pigeon_post-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeon-post\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[deltabus.transports]\n"
        "carrier = pigeons:CarrierTransport\n"
        "lame = lame:LameTransport\n"
        "file = pigeons:CarrierTransport\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("pigeons", "lame"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("url", "kind", "shown"),
    [
        ("memory://run-7", MemoryTransport, "memory://run-7"),
        ("MEMORY://Run-7", MemoryTransport, "memory://Run-7"),
        ("file:///data/run-7", FileTransport, "file:///data/run-7"),
        ("file:///data/run-7/", FileTransport, "file:///data/run-7"),
        ("file:///data/run%207?poll=2", FileTransport, "file:///data/run%207"),
        ("/data/run-7", FileTransport, "file:///data/run-7"),
        ("/data/a?b#c %20@d", FileTransport, "file:///data/a%3Fb%23c%20%2520%40d"),
        (Path("/data/run-7"), FileTransport, "file:///data/run-7"),
        (Path("file:/run"), FileTransport, (Path.cwd() / "file:/run").as_uri()),
        ("./run", FileTransport, (Path.cwd() / "run").as_uri()),
        ("run", FileTransport, (Path.cwd() / "run").as_uri()),
        ("~/run", FileTransport, (Path.home() / "run").as_uri()),
        ("./memory:run", FileTransport, (Path.cwd() / "memory:run").as_uri()),
    ],
)
def test_a_url_chooses_its_transport(url, kind, shown):
    transport = open_transport(url)
    assert type(transport) is kind
    assert transport.url == shown


def test_only_what_is_there_is_listed():
    assert known_schemes() == sorted(registry._TARGETS)


def test_an_unknown_scheme_lists_the_known_and_suggests_the_nearest():
    with pytest.raises(UnknownSchemeError, match=r"memry://.*did you mean memory://.*file://.*memory://"):
        open_transport("memry://run")
    with pytest.raises(UnknownSchemeError, match=r"gopher://") as caught:
        open_transport(f"gopher://user:{SECRET}@host/run?token={SECRET}")
    assert "did you mean" not in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "file:run",
        "file:/data/run",
        "memory:run",
        "s3:/bucket/run",
        "~nobody-of-that-name/run",
        "file:///a%00b",
        "/a\0b",
        "file:///a\nb",
    ],
)
def test_what_is_neither_a_url_nor_a_path_is_refused(url):
    with pytest.raises(UsageError):
        open_transport(url)


def test_unknown_options_list_the_valid_ones():
    with pytest.raises(UnknownOptionError, match=r"'pol'.*did you mean 'poll'.*poll.*timeout.*watch"):
        open_transport("file:///data/run?pol=1")
    with pytest.raises(UnknownOptionError, match=r"memory://run has no option 'poll'.*limit"):
        open_transport("memory://run", poll=1)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("poll", "soon"),
        ("poll", "0"),
        ("poll", "-1"),
        ("poll", "nan"),
        ("poll", "inf"),
        ("poll", ""),
        ("timeout", "1m"),
        ("watch", "maybe"),
    ],
)
def test_malformed_values_name_their_option(option, text):
    for arguments in (f"file:///data/run?{option}={text}", {}), ("file:///data/run", {option: text}):
        with pytest.raises(UsageError, match=f"{option}.*{text}"):
            open_transport(arguments[0], **arguments[1])


def test_options_in_the_call_go_before_those_in_the_url():
    transport = open_transport("file:///data/run?poll=2&watch=no", poll=0.5)
    assert transport._poll == 0.5
    assert transport._watch is False
    assert open_transport("/data/run", watch=False)._watch is False


@pytest.mark.parametrize("query", ["poll=1&poll=2", "poll", "poll=1&&watch=1", "=1"])
def test_malformed_queries_are_refused(query):
    with pytest.raises(UsageError):
        open_transport(f"file:///data/run?{query}")


@pytest.mark.parametrize(
    "url",
    [
        "file:///data/run#{secret}",
        "memory://user:{secret}/more@host/run",
        "memory://user:{secret}@[::1/run",
        "memory://user:{secret}@ho\u2100st/run",
        "memory://user:{secret}@host:port/run",
        "file://user:{secret}@host/run",
        "file://:{secret}@/run",
        "memory://user@run?token={secret}",
        "memory://run?{secret}",
        "carrier://coop?pin={secret}",
        "carrier://coop?pigeons={secret}&pigeons=1",
        "lame://user:{secret}@coop",
    ],
)
def test_errors_tell_no_secrets(carrier, url):
    with pytest.raises(UsageError) as caught:
        open_transport(url.format(secret=SECRET))
    told = caught.value
    while told is not None:
        assert SECRET not in str(told)
        told = told.__cause__ or (None if told.__suppress_context__ else told.__context__)


def test_packages_add_schemes(carrier):
    assert known_schemes() == sorted({*registry._TARGETS, "carrier", "lame"})
    transport = open_transport(
        f"carrier://ann%40home:{SECRET}%2F@coop:7/nest%20box?pigeons=3&access_token={SECRET}&pin=42"
    )
    assert transport.given == {"pigeons": 3, "access_token": SECRET, "pin": 42}
    address = transport.address
    assert (address.scheme, address.host, address.path) == ("carrier", "coop:7", "/nest box")
    assert (address.username, address.password) == ("ann@home", f"{SECRET}/")
    assert transport.url == repr(address)[9:-2] == "carrier://coop:7/nest%20box?pigeons=3"
    assert open_transport("carrier://coop").address == Address("carrier", "coop", "", None, None, "carrier://coop")
    assert open_transport("carrier://coop").given == {"pigeons": 1, "access_token": "", "pin": 0}


def test_packages_cannot_replace_a_scheme(carrier):
    assert type(open_transport("file:///data/run")) is FileTransport


def test_a_missing_library_says_what_to_install(carrier, monkeypatch):
    with pytest.raises(MissingExtraError, match=r"a_library_that_is_not_there.*pip install pigeon-post"):
        open_transport("lame://coop")
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    for name in ("file", "watch"):
        monkeypatch.delitem(sys.modules, f"deltabus.transports.{name}")
    with pytest.raises(MissingExtraError, match=r"watchfiles.*pip install deltabus"):
        open_transport("file:///data/run")


def test_a_backend_is_imported_when_its_url_is_opened():
    program = (
        "import sys, deltabus.transports as transports\n"
        "transports.known_schemes()\n"
        "transports.open_transport('memory://run')\n"
        "print([name for name in ('watchfiles', 'deltabus.transports.file', 'torch') if name in sys.modules])\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"[]\n"


def test_every_scheme_of_ours_leads_to_a_transport_that_declares_its_options():
    for scheme, target in registry._TARGETS.items():
        backend = registry._load(scheme)
        assert target.path.endswith(f":{backend.__name__}")
        for option in backend.options:
            assert isinstance(option, Option)
            assert option.help
            assert option.parse(str(option.default)) == option.default


@given(st.text())
def test_any_text_gives_a_transport_or_a_clear_error(text):
    try:
        transport = open_transport(f"file:///data/{text}")
    except UsageError:
        return
    assert transport.url.startswith("file:///data")
    assert open_transport(transport.url).url == transport.url


@given(st.floats(min_value=1e-9, max_value=1e9))
def test_seconds(value):
    assert parse_seconds(str(value)) == value


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1), ("7B", 7), ("2KiB", 2048), ("3 MiB", 3 << 20), ("4TiB", 4 << 40)]
)
def test_sizes(text, value):
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1KB", "MiB", "1 kib", "9" * 19, "\u0661"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["1", "true", "True", "YES", "on"])
def test_flags(text):
    assert parse_flag(text) is True
    with pytest.raises(ValueError, match="true"):
        parse_flag(f"{text}!")


def test_a_transport_without_options_says_so():
    assert read_options((), {}, where="it") == {}
    with pytest.raises(UnknownOptionError, match="its options are: none"):
        read_options((), {"a": "1"}, where="it")
