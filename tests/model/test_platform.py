"""Platforms of images and machines."""

from __future__ import annotations

import pytest

from p2pdist.model.errors import UsageError
from p2pdist.model.platform import machine_platform, parse_platform, platform_of

V2 = "flags : fpu cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"
V3 = f"{V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"


@pytest.mark.parametrize(
    ("machine", "image", "runs"),
    [
        ("linux/amd64", "linux/amd64/v1", True),
        ("linux/amd64", "linux/amd64/v2", False),
        ("linux/amd64/v3", "linux/amd64/v2", True),
        ("linux/arm/v7", "linux/arm/v6", True),
        ("linux/arm/v6", "linux/arm/v7", False),
        ("linux/arm", "linux/armhf", True),
        ("linux/armel", "linux/arm/v7", False),
        ("linux/aarch64", "linux/arm64/v8", True),
        ("linux/arm64/v8.2", "linux/arm64/8.1", True),
        ("linux/arm64", "linux/arm64/v8.1", False),
        ("linux/x86_64", "windows/amd64", False),
        ("linux/riscv64", "linux/riscv64/rva23", False),
        ("linux/riscv64/rva23", "linux/riscv64/rva23", True),
    ],
)
def test_a_machine_runs_its_own_level_and_lower_ones(machine: str, image: str, runs: bool) -> None:
    assert parse_platform(machine)[0].runs(parse_platform(image)[0]) is runs


@pytest.mark.parametrize(
    ("machine", "cpu", "expected"),
    [
        ("x86_64", "", "linux/amd64"),
        ("x86_64", V2, "linux/amd64/v2"),
        ("x86_64", f"processor : 0\n{V3}\nbugs : none", "linux/amd64/v3"),
        ("x86_64", f"{V3} avx512f", "linux/amd64/v3"),
        ("x86_64", V3.replace("ssse3", ""), "linux/amd64"),
        ("aarch64", "", "linux/arm64"),
        ("armv7l", "", "linux/arm/v7"),
        ("armv6l", "", "linux/arm/v6"),
    ],
)
def test_what_this_machine_is(machine: str, cpu: str, expected: str) -> None:
    assert str(machine_platform(machine, cpu)) == expected


@pytest.mark.parametrize("text", ["linux", "", "/amd64", "linux/arm/v7/x", "linux/"])
def test_what_is_no_platform(text: str) -> None:
    with pytest.raises(UsageError, match="platform"):
        parse_platform(text)


def test_names_that_an_index_leaves_out() -> None:
    assert str(platform_of(None, "amd64")) == "linux/amd64"
    assert str(platform_of("linux", "arm", None)) == "linux/arm/v7"
