"""Files on local disks and object stores: every path is an fsspec URL, and a plain path is a local file.

- `write_bytes` is atomic: a reader sees the old bytes or the new ones. Local files are written under a temporary name,
  synced and renamed; object stores replace whole objects.
- A *set* of files is complete when it has a manifest.json, which is written last (`commit`).
- Transient failures are retried with back-off and then raise PeerLost. A full disk raises DiskFull immediately, and
  the temporary file is removed. `observe_delays` reports attempts that failed and requests that took long.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import io
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

from lakh.errors import DataError, DiskFull, LakhError, MissingExtra, PeerLost, UserError

__all__ = [
    "MANIFEST",
    "MANIFEST_HASH",
    "PART",
    "HashingFile",
    "ObjectInfo",
    "StorageDelay",
    "cache_folder",
    "commit",
    "create",
    "exists",
    "explain",
    "find_files",
    "is_complete",
    "is_local",
    "join",
    "list_dir",
    "local_path",
    "make_dir",
    "manifest_to_reuse",
    "observe_delays",
    "open_read",
    "read_bytes",
    "read_manifest",
    "read_range",
    "real_path",
    "remove_parts",
    "remove_tree",
    "require_folder",
    "require_space",
    "retry",
    "sha256",
    "size_of",
    "write_bytes",
]

MANIFEST = "manifest.json"
PART = ".part"
MANIFEST_HASH = "manifest_sha256"
_NO_HASH = "0" * 64  # in place of the hash while the manifest is hashed
RETRY_ATTEMPTS = 5
CREDENTIAL_ERRORS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError"}
"""Errors of botocore that no retry repairs; it is not imported here."""
RETRY_FIRST_WAIT_S = 0.2
SLOW_REQUEST_S = 1.5
SLOW_BYTES_PER_S = 20e6  # what a request may take beyond that for its bytes
COPY_BLOCK_BYTES = 4 << 20
RANGE_BYTES = 8 << 20  # of one request; object stores answer several of them faster than one large one
RANGE_THREADS = 8

T = TypeVar("T")


class StorageDelay(NamedTuple):
    operation: str
    """Such as "write s3://bucket/key"."""
    seconds: float
    """Since the first attempt began."""
    attempts: int
    reason: str


_observers: list[Callable[[StorageDelay], None]] = []


class ObjectInfo(NamedTuple):
    size_bytes: int
    version: str
    """Another one after each write; empty if the store has none."""


def is_local(url: str | Path) -> bool:
    return "://" not in str(url) or str(url).startswith("file://")


def local_path(url: str | Path) -> Path:
    """The local file behind a plain path or a file:// URL."""
    if not is_local(url):
        raise UserError(str(url), "is not a local path", "give a path on this machine")
    return Path(str(url).removeprefix("file://"))


def real_path(url: str | Path) -> Path:
    """The local file without symbolic links. Of links in a circle the path itself, where Path.resolve fails."""
    return Path(os.path.realpath(local_path(url)))


def join(url: str | Path, *parts: str) -> str:
    return "/".join([str(url).rstrip("/"), *parts])


def exists(url: str | Path) -> bool:
    if is_local(url):
        with _local_errors(url):
            return local_path(url).exists()
    fs, path = _filesystem(url)
    return bool(retry(lambda: fs.exists(path), f"look for {url}"))


def list_dir(url: str | Path) -> list[str]:
    """Names (not paths) in a folder, sorted; empty if the folder does not exist."""
    if is_local(url):
        with _local_errors(url):
            try:
                return sorted(entry.name for entry in local_path(url).iterdir())
            except (FileNotFoundError, NotADirectoryError):
                return []
    fs, path = _filesystem(url)

    def names() -> list[str]:
        fs.invalidate_cache(path)
        try:
            return sorted(name.rstrip("/").rpartition("/")[2] for name in fs.ls(path, detail=False))
        except FileNotFoundError:
            return []

    return retry(names, f"list {url}")


def find_files(url: str | Path) -> dict[str, ObjectInfo]:
    """The files of an object store below a URL, by their path from there; empty if there are none."""
    fs, path = _filesystem(url)

    def files() -> dict[str, ObjectInfo]:
        fs.invalidate_cache(path)
        try:
            found = fs.find(path, detail=True)
        except FileNotFoundError:
            return {}
        prefix = path.rstrip("/") + "/"
        return {
            name.removeprefix(prefix): ObjectInfo(int(facts["size"] or 0), _version(facts))
            for name, facts in found.items()
            if name.startswith(prefix)
        }

    return retry(files, f"list {url}")


