"""Train a tokenizer in a child process, which an interrupt ends at once: the library that merges pairs looks at no
signal for many seconds. Nothing incomplete is kept. This process imports none of the libraries: an interrupt in an
import may be lost.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lakh import storage
from lakh.child_process import Channel, ChannelClosed, ChildProcess
from lakh.errors import PeerLost

if TYPE_CHECKING:
    from lakh.corpus.document import Progress

__all__ = ["train_in_child"]


def train_in_child(
    corpus: str | Path, out: str | Path, *, progress: Progress | None = None, **options: Any
) -> dict[str, Any]:
    """`training.train` with the same options in a process of its own; its result as plain data."""
    child: ChildProcess | None = None
    try:
        child = ChildProcess.start("lakh.tokens.training_process:_train", str(corpus), str(out), options)
        while not isinstance(message := child.channel.receive(), dict):
            if progress is not None:
                progress(*message)
        return message
    except ChannelClosed:
        assert child is not None
        found = f"the process that trains it ended ({child.exit_reason()})"
        raise PeerLost(str(out), found, "run it again, with a smaller --sample-bytes if memory was short") from None
    finally:
        if child is not None:
            child.kill()
        storage.remove_parts(out)


def _train(channel: Channel, corpus: str, out: str, options: dict[str, Any]) -> None:
    from lakh.tokens.tokenizer.training import train

    channel.send(asdict(train(corpus, out, **options, progress=lambda *done: channel.send(done))))
