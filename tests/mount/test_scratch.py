"""Directories that the environment names, and which another user may be able to change."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from p2pdist.cli.main import main as entry
from p2pdist.cli.services import default_layout
from p2pdist.model.errors import NotFound, Refused
from p2pdist.mount.scratch import is_safe, scratch_directory

OTHER = 65534


def made(path: Path, owner: int, mode: int) -> Path:
    path.mkdir()
    path.chmod(mode)
    os.chown(path, owner, owner)
    return path


@pytest.mark.root
@pytest.mark.parametrize(
    ("owner", "mode", "safe"),
    [
        (0, 0o700, True),
        (0, 0o755, True),
        (0, 0o1777, True),
        (0, 0o777, False),
        (0, 0o775, False),
        (OTHER, 0o700, False),
        (OTHER, 0o1777, False),  # the owner of a sticky directory may rename all that is in it
    ],
)
def test_only_a_directory_that_no_other_user_can_change_is_safe(
    tmp_path: Path, owner: int, mode: int, safe: bool
) -> None:
    """So is one below it, and one to which a link of another user leads is judged by itself."""
    directory = made(tmp_path / "directory", owner, mode)
    below = made(directory / "below", 0, 0o700)
    assert is_safe(directory) is safe
    assert is_safe(below) is safe
    (tmp_path / "link").symlink_to(directory)
    assert is_safe(tmp_path / "link") is safe
    assert not is_safe(tmp_path / "missing")


@pytest.mark.root
def test_temporary_directories_are_not_made_where_another_user_may_rename_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(made(tmp_path / "theirs", OTHER, 0o777)))
    directory = scratch_directory("p2pdist-test-")
    directory.rmdir()
    assert directory.parent in (Path("/tmp"), Path("/var/tmp"))
    own = made(tmp_path / "own", 0, 0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    assert scratch_directory("p2pdist-test-").parent == own
    monkeypatch.setattr("p2pdist.mount.scratch._SHARED", ())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "theirs"))
    with pytest.raises(Refused, match="other users can change") as refused:
        scratch_directory("p2pdist-test-")
    assert "TMPDIR" in refused.value.remedy


@pytest.mark.root
@pytest.mark.parametrize("variable", ["HOME", "XDG_DATA_HOME"])
def test_root_leaves_the_layout_of_another_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """With `sudo -E` root has that user's environment; --layout still names any directory."""
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    own, theirs = made(tmp_path / "own", 0, 0o755), made(tmp_path / "theirs", OTHER, 0o755)
    monkeypatch.setenv(variable, str(own))
    assert default_layout().is_relative_to(own)
    monkeypatch.setenv(variable, str(theirs))
    assert not default_layout().is_relative_to(theirs)


@pytest.mark.root
def test_root_asks_no_agent_of_another_user_that_its_environment_names(tmp_path: Path) -> None:
    """It would run what that agent shows. On the command line root may name any socket."""
    theirs = made(tmp_path / "theirs", OTHER, 0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(theirs / "agent.sock"))
        named = {"P2PDIST_SOCKET": str(theirs / "agent.sock")}
        refused = CliRunner().invoke(entry, ["ls"], env=named)
        assert refused.exit_code == Refused.exit_code and "another user can change the socket" in refused.output
        run = ["run", "--layout", str(tmp_path / "layout")]
        assert CliRunner().invoke(entry, [*run, "a:1"], env=named).exit_code == Refused.exit_code
        alone = CliRunner().invoke(entry, [*run, "--local", "a:1"], env=named)  # that asks no agent
        assert alone.exit_code == NotFound.exit_code and "there is no directory file:" in alone.output
        given = CliRunner().invoke(entry, ["ls", "--socket", named["P2PDIST_SOCKET"]])
        assert "another user" not in given.output
        theirs.chmod(0o755)
        os.chown(theirs, 0, 0)
        assert "another user" not in CliRunner().invoke(entry, ["ls"], env=named).output
