"""One metrics registry: exposed over HTTP, and transferable between processes."""

from __future__ import annotations

import pickle
import socket
import urllib.request

import pytest

from lakh.errors import UserError
from lakh.metrics import CONTENT_TYPE, MetricsRegistry, counter_family, gauge_family


def test_the_page_shows_counters_and_callbacks() -> None:
    metrics = MetricsRegistry("lakh:")
    requests = metrics.counter("requests_total", "Requests by status.", ["code"])
    requests.labels("200").inc(2)
    metrics.histogram("latency_seconds", "Latency.", (0.1, 1)).observe(0.5)
    metrics.collect_from(lambda: [gauge_family("lakh:waiting", "Requests waiting.", 3)])
    lines = metrics.page().decode().splitlines()
    assert 'lakh:requests_total{code="200"} 2.0' in lines
    assert 'lakh:latency_seconds_bucket{le="1.0"} 1.0' in lines
    assert "lakh:waiting 3.0" in lines
    assert not any("_created" in line for line in lines)


def test_families_cross_a_process_boundary() -> None:
    engine = MetricsRegistry("lakh:")
    engine.counter("steps_total", "Engine steps.").inc(5)
    sent = pickle.dumps([*engine.families(), counter_family("lakh:cached_total", "Tokens.", {"hit": 2}, "kind")])
    gateway = MetricsRegistry("lakh:")
    gateway.collect_from(lambda: pickle.loads(sent))
    page = gateway.page().decode()
    assert "lakh:steps_total 5.0" in page
    assert 'lakh:cached_total{kind="hit"} 2.0' in page


def test_a_server_listens_on_a_free_port_until_it_is_closed() -> None:
    metrics = MetricsRegistry()
    metrics.gauge("up", "Whether it runs.").set(1)
    server = metrics.serve(0)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        assert b"lakh_up 1.0" in answer.read()
        assert answer.headers["Content-Type"].partition(";")[0] == CONTENT_TYPE.partition(";")[0]
    server.close()


def test_a_port_in_use_is_a_user_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=r"train\.prometheus_port"):
            MetricsRegistry().serve(taken.getsockname()[1], setting="train.prometheus_port")
