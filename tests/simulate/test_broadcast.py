"""Broadcasts without faults come close to what physics allows, and read the origin once."""

import pytest

from p2pdist.simulate.report import Report, percentile
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.simulation import Simulation


def broadcast(hosts: int, size: int, nic_bytes_s: float, **more: float) -> Report:
    return Simulation(Scenario(hosts, size, nic_bytes_s, **more)).run()  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2, 3, 7, 24, 60])
def test_a_broadcast_reads_the_origin_once_and_is_nearly_as_fast_as_possible(hosts: int) -> None:
    """Every host completes, no piece is received twice, the origin sends one copy."""
    report = broadcast(hosts, 96 << 20, 5e6)
    assert report.complete == hosts
    assert report.origin_ratio == 1.0
    assert report.duplicates == 0
    assert report.ratio <= 1.05


@pytest.mark.slow
def test_300_hosts() -> None:
    """The case of the 2,600 hosts, smaller."""
    report = broadcast(300, 80_000_000, 20e6, piece_size=128 << 10)
    assert report.complete == 300
    assert report.origin_ratio == 1.0
    assert report.p999_s <= 1.10 * report.bound_s
    assert report.host_sent_ratio_max <= 1.1


@pytest.mark.long
@pytest.mark.timeout(900)
def test_2600_hosts_3_gb_at_300_mb_s() -> None:
    """p99.9 within 1.10 of the bound of 10 s, and one copy from the origin."""
    report = broadcast(2600, 3_000_000_000, 300e6)
    assert report.complete == 2600
    assert report.bound_s == pytest.approx(10.0, rel=0.01)
    assert report.p999_s <= 1.10 * report.bound_s
    assert report.origin_ratio == 1.0


def test_a_slow_origin_is_the_bound() -> None:
    """With an origin at half a host's rate everything waits for it, and still it sends one copy."""
    report = broadcast(20, 32 << 20, 10e6, origin_bytes_s=5e6)
    assert report.bound_s == pytest.approx((32 << 20) / 5e6)
    assert report.ratio <= 1.06
    assert report.origin_ratio == 1.0


def test_several_blobs_at_once_share_the_links() -> None:
    """Three blobs to the same hosts take about three times as long as one, and one copy of each is
    read."""
    report = broadcast(20, 16 << 20, 5e6, blobs=3)
    assert report.complete == 60
    assert report.origin_ratio == 1.0
    assert report.ratio <= 1.15


def test_blocks_smaller_than_pieces_change_little() -> None:
    """Cutting pieces of 256 KiB into four blocks gives fairer turns at the same speed."""
    whole = broadcast(24, 128 << 20, 10e6, piece_size=256 << 10)
    cut = broadcast(24, 128 << 20, 10e6, piece_size=256 << 10, blocks_per_piece=4)
    assert cut.complete == whole.complete == 24
    assert cut.ratio == pytest.approx(whole.ratio, rel=0.05)


def test_a_tiny_blob_goes_round() -> None:
    """One piece to many hosts: a single stripe, latency-bound."""
    report = broadcast(40, 5000, 10e6)
    assert (report.pieces, report.stripes, report.complete) == (1, 1, 40)
    assert report.origin_ratio == 1.0


def test_percentiles_are_of_the_nearest_rank() -> None:
    values = [float(number) for number in range(1, 1001)]
    assert percentile(values, 0.5) == 500.0
    assert percentile(values, 0.999) == 999.0
    assert percentile([7.0], 0.999) == 7.0
    assert percentile([], 0.5) == 0.0
