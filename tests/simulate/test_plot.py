"""Pictures of runs: the curve, the bound, the percentiles."""

import subprocess
import sys
from pathlib import Path

import pytest

from p2pdist.model.errors import UsageError
from p2pdist.simulate.faults import Crash
from p2pdist.simulate.report import check_plot, draw, picture
from p2pdist.simulate.scenario import Scenario
from p2pdist.simulate.simulation import Simulation

RUN = ["simulate", "--hosts", "8", "--size", "2MiB", "--nic", "2MB/s"]


def test_the_picture_shows_curve_bound_and_percentiles(tmp_path: Path) -> None:
    """Of ten hosts one is lost: the curve ends at nine tenths."""
    pytest.importorskip("matplotlib")
    report = Simulation(Scenario(10, 32 << 16, 1e6, faults=(Crash("h00004", 0.5, None),))).run()
    curve, line, *marks = picture(report).axes[0].lines
    shares = list(curve.get_ydata())
    assert (shares[0], shares[-1]) == (0.0, 0.9)
    assert list(curve.get_xdata())[1:-1] == list(report.completions)
    assert list(line.get_xdata()) == [report.bound_s] * 2
    assert [str(mark.get_label()).split()[0] for mark in marks] == ["p50", "p99", "p99.9"]
    assert list(marks[0].get_xdata()) == [report.completions[4]]
    draw(report, tmp_path / "out.svg")
    assert "<svg" in (tmp_path / "out.svg").read_text()


@pytest.mark.slow
def test_the_command_writes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "out.png"
    done = subprocess.run(
        [sys.executable, "-m", "p2pdist", *RUN, "--plot", str(target)], check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert target.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not the name of a picture"):
        check_plot(tmp_path / "out.bmp")
    with pytest.raises(UsageError, match="no directory"):
        check_plot(tmp_path / "nowhere" / "out.png")


def test_without_matplotlib_the_remedy_is_the_extra(tmp_path: Path) -> None:
    """And the run, which may take an hour, is not begun."""
    program = f"""
import sys
sys.modules["matplotlib"] = None
from p2pdist.cli.main import main
main({[*RUN, "--plot", str(tmp_path / "out.png")]!r})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "matplotlib, which is not installed" in done.stderr and "p2pdist[plot]" in done.stderr
