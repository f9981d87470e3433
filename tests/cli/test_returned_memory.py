"""A tracker's process returns what it frees, measured in one of its own: the verb is run until it
would serve."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

MIB = 1 << 20
needs_mallopt = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")

PROGRAM = """
import ctypes, os, sys
from p2pdist.cli import daemon
from p2pdist.cli.main import main

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def measure(service=None):
    if service is not None:
        service.close()
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    libc.free(libc.malloc(24 << 20))  # glibc keeps twice that at the end of its heap from now on
    blocks = (ctypes.c_void_p * 320)()  # a list would grow above them
    before = resident()
    for number in range(320):
        blocks[number] = libc.malloc(64 << 10)
        ctypes.memset(blocks[number], 1, 64 << 10)
    for number in reversed(range(320)):
        libc.free(blocks[number])
    print(resident() - before)

if sys.argv[1] == "returns":
    daemon.run = measure
    sys.argv = ["p2pdist", "tracker", "--listen", "127.0.0.1:7070", "--no-discovery"]
    main()
else:
    measure()
"""


@needs_mallopt
@pytest.mark.parametrize(("how", "kept"), [("returns", False), ("keeps", True)])
def test_what_a_tracker_frees_is_returned(how: str, kept: bool) -> None:
    """Of 20 MiB; without it all of them stay."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=60)
    assert (int(ended.stdout) > 15 * MIB) == kept, ended.stdout
    assert (int(ended.stdout) < 5 * MIB) != kept, ended.stdout
