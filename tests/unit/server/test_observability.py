"""Request logs, traces, costs and the autoscaling signal: what operators see of each request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lakh.cli.serve_options import _collector
from lakh.errors import MissingExtra, UserError
from lakh.server import proto
from lakh.server.api import grpc as grpc_api
from lakh.server.api.server import HttpServer, running
from lakh.server.backend import PhaseTimes, Usage
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine, SamplingParams
from lakh.server.observability.cost import CostMeter
from lakh.server.observability.request_record import RequestLog, RequestRecord
from lakh.server.observability.tracing import RequestTracer
from lakh.server.store import MemoryCacheStore

TIMEOUT_S = 60.0
ASK = {"prompt": "def add(", "max_tokens": 6, "temperature": 0}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@contextlib.asynccontextmanager
async def serving(engine: Engine, **options: Any) -> AsyncIterator[tuple[HttpServer, aiohttp.ClientSession]]:
    async with (
        running(InProcessBackend(engine), "127.0.0.1", 0, **options) as server,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session,
    ):
        yield server, session


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


async def post(server: HttpServer, session: aiohttp.ClientSession, body: object, **headers: str) -> int:
    data = json.dumps(body)
    async with session.post(f"{server.url}/v1/completions", data=data, headers=headers) as response:
        await response.read()
        return response.status


def test_the_log_has_one_line_per_request_and_no_text(engine: Engine, tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path / "requests.jsonl"))

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]

    async def scenario() -> None:
        secret = "secret_name_in_the_prompt"
        async with serving(engine, observers=[log], store=MemoryCacheStore()) as (server, session):
            assert await post(server, session, {**ASK, "prompt": secret, "n": 2, "seed": 1, "temperature": 1}) == 200
            assert await post(server, session, ASK) == 200
            assert await post(server, session, {**ASK, "stream": True}) == 200  # from the completion cache
            assert await post(server, session, {**ASK, "max_tokens": -1}) == 400
            assert await post(server, session, {**ASK, "model": "other"}) == 404
        text = (tmp_path / "requests.jsonl").read_text()
        assert secret not in text
        first, second, cached, invalid, other = lines()
        assert (first["status"], first["n"], len(first["finish_reasons"])) == (200, 2, 2)
        assert second["completion_tokens"] <= 6
        assert second["model"] == "tiny"
        assert second["total_s"] >= second["first_text_s"] > 0
        phases = [second[name] for name in ("queue_s", "prefill_s", "decode_s")]
        assert all(phase >= 0 for phase in phases)
        assert sum(phases) <= second["total_s"]
        assert (cached["from_cache"], cached["stream"], "queue_s" in cached) == (True, True, False)
        assert (invalid["status"], invalid["error"], "model" in invalid) == (400, "invalid_request", False)
        assert (other["status"], other["error"]) == (404, "model_not_found")
        assert len({line["id"] for line in lines()}) == 5

    run(scenario)


def test_a_rotated_log_is_opened_again(tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path / "log"))
    log.finish(RequestRecord("/a"))
    (tmp_path / "log").rename(tmp_path / "log.1")
    log.finish(RequestRecord("/b"))
    log.reopen()
    log.finish(RequestRecord("/c"))
    assert [json.loads(line)["path"] for line in (tmp_path / "log.1").read_text().splitlines()] == ["/a", "/b"]
    assert json.loads((tmp_path / "log").read_text())["path"] == "/c"
    with pytest.raises(UserError, match="cannot be written"):
        RequestLog(str(tmp_path / "missing" / "log"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_loses_log_lines_and_no_request(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog("/dev/full")

    async def scenario() -> None:
        async with serving(engine, observers=[log]) as (server, session):
            assert [await post(server, session, ASK) for _ in range(3)] == [200, 200, 200]

    asyncio.run(asyncio.wait_for(scenario(), 120))
    assert log.num_lost == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # not one for each line


def test_a_request_is_a_span_in_the_callers_trace(engine: Engine, tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    tracer = RequestTracer("http://unused", exporter=exporter)
    log = RequestLog(str(tmp_path / "log"))

    async def scenario() -> None:
        async with serving(engine, observers=[tracer, log]) as (server, session):
            assert await post(server, session, ASK, traceparent=f"00-{TRACE}-{PARENT}-01") == 200
            assert await post(server, session, {"prompt": 5}) == 400
            assert await post(server, session, ASK, traceparent="not a trace") == 200
            async with (
                grpc_api.running(server.handler, "127.0.0.1", 0) as address,
                grpc.aio.insecure_channel(address) as channel,
            ):
                call = channel.unary_stream(
                    f"/{proto.SERVICE}/Complete",
                    request_serializer=proto.CompleteRequest.SerializeToString,
                    response_deserializer=proto.CompleteChunk.FromString,
                )
                message = proto.CompleteRequest(prompt="def add(", max_tokens=4)
                metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
                async for _ in call(message, metadata=metadata, timeout=TIMEOUT_S):
                    pass

    run(scenario)
    tracer.close()
    spans = exporter.get_finished_spans()
    requests = [span for span in spans if span.name == "completion"]
    assert len(requests) == 4
    http, invalid, fresh, over_grpc = requests
    for span in (http, over_grpc):
        assert format(span.context.trace_id, "032x") == TRACE
        assert format(span.parent.span_id, "016x") == PARENT
    assert invalid.attributes["http.response.status_code"] == 400
    assert fresh.parent is None
    assert format(fresh.context.trace_id, "032x") != TRACE
    assert http.attributes["gen_ai.response.model"] == "tiny"
    assert http.attributes["gen_ai.usage.input_tokens"] > 0
    assert not any("def add" in str(value) for span in spans for value in (span.attributes or {}).values())
    children = [span for span in spans if span.parent and span.parent.span_id == http.context.span_id]
    assert [span.name for span in children] == ["queue", "prefill", "decode"]
    for before, after in itertools.pairwise(children):
        assert before.end_time == after.start_time
    assert http.start_time <= children[0].start_time
    assert children[-1].end_time <= http.end_time
    logged = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert logged[0]["trace_id"] == TRACE


def test_spans_arrive_at_a_collector(engine: Engine) -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    tracer = RequestTracer(f"http://127.0.0.1:{collector.server_port}")

    async def scenario() -> None:
        async with serving(engine, observers=[tracer]) as (server, session):
            assert await post(server, session, ASK) == 200

    run(scenario)
    tracer.close()
    collector.shutdown()
    assert [path for path, _ in received] == ["/v1/traces"]
    assert all(name in received[0][1] for name in (b"completion", b"prefill", b"decode", b"lakh"))


def test_without_the_package_the_option_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(MissingExtra, match=r"lakh\[otel\]"):
        RequestTracer("http://127.0.0.1:4318")
    with pytest.raises(UserError, match="--otlp"):
        _collector("127.0.0.1:4318")


def test_the_cost_is_the_price_of_the_last_minutes_over_their_completions() -> None:
    now_s = [0.0]
    meter = CostMeter(3.6, clock=lambda: now_s[0])  # 0.001 USD a second
    done = RequestRecord("/", usage=Usage(1, 1, phases=PhaseTimes(0, 0, 0)))

    def metric(name: str) -> float | None:
        samples = [sample for family in meter.metric_families() for sample in family.samples]
        return next((sample.value for sample in samples if sample.name == f"lakh:{name}"), None)

    assert metric("cost_per_1k_completions_usd") is None
    for second in range(100):
        now_s[0] = float(second)
        meter.finish(done)
        meter.finish(RequestRecord("/", status=429))
    now_s[0] = 100.0
    assert metric("cost_per_1k_completions_usd") == pytest.approx(1.0)  # 100 s, 100 completions
    assert metric("cost_usd_total") == pytest.approx(0.1)
    now_s[0] = 15 * 60.0
    assert metric("cost_per_1k_completions_usd") is None  # all are older than the window
    for _ in range(10):
        meter.finish(done)
    assert metric("cost_per_1k_completions_usd") == pytest.approx(0.54 / 10 * 1000)  # 9 minutes so far


def test_the_age_of_the_oldest_waiting_request_is_a_metric(make_engine: Callable[..., Engine]) -> None:
    now_s = [100.0]
    engine = make_engine(options={"clock": lambda: now_s[0]})
    backend = InProcessBackend(engine)

    def oldest() -> float:
        samples = [sample for family in backend.metric_families() for sample in family.samples]
        return next(sample.value for sample in samples if sample.name == "lakh:oldest_waiting_seconds")

    assert oldest() == 0.0
    seq = engine.make_sequence((5,), SamplingParams(max_tokens=1))
    engine.submit(seq)  # the thread steps only for jobs of its own
    now_s[0] = 107.5
    assert oldest() == 7.5
    engine.abort(seq)
    assert oldest() == 0.0
    asyncio.run(backend.close())
