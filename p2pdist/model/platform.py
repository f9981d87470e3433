"""What an image runs on: operating system, architecture and variant, as the OCI image index names
them (image specification, "Image Index Property Descriptions") and as docker's --platform does.

A variant is a level: a processor runs what is made for its own and for lower ones. Without one
amd64 is v1, arm v7 and arm64 v8, as containerd has it (platforms.Normalize).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from p2pdist.model.errors import UsageError

_ARCHITECTURES = {
    "x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64", "i386": "386", "i686": "386", "loongarch64": "loong64",
}  # fmt: skip
_ARMS = {"armhf": "v7", "armv7l": "v7", "armv8l": "v8", "armel": "v6", "armv6l": "v6", "armv5tel": "v5"}
_LOWEST = {"amd64": "v1", "arm": "v7", "arm64": "v8"}
_LEVEL = re.compile(r"v(\d{1,3})(?:\.(\d{1,3}))?\Z")
_AMD64_FLAGS = (
    ("v2", "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"),
    ("v3", "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"),
    ("v4", "avx512f avx512bw avx512cd avx512dq avx512vl"),
)
"""Flags of /proc/cpuinfo that each level adds (System V ABI for AMD64, "Micro-Architecture
Levels")."""


@dataclass(frozen=True, slots=True)
class Platform:
    """`variant` is never empty where the architecture has levels."""

    os: str
    architecture: str
    variant: str = ""

    def __str__(self) -> str:
        lowest = _LOWEST.get(self.architecture, "")
        shown = "" if self.variant == lowest and self.architecture != "arm" else self.variant
        return "/".join(part for part in (self.os, self.architecture, shown) if part)

    @property
    def level(self) -> tuple[int, int]:
        """The variant's number: a processor runs images of its own level and of lower ones."""
        match = _LEVEL.match(self.variant)
        return (int(match[1]), int(match[2] or 0)) if match else (0, 0)

    def runs(self, image: Platform) -> bool:
        """Whether a machine of this platform runs an image of that one."""
        if (self.os, self.architecture) != (image.os, image.architecture):
            return False
        return self.variant == image.variant or (_LEVEL.match(image.variant) is not None and image.level <= self.level)


def platform_of(os: Any, architecture: Any, variant: Any = "") -> Platform:
    """A platform by any of its names: x86_64 is amd64, armhf is arm/v7."""
    name = str(architecture or "").lower()
    if name in _ARMS:
        name, variant = "arm", variant or _ARMS[name]
    name = _ARCHITECTURES.get(name, name)
    level = str(variant or "").lower()
    level = f"v{level}" if level[:1].isdigit() else level
    return Platform(str(os or "linux").lower(), name, level or _LOWEST.get(name, ""))


def parse_platform(text: str) -> tuple[Platform, bool]:
    """The platform that OS/ARCHITECTURE[/VARIANT] names, and whether it names a variant. Raises
    UsageError."""
    parts = text.split("/")
    if not 2 <= len(parts) <= 3 or not all(parts):
        raise UsageError(f"{text[:100]!r} is not a platform", remedy="Write OS/ARCH or OS/ARCH/VARIANT: linux/arm/v7")
    return platform_of(*parts), len(parts) == 3


def machine_platform(machine: str, cpu: str) -> Platform:
    """The platform of a Linux machine, from what uname(2) calls it and the text of
    /proc/cpuinfo."""
    platform = platform_of("linux", machine)
    if platform.architecture != "amd64":
        return platform
    flags = next((line for line in cpu.splitlines() if line.startswith("flags")), "").split()
    variant = platform.variant
    for level, needed in _AMD64_FLAGS:
        if not set(needed.split()) <= set(flags):
            break
        variant = level
    return Platform(platform.os, platform.architecture, variant)
