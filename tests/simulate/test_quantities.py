"""Rates, times, shares and ratios as people write them."""

import re
from collections.abc import Callable

import pytest

from p2pdist.cli.options import parse_rate, parse_ratio, parse_share, parse_time
from p2pdist.model.errors import UsageError


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_rate, "300MB/s", 300e6),
        (parse_rate, "1GiB/s", 1 << 30),
        (parse_rate, "25Gbit/s", 25e9 / 8),
        (parse_rate, "80kbit/s", 10e3),
        (parse_time, "0.2ms", 0.0002),
        (parse_time, "50us", 0.00005),
        (parse_time, "5s", 5.0),
        (parse_share, "5%", 0.05),
        (parse_share, "0.1", 0.1),
        (parse_share, ".5", 0.5),
        (parse_share, "0%", 0.0),
        (parse_share, "1", 1.0),
        (parse_ratio, "4:1", 4.0),
        (parse_ratio, "3:2", 1.5),
        (parse_ratio, "2.5", 2.5),
    ],
)
def test_values(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((parse_rate, text) for text in ("", "fast", "0MB/s", "1.2.3bit/s", "-1MB/s", "nan")),
        *((parse_time, text) for text in ("", "5", "-1s", "1h", "nan s")),
        *((parse_share, text) for text in ("", "101%", "1.5", "-1%", "nan", "5%%")),
        *((parse_ratio, text) for text in ("", ":", "4:0", "0:1", "4:1:1", "a:b", "4%:1")),
    ],
)
def test_what_is_refused(parse: Callable[[str], float], text: str) -> None:
    with pytest.raises(UsageError):
        parse(text)


@pytest.mark.parametrize("text", ["10Gb/s", "10gb/s", "10 Gib/s", "10Gb", " 10Gb/s "])
def test_a_rate_that_may_be_bits_or_bytes_is_warned_of(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is what it was to earlier versions: an upgrade stops no agent whose settings have it."""
    assert parse_rate(text) == (10 << 30 if "i" in text else 10e9)
    [warning] = caplog.messages
    caplog.clear()
    as_bytes, as_bits = re.search(r"Write (\S+), or (\S+) for bits", warning).groups()  # type: ignore[union-attr]
    assert "taken for bytes" in warning and parse_rate(as_bits) == 10e9 / 8
    assert parse_rate(as_bytes) == (10 << 30 if "i" in text else 10e9)
    assert not caplog.messages, "what it advises leaves no doubt"


def test_a_bare_number_is_seconds_where_it_may_be() -> None:
    assert parse_time("30", bare=True) == 30.0
