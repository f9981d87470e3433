"""`python load_child.py FILE`: loads all tensors of a file and reads them, says the sum and which
part of the mapping counts for this process (PSS, in KiB), twice: when a line comes, so that all
processes have read everything by then."""

from __future__ import annotations

import sys

from p2pdist.load import safetensors

path = sys.argv[1]
tensors = dict(safetensors(path))
total = sum(float(tensor.double().sum()) for tensor in tensors.values())
print(total, flush=True)
sys.stdin.readline()
pss, inside = 0, False
with open("/proc/self/smaps") as file:
    for line in file:
        if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
            inside = line.rstrip().endswith(path)
        elif inside and line.startswith("Pss:"):
            pss += int(line.split()[1])
print(pss, flush=True)
sys.stdin.readline()