def _version(facts: dict[str, Any]) -> str:
    """What changes when an object is written again; the names of the fields are those of S3, GCS, Azure and others."""
    names = ("ETag", "etag", "LastModified", "updated", "last_modified", "mtime", "created")
    return next((str(facts[name]) for name in names if facts.get(name)), "")


def require_folder(url: str | Path, todo: str) -> None:
    """Raise UserError unless `url` is a folder; `todo` says which one to give."""
    if not exists(url):
        raise UserError(str(url), "no such folder", todo)
    if is_local(url) and not local_path(url).is_dir():
        raise UserError(str(url), "is a file", todo)


def make_dir(url: str | Path) -> None:
    """Make a local folder; does nothing for object stores."""
    if is_local(url):
        with _local_errors(url):
            local_path(url).mkdir(parents=True, exist_ok=True)


def read_bytes(url: str | Path) -> bytes:
    if is_local(url):
        with _local_errors(url):
            return local_path(url).read_bytes()
    fs, path = _filesystem(url)
    return bytes(retry(lambda: fs.cat_file(path), f"read {url}"))


def read_range(url: str | Path, start: int, size_bytes: int) -> bytes:
    """Bytes start .. start + size_bytes - 1 of a file; fewer if it ends before. Reads remote files in parallel."""
    if is_local(url):
        with _local_errors(url), local_path(url).open("rb", buffering=0) as file:
            file.seek(start)
            return file.read(size_bytes)
    fs, path = _filesystem(url)
    end = start + size_bytes
    pieces = [(at, min(end, at + RANGE_BYTES)) for at in range(start, end, RANGE_BYTES)]

    def fetch(piece: tuple[int, int]) -> bytes:
        size_bytes = piece[1] - piece[0]
        return bytes(retry(lambda: fs.cat_file(path, start=piece[0], end=piece[1]), f"read {url}", size_bytes))

    if len(pieces) == 1:
        return fetch(pieces[0])
    with ThreadPoolExecutor(RANGE_THREADS, thread_name_prefix="lakh-range") as threads:
        return b"".join(threads.map(fetch, pieces))


def size_of(url: str | Path) -> int:
    """The size of a file in bytes."""
    if is_local(url):
        with _local_errors(url):
            return local_path(url).stat().st_size
    fs, path = _filesystem(url)

    def size() -> int:
        fs.invalidate_cache(path)
        return int(fs.size(path))

    return retry(size, f"look at {url}")


def open_read(url: str | Path) -> IO[bytes]:
    """A seekable binary file; ranges of remote objects are fetched on demand."""
    if is_local(url):
        with _local_errors(url):
            return local_path(url).open("rb")
    fs, path = _filesystem(url)
    opened: IO[bytes] = retry(lambda: fs.open(path, "rb"), f"open {url}")
    return opened


def write_bytes(url: str | Path, data: bytes) -> None:
    """Replace the file by `data` atomically."""
    if is_local(url):
        with create(url) as file:
            file.write(data)
        return
    fs, path = _filesystem(url)
    retry(lambda: fs.pipe_file(path, data), f"write {url}", size_bytes=len(data))


@contextlib.contextmanager
def create(url: str | Path) -> Iterator[IO[bytes]]:
    """A binary file that appears under its name only when the block ends without an exception."""
    if not is_local(url):
        # Staged on local disk and uploaded as one object, so that the upload can be retried.
        with tempfile.TemporaryDirectory(prefix="lakh-upload-") as folder:
            staged = Path(folder) / "object"
            with _local_errors(staged), staged.open("wb") as file:
                yield file
            fs, path = _filesystem(url)
            retry(lambda: fs.put_file(str(staged), path), f"write {url}", size_bytes=staged.stat().st_size)
        return
    target = local_path(url)
    if target.exists() and not target.is_file() and not target.is_dir():
        with _local_errors(url), target.open("wb") as device:  # /dev/null or a pipe: never replaced by a file
            yield device
        return
    target = Path(os.path.realpath(target)) if target.is_symlink() else target  # keep the link
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}{PART}")
    with _local_errors(url, hidden=temporary):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as local:
                yield local
                local.flush()
                os.fsync(local.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)


