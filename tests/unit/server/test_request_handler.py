"""What HTTP and gRPC share (quotas, TLS, feedback), and the load generator."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import random
import ssl
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from bench.serve.ablation import ablation_rows
from hypothesis import given
from hypothesis import strategies as st

from lakh.errors import UserError
from lakh.server import proto
from lakh.server.api import grpc as grpc_api
from lakh.server.api import responses
from lakh.server.api.api_keys import ApiKeys
from lakh.server.api.quota import Quota, QuotaTracker, decide
from lakh.server.api.request_handler import RequestHandler
from lakh.server.api.server import running
from lakh.server.api.tls import Tls, tls_of
from lakh.server.backend import BackendHealth, CompletionDelta, ModelCard, Usage
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine
from lakh.server.loadgen import generator
from lakh.server.loadgen.generator import LoadConfig, Techniques, request_body, run_load
from lakh.server.loadgen.report import ENDS, LoadReport, plot
from lakh.server.loadgen.typing import EditorRequest, arrivals_s, read_source_files
from lakh.server.request import CompletionRequest, RequestError, parse
from lakh.server.store import CacheStore, MemoryCacheStore, RedisCacheStore

TIMEOUT_S = 30.0
ASK = {"prompt": "def add(", "max_tokens": 4, "temperature": 0}


# --- quotas ---


class Clock:
    now_s = 600.0

    def __call__(self) -> float:
        return self.now_s


async def admit(quotas: QuotaTracker, tenant: str = "a", tokens: int = 0) -> bool:
    try:
        async with quotas.admit(tenant) as charge:
            charge(tokens)
    except RequestError as error:
        refused = error
    else:
        return True
    assert (refused.status, refused.code) == (429, "quota_exceeded")
    assert 1 <= refused.retry_after_s <= 60
    return False


def test_a_quota_of_requests_renews_every_minute() -> None:
    async def main() -> None:
        clock = Clock()
        quotas = QuotaTracker({"a": Quota(requests_per_minute=3)}, None, clock)
        assert [await admit(quotas) for _ in range(5)] == [True] * 3 + [False] * 2
        assert await admit(quotas, "b")  # without a limit
        clock.now_s += 60
        assert await admit(quotas)

    asyncio.run(main())


def test_tokens_are_charged_after_the_completion() -> None:
    async def main() -> None:
        quotas = QuotaTracker({"a": Quota(tokens_per_minute=100)}, MemoryCacheStore(), Clock())
        assert [await admit(quotas, tokens=60) for _ in range(3)] == [True, True, False]

    asyncio.run(main())


def test_a_client_that_disconnects_is_charged_for_generated_tokens(engine: Engine) -> None:
    keys = ApiKeys({"key-of-a": "a"}, {"a": Quota(tokens_per_minute=3)})

    async def main() -> None:
        async with (
            asyncio.timeout(2 * TIMEOUT_S),
            running(InProcessBackend(engine), "127.0.0.1", 0, keys=keys) as server,
        ):
            server.handler.quotas._clock = Clock()
            items = server.handler.complete(parse({**ASK, "max_tokens": 60}, "a"))
            generated = 0
            while generated < 4:  # deltas may have several tokens
                generated += len((await anext(items)).tokens)  # type: ignore[union-attr]
            await items.aclose()
            with pytest.raises(RequestError, match="tokens a minute"):
                await anext(server.handler.complete(parse(ASK, "a")))

    asyncio.run(main())


class FakeBackend:
    """A backend with given responses that records whether it was closed."""

    num_running = num_waiting = 0

    def __init__(self, items: Iterable[CompletionDelta | Usage]) -> None:
        self._items, self.is_closed = items, False

    def models(self) -> list[ModelCard]:
        return [ModelCard("text", 96, "0")]

    def health(self) -> BackendHealth:
        return BackendHealth()

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionDelta | Usage, None]:
        try:
            for item in self._items:
                yield item
        finally:
            self.is_closed = True

    def metric_families(self) -> list[Any]:
        return []

    async def start(self) -> None:
        pass

    async def drain(self, deadline_s: float) -> None:
        pass

    async def close(self) -> None:
        pass


def test_text_beyond_the_context_is_charged() -> None:
    items = [CompletionDelta(0, "x", "stop", (1,)), Usage(20, 1)]  # the rest of the prompt was cut
    handler = RequestHandler(FakeBackend(items), keys=ApiKeys({"key-of-a": "a"}, {"a": Quota(tokens_per_minute=900)}))
    handler.quotas._clock = Clock()
    request = parse({"prompt": "x" * 4000, "suffix": "\n"}, "a")

    async def main() -> None:
        assert [item async for item in handler.complete(request)] == items
        with pytest.raises(RequestError, match="tokens a minute"):
            await anext(handler.complete(request))

    asyncio.run(main())


def test_a_request_that_finds_the_queue_full_is_not_charged() -> None:
    async def main() -> None:
        quotas = QuotaTracker({"a": Quota(tokens_per_minute=100)}, None, Clock())

        async def refused() -> None:
            async with quotas.admit("a") as charge:
                charge(1000)
                raise RequestError(None, "the queue is full", status=429)

        with pytest.raises(RequestError, match="full"):
            await refused()
        assert await admit(quotas)

    asyncio.run(main())


def test_a_completion_without_token_counts_is_charged_by_its_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = [CompletionDelta(0, "x" * 40), CompletionDelta(0, "", "abort"), Usage(0, 0)]
    handler = RequestHandler(FakeBackend(late), keys=ApiKeys({"key-of-a": "a"}, {"a": Quota(tokens_per_minute=3)}))
    handler.quotas._clock = Clock()

    async def main() -> None:
        assert [item async for item in handler.complete(parse(ASK, "a"))] == late
        with pytest.raises(RequestError, match="tokens a minute"):
            await anext(handler.complete(parse(ASK, "a")))

    asyncio.run(main())


def test_a_client_that_reads_nothing_counts_as_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "READER_TIMEOUT_S", 0.2)
    backend = FakeBackend(CompletionDelta(0, "x" * 1_000_000) for _ in range(1000))

    async def main() -> None:
        async with asyncio.timeout(TIMEOUT_S), running(backend, "127.0.0.1", 0) as server:
            port = int(server.url.rpartition(":")[2])
            _reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            body = json.dumps({**ASK, "stream": True})
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            while not backend.is_closed:
                await asyncio.sleep(0.01)
            while not server.handler.metrics.cancelled._value.get():
                await asyncio.sleep(0.01)
            writer.close()

    asyncio.run(main())


def test_a_quota_limits_concurrent_requests() -> None:
    async def main() -> None:
        quotas = QuotaTracker({"a": Quota(at_once=1)}, None)
        async with quotas.admit("a"):
            assert not await admit(quotas)
        assert await admit(quotas)

    asyncio.run(main())


def test_servers_share_counts_in_redis_and_count_alone_without_it(redis_server: Any) -> None:
    async def main() -> None:
        stores: list[CacheStore] = [RedisCacheStore(redis_server.url, limit_s=10.0) for _ in range(2)]
        one, other = (QuotaTracker({"a": Quota(requests_per_minute=3)}, store, Clock()) for store in stores)
        assert [await admit(quotas) for quotas in (one, other, one, other)] == [True, True, True, False]
        redis_server.kill()
        lone = QuotaTracker({"a": Quota(requests_per_minute=2)}, stores[0], Clock())
        assert [await admit(lone) for _ in range(3)] == [True, True, False]
        for store in stores:
            await store.close()

    asyncio.run(main())


@given(used=st.integers(0, 100), limit=st.none() | st.integers(1, 100), now_s=st.floats(0, 1e9))
def test_a_quota_decision_says_when_to_retry(used: int, limit: int | None, now_s: float) -> None:
    verdict = decide("requests", used, limit, now_s)
    assert verdict.allowed == (limit is None or used <= limit)
    assert verdict.allowed or 0 < verdict.retry_after_s <= 60


def test_a_key_file_has_tenants_and_quotas(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nkey-of-a-1 a\nkey-of-a-2 a requests_per_minute=6 at_once=2\nkey-of-b-1 b\n")
    keys = ApiKeys.load(str(path))
    assert [keys.tenant(key) for key in ("key-of-a-1", "key-of-a-2", "key-of-b-1", "none")] == ["a", "a", "b", None]
    assert keys.quotas == {"a": Quota(requests_per_minute=6, at_once=2)}
    for line in (
        "key-of-a-1 a rpm=5",
        "key-of-a-1 a at_once=0",
        "key-of-a-1 a at_once=x",
        "key-of-a-1 at_once=3",
        "k a",
    ):
        path.write_text(line)
        with pytest.raises(UserError):
            ApiKeys.load(str(path))


def test_keys_are_read_again_and_an_invalid_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("first-key a at_once=1\n")
    keys = ApiKeys.load(str(path))
    handler = RequestHandler(FakeBackend([]), keys=keys)
    path.write_text("second-key b requests_per_minute=1\n")
    keys.reload(str(path))
    assert (keys.tenant("first-key"), keys.tenant("second-key")) == (None, "b")
    path.write_text("short b\n")
    with pytest.raises(UserError):
        keys.reload(str(path))
    assert keys.tenant("second-key") == "b"

    async def main() -> None:  # the running server has the new limits
        handler.quotas._clock = Clock()
        assert [await admit(handler.quotas, "b") for _ in range(2)] == [True, False]
        async with handler.quotas.admit("a"):
            assert await admit(handler.quotas, "a")

    asyncio.run(main())


def test_an_exceeded_quota_is_429_on_http_and_resource_exhausted_on_grpc(engine: Engine) -> None:
    keys = ApiKeys({"key-of-a": "a"}, {"a": Quota(requests_per_minute=1)})

    async def main() -> None:
        async with (
            asyncio.timeout(2 * TIMEOUT_S),
            running(InProcessBackend(engine), "127.0.0.1", 0, keys=keys) as server,
            grpc_api.running(server.handler, "127.0.0.1", 0) as address,
            aiohttp.ClientSession(headers={"Authorization": "Bearer key-of-a"}) as session,
            grpc.aio.insecure_channel(address) as channel,
        ):
            server.handler.quotas._clock = Clock()
            statuses = []
            for _ in range(2):
                async with session.post(f"{server.url}/v1/completions", json=ASK) as response:
                    statuses.append(response.status)
                    retry_after = response.headers.get("Retry-After")
            assert statuses == [200, 429]
            assert retry_after is not None
            assert 1 <= int(retry_after) <= 60
            complete = channel.unary_stream(
                f"/{proto.SERVICE}/Complete",
                request_serializer=proto.CompleteRequest.SerializeToString,
                response_deserializer=proto.CompleteChunk.FromString,
            )
            metadata = (("authorization", "Bearer key-of-a"),)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [chunk async for chunk in complete(proto.CompleteRequest(**ASK), metadata=metadata)]
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(main())


# --- feedback: acceptance by users ---


def test_feedback_is_counted_per_tenant_over_all_servers(engine: Engine, redis_server: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * TIMEOUT_S), aiohttp.ClientSession() as session:
            for seen in (1, 2):
                store = RedisCacheStore(redis_server.url, limit_s=10.0)
                async with running(InProcessBackend(engine), "127.0.0.1", 0, store=store) as server:
                    answers = []
                    for event in ("shown", "accepted", "eaten", 5, None):
                        async with session.post(f"{server.url}/v1/feedback", json={"event": event}) as response:
                            answers.append((response.status, await response.json()))
                    assert [status for status, _ in answers] == [200, 200, 400, 400, 400]
                    assert answers[1][1] == {"shown": seen, "accepted": seen}
                    page = server.handler.metrics.page().decode().splitlines()
                    assert "lakh:suggestions_shown_total 1.0" in page
                    assert "lakh:suggestions_accepted_total 1.0" in page

    asyncio.run(main())


# --- TLS ---


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Self-signed, for 127.0.0.1."""
    x509 = pytest.importorskip("cryptography.x509", reason="pip install cryptography")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    chain, private = tmp_path / "chain.pem", tmp_path / "key.pem"
    chain.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return chain, private


