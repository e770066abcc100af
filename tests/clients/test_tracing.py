"""OpenTelemetry spans, as the real SDK gets them."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from deltabus import Publisher, Subscriber
from deltabus.bus.errors import PublishError, StorageFullError
from deltabus.tracing import TracingListener, trace_metadata
from deltabus.transports import open_transport
from deltabus.transports.http.service import Service, ServiceSettings

from .support import LIMIT, faulty, once, small_model, train


@pytest.fixture
def traced():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider, exporter.get_finished_spans
    provider.shutdown()


def named(spans, name):
    return [span for span in spans if span.name == name]


async def test_a_step_is_one_trace_from_the_trainer_and_linked_at_the_engine(tmp_path, traced):
    provider, finished = traced
    url, model, engine = tmp_path.as_uri(), small_model(), small_model(9)
    tracer, listener = provider.get_tracer("trainer"), TracingListener(provider)
    with Publisher(url, on_event=listener, on_busy="wait", skips="off", workers=1) as publisher:
        with tracer.start_as_current_span("training step") as step:
            await publisher.publish(1, model, metadata={"run": "a", **trace_metadata()})
        async with asyncio.timeout(LIMIT), Subscriber(url, on_event=listener, workers=1) as subscriber:
            with tracer.start_as_current_span("engine") as serving:
                (await anext(subscriber)).apply(engine)
            train(model, 2)
            await publisher.publish(2, model)
            (await anext(subscriber)).apply(engine)
    spans = finished()
    published, received, applied = (named(spans, f"deltabus {kind}") for kind in ("published", "received", "applied"))
    assert [[span.attributes["deltabus.step"] for span in each] for each in (published, received, applied)] == [
        [1, 2]
    ] * 3
    here = step.get_span_context()
    assert published[0].context.trace_id == here.trace_id
    assert published[0].parent.span_id == here.span_id
    assert applied[0].parent.span_id == serving.get_span_context().span_id
    for span in (received[0], applied[0]):
        assert [link.context.span_id for link in span.links] == [here.span_id]
    # A step without a span of the trainer's stands for itself.
    assert (published[1].parent, received[1].links, applied[1].links) == (None, (), ())
    for outer, stages in ((published[0], ("blocked", "upload")), (received[1], ("download", "decode"))):
        inner = [span for span in spans if span.parent and span.parent.span_id == outer.context.span_id]
        assert sorted(span.name for span in inner) == sorted(f"deltabus {stage}" for stage in stages)
        for span in inner:
            assert outer.start_time <= span.start_time <= span.end_time <= outer.end_time
    assert published[1].attributes["deltabus.changed"] > 0
    assert published[1].attributes["deltabus.topic"] == url
    assert published[1].attributes["deltabus.seconds.upload"] > 0


def test_a_step_that_fails_is_an_error(tmp_path, monkeypatch, traced):
    provider, finished = traced
    with faulty(monkeypatch) as faults:
        faults.before = once(StorageFullError("the disk is full", url="file:///x"), "append")
        publisher = Publisher(tmp_path, on_event=TracingListener(provider), workers=1)
        with pytest.raises(PublishError):
            publisher.publish(1, small_model()).result(LIMIT)
        with pytest.raises(PublishError):
            publisher.close()
    (span,) = named(finished(), "deltabus failed")
    assert span.status.status_code is StatusCode.ERROR
    assert "the disk is full" in span.status.description


# Keys of requests that are no texts came with a later aiohttp than the oldest that is supported.
@pytest.mark.filterwarnings("ignore:It is recommended to use web.RequestKey:UserWarning")
async def test_requests_of_a_service_are_spans_below_those_of_who_asks(tmp_path, traced):
    provider, finished = traced
    settings = ServiceSettings(upstream=tmp_path.as_uri(), port=0, tracer=provider.get_tracer("service"))
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with Service(settings) as service:
        async with open_transport(f"{service.url}/run-7", reader="engine-1") as transport:
            await transport.put("blobs/x/1", b"bits")
            assert await transport.get("blobs/x/1") == b"bits"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(service.url.rpartition(":")[2]))
        head = (
            f"GET /run-7/-/logs HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\ntraceparent: 00-{trace}-{span}-01"
        )
        writer.write(f"{head}\r\n\r\n".encode())
        assert b"200 OK" in await reader.read()
        writer.close()
    spans = finished()
    assert {each.kind for each in spans} == {SpanKind.SERVER}
    (put,) = named(spans, "PUT /blobs/{key}")
    told = {"http.response.status_code": 204, "deltabus.topic": "run-7", "deltabus.reader": "engine-1"}
    assert told.items() <= put.attributes.items()
    (logs,) = named(spans, "GET /logs")
    assert (f"{logs.context.trace_id:032x}", f"{logs.parent.span_id:016x}") == (trace, span)


def test_without_the_extra_it_is_told_what_to_install(tmp_path):
    code = (
        "import sys\nsys.modules['opentelemetry'] = None\nimport deltabus.events\n"
        "from deltabus.tracing import TracingListener, export_spans, trace_metadata\n"
        "for make in (TracingListener, trace_metadata, lambda: export_spans('x')):\n"
        "    try: make()\n    except ImportError as error: print(error)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=True)
    *told, torch = done.stdout.splitlines()
    assert [line.endswith("pip install 'deltabus[otel]'") for line in told] == [True] * 3
    assert torch == "False"
