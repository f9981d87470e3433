"""Tensors of safetensors files, in file order, from one mapping of the file.

All processes of a host that load a file map the same pages of the page cache, so that weights are
in memory once, whatever the number of ranks. A tensor on the CPU is such pages. A page that a
program writes to becomes its own (copy on write): the file never changes.

A file that still arrives has its full length from the beginning. Before a tensor is made, the agent
has said that its bytes are there and verified; so loading goes along with the broadcast. What comes
straight from a registry counts as a whole only, and is loaded once it is complete.

To a CUDA device bytes go through two pinned buffers, while the next ones arrive.
"""

from __future__ import annotations

import importlib
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from p2pdist.agent.api.client import DEFAULT_SOCKET, LocalClient
from p2pdist.load.header import LENGTH_BYTES, Place, decode_header, header_length
from p2pdist.model.digest import is_digest
from p2pdist.model.errors import Corrupt, NotFound, Unavailable, UsageError
from p2pdist.model.hub import is_hub
from p2pdist.model.image import is_image
from p2pdist.model.messages import BlobFile, PullRequest

ENDING = ".safetensors"
STAGE_BYTES = 64 << 20
"""Of each of two pinned buffers."""

AHEAD = 3
"""Files of a hub that are fetched while the one before them is loaded."""

NO_RESERVE = 0x4000
"""MAP_NORESERVE of mmap(2): a file larger than the memory is mapped all the same."""

TRIES = 5
"""A blob's file gets another name when it is complete, maybe just before it is opened; and where
the blob is removed meanwhile, the next file of it is another one."""

_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


def safetensors(
    source: str | os.PathLike[str],
    *,
    device: Any = "cpu",
    socket: str | os.PathLike[str] | None = None,
    chosen: Callable[[str], bool] = lambda path: True,
) -> Iterator[tuple[str, Any]]:
    """Names and tensors of `source`, in file order: a path of a file or directory, the digest of a
    blob, or the reference of a model, whose pull the agent begins; of one of the hub (`hf://...`)
    it fetches the files as they are loaded. Of several files, those of which `chosen` says so of
    the path within `source`, each comes after the one before, by name. `socket` is the agent's,
    else that of P2PDIST_SOCKET.

    Tensors on the CPU share the pages of the file with all programs that load it, as long as they
    are not written to. Raises UsageError, NotFound, Corrupt for what is no safetensors file, and
    what pulling raises."""
    torch = _torch()
    return _all(torch, _files(source, socket, chosen), torch.device(device))


def _all(torch: Any, files: Iterator[_File], device: Any) -> Iterator[tuple[str, Any]]:
    put = _Staging(torch, device).put if device.type == "cuda" else None
    ahead: list[_File] = []
    while True:
        for file in islice(files, AHEAD + 1 - len(ahead)):
            file.begin()
            ahead.append(file)
        if not ahead:
            return
        yield from _tensors(torch, ahead.pop(0), device, put)


@dataclass
class _File:
    """A file to load: a path, or a blob of the agent that `client` asks."""

    name: str
    path: str = ""
    digest: str = ""
    client: LocalClient | None = None
    model: str = ""
    """The model of a hub that has it."""
    here: int = 0
    """Up to where the bytes of a blob are there."""
    inode: int = 0
    """Of the file that is mapped."""
    mapped: mmap.mmap | None = None

    def begin(self) -> None:
        """Have the agent fetch a file of a hub, which nothing else does."""
        if self.client is not None and self.model:
            self._ask(self.client, 0, 0)

    def _ask(self, client: LocalClient, start: int, end: int) -> BlobFile:
        try:
            return client.blob_file(self.digest, start, end, self.model)
        except Corrupt as error:
            raise Corrupt(f"{self.name} cannot be loaded: {error.what}", remedy=error.remedy) from error

    def ready(self, start: int, end: int) -> mmap.mmap:
        """A mapping of the file, once bytes are there and verified. It is another one than before
        where the blob was removed and fetched again: the former file will never get the rest."""
        for _ in range(TRIES):
            inode = 0
            if self.client is not None and (end > self.here or self.mapped is None):
                found = self._ask(self.client, start, end)
                self.path, self.here, inode = found.path, found.here, found.inode
            if self.mapped is not None and inode in (0, self.inode):
                return self.mapped
            if (mapped := self._map(inode)) is not None:
                return mapped
        raise Unavailable(f"{self.name} is not where the agent says", remedy="See the agent's log")

    def _map(self, inode: int) -> mmap.mmap | None:
        """Map the file; None where it is not there any more, or is another one than the agent spoke
        of (`inode`, 0 for any)."""
        self.mapped = None
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            if self.client is None:
                raise NotFound(f"there is no file {self.path}") from error
            return None
        except PermissionError as error:
            raise UsageError(
                f"this user may not read {self.path}", remedy="Be in the group of the agent's socket"
            ) from error
        try:
            status = os.fstat(handle)
            if inode not in (0, status.st_ino):
                return None
            if not status.st_size:
                raise Corrupt(f"{self.name} is empty, and no safetensors file")
            flags, prot = mmap.MAP_PRIVATE | NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            self.inode, self.mapped = status.st_ino, mmap.mmap(handle, 0, flags=flags, prot=prot)
            return self.mapped
        finally:
            os.close(handle)