def remove_parts(url: str | Path) -> None:
    """Remove what a killed process has left in a local folder: files that `create` had not finished."""
    if is_local(url):
        with _local_errors(url):
            for path in local_path(url).glob(f".*{PART}"):
                path.unlink(missing_ok=True)


def remove_tree(url: str | Path) -> None:
    """Remove a file or a folder with its contents, if it exists."""
    if is_local(url):
        path = local_path(url)
        with _local_errors(url):
            if not path.is_dir():
                path.unlink(missing_ok=True)
                return
            (path / MANIFEST).unlink(missing_ok=True)  # first: a partly removed set must not look complete
            while path.is_dir():
                with contextlib.suppress(FileNotFoundError):  # another process removes it too
                    shutil.rmtree(path)
        return
    fs, path_text = _filesystem(url)

    def remove() -> None:
        fs.invalidate_cache()
        if fs.exists(manifest := f"{path_text.rstrip('/')}/{MANIFEST}"):
            fs.rm_file(manifest)  # first: a partly removed set must not look complete
        if fs.exists(path_text):
            fs.rm(path_text, recursive=True)

    retry(remove, f"remove {url}")


def sha256(url: str | Path) -> str:
    digest = hashlib.sha256()
    with open_read(url) as file:
        while block := file.read(COPY_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


class HashingFile(io.RawIOBase):
    """A binary file to write to that counts and hashes the bytes. Does not close the file that it writes to."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.size_bytes = 0
        self._digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.file.write(view)
        self._digest.update(view)
        self.size_bytes += len(view)
        return len(view)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def tell(self) -> int:
        return self.size_bytes

    def writable(self) -> bool:
        return True


def cache_folder(name: str) -> Path:
    """This user's cache: under $XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path's would raise
    return Path(_process_cache() if base.startswith("~") else base) / "lakh" / name


@functools.cache
def _process_cache() -> str:
    """A cache for a user without a home folder, as in containers; removed with the process."""
    folder = tempfile.mkdtemp(prefix="lakh-cache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# --- sets of files -----------------------------------------------------------------------------------------------


def commit(url: str | Path, manifest: dict[str, Any], *, hashed: bool = False) -> str:
    """Mark the set of files in folder `url` as complete. Must be the last write to the set.

    `hashed`: the manifest carries its own SHA-256, which `read_manifest` compares. Returns it.
    """
    text = json.dumps(manifest | ({MANIFEST_HASH: _NO_HASH} if hashed else {}), indent=1, sort_keys=True) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest() if hashed else ""
    write_bytes(join(url, MANIFEST), (text.replace(_NO_HASH, digest) if hashed else text).encode())
    return digest


def is_complete(url: str | Path) -> bool:
    return exists(join(url, MANIFEST))


def read_manifest(url: str | Path, *, made_by: str) -> dict[str, Any]:
    """The manifest of a complete set; errors name the command that makes one (`made_by`).

    DataError if it is not JSON or differs from its own hash. Sets of earlier versions have none: the caller decides.
    """
    if not is_complete(url):
        found = "is not complete: it has no manifest.json" if exists(url) else "no such folder"
        raise UserError(str(url), found, f"make it with: {made_by}")
    raw = read_bytes(join(url, MANIFEST))
    try:
        manifest = json.loads(raw)
    except (ValueError, RecursionError):
        manifest = None
    found = ""
    if not isinstance(manifest, dict):
        found = "is damaged: not a JSON object"
    elif MANIFEST_HASH in manifest:
        expected = str(manifest[MANIFEST_HASH])
        if hashlib.sha256(raw.replace(expected.encode(), _NO_HASH.encode())).hexdigest() != expected:
            found = "is damaged: it does not match its own hash"
    if found:
        raise DataError(join(url, MANIFEST), found, f"make it again with: {made_by}")
    return cast(dict[str, Any], manifest)


def manifest_to_reuse(url: str, *, kind: str, made_by: str, force: bool) -> dict[str, Any] | None:
    """The manifest of the complete set in `url`; None if there is none, or if `force` replaces it.

    Raises UserError for a set of another kind, even with `force`: the folder was probably a mistake.
    """
    if not is_complete(url):
        return None
    try:
        manifest = read_manifest(url, made_by=made_by)
    except DataError:
        if force:
            return None
        raise
    if manifest.get("format") != kind:
        raise UserError(url, f"holds something else ({manifest.get('format')!r})", "choose another --out")
    return None if force else manifest


# --- failures ----------------------------------------------------------------------------------------------------


def retry(
    call: Callable[[], T],
    what: str,
    size_bytes: int = 0,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Call until it succeeds, with waits of 0.2, 0.4, 0.8 ... s. A missing file is not retried."""
    began_s = clock()

    def report(attempt: int, reason: str) -> None:
        for observer in list(_observers):
            observer(StorageDelay(what, clock() - began_s, attempt + 1, reason))

    for attempt in range(RETRY_ATTEMPTS):
        attempt_s = clock()
        try:
            done = call()
            if clock() - attempt_s > SLOW_REQUEST_S + size_bytes / SLOW_BYTES_PER_S:
                report(attempt, "is slow")
            return done
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            raise UserError(what, f"{type(error).__name__}: {error}", "check the URL and its rights") from None
        except LakhError:
            raise
        except Exception as error:  # every fsspec back-end has its own error types
            if type(error).__name__ in CREDENTIAL_ERRORS:
                raise UserError(what, f"{type(error).__name__}: {error}", "set the credentials of the store") from None
            report(attempt, f"{type(error).__name__}: {error}")
            if attempt == RETRY_ATTEMPTS - 1:
                found = f"failed {RETRY_ATTEMPTS} times ({type(error).__name__}: {error})"
                raise PeerLost(what, found, "try again later") from error
            sleep(RETRY_FIRST_WAIT_S * 2**attempt)
    raise AssertionError("unreachable")


@contextlib.contextmanager
def observe_delays(observer: Callable[[StorageDelay], None]) -> Iterator[None]:
    """Inside the block, call `observer` after each attempt on an object store that failed or was slow.

    It is called in the thread of the request.
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def require_space(url: str | Path, size_bytes: int) -> None:
    """Raise DiskFull early if a local disk cannot hold `size_bytes`."""
    if not is_local(url):
        return
    path = local_path(url).absolute()
    while not path.exists():
        path = path.parent
    if not os.access(path, os.W_OK):
        raise UserError(str(url), f"{path} is not writable", "choose another folder, or check its owner and mode")
    free = shutil.disk_usage(path).free
    if free < size_bytes:
        found = f"needs about {_size(size_bytes)} and {_size(free)} are free"
        raise DiskFull(str(url), found, "free some space or choose another disk")


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.2f} MB"


def explain(error: OSError, where: str | Path) -> LakhError | None:
    """The LakhError for an operating system error; None if the user can do nothing about it."""
    place, words = str(error.filename or where), (error.strerror or str(error)).lower()
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        todo = "free some space and run the same command again; nothing incomplete was kept"
        return DiskFull(place, "no space left on the disk", todo)
    if isinstance(error, FileNotFoundError):
        return UserError(place, "no such file", "check the path")
    if isinstance(error, PermissionError):
        return UserError(place, "permission denied", "check its owner and mode")
    if error.errno == errno.EROFS:
        return UserError(place, words, "choose a writable folder")
    if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP):
        return UserError(place, words, "check the path")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return UserError(place, words, "raise the limit (ulimit -n), or start fewer workers")
    if error.errno == errno.EFBIG:
        return UserError(place, "is larger than the limit on the size of a file", "raise the limit (ulimit -f)")
    if error.errno == errno.EIO:
        return DataError(place, "the disk failed to read or write", "check the disk (dmesg) and save its contents")
    return None


@contextlib.contextmanager
def _local_errors(url: str | Path, hidden: Path | None = None) -> Iterator[None]:
    """Report errors of the temporary file `hidden` as errors of `url`."""
    try:
        yield
    except OSError as error:
        if hidden is not None and error.filename == str(hidden):
            error.filename = str(url)
        if (explained := explain(error, url)) is None:
            raise
        raise explained from None


def _sync_folder(folder: Path) -> None:
    """Make the rename durable, where the file system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _filesystem(url: str | Path) -> tuple[Any, str]:
    import fsspec

    text = str(url)
    try:
        fs, path = fsspec.core.url_to_fs(text)
    except ImportError as error:
        raise MissingExtra(text, str(error.name or error), "s3") from None
    except ValueError as error:
        raise UserError(text, str(error), "use a plain path or a URL such as s3://bucket/key") from None
    return fs, path