@pytest.mark.parametrize("with_client", [False, True])
def test_http_and_grpc_serve_tls_and_may_require_client_certificates(
    engine: Engine, certificate: tuple[Path, Path], with_client: bool
) -> None:
    chain, private = certificate
    tls = Tls(chain, private, chain if with_client else None)
    trusting = ssl.create_default_context(cafile=str(chain))
    if with_client:
        trusting.load_cert_chain(chain, private)
    pair = (private.read_bytes(), chain.read_bytes()) if with_client else (None, None)

    async def main() -> None:
        async with (
            asyncio.timeout(2 * TIMEOUT_S),
            running(InProcessBackend(engine), "127.0.0.1", 0, tls=tls) as server,
            grpc_api.running(server.handler, "127.0.0.1", 0, tls=tls) as address,
            aiohttp.ClientSession() as session,
        ):
            assert server.url.startswith("https://")
            async with session.post(f"{server.url}/v1/completions", json=ASK, ssl=trusting) as response:
                assert response.status == 200
            with pytest.raises(aiohttp.ClientError):
                await session.get(server.url.replace("https", "http") + "/health")
            if with_client:
                plain = ssl.create_default_context(cafile=str(chain))
                with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
                    async with session.get(f"{server.url}/health", ssl=plain) as response:
                        await response.read()
            credentials = grpc.ssl_channel_credentials(chain.read_bytes(), *pair)
            async with grpc.aio.secure_channel(address.replace("127.0.0.1", "localhost"), credentials) as channel:
                models = channel.unary_unary(
                    f"/{proto.SERVICE}/Models",
                    request_serializer=proto.ModelsRequest.SerializeToString,
                    response_deserializer=proto.ModelsReply.FromString,
                )
                assert (await models(proto.ModelsRequest(), timeout=TIMEOUT_S)).models[0].id == "tiny"

    asyncio.run(main())


