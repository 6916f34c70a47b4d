"""Several models behind one server: selected by name, loaded and unloaded by the operator only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lakh.cli.serve_models import NamedModel, named_adapters, named_models
from lakh.errors import UserError
from lakh.server.api.api_keys import ApiKeys
from lakh.server.api.operator_routes import Operator
from lakh.server.api.server import running
from lakh.server.backend import BackendHealth
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.backends.model_router import ModelRouter
from lakh.server.engine import Engine

from .test_adapters import write_adapter

TIMEOUT_S = 60.0
KEY = "operator-secret-key"
ASK = {"prompt": "def add(", "max_tokens": 12, "temperature": 0}


class Api:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def post(self, path: str, body: object, key: str = "") -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self.session.post(self.url + path, data=json.dumps(body), headers=headers) as response:
            return response.status, await response.json()

    async def text(self, **fields: Any) -> str:
        status, answer = await self.post("/v1/completions", {**ASK, **fields})
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            return await (response.text() if path == "/metrics" else response.json())

    async def models(self) -> list[str]:
        return [card["id"] for card in (await self.get("/v1/models"))["data"]]


@contextlib.asynccontextmanager
async def serving(router: ModelRouter, **options: Any) -> AsyncIterator[Api]:
    async with (
        running(router, "127.0.0.1", 0, **options) as server,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session,
    ):
        yield Api(server.url, session)


def backend_of(engine: Engine, name: str) -> InProcessBackend:
    engine.name = name
    return InProcessBackend(engine)


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_a_request_selects_its_model_and_metrics_say_which(make_engine: Callable[..., Engine]) -> None:
    async def scenario() -> None:
        router = ModelRouter({name: backend_of(make_engine(seed), name) for seed, name in ((1, "one"), (2, "two"))})
        async with serving(router) as api:
            assert await api.models() == ["one", "two"]
            one, two = await asyncio.gather(api.text(model="one"), api.text(model="two"))
            assert one != two
            assert await api.text() == one  # the first is the default
            status, answer = await api.post("/v1/completions", {**ASK, "model": "three"})
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
            page = await api.get("/metrics")
            assert 'lakh:model_requests_total{model_name="one"} 2.0' in page
            assert 'lakh:model_requests_total{model_name="two"} 1.0' in page
            for name in ("one", "two"):
                assert f'lakh:kv_cache_usage_perc{{model_name="{name}"}}' in page
                assert f'lakh:request_queue_time_seconds_count{{model_name="{name}"}}' in page
            assert page.count("# TYPE lakh:kv_cache_usage_perc gauge") == 1

    run(scenario)


def test_one_lost_model_leaves_the_others(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        backends = {name: backend_of(make_engine(), name) for name in ("one", "two")}
        deaths: list[str] = []
        router = ModelRouter(dict(backends), on_death=lambda: deaths.append("all"))
        async with serving(router) as api:
            await api.models()
            monkeypatch.setattr(backends["two"], "health", lambda: BackendHealth("it is gone", is_alive=False))
            router.engine_died()
            assert not deaths
            assert await api.text(model="one")
            status, answer = await api.post("/v1/completions", {**ASK, "model": "two"})
            assert (status, answer["error"]["code"]) == (503, "no_engine")
            assert (await api.get("/ready"))["status"] == "ok"
            monkeypatch.setattr(backends["one"], "health", lambda: BackendHealth("gone too", is_alive=False))
            router.engine_died()
            assert deaths == ["all"]
            assert "gone too" in str(router.died)
            assert "it is gone" in (await api.get("/health"))["status"]

    run(scenario)


def test_only_the_operator_loads_and_unloads(
    make_engine: Callable[..., Engine], model_dir: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", model_dir, 1)

    def load(name: str, path: str) -> InProcessBackend:
        return backend_of(Engine.load(path), name)

    async def scenario() -> None:
        router = ModelRouter({"one": backend_of(make_engine(seed=2), "one")}, make_engine=load)
        keys = ApiKeys({"user-key-123": "tenant"})
        async with serving(router, operator=Operator(KEY, router), keys=keys) as api:
            routes = ("/v1/models/load", "/v1/models/unload", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
            for route in routes:
                for key in ("", "user-key-123", KEY[:-1]):
                    assert (await api.post(route, {"model": "x", "path": "x"}, key))[0] == 401
            for route, body in zip(routes, ({"model": "x"}, [1], {"lora_name": ""}, {"lora_name": 3}), strict=True):
                assert (await api.post(route, body, KEY))[0] == 400
            new = {"model": "new", "path": str(model_dir)}
            assert await api.post("/v1/models/load", new, KEY) == (200, {"status": "ok"})
            status, answer = await api.post("/v1/models/load", new, KEY)
            assert (status, "loaded already" in answer["error"]["message"]) == (400, True)
            status, answer = await api.post("/v1/models/load", {**new, "model": "bad", "path": "/missing"}, KEY)
            assert (status, "no such" in answer["error"]["message"]) == (400, True)
            lora = {"lora_name": "sql", "lora_path": str(adapter), "model": "new"}
            assert (await api.post("/v1/load_lora_adapter", lora, KEY))[0] == 200
            assert [card.id for card in router.models()] == ["one", "new", "sql"]
            ask = {**ASK, "model": "sql"}
            plain = await api.post("/v1/completions", {**ASK, "model": "new"}, "user-key-123")
            adapted = await api.post("/v1/completions", ask, "user-key-123")
            assert plain[1]["choices"][0]["text"] != adapted[1]["choices"][0]["text"]
            assert (await api.post("/v1/unload_lora_adapter", {"lora_name": "new"}, KEY))[0] == 400
            assert (await api.post("/v1/unload_lora_adapter", {"lora_name": "sql"}, KEY))[0] == 200
            assert (await api.post("/v1/completions", ask, "user-key-123"))[0] == 404
            assert (await api.post("/v1/models/unload", {"model": "new"}, KEY))[0] == 200
            status, answer = await api.post("/v1/models/unload", {"model": "one"}, KEY)
            assert (status, "only one" in answer["error"]["message"]) == (400, True)
            assert [card.id for card in router.models()] == ["one"]

    run(scenario)


def test_without_an_operator_key_nobody_loads(make_engine: Callable[..., Engine]) -> None:
    async def scenario() -> None:
        router = ModelRouter({"one": backend_of(make_engine(), "one")})
        async with serving(router) as api:
            assert (await api.post("/v1/models/load", {"model": "x", "path": "/x"}, "any-key"))[0] == 403

    run(scenario)


def test_models_and_adapters_are_read_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    assert named_models(["x", "n=runs/y"], None) == [NamedModel("x", None), NamedModel("runs/y", "n")]
    assert named_models([str(tmp_path / "a=b")], None) == [NamedModel(str(tmp_path / "a=b"), None)]
    assert named_models(["n=x"], "other") == [NamedModel("x", "other")]
    with pytest.raises(UserError, match="served-name"):
        named_models(["x", "y"], "other")
    assert named_adapters(["a=b=c"]) == {"a": "b=c"}
    for bad in (["a"], ["=b"], ["a="], ["a=b", "a=c"]):
        with pytest.raises(UserError, match="--adapter"):
            named_adapters(bad)


@pytest.mark.slow
def test_lakh_serve_with_two_models_and_an_adapter(model_dir: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", model_dir, 1)
    key_file = tmp_path / "operator"
    key_file.write_text(KEY)
    command = [sys.executable, "-m", "lakh", "serve", f"one={model_dir}", f"two={model_dir}", "--http", "127.0.0.1:0"]
    command += ["--adapter", f"sql={adapter}", "--operator-key-file", str(key_file), "--threads", "1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert ready["models"] == ["one", "sql", "two"]

            async def scenario() -> None:
                async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
                    api = Api(ready["url"], session)
                    one, two, sql = [await api.text(model=name) for name in ("one", "two", "sql")]
                    assert one == two != sql
                    more = {"lora_name": "more", "lora_path": str(adapter), "model": "two"}
                    assert (await api.post("/v1/load_lora_adapter", more, KEY))[0] == 200
                    assert await api.text(model="more") == sql
                    assert (await api.post("/v1/models/unload", {"model": "one"}, KEY))[0] == 200
                    assert await api.models() == ["two", "more"]

            run(scenario)
            os.kill(ready["pid"], signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()
