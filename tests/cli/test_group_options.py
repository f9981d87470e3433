"""Options of verbs that have verbs of their own, such as `hosts` and `trackers`."""

from __future__ import annotations

from pathlib import Path

import programs
import pytest

AWAY = "the tracker {} does not answer"
ONE, TWO, THREE = (f"http://127.0.0.1:{port}" for port in (1, 2, 3))


def refusal(*arguments: str | Path, **environment: str) -> str:
    done = programs.run(*arguments, env={"PATH": "/usr/bin:/bin", **environment})
    assert done.returncode == 5, done.stderr
    return done.stderr


@pytest.mark.parametrize("verb", ["hosts", "trackers"])
def test_variables_and_the_file_reach_a_verb_with_verbs_of_its_own(tmp_path: Path, verb: str) -> None:
    """P2PDIST_TRACKER and --config, which the help of both names."""
    assert AWAY.format(ONE) in refusal(verb, P2PDIST_TRACKER=ONE)
    assert AWAY.format(ONE) in refusal(verb, "drain", "x", P2PDIST_TRACKER=ONE)
    assert AWAY.format(TWO) in refusal(verb, "--tracker", TWO, "drain", "x", P2PDIST_TRACKER=ONE)
    (tmp_path / "file.toml").write_text(
        f'tracker = "{ONE}"\n[{verb}]\ntracker = "{TWO}"\n[{verb}.drain]\ntracker = "{THREE}"\n'
    )
    assert AWAY.format(TWO) in refusal("--config", tmp_path / "file.toml", verb)
    assert AWAY.format(TWO) in refusal(verb, "--config", tmp_path / "file.toml")
    assert AWAY.format(THREE) in refusal(verb, "--config", tmp_path / "file.toml", "drain", "x")
    own = {f"P2PDIST_{verb.upper()}_TRACKER": THREE, "P2PDIST_TRACKER": ONE}
    assert AWAY.format(THREE) in refusal(verb, "drain", "x", **own), "it is said for the verb of which drain is part"
    (tmp_path / "file.toml").write_text(f'[{verb}]\ntracker = "{TWO}"\n[tracker]\nlisten = "127.0.0.1:1"\n')
    for words in ((), ("drain", "x")):
        assert AWAY.format(TWO) in refusal(verb, *words, "--config", tmp_path / "file.toml")