def test_invalid_certificate_files_are_a_user_error(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    chain, private = map(str, certificate)
    junk = tmp_path / "junk"
    junk.write_text("x")
    assert tls_of(None, None) is None
    for words in (
        (chain, None),
        (None, private),
        (chain, str(junk)),
        (str(junk), private),
        (chain, "none"),
        (None, None, chain),
    ):
        with pytest.raises(UserError, match=r"tls-|TLS"):
            tls_of(*words)


# --- loads ---


def test_bursts_keep_the_mean_and_change_the_spread() -> None:
    counts = {}
    for burst in (1.0, 8.0):
        times = list(arrivals_s(50, 400, random.Random(1), burst))
        assert times == sorted(times)
        assert len(times) == pytest.approx(20_000, rel=0.08)  # 400 phases of about 1 s: a standard deviation of 4 %
        per_second = [0] * 400
        for at_s in times:
            per_second[int(at_s)] += 1
        mean = sum(per_second) / 400
        counts[burst] = sum((count - mean) ** 2 for count in per_second) / 400 / mean
    assert counts[1.0] == pytest.approx(1, abs=0.3)  # Poisson: the variance is the mean
    assert counts[8.0] > 5


def test_techniques_are_selected_by_what_is_sent() -> None:
    ask = EditorRequest(3, "a.py", "x" * 9000 + "\ny", "z" * 3000)
    nothing, everything = (
        request_body(ask, LoadConfig(rate=1, seconds=1, prefix_chars=400, techniques=techniques))
        for techniques in (Techniques(prefix_cache=False, supersede=False, reuse=False), Techniques())
    )
    assert "supersede" not in nothing
    assert nothing["reuse"] is False
    assert (
        nothing["cache_salt"]
        != request_body(ask, LoadConfig(rate=1, seconds=1, techniques=Techniques(prefix_cache=False)))["cache_salt"]
    )
    assert (everything["supersede"], everything["reuse"], "cache_salt" in everything) == ("a.py", True, False)
    assert 300 <= len(everything["prompt"]) <= 400
    for body in (nothing, everything):
        parse(body)
        proto.CompleteRequest(**body)
    names = [row.name for row in ablation_rows("spm", "draft")]
    assert len(names) == len(set(names)) == 7
    assert [row.order for row in ablation_rows("none", None)] == ["none"] * 5


@pytest.mark.slow
@pytest.mark.parametrize("how", ["open", "closed", "grpc"])
def test_a_load_counts_every_request_and_leaves_no_blocks(
    engine: Engine, tmp_path: Path, how: str, make_engine: Callable[..., Engine]
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "a.py").write_text("def add(left, right):\n    return left + right\n" * 60)
    load = LoadConfig(
        rate=30,
        seconds=1.5,
        clients=20 if how == "closed" else None,
        users=4,
        max_tokens=4,
        timeout_s=TIMEOUT_S,
        prefix_chars=60,
        suffix_chars=20,
        burst=3,
    )

    async def main() -> LoadReport:
        async with (
            running(InProcessBackend(make_engine()), "127.0.0.1", 0) as server,
            grpc_api.running(server.handler, "127.0.0.1", 0) as address,
        ):
            url = f"grpc://{address}" if how == "grpc" else server.url
            return await asyncio.to_thread(run_load, url, files, load, metrics_url=server.url)

    report = asyncio.run(main())
    data = report.as_dict(price_per_hour=3.6)
    assert data["sent"] == sum(report.ends.values()) > 5
    assert data["completed"] > 0
    assert data["failed"] == 0, data["failures"]
    assert data["blocks_held_after"] == 0
    assert data["prefix_hit_rate"] > 0
    assert data["cost_per_1k"] == pytest.approx(data["wall_s"] / data["completed"])
    if how == "open":
        for name in ("a.png", "a.svg"):
            plot(report, tmp_path / name, "a load")
            assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize("clients", [None, 5])
def test_an_interrupted_load_reports_what_it_measured(
    tmp_path: Path, clients: int | None, make_engine: Callable[..., Engine]
) -> None:
    files = tmp_path / "a.py"
    files.write_text("def add(left, right):\n    return left + right\n" * 60)
    load = LoadConfig(
        rate=40, seconds=1000, clients=clients, users=4, max_tokens=4, timeout_s=TIMEOUT_S, prefix_chars=60
    )

    async def main() -> LoadReport:
        async with running(InProcessBackend(make_engine()), "127.0.0.1", 0) as server:

            def stop_at_the_tenth(sent: int) -> None:
                if sent == 10:
                    task.cancel()  # as asyncio.run does at Ctrl-C

            run = generator._LoadRun(server.url, read_source_files(tmp_path), load, None, stop_at_the_tenth)
            task = asyncio.create_task(run.run())
            return await task

    data = asyncio.run(main()).as_dict(price_per_hour=3.6)
    assert data["interrupted"] is True
    assert data["sent"] == sum(data[end] for end in ENDS) >= 10
    assert data["failed"] == 0, data["failures"]
    assert data["blocks_held_after"] == 0
    assert 0 < data["wall_s"] < 1000
