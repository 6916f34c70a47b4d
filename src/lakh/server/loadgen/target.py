"""A completion service as its clients see it, over HTTP or gRPC: sends one request and classifies the outcome.

Times are of the client's monotonic clock, from the moment the request leaves. 429 and RESOURCE_EXHAUSTED count as
"rejected", superseded requests as "cancelled", responses after the timeout as "timeouts", all other errors as "failed".
"""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

import aiohttp

from lakh.errors import PeerLost, UserError

__all__ = ["GrpcTarget", "HttpTarget", "RequestOutcome", "Target", "read_metrics", "target_of"]

GRACE_S = 1.0  # beyond the timeout, for a response in transit
START = "start it with: lakh serve MODEL --http HOST:PORT"


class RequestOutcome(NamedTuple):
    end: str
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    characters: int = 0
    detail: str = ""


class HttpTarget:
    def __init__(self, url: str, timeout_s: float, key: str | None) -> None:
        self._url, self._timeout_s = url, timeout_s
        self.session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=timeout_s + GRACE_S),
            connector=aiohttp.TCPConnector(limit=0),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    async def complete(self, body: dict[str, Any]) -> RequestOutcome:
        began_s = time.monotonic()
        first_token_s, characters = None, 0
        try:
            async with self.session.post(f"{self._url}/v1/completions", json={**body, "stream": True}) as response:
                if response.status != 200:
                    end = {429: "rejected", 409: "cancelled"}.get(response.status, "failed")
                    return RequestOutcome(end, detail=f"{response.status} {(await response.text())[:100]}")
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        first_token_s = first_token_s or time.monotonic()
                        data = json.loads(line[6:])
                        if "error" in data:
                            is_superseded = data["error"].get("code") == "superseded"
                            return RequestOutcome(
                                "cancelled" if is_superseded else "failed", detail=str(data["error"])[:100]
                            )
                        characters += sum(len(choice["text"]) for choice in data["choices"])
        except TimeoutError:
            return RequestOutcome("timeouts")
        except (aiohttp.ClientError, ValueError, LookupError) as error:
            return RequestOutcome("failed", detail=type(error).__name__)
        return _completed(began_s, first_token_s, characters, self._timeout_s)

    async def close(self) -> None:
        await self.session.close()


class GrpcTarget:
    def __init__(self, address: str, timeout_s: float, key: str | None) -> None:
        import grpc

        from lakh.server import proto

        self._status, self._error = grpc.StatusCode, grpc.aio.AioRpcError
        self._timeout_s = timeout_s
        self._metadata = [("authorization", f"Bearer {key}")] if key else []
        self._channel = grpc.aio.insecure_channel(address)
        self._request = proto.CompleteRequest
        self._call = self._channel.unary_stream(
            f"/{proto.SERVICE}/Complete",
            request_serializer=proto.CompleteRequest.SerializeToString,
            response_deserializer=proto.CompleteChunk.FromString,
        )

    async def complete(self, body: dict[str, Any]) -> RequestOutcome:
        began_s = time.monotonic()
        first_token_s, characters = None, 0
        call = self._call(self._request(**body), timeout=self._timeout_s, metadata=self._metadata)
        try:
            async for chunk in call:
                first_token_s = first_token_s or time.monotonic()
                characters += len(chunk.text)
        except self._error as error:
            end = {
                self._status.RESOURCE_EXHAUSTED: "rejected",
                self._status.ABORTED: "cancelled",
                self._status.DEADLINE_EXCEEDED: "timeouts",
            }.get(error.code(), "failed")
            return RequestOutcome(end, detail=f"{error.code().name} {(error.details() or '')[:100]}")
        finally:
            call.cancel()  # no-op after the call has ended
        return _completed(began_s, first_token_s, characters, self._timeout_s)

    async def close(self) -> None:
        await self._channel.close()


Target = HttpTarget | GrpcTarget


def _completed(began_s: float, first_token_s: float | None, characters: int, timeout_s: float) -> RequestOutcome:
    now_s = time.monotonic()
    end = "timeouts" if now_s - began_s > timeout_s else "completed"
    return RequestOutcome(end, (first_token_s or now_s) - began_s, now_s - began_s, characters)


def target_of(url: str, timeout_s: float, key: str | None) -> Target:
    """http://, https:// or grpc://"""
    scheme, _, address = url.partition("://")
    if scheme == "grpc" and address:
        return GrpcTarget(address, timeout_s, key)
    if scheme in ("http", "https") and address:
        return HttpTarget(url.rstrip("/"), timeout_s, key)
    raise UserError(url, "is not an address", "write e.g. http://127.0.0.1:8000 or grpc://127.0.0.1:50051")


async def read_metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Samples of the metrics page without labels, or summed over the models of a server; {} if the server has none."""
    try:
        async with session.get(f"{url.rstrip('/')}/metrics") as response:
            text = await response.text() if response.status == 200 else ""
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
        raise UserError(url, "is not an address", "write e.g. http://127.0.0.1:8000") from None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise PeerLost(url, f"does not answer ({type(error).__name__})", START) from None
    samples = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    try:
        found: dict[str, float] = {}
        for name, _, value in samples:
            stem, brace, labels = name.partition("{")
            if not brace or (labels.startswith("model_name=") and "," not in labels):
                found[stem] = found.get(stem, 0.0) + float(value)
        return found
    except ValueError:
        return {}
