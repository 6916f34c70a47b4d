"""The gRPC face: lakh.v1.Completion over the same engine, queue, keys and rules as HTTP.

    lakh.v1.Completion/Complete    server streaming; the client's deadline and its cancellation reach the engine
    grpc.health.v1.Health          "" is alive, "ready" serves requests; not serving while draining
    reflection                     for grpcurl and its like, where grpcio-reflection is installed

A request is read by requests.py in OpenAI's field names, so both faces refuse the same things; a refusal becomes the
gRPC status that means it. Knows grpc.aio and http.Server's parts; knows nothing of models.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from lakh.errors import UserError
from lakh.server import proto
from lakh.server.http import RESULT_TIMEOUT_S, Server, as_bad_request, rows_of
from lakh.server.requests import BadRequest, parse
from lakh.server.worker import Job, QueueFull

__all__ = ["running"]

MAX_MESSAGE_BYTES = 4 << 20
STOP_GRACE_S = 5.0
STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_PLAIN = ("suffix", "max_tokens", "temperature", "top_p", "top_k", "seed", "logprobs", "n")
_WORDS = ("stop_rule", "order", "supersede", "user", "model")


@contextlib.asynccontextmanager
async def running(server: Server, host: str, port: int) -> AsyncIterator[str]:
    """Answers inside the block; gives the address with the real port where 0 was asked for."""
    grpc_server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
    face = _Face(server)
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
        real_port = grpc_server.add_insecure_port(where)
    except RuntimeError:
        raise UserError(where, "cannot be listened on", "choose another, or port 0: --grpc HOST:PORT") from None
    await grpc_server.start()
    for name in ("", "ready", proto.SERVICE):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    try:
        yield f"{host}:{real_port}"
    finally:
        await checks.enter_graceful_shutdown()
        await grpc_server.stop(STOP_GRACE_S)


class _Face:
    def __init__(self, server: Server) -> None:
        self.server = server

    async def models(self, _: Any, context: grpc.aio.ServicerContext) -> Any:
        engine = self.server.engine
        return proto.ModelsReply(models=[{"id": engine.name, "context": engine.spec.context}])

    async def complete(self, message: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        server = self.server
        job: Job | None = None
        try:
            metadata = dict(context.invocation_metadata() or ())
            tenant = server.tenant(str(metadata.get("authorization", "")))
            request = parse(_as_openai(message), tenant)
            server.check(request)
            rows = await asyncio.get_running_loop().run_in_executor(server.encoders, rows_of, server.engine, request)
            left_s = context.time_remaining()
            for row in rows:
                if left_s is not None:
                    row.deadline_s = min(row.deadline_s or float("inf"), server.engine.clock() + left_s)
            job = Job(rows, request.supersede)
            server.worker.submit(job)
            server.metrics.prompt_tokens += sum(len(row.prompt) for row in rows[:: request.n])
            async for index, chunk in job.results(RESULT_TIMEOUT_S):
                server.metrics.generation_tokens += len(chunk.tokens)
                if chunk.finish_reason is not None:
                    server.metrics.finished[chunk.finish_reason] += 1
                yield proto.CompleteChunk(
                    index=index,
                    text=chunk.text,
                    tokens=chunk.tokens,
                    finish_reason=chunk.finish_reason or "",
                    logprobs=[{"token": item.token, "logprob": item.logprob} for item in chunk.logprobs or ()],
                    prompt_tokens=len(rows[index].prompt),
                    cached_tokens=rows[index].num_cached,
                )
        except asyncio.CancelledError:
            server.metrics.cancelled += 1
            raise
        except QueueFull:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full; try again later")
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time")
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as error:  # noqa: BLE001 - the one place where errors become statuses
            answer = as_bad_request(error)
            await context.abort(STATUS.get(answer.status, grpc.StatusCode.INTERNAL), answer.message)
        finally:
            if job is not None:
                server.worker.cancel(job)


def _as_openai(message: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": list(message.prompt_ids) or message.prompt}
    if message.prompt and message.prompt_ids:
        raise BadRequest("prompt", "prompt and prompt_ids: give one of them")
    body |= {name: getattr(message, name) for name in _PLAIN if message.HasField(name)}
    body |= {name: getattr(message, name) for name in _WORDS if getattr(message, name)}
    return body | {"stop": list(message.stop), "stream": True}
