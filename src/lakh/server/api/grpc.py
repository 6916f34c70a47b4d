"""The gRPC face: lakh.v1.Completion over the same engine, queue, keys and rules as HTTP.

    lakh.v1.Completion/Complete    server streaming; the client's deadline and its cancellation reach the engine
    lakh.v1.Completion/Feedback    what became of a suggestion
    grpc.health.v1.Health          "" is alive, "ready" serves requests; not serving while draining
    reflection                     for grpcurl and its like, where grpcio-reflection is installed

A request is read by requests.py in OpenAI's field names, so both faces refuse the same things; a refusal becomes the
gRPC status that means it. Knows grpc.aio and the desk; knows nothing of models.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from lakh.errors import UserError
from lakh.server import proto
from lakh.server.backend import CompletionDelta, Usage
from lakh.server.api.listen import check_free
from lakh.server.api.request_handler import RequestHandler, refusal
from lakh.server.api.tls import Tls
from lakh.server.request import RequestError, parse

__all__ = ["running"]

MAX_MESSAGE_BYTES = 4 << 20
STOP_GRACE_S = 5.0
WATCH_S = 0.2
MIN_TIMEOUT_S = 0.001
STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_PLAIN = ("suffix", "max_tokens", "temperature", "top_p", "top_k", "seed", "logprobs", "n", "reuse", "heal")
_WORDS = ("stop_rule", "order", "supersede", "user", "model", "cache_salt")


@contextlib.asynccontextmanager
async def running(
    desk: RequestHandler, host: str, port: int, *, tls: Tls | None = None, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> AsyncIterator[str]:
    """Answers inside the block; gives the address with the real port where 0 was asked for."""
    options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.so_reuseport", 0),  # else a second server takes half of the first one's connections, and nobody is told
    ]
    grpc_server = grpc.aio.server(options=options)
    face = _Face(desk)
    handlers = {
        "Complete": grpc.unary_stream_rpc_method_handler(
            face.complete,
            request_deserializer=proto.CompleteRequest.FromString,
            response_serializer=proto.CompleteChunk.SerializeToString,
        ),
        "Models": grpc.unary_unary_rpc_method_handler(
            face.models,
            request_deserializer=proto.ModelsRequest.FromString,
            response_serializer=proto.ModelsReply.SerializeToString,
        ),
        "Feedback": grpc.unary_unary_rpc_method_handler(
            face.feedback,
            request_deserializer=proto.FeedbackRequest.FromString,
            response_serializer=proto.FeedbackReply.SerializeToString,
        ),
    }
    grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(proto.SERVICE, handlers),))
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, grpc_server)
    services = [proto.SERVICE, health.SERVICE_NAME]
    with contextlib.suppress(ModuleNotFoundError):
        from grpc_reflection.v1alpha import reflection

        reflection.enable_server_reflection([*services, reflection.SERVICE_NAME], grpc_server)
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is None:
            real_port = grpc_server.add_insecure_port(where)
        else:
            real_port = grpc_server.add_secure_port(where, tls.grpc_credentials())
    except RuntimeError:
        check_free("--grpc", host, port)  # says why, where it can; gRPC does not
        raise UserError(where, "cannot be listened on", "choose another, or port 0: --grpc HOST:PORT") from None
    await grpc_server.start()
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    watching = asyncio.create_task(_watch(desk, checks))
    try:
        yield f"{host}:{real_port}"
    finally:
        watching.cancel()
        await checks.enter_graceful_shutdown()
        await grpc_server.stop(STOP_GRACE_S)


async def _watch(desk: RequestHandler, checks: Any) -> None:
    """ "ready" says whether requests are taken: a gateway without engines, or a server that drains, takes none."""
    known = None
    while True:
        is_ready = not desk.draining and bool(desk.backend.models())
        if is_ready != known:
            status = health_pb2.HealthCheckResponse
            for name in ("ready", proto.SERVICE):
                await checks.set(name, status.SERVING if is_ready else status.NOT_SERVING)
            known = is_ready
        await asyncio.sleep(WATCH_S)


class _Face:
    def __init__(self, desk: RequestHandler) -> None:
        self.desk = desk

    async def models(self, _: Any, context: grpc.aio.ServicerContext) -> Any:
        return proto.ModelsReply(
            models=[{"id": card.id, "context": card.context} for card in self.desk.backend.models()]
        )

    async def feedback(self, message: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            tenant = self.desk.tenant(_authorization(context))
            await self.desk.feedback(tenant, {"event": message.event})
        except RequestError as answer:
            await context.abort(STATUS.get(answer.status, grpc.StatusCode.INTERNAL), answer.message)
        return proto.FeedbackReply(**await self.desk.accepted_by_tenant(tenant))

    async def complete(self, message: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            with self.desk.counted():
                request = parse(_as_openai(message), self.desk.tenant(_authorization(context)))
                left_s = context.time_remaining()
                if left_s is not None:
                    request = replace(request, timeout_s=max(left_s, MIN_TIMEOUT_S))
                async with contextlib.aclosing(self.desk.answer(request)) as items:
                    async for item in items:
                        yield _chunk(item)
        except (asyncio.CancelledError, grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as error:  # noqa: BLE001 - the one place where errors become statuses
            answer = refusal(error)
            await context.abort(STATUS.get(answer.status, grpc.StatusCode.INTERNAL), answer.message)


def _chunk(item: CompletionDelta | Usage) -> Any:
    if isinstance(item, Usage):
        return proto.CompleteChunk(
            usage={
                "prompt_tokens": item.prompt_tokens,
                "completion_tokens": item.completion_tokens,
                "cached_tokens": item.cached_tokens,
            }
        )
    scores = [] if item.logprobs is None else item.logprobs["token_logprobs"]
    return proto.CompleteChunk(
        index=item.index,
        text=item.text,
        tokens=item.tokens,
        finish_reason=item.finish_reason or "",
        logprobs=[
            {"token": token, "logprob": score} for token, score in zip(item.tokens, scores, strict=False) if scores
        ],
    )


def _authorization(context: grpc.aio.ServicerContext) -> str:
    return str(dict(context.invocation_metadata() or ()).get("authorization", ""))


def _as_openai(message: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": list(message.prompt_ids) or message.prompt}
    if message.prompt and message.prompt_ids:
        raise RequestError("prompt", "prompt and prompt_ids: give one of them")
    body |= {name: getattr(message, name) for name in _PLAIN if message.HasField(name)}
    body |= {name: getattr(message, name) for name in _WORDS if getattr(message, name)}
    # Log-probabilities stand beside ids here: a gateway has to ask its engines for those.
    return body | {"stop": list(message.stop), "stream": True, "return_token_ids": "logprobs" in body}