def _files(
    source: str | os.PathLike[str], socket: str | os.PathLike[str] | None, chosen: Callable[[str], bool]
) -> Iterator[_File]:
    text = os.fspath(source)
    if not isinstance(source, str) or text.startswith(("/", "./", "../")) or text.endswith(ENDING):
        path = Path(text)
        paths = sorted(path.glob(f"*{ENDING}")) if path.is_dir() else [path]
        paths = [each for each in paths if chosen(each.name)]
        if not paths:
            raise NotFound(f"there is no such *{ENDING} file in {path}")
        yield from (_File(str(each), str(each)) for each in paths)
        return
    client = LocalClient(Path(socket or os.environ.get("P2PDIST_SOCKET") or DEFAULT_SOCKET))
    if is_digest(text):
        yield _File(text, digest=text, client=client)
        return
    if not is_image(text) and not is_hub(text):
        client.begin_pull(PullRequest(package=text))
    model = client.model_files(text)
    hub = model.reference if is_hub(text) else ""
    weights = sorted(
        (file.path, file.digest) for file in model.files if file.path.endswith(ENDING) and chosen(file.path)
    )
    if not weights:
        raise NotFound(f"{model.reference} has no such *{ENDING} file", remedy="Name a path within it")
    yield from (_File(path, digest=digest, client=client, model=hub) for path, digest in weights)


def _tensors(torch: Any, file: _File, device: Any, put: Any) -> Iterator[tuple[str, Any]]:
    mapped = file.ready(0, LENGTH_BYTES)
    size = len(mapped)
    start = LENGTH_BYTES + header_length(mapped[:LENGTH_BYTES], size)
    mapped = file.ready(LENGTH_BYTES, start)
    for place in decode_header(mapped[LENGTH_BYTES:start], size):
        tensor = _tensor(torch, file.ready(place.begin, place.end), place)
        if put is not None:
            tensor = put(tensor)
        elif device.type != "cpu":
            tensor = tensor.to(device)
        yield place.name, tensor


def _tensor(torch: Any, mapped: mmap.mmap, place: Place) -> Any:
    """The tensor whose values are in the mapping, which it keeps."""
    dtype = getattr(torch, _TYPES[place.dtype], None)
    if dtype is None:
        raise UsageError(f"this torch has no type {place.dtype}, of the tensor {place.name[:200]}")
    if place.begin == place.end:
        return torch.empty(place.shape, dtype=dtype)
    flat = torch.frombuffer(mapped, dtype=torch.uint8, count=place.end - place.begin, offset=place.begin)
    if dtype.itemsize > 1 and flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()  # what is not aligned cannot be seen as the type
    return flat.view(dtype).reshape(place.shape)


class _Staging:
    """Copies to a CUDA device through pinned buffers in turn: while one is read by the device, the
    other is filled."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch, self._device, self._turn = torch, device, 0
        self._buffers = [torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._read = [torch.cuda.Event() for _ in range(2)]

    def put(self, tensor: Any) -> Any:
        """The tensor on the device."""
        there = self._torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = (each.reshape(-1).view(self._torch.uint8) for each in (tensor, there))
        for start in range(0, source.numel(), STAGE_BYTES):
            count = min(STAGE_BYTES, source.numel() - start)
            buffer, read = self._buffers[self._turn], self._read[self._turn]
            read.synchronize()
            buffer[:count].copy_(source[start : start + count])
            target[start : start + count].copy_(buffer[:count], non_blocking=True)
            read.record()
            self._turn = 1 - self._turn
        self._read[1 - self._turn].synchronize()
        return there


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise UsageError("torch is not installed", remedy="pip install 'p2pdist[torch]'") from error
