"""The demo job of docker-compose.yml: packs, pushes, pulls on every agent at once and checks, for
two versions of a package.

    demo.py --seed SOCKET --push ORIGIN [--served URL] AGENT-SOCKET...

Each run makes new content, so nothing is there before. The seed is given the first version only; of
the second, one file of which differs, no agent has anything but what stayed the same. Where the web
server of the origin counts what it sends (`--served`), each byte must have left the origin about
once. Ends with 0 when every claim held, else with 1; needs nothing but p2pdist.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

REFERENCE = "demo/app"
FILE_BYTES, FILES = 4 << 20, 8
COMMAND_S = 300
ORIGIN_COPIES_MAX = 1.1
"""What may leave the origin over what was new: manifests, piece lists and a piece asked for twice
are on top of the content."""

PROGRAM = """\
import hashlib, pathlib
here = pathlib.Path(__file__).parent
for file in sorted(here.glob("shard-*.bin")):
    print(file.name, hashlib.sha256(file.read_bytes()).hexdigest())
"""


def p2pdist(*words: str) -> Any:
    """The JSON that a command prints; raises SystemExit with what it says when it fails."""
    done = subprocess.run(["p2pdist", *words, "--json"], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise SystemExit(f"demo: p2pdist {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def check(held: bool, claim: str) -> None:
    print(f"  {'ok    ' if held else 'FAILED'} {claim}", flush=True)
    if not held:
        raise SystemExit(f"demo: this did not hold: {claim}")


def served_by(url: str) -> Callable[[], int]:
    """What tells how many bytes the origin has sent."""

    def count() -> int:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - from the command line
            return int(json.load(answer)["bytes"])

    return count


def check_copies(sent: int, new: int, hosts: int) -> None:
    copies = sent / new
    check(1 <= copies <= ORIGIN_COPIES_MAX, f"{copies:.2f} copies of what was new left the origin for {hosts} hosts")


def publish(source: Path, reference: str, origin: str) -> dict[str, Any]:
    """Pack and push; returns what pack printed."""
    layout = str(source.with_name("layout"))
    entrypoint = json.dumps(["python3", "${P2PDIST_ROOT}/check.py"])
    how = ("--format", "tree", "--entrypoint", entrypoint, "--layout", layout)
    packed: dict[str, Any] = p2pdist("pack", str(source), "-t", reference, *how)
    pushed = p2pdist("push", reference, "--layout", layout, "--origin", origin)
    check(pushed["digest"] == packed["digest"], f"{reference} was pushed as packed, {pushed['digest'][:19]}")
    print(f"  {megabytes(pushed['bytes_sent'])} sent, {megabytes(pushed['bytes_skipped'])} there before")
    return packed


def pull(sockets: Sequence[str], reference: str) -> list[dict[str, Any]]:
    """Pull on all agents at once."""
    with ThreadPoolExecutor(len(sockets)) as pool:
        pulls = list(pool.map(lambda socket: p2pdist("pull", reference, "--socket", socket), sockets))
    for socket, one in zip(sockets, pulls, strict=True):
        amounts = ((word, megabytes(one[f"bytes_{word}"])) for word in ("origin", "peers", "cached"))
        said = ", ".join(f"{word} {amount}" for word, amount in amounts)
        print(f"  {Path(socket).stem}: {said}, {one['seconds']:.2f} s")
    return pulls


def play(agents: Sequence[str], seed: str, origin: str, served: Callable[[], int] | None, source: Path) -> None:
    source.mkdir()
    (source / "check.py").write_text(PROGRAM)
    for number in range(FILES):
        (source / f"shard-{number}.bin").write_bytes(os.urandom(FILE_BYTES))
    content = FILES * FILE_BYTES
    reference = f"{REFERENCE}:v1"
    print(f"Version 1: {FILES} files, {megabytes(content)}, first to the seed, then to {len(agents)} agents")
    before = served() if served is not None else 0
    packed = publish(source, reference, origin)
    p2pdist("pin", reference, "--socket", seed)
    pulls = pull(agents, reference)
    check({one["digest"] for one in pulls} == {packed["digest"]}, "every agent got the package that was packed")
    check(all(one["bytes_origin"] + one["bytes_peers"] >= content for one in pulls), "every agent got all of it")
    if served is not None:
        check_copies(served() - before, content, len(agents) + 1)

    (source / "shard-0.bin").write_bytes(os.urandom(FILE_BYTES))
    reference = f"{REFERENCE}:v2"
    print("Version 2: one file differs, the seed is not told")
    before = served() if served is not None else 0
    packed = publish(source, reference, origin)
    pulls = pull(agents, reference)
    check({one["digest"] for one in pulls} == {packed["digest"]}, "every agent got the package that was packed")
    most = max(one["bytes_origin"] + one["bytes_peers"] for one in pulls)
    check(most <= 2 * FILE_BYTES, f"{megabytes(most)} moved to each agent, not {megabytes(content)}")
    if served is not None:
        check_copies(served() - before, FILE_BYTES, len(agents))

    print("What the agents hold")
    for socket in agents:
        found = p2pdist("verify", "--no-repair", "--socket", socket)
        whole = not found["wrong"] and found["bytes_checked"] >= content
        check(whole, f"{Path(socket).stem}: {megabytes(found['bytes_checked'])} verified")
    p2pdist("pin", "--remove", f"{REFERENCE}:v1", "--socket", seed)


def main() -> None:
    """Parse the command line and play."""
    parser = argparse.ArgumentParser(description="Pack, push, pull on every agent, and check")
    parser.add_argument("--seed", required=True, metavar="SOCKET")
    parser.add_argument("--push", required=True, metavar="ORIGIN")
    parser.add_argument("--served", default="", metavar="URL")
    parser.add_argument("agents", nargs="+", metavar="AGENT-SOCKET")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="p2pdist-demo-") as place:
        served = served_by(options.served) if options.served else None
        play(options.agents, options.seed, options.push, served, Path(place) / "app")
    print("Every claim held")


if __name__ == "__main__":
    main()
