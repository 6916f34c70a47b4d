"""The messages of completion.proto, made from its compiled descriptor when imported.

completion.binpb is what `python -m grpc_tools.protoc -I src/lakh/server/proto --descriptor_set_out
src/lakh/server/proto/completion.binpb completion.proto` writes. Generated Python code would tie lakh to the protobuf
version that generated it; a descriptor is read by all of them. Other languages generate from completion.proto as
usual.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = [
    "SERVICE",
    "CompleteChunk",
    "CompleteRequest",
    "FeedbackReply",
    "FeedbackRequest",
    "ModelsReply",
    "ModelsRequest",
]

SERVICE = "lakh.v1.Completion"

_set = descriptor_pb2.FileDescriptorSet.FromString(resources.files(__name__).joinpath("completion.binpb").read_bytes())
for _file in _set.file:
    descriptor_pool.Default().AddSerializedFile(_file.SerializeToString())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(f"lakh.v1.{name}"))


CompleteRequest, CompleteChunk = _message("CompleteRequest"), _message("CompleteChunk")
ModelsRequest, ModelsReply = _message("ModelsRequest"), _message("ModelsReply")
FeedbackRequest, FeedbackReply = _message("FeedbackRequest"), _message("FeedbackReply")
