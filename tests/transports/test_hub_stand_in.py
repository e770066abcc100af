"""The stand-in Hub, against the real clients: `huggingface_hub` and `hf_xet`, unchanged."""

import json
import struct
import urllib.error
import urllib.request

import huggingface_hub
import lz4.frame
import pytest
from huggingface_hub.errors import BucketNotFoundError, HfHubHTTPError
from hypothesis import given
from hypothesis import strategies as st

from .hub_server import HubServer, small_clients
from .hub_stand_in.buckets import Buckets
from .hub_stand_in.formats import ProtocolError, decode_chunks, parse_shard, scan_xorb

BUCKET = "team/weights"
WRITE, READ = "hf_writer", "hf_reader"


@pytest.fixture(scope="module", autouse=True)
def quiet(tmp_path_factory):
    with small_clients(tmp_path_factory.mktemp("home")):
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    arguments = ["--token", WRITE, "--read-token", READ, "--quota", str(32 << 20), "--bucket", BUCKET]
    with HubServer(tmp_path_factory.mktemp("hub"), *arguments) as server:
        yield server


@pytest.fixture
def api(server):
    yield huggingface_hub.HfApi(endpoint=server.endpoint, token=WRITE)
    server.heal()


def noise(size, seed):
    return b"".join(struct.pack("<Q", hash((seed, n)) & (1 << 64) - 1) for n in range(size // 8))


def feed(server, query=""):
    """The feed's events until it is up to date, as (name, payload)."""
    request = urllib.request.Request(
        f"{server.endpoint}/api/buckets/{BUCKET}/events{query}", headers={"Authorization": f"Bearer {READ}"}
    )
    events = []
    with urllib.request.urlopen(request, timeout=30) as stream:
        for line in stream:
            if line.startswith(b"event: "):
                events.append([line[7:].decode().strip()])
            elif line.startswith(b"data: "):
                events[-1].append(json.loads(line[6:]))
                if events[-1][0] in ("ready", "reset"):
                    return events
    return events


@pytest.mark.parametrize("data", [b"", b"x", bytes(5 << 20), noise(3 << 20, 1)], ids=["none", "one", "zeros", "noise"])
def test_what_the_real_clients_upload_they_download(server, api, tmp_path, data):
    path = f"files/{len(data)}"
    api.batch_bucket_files(BUCKET, add=[(data, path)])
    (info,) = api.get_bucket_paths_info(BUCKET, [path, "missing"])
    assert info.size == len(data)
    api.download_bucket_files(BUCKET, [(path, tmp_path / "file")])
    assert (tmp_path / "file").read_bytes() == data
    filesystem = huggingface_hub.HfFileSystem(endpoint=server.endpoint, token=READ, skip_instance_cache=True)
    assert filesystem.cat(f"buckets/{BUCKET}/{path}") == data
    assert filesystem.cat_file(f"buckets/{BUCKET}/{path}", start=3, end=90_000) == data[3:90_000]


def test_listing_and_deleting(api):
    api.batch_bucket_files(BUCKET, add=[(b"%d" % n, f"many/{n:04}") for n in range(1200)])
    assert [file.path for file in api.list_bucket_tree(BUCKET, "many/")] == [f"many/{n:04}" for n in range(1200)]
    assert [file.path for file in api.list_bucket_tree(BUCKET, "many/011")] == [f"many/011{n}" for n in range(10)]
    assert "many" in [entry.path for entry in api.list_bucket_tree(BUCKET)]
    api.batch_bucket_files(BUCKET, delete=[f"many/{n:04}" for n in range(1199)])
    assert [file.path for file in api.list_bucket_tree(BUCKET, "many", recursive=True)] == ["many/1199"]


def test_buckets_come_and_go(api):
    api.create_bucket("team/other", private=True)
    api.create_bucket("team/other", exist_ok=True)
    assert {bucket.id for bucket in api.list_buckets("team")} == {BUCKET, "team/other"}
    api.move_bucket("team/other", "team/moved")
    assert api.bucket_info("team/moved").private
    api.delete_bucket("team/moved")
    with pytest.raises(BucketNotFoundError):
        api.bucket_info("team/moved")


def test_tokens(server):
    reader = huggingface_hub.HfApi(endpoint=server.endpoint, token=READ)
    assert list(reader.list_bucket_tree(BUCKET, "nothing")) == []
    with pytest.raises((HfHubHTTPError, RuntimeError, ConnectionError, PermissionError), match=r"403|may only read"):
        reader.batch_bucket_files(BUCKET, add=[(b"x", "refused")])
    with pytest.raises(HfHubHTTPError, match="403"):
        reader.batch_bucket_files(BUCKET, delete=["refused"])
    stranger = huggingface_hub.HfApi(endpoint=server.endpoint, token="hf_stranger")
    with pytest.raises(HfHubHTTPError, match="401"):
        list(stranger.list_bucket_tree(BUCKET))


def test_everything_outlives_the_process(server, api, tmp_path):
    api.batch_bucket_files(BUCKET, add=[(b"lasting" * 1000, "lasting"), (b"x", "gone")])
    api.batch_bucket_files(BUCKET, delete=["gone"])
    before = api.bucket_info(BUCKET)
    server.kill()
    server.start()
    assert api.bucket_info(BUCKET) == before
    api.download_bucket_files(BUCKET, [("lasting", tmp_path / "file")])
    assert (tmp_path / "file").read_bytes() == b"lasting" * 1000


def test_half_a_line_of_the_journal_is_forgotten(tmp_path):
    buckets = Buckets(tmp_path)
    buckets.record(what="create", bucket="a/b", private=True, at="then")
    buckets.close()
    with (tmp_path / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"what": "remove", "buc')
    for _ in range(2):
        again = Buckets(tmp_path)
        assert list(again.by_id) == ["a/b"]
        again.record(what="settings", bucket="a/b", private=False)
        again.close()


def test_the_feed_goes_on_behind_a_cursor(server, api):
    ((name, ready),) = feed(server)
    assert name == "ready"
    api.batch_bucket_files(BUCKET, add=[(b"1", "fed")])
    api.batch_bucket_files(BUCKET, add=[(b"2", "fed")])
    (_, changes), (last, _) = feed(server, f"?cursor={ready['cursor']}")
    assert [(change["op"], change["path"]) for change in changes["changes"]] == [("add", "fed"), ("update", "fed")]
    assert last == "ready"
    with pytest.raises(urllib.error.HTTPError, match="400"):
        feed(server, "?cursor=nonsense")


def test_the_feed_forgets(tmp_path):
    with HubServer(tmp_path, "--bucket", BUCKET) as server:
        api = huggingface_hub.HfApi(endpoint=server.endpoint, token=WRITE)
        ((_, ready),) = feed(server)
        api.batch_bucket_files(BUCKET, add=[(b"1", "fed")])
        server.call("POST", "/_test/reconnect", {"forget": True})
        assert [name for name, _ in feed(server, f"?cursor={ready['cursor']}")] == ["reset"]


def test_faults(server, api):
    server.fault("/batch$", drop="after", times=1)
    server.requests()
    api.batch_bucket_files(BUCKET, add=[(b"1", "dropped")])  # the client sends it again by itself
    assert len([line for line in server.requests() if line.endswith("/batch")]) == 2
    server.fault("/paths-info$", status=418, message="short and stout")
    with pytest.raises(HfHubHTTPError, match="418"):
        list(api.get_bucket_paths_info(BUCKET, ["dropped"]))
    server.heal()
    assert len(list(api.get_bucket_paths_info(BUCKET, ["dropped"]))) == 1


def test_a_full_store_says_so(api):
    with pytest.raises((HfHubHTTPError, RuntimeError, OSError), match="507"):
        api.batch_bucket_files(BUCKET, add=[(noise(36 << 20, 2), "too large")])


def chunk(data, scheme):
    packed = {0: bytes, 1: lz4.frame.compress, 2: lambda d: lz4.frame.compress(b"".join(d[n::4] for n in range(4)))}
    body = packed[scheme](data)
    lengths = len(body).to_bytes(3, "little") + bytes([scheme]) + len(data).to_bytes(3, "little")
    return b"\0" + lengths + body


@given(st.lists(st.tuples(st.binary(max_size=50), st.sampled_from([0, 1, 2])), max_size=6))
def test_chunks_of_every_scheme(parts):
    xorb = b"".join(chunk(data, scheme) for data, scheme in parts)
    places, content = scan_xorb(xorb + b"XETBLOB and more")
    assert places[-1] == len(xorb)
    assert content[-1] == sum(len(data) for data, _ in parts)
    assert decode_chunks(xorb) == b"".join(data for data, _ in parts)


@pytest.mark.parametrize("data", [b"\1" * 8, chunk(b"abc", 0)[:-1], b"\0" * 7])
def test_malformed_xorbs_are_refused(data):
    with pytest.raises(ProtocolError):
        scan_xorb(data)


@given(st.binary(max_size=200))
def test_malformed_shards_are_refused(data):
    with pytest.raises(ProtocolError):
        parse_shard(data)
