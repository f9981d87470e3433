"""The command as a whole: verbs, options from three places, failures and exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import click
import programs
import pytest
from ports import free_port

from p2pdist.cli import daemon, output
from p2pdist.cli.main import VERBS, _as_given, _verb, main, parts_of, settings_of
from p2pdist.cli.options import NAMES
from p2pdist.model.errors import Conflict, Corrupt, DiskFull, NotFound, P2PDistError, Refused, Unavailable, UsageError


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return programs.run(*arguments, env={"PATH": "/usr/bin:/bin", **environment})


def test_help_lists_the_verbs_and_imports_little() -> None:
    """The list of verbs costs no imports: neither storage drivers nor servers."""
    script = (
        "import sys; from p2pdist.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'aiohttp', 'obstore', 'rich', 'libtorrent', 'asyncio', 'p2pdist.cli.verbs.pack'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for verb in ("pack", "push", "inspect", "diff", "blob"):
        assert f"  {verb} " in done.stdout


def test_every_present_verb_loads_and_says_how_it_is_used() -> None:
    context = click.Context(main, info_name="p2pdist")
    for verb in main.list_commands(context):
        command = main.get_command(context, verb)
        assert command is not None
        help_text = command.get_help(click.Context(command, info_name=verb, parent=context))
        assert help_text
        assert verb in VERBS


@pytest.mark.parametrize("locale", ["C", "latin1"])
def test_names_stay_the_bytes_that_they_are_in_any_locale(tmp_path: Path, locale: str) -> None:
    """Through argument, archive, package and archive again, and on standard output."""
    environ = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if locale == "latin1":
        if not shutil.which("localedef") or not Path("/usr/share/i18n/locales/en_US").exists():
            pytest.skip("needs localedef and the sources of locales")
        made = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", tmp_path / "en_US"]
        subprocess.run(made, capture_output=True, check=False)
        environ = {"LC_ALL": "en_US", "LOCPATH": str(tmp_path)}
    place = os.fsencode(tmp_path)
    names = [b"caf\xe9", "caf\u00e9".encode(), "\u30c7".encode()]
    for name in names:
        (tmp_path / "source").mkdir(exist_ok=True)
        Path(os.fsdecode(place + b"/source/" + name)).touch()
    archive, out = place + b"/\xe9.tar", place + b"/caf\xc3\xa9\xe9.tar"
    subprocess.run(["tar", "-C", place + b"/source", "-cf", archive, "."], check=True)
    command = [sys.executable, "-m", "p2pdist"]
    layout = [b"--layout", place + b"/layout"]
    subprocess.run([*command, "import", archive, "-t", "a/b:v1", *layout], env=environ, check=True, capture_output=True)
    done = subprocess.run(
        [*command, "export", "a/b:v1", "--tar", "-o", out, *layout], env=environ, check=True, capture_output=True
    )
    assert done.stdout.endswith(b" -> " + out + b"\n")
    with tarfile.open(os.fsdecode(out), encoding="utf-8", errors="surrogateescape") as made_of:
        assert sorted(map(os.fsencode, made_of.getnames())) == sorted(names)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_command_begins_ends_it_without_a_trace(number: signal.Signals) -> None:
    script = f"""
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as launch.py does
from p2pdist.cli import main
main._name_misspelt = lambda given: signal.raise_signal({number.value})
main.main(["completion", "bash"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-number, "")


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("p2pdist, version ")


@pytest.mark.parametrize(
    "arguments", [(), ("no-such-verb",), ("pack",), ("pack", "--no-such-flag"), ("push", "UPPER:v1")]
)
def test_wrong_usage_exits_2(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.count("Usage:") <= 1


def test_wrong_usage_with_json_is_a_problem_document() -> None:
    done = run("pack", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["status"] == 400


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (P2PDistError("it failed"), 1),
        (DiskFull("the store", needed=2, free=1), 1),
        (UsageError("it failed"), 2),
        (NotFound("it failed", remedy="Look elsewhere"), 3),
        (Refused("it failed"), 4),
        (Unavailable("it failed"), 5),
        (Corrupt("it failed"), 6),
        (ExceptionGroup("several", [ValueError("x"), ExceptionGroup("more", [Corrupt("it failed")])]), 6),
    ],
)
def test_failures_become_a_line_and_an_exit_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output.report(error, as_json=True) == code
    said = capsys.readouterr()
    assert said.err.startswith("p2pdist: ")
    assert said.err.count("\n") == 1
    assert json.loads(said.out)["detail"] in said.err
    output.report(error, as_json=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EROFS, "read-only"),
        (errno.EIO, "dmesg"),
        (errno.ENOSPC, "df -i"),
        (errno.EDQUOT, "quota"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ESTALE, "Mount the file system again"),
        (errno.ENOTCONN, "not connected"),
        (errno.EACCES, "owner"),
        (errno.ENOTDIR, "no directory"),
    ],
)
def test_what_any_machine_may_meet_is_not_unexpected(code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert output.report(OSError(code, os.strerror(code), "/srv/file"), as_json=False) == 1
    said = capsys.readouterr().err
    assert "/srv/file" in said
    assert words in said
    assert "unexpected" not in said


@pytest.mark.parametrize(
    ("act", "words"), [("threading.Thread().start()", "another thread"), ("bytes(1 << 40)", "no memory is left")]
)
def test_what_a_limit_of_memory_forbids_is_said(act: str, words: str) -> None:
    script = (
        "import resource, sys, threading; from p2pdist.cli import output\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20),) * 2)\n"
        f"try: {act}\n"
        "except Exception as error: sys.exit(output.report(error, as_json=False))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, words in done.stderr, "ulimit -v" in done.stderr) == (1, True, True), done.stderr


def test_what_loads_asyncio_late_has_it_silenced() -> None:
    """A verb that loads it as a module has it silenced with that."""
    for file in Path(output.__file__).parent.rglob("*.py"):
        text = file.read_text()
        runs = [at for at, line in enumerate(text.splitlines()) if "asyncio.run(" in line]
        if runs and "\nimport asyncio\n" not in text:
            assert "output.silence_event_loop()" in text or "__name__" in text, file


def test_the_event_loop_says_nothing_of_what_a_failure_left_behind() -> None:
    script = (
        "import asyncio, sys; from p2pdist.cli import main\n"
        "main.main.get_command(None, 'resolve')\n"
        "async def left(): asyncio.get_running_loop().create_future().set_exception(ValueError('left'))\n"
        "asyncio.run(left())"
    )
    for debug in ("", "1"):
        environment = {**os.environ, "P2PDIST_DEBUG": debug}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, "left" in done.stderr) == (0, bool(debug)), done.stderr


@pytest.mark.parametrize("debug", [False, True])
def test_the_unexpected_is_one_line(
    debug: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback only for those who ask for it."""
    monkeypatch.setenv("P2PDIST_DEBUG", "1" if debug else "0")
    try:
        raise RuntimeError("first line\nsecond line")
    except RuntimeError as error:
        assert output.report(error, as_json=False) == 1
    said = capsys.readouterr().err
    assert "unexpected RuntimeError: first line" in said
    assert ("Traceback" in said) == debug
    assert debug or said.count("\n") == 1


@pytest.mark.parametrize("debug", [False, True])
def test_neither_the_unexpected_nor_its_traceback_shows_a_secret(
    debug: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library of a storage names the whole URL, with the signature that opens it."""
    monkeypatch.setenv("P2PDIST_DEBUG", "1" if debug else "0")
    try:
        raise RuntimeError("GET http://user:S3cr3t@host/index.json?sv=1&sig=S1gn4ture failed\nto GET ?sig=S1gn4ture")
    except RuntimeError as error:
        output.report(error, as_json=False)
    said = capsys.readouterr().err
    assert "host/index.json" in said
    assert not [secret for secret in ("S3cr3t", "S1gn4ture") if secret in said]


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("agent", "--listen", "x"), "Write --listen 0.0.0.0:7071"),
        (("agent", "--mirror", "x"), "Write --mirror 127.0.0.1:7073"),
        (("agent", "--probe-listen", "x"), "Write --probe-listen "),
        (("tracker", "--listen", "x"), "Write --listen 0.0.0.0:7070"),
        (("tracker", "--probe-listen", "x"), "Write --probe-listen "),
        (("agent", "--tracker", "http://t:99999"), "Write http://host:7070"),
    ],
)
def test_the_option_that_is_wrong_is_the_one_to_write(words: tuple[str, ...], remedy: str, tmp_path: Path) -> None:
    done = run(*words, P2PDIST_STORE=str(tmp_path / "store"), P2PDIST_SOCKET=str(tmp_path / "s"))
    assert (done.returncode, remedy in done.stderr) == (2, True), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "option"),
    [("tracker", "--probe-listen"), ("agent", "--probe-listen"), ("agent", "--mirror"), ("agent", "--s3")],
)
def test_the_option_of_a_port_that_is_taken_is_the_one_to_change(verb: str, option: str, tmp_path: Path) -> None:
    words = [verb, "--listen", f"127.0.0.1:{free_port()}", "--no-discovery"]
    if verb == "agent":
        words += ["--store", str(tmp_path / "store"), "--socket", str(tmp_path / "s"), "--transport", "trees"]
        words += ["--bucket", "files=a:v1"] if option == "--s3" else []
        words += ["--mirror", "off"] if option != "--mirror" else []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run(*words, option, address)
    assert done.returncode == 1, done.stderr
    assert f"cannot listen on {address}: address already in use" in done.stderr
    assert done.stderr.endswith(f"Choose another one with {option}\n")


@pytest.mark.parametrize("words", [("revoke", "host:h1"), ("unrevoke", "host:h1"), ("rotate",)])
def test_what_no_tracker_reads_is_not_changed(words: tuple[str, ...], tmp_path: Path) -> None:
    """A host that is said to be revoked is revoked: not in a directory without an access file."""
    for directory in (tmp_path, tmp_path / "etc"):
        done = run("access", *words, "--access", directory / "access.toml")
        assert (done.returncode, done.stdout) == (3, ""), done.stderr
        assert "there is no" in done.stderr and str(directory / "access.toml") in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_revoked_and_not_known_is_named(tmp_path: Path) -> None:
    """It may have been misspelt, or made elsewhere; hosts need not be known."""
    access = tmp_path / "access.toml"
    assert run("access", "create", "--access", access).returncode == 0
    made = json.loads(run("token", "create", "--role", "operator", "--access", access, "--json").stdout)
    known = ("host:any", "join:default", f"token:{made['id']}")
    done = run("access", "revoke", *known, "join:defualt", "token:0", "--access", access)
    assert (done.returncode, done.stderr.count("\n")) == (0, 2), done.stderr
    assert "join:defualt is not known" in done.stderr and "token:0 is not known" in done.stderr
    assert set(json.loads(run("access", "show", "--access", access, "--json").stdout)["revoked"]) > set(known)
    (tmp_path / "tokens.jsonl").write_text("{")
    assert run("access", "revoke", "token:1", "--access", access).returncode == 0, "it is revoked all the same"


def test_a_warning_that_cannot_be_written_keeps_no_command_from_running() -> None:
    with open("/dev/full", "w") as full:
        program = programs.start(
            "completion", "bash", env={"P2PDIST_ORIGN": "x"}, stdout=subprocess.PIPE, stderr=full, text=True
        )
        said, _ = program.communicate(60)
    assert (program.returncode, "complete -o nosort" in said) == (0, True)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_interruption_exits_130(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    assert output.report(error, as_json=True) == 130
    assert capsys.readouterr().out == ""


def every_command() -> Iterator[tuple[str, click.Command]]:
    """All verbs, and those that they consist of, with what is typed for them."""
    context = click.Context(main, info_name="p2pdist")
    pending = [(verb, main.get_command(context, verb)) for verb in main.list_commands(context)]
    while pending:
        words, command = pending.pop()
        assert command is not None
        yield words, command
        pending += [(f"{words} {name}", part) for name, part in parts_of(command).items()]


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_has_an_example_that_it_takes(verb: str) -> None:
    """Each line of an example begins a command, whose options exist."""
    commands = dict(every_command())
    for words, command in commands.items():
        if words.split()[0] != verb:
            continue
        text = command.help or ""
        assert "Example" in text, words
        example = text.partition("Example")[2].replace("\\\n", " ")
        lines = re.findall(r"(?<![\w/@])p2pdist ((?:(?!\bp2pdist )[^\n])+)", example)
        assert lines or verb in ("completion", "slurm"), words
        for line in lines:
            typed = shlex.split(re.split(r" [|>&] | && |\"?\$\(|\)\"|  +#", line)[0].rstrip(')"'))
            length = next(n for n in (3, 2, 1) if " ".join(typed[:n]) in commands)
            meant = commands[" ".join(typed[:length])]
            meant.make_parser(click.Context(meant)).parse_args(typed[length:])


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A configuration file whose origins do not exist, so that the message tells which one was
    used."""
    (tmp_path / "config.toml").write_text(
        f'origin = "file://{tmp_path}/from-top"\n[inspect]\norigin = "file://{tmp_path}/from-table"\n[diff]\nodd = 1\n'
    )
    return tmp_path


def test_flag_over_variable_over_file(places: Path) -> None:
    config, verb = places / "config.toml", ("inspect", "app:v1")
    layout = ("--layout", places / "absent")
    assert "from-table" in run(*verb, *layout, "--config", config).stderr
    assert "from-table" in run("--config", config, *verb, *layout).stderr
    assert "from-table" in run(*verb, *layout, P2PDIST_CONFIG=str(config)).stderr
    variable = f"file://{places}/from-variable"
    assert "from-variable" in run(*verb, *layout, "--config", config, P2PDIST_ORIGIN=variable).stderr
    flag = ("--origin", f"file://{places}/from-flag")
    done = run(*verb, *layout, "--config", config, *flag, P2PDIST_ORIGIN=variable)
    assert "from-flag" in done.stderr
    assert done.returncode == 3


def test_the_top_of_the_file_serves_all_verbs_and_tables_are_checked(places: Path) -> None:
    config = places / "config.toml"
    done = run("push", "app:v1", "--layout", places, "--config", config)
    assert done.returncode == 3
    done = run("diff", "app:v1", "app:v2", "--config", config)
    assert done.returncode == 2
    assert "odd" in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('orgin = "file:///x"', ("no verb has an option 'orgin'", "Did you mean origin?")),
        ("[pul]\nquiet = true", ("there is no verb for the table [pul]", "Did you mean pull?")),
        ("[blob]\nlevel = 3", ("[blob] has no option 'level'",)),
        ("[blob.pus]\nquiet = true", ("[blob] has no option 'pus'", "Did you mean push?")),
        ("[blob.push]\nquite = true", ("[blob.push] has no option 'quite'", "Did you mean quiet?")),
    ],
)
def test_a_misspelt_name_in_the_file_is_refused(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    """Wherever it stands; what it sets would be left as it is without a word."""
    file = tmp_path / "config.toml"
    file.write_text(text)
    done = run("blob", "push", file, "--origin", f"file://{tmp_path}/none/none", "--config", file)
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("ORIGN", "ORIGIN"),
        ("AGENT_STROE", "AGENT_STORE"),
        ("TRAKCER_LISTEN", "TRACKER_LISTEN"),
        ("TOKEN_FILES", "TOKEN_FILE"),
        ("ORIGIN", ""),
        ("AGENT_DOWNLOAD_LIMIT", ""),
        ("CACHE_SAVE_PYTHON", ""),
        ("TOKEN", ""),
        ("TRACKER_SERVICE_PORT_HTTP", ""),
        ("TRACKER_PORT_7070_TCP_ADDR", ""),
        ("FAVOURITE_COLOUR", ""),
    ],
)
def test_a_misspelt_variable_is_named_once(variable: str, meant: str) -> None:
    done = run("completion", "bash", **{f"P2PDIST_{variable}": "x"})
    expected = (
        f"warning: P2PDIST_{variable} sets nothing and is ignored. Did you mean P2PDIST_{meant}?\n" if meant else ""
    )
    assert (done.returncode, done.stderr) == (0, expected)


def test_a_program_of_a_package_may_run_the_command(tmp_path: Path) -> None:
    """It has P2PDIST_ROOT, which is no setting of `run --root` or of `mirror --root`."""
    for root in ("/", str(tmp_path / "view")):
        done = run("run", "--local", "none:v1", "--layout", tmp_path, P2PDIST_ROOT=root)
        assert done.returncode == 3, done.stderr
        done = run("mirror", "uninstall", "crio", "--dry-run", P2PDIST_ROOT=root)
        assert done.returncode == 0, done.stderr
    done = run("run", "--local", "none:v1", "--layout", tmp_path, P2PDIST_RUN_ROOT="maybe")
    assert (done.returncode, "--root" in done.stderr) == (2, True)


def test_the_names_of_all_options_are_known() -> None:
    assert {name for _, command in every_command() for name in settings_of(command)} == NAMES


def test_names_of_all_verbs_may_stand_in_the_file(tmp_path: Path) -> None:
    """An option of any verb at the top, and tables of other verbs, which are looked at by these."""
    file = tmp_path / "config.toml"
    top = 'capacity = "1GiB"\nfirst-party = ["a"]\nentry = "x"\n'
    file.write_text(f"{top}[agent]\nodd = 1\n[hosts]\n[trace.show]\nentry = 'y'\n[blob.pull]\nx = 1\n")
    done = run("blob", "push", file, "--origin", f"file://{tmp_path}/none/none", "--config", file)
    assert (done.returncode, "there is no directory" in done.stderr) == (3, True), done.stderr


@pytest.mark.parametrize("text", ["x =", "\xff", None])
def test_a_bad_configuration_file_is_named(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "config.toml"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    done = run("inspect", "app:v1", "--config", file)
    assert done.returncode == (3 if text is None else 2)
    assert str(file) in done.stderr
    assert "Traceback" not in done.stderr


def test_settings_may_come_from_a_pipe_and_there_may_be_none() -> None:
    """They may hold secrets. Two verbs of one command line read the same pipe."""
    command = shlex.join([sys.executable, "-m", "p2pdist.cli.main"])
    settings = "<(printf 'tracker = \"http://127.0.0.1:1\"\\njson = true\\n')"
    for words in (f"--config {settings} hosts show h1", f"hosts show h1 --config {settings}"):
        done = subprocess.run(
            ["bash", "-c", f"{command} {words}"], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 5 and "http://127.0.0.1:1 does not answer" in done.stderr, done.stderr
        assert json.loads(done.stdout)["status"] == 503
    assert run("--config", "/dev/null", "completion", "bash").returncode == 0


def test_settings_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As editors on Windows write it; a file that holds a token alone may, too."""
    file, token = tmp_path / "config.toml", tmp_path / "token"
    file.write_bytes(b'\xef\xbb\xbftracker = "http://127.0.0.1:1"\n')
    done = run("hosts", "show", "h1", "--config", file)
    assert (done.returncode, "http://127.0.0.1:1 does not answer" in done.stderr) == (5, True), done.stderr
    token.write_bytes(b"\xef\xbb\xbfp2pdist-x")
    token.chmod(0o600)
    said = run("hosts", "show", "h1", "--token-file", token).stderr
    token.write_text("p2pdist-x")
    assert said == run("hosts", "show", "h1", "--token-file", token).stderr


def test_lists_within_a_list_are_values(tmp_path: Path) -> None:
    """Of an option with several values; elsewhere none that is left out without a word."""
    file = tmp_path / "config.toml"
    verb = ("--tracker", "http://127.0.0.1:1", "--config", file)
    file.write_text("[rank]\nrole = [['a', 1, 't/a:v1'], ['b', 2, 'UPPER']]")
    done = run("rank", *verb)
    assert (done.returncode, "UPPER" in done.stderr) == (2, True), done.stderr
    hosts = click.Option(["--host"], multiple=True)
    assert _as_given(hosts, [["a"], "b"]) == ['["a"]', "b"]


def test_one_value_or_a_list_is_what_a_flag_takes(tmp_path: Path) -> None:
    """Of an option that may be repeated one value; of one that takes names with commas between a
    list."""
    file = tmp_path / "config.toml"
    file.write_text('tracker = ["http://127.0.0.1:1", "http://127.0.0.1:2"]\n[preseed]\nhost = "h1"\n')
    done = run("preseed", "app:v1", "--config", file)
    assert (done.returncode, "http://127.0.0.1:2 does not answer" in done.stderr) == (5, True), done.stderr
    file.write_text('[tracker]\nnetworks = ["10.0.0.0/8", "nowhere"]\n')
    done = run("tracker", "--config", file)
    assert (done.returncode, "'nowhere'" in done.stderr) == (2, True), done.stderr


def test_plain_progress_comes_at_intervals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PLAIN_INTERVAL_S", 0.0)
    with output.Progress(quiet=False) as progress:
        progress("pushing", 1 << 20, 3 << 30)
    with output.Progress(quiet=True) as progress:
        progress("pushing", 1, 2)
    assert capsys.readouterr().err == "pushing: 1.0 MiB of 3.0 GiB\n"


def screen(written: str) -> list[str]:
    """The rows of a terminal after what was written to it: of its controls those that bars use."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\??[0-9;]*[A-Za-z]|.", written, re.DOTALL):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, rows = row + 1, rows + [""] * (row + 2 - len(rows))
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1])
        elif part == "\x1b[2K":
            rows[row] = ""
        elif not part.startswith("\x1b"):
            rows[row] = rows[row].ljust(column)[:column] + part + rows[row][column + 1 :]
            column += 1
    return [each.split(" ")[0] for each in rows if each.strip()]


def on_terminal(script: str, kind: str) -> str:
    """What a script of Python writes to a terminal of this kind."""
    ours, theirs = os.openpty()
    with subprocess.Popen([sys.executable, "-c", script], stderr=theirs, env={**os.environ, "TERM": kind}) as process:
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # it has ended
            while data := os.read(ours, 4096):
                written += data
    os.close(ours)
    assert process.returncode == 0
    return written.decode()


@pytest.mark.parametrize(
    ("kind", "variables", "coloured"), [("xterm", {}, True), ("dumb", {}, False), ("xterm", {"NO_COLOR": "1"}, False)]
)
def test_colours_are_for_terminals_and_users_that_want_them(
    kind: str, variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NO_COLOR: https://no-color.org"""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    script = """
import sys
from p2pdist.cli.diagnosis import Finding
from p2pdist.cli.verbs.doctor import _print
sys.stdout = sys.stderr
_print(Finding("port", "failed", "is taken"))
"""
    text = on_terminal(script, kind)
    assert ("\x1b[" in text) is coloured and "FAILED" in text


def test_a_terminal_that_cannot_draw_gets_lines() -> None:
    script = """
from p2pdist.cli import daemon, output
output.PLAIN_INTERVAL_S = 0.0
with output.Progress(quiet=False) as progress: progress("pushing", 1, 2)
"""
    assert on_terminal(script, "dumb") == "pushing: 1 B of 2 B\r\n"
    assert "\x1b[" in on_terminal(script, "xterm")


def test_bars_of_several_and_lines_leave_each_other_whole() -> None:
    """On a terminal each has its row, a line comes above them, and when all is over it alone is
    left."""
    script = """
from p2pdist.cli import daemon, output
with output.Progress(quiet=False) as bars:
    with output.Progress(quiet=False, beside=bars) as one:
        with output.Progress(quiet=False, beside=bars) as two:
            one("one", 1, 10), two("two", 1, 10)
            bars._bars.refresh()
            output.line("line")
            bars._bars.refresh()
            output.line("MARK")
    bars._bars.refresh()
output.line("end")
"""
    text = on_terminal(script, "xterm")
    assert screen(text[: text.index("MARK")].rpartition("\r\x1b[2K")[0]) == ["line", "one", "two"]
    assert screen(text) == ["line", "MARK", "end"]


def test_a_reader_that_goes_away_is_no_news() -> None:
    """`p2pdist --help | head -0`"""
    command = [sys.executable, "-m", "p2pdist.cli.main", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) in (0, 1)


def test_a_group_of_failures_prefers_ours() -> None:
    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    async def fail() -> None:
        raise NotFound("it is gone")

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(work())
    assert output.report(caught.value, as_json=False) == 3


def test_a_secret_on_the_command_line_is_written_over_and_warned_of() -> None:
    """Every user of a machine may read the command lines of its processes."""
    script = (
        "import sys, pathlib\n"
        "from p2pdist.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: print(pathlib.Path('/proc/self/cmdline').read_bytes().decode())"
    )
    urls = [
        "--origin",
        "http://deploy:S3cr3t@h/pk?sig=TOKEN",
        "--tracker=http://u:HIDDEN@a,http://u:HIDDEN@b",
        "--version",
    ]
    done = subprocess.run([sys.executable, "-c", script, *urls], capture_output=True, text=True, check=True)
    assert "http://xxxxxxxxxxxxx@h/pk?xxxxxxxxx" in done.stdout
    assert "http://xxxxxxxx@a,http://xxxxxxxx@b" in done.stdout
    assert "P2PDIST_ORIGIN" in done.stderr
    for secret in ("S3cr3t", "TOKEN", "HIDDEN"):
        assert secret not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("url", "mode", "warns"),
    [
        ("http://deploy:S3cr3t@127.0.0.1:1/", 0o644, True),
        ("http://127.0.0.1:1/pk?sig=S3cr3t", 0o604, True),
        ("http://deploy:S3cr3t@127.0.0.1:1/", 0o640, False),
        ("http://127.0.0.1:1/", 0o644, False),
    ],
)
def test_a_file_with_a_secret_that_all_users_may_read_is_warned_of(
    tmp_path: Path, url: str, mode: int, warns: bool
) -> None:
    """For a command, and for a daemon in its log, which ends here since it cannot listen."""
    config, origin, several = tmp_path / "p2pdist.toml", tmp_path / "origin", tmp_path / "several.toml"
    config.write_text(f'origin = "{url}"\n')
    origin.write_text(url)
    several.write_text(f'tracker = ["http://127.0.0.1:1", "{url}"]\n')
    for each in (config, origin, several):
        each.chmod(mode)
    for words, file in (
        (("hosts", "show", "h1", "--config", several), several),
        (("resolve", "a:b", "--config", config), config),
        (("tracker", "--listen", "192.0.2.1:1", "--no-discovery", "--config", config), config),
        (("tracker", "--listen", "192.0.2.1:1", "--no-discovery", "--origin-file", origin), origin),
    ):
        said = run(*words).stderr
        assert (f"{file}" in said and "chmod o=" in said) == warns, said
        assert "S3cr3t" not in said


def test_what_is_no_secret_on_the_command_line_stays() -> None:
    done = run("resolve", "a:b", "--origin", "file:///nowhere", "--", "http://u:p@h/")
    assert "warning" not in done.stderr


def test_a_path_that_is_empty_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--layout "$UNSET" does not mean the working directory; a variable that is empty is none."""
    (tmp_path / "source").mkdir()
    monkeypatch.chdir(tmp_path)
    for option in ("--layout", "--project"):
        done = run("pack", "source", "-t", "a:1", option, "")
        assert (done.returncode, "path is empty" in done.stderr) == (2, True)
    layout = ("-t", "a:1", "--layout", tmp_path.with_name("other"))
    for words in (("pack", "", *layout), ("blob", "push", ""), ("mount", "a:1", ""), ("umount", "")):
        done = run(*words)
        assert (done.returncode, "path is empty" in done.stderr) == (2, True), done.stderr
    assert run("import", "", *layout).returncode == 2
    assert "is not a reference" in run("pack", "source", *layout, "--base", "").stderr
    assert run("pack", "source", "-t", "a:1", "--layout", "made", P2PDIST_LAYOUT="").returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "source"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("quiet = 3", "not a valid boolean"),
        ("level = 3.7", "not a valid integer"),
        ("level = true", "not a valid integer"),
        ("[[pack]]\nlevel = 3", "a list of tables"),
    ],
)
def test_values_of_the_file_are_checked_as_flags_are(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "file.toml").write_text(text)
    done = run("pack", tmp_path / "source", "-t", "a:1", "--config", tmp_path / "file.toml")
    assert (done.returncode, word in done.stderr) == (2, True), done.stderr


def test_a_failure_is_json_wherever_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "file.toml").write_text("json = true")
    verb = ("pack", tmp_path / "none", "-t", "a:1")
    for arguments, environment in (
        ((*verb, "--json"), {}),
        ((*verb, "--config", tmp_path / "file.toml"), {}),
        (verb, {"P2PDIST_JSON": "on"}),
        (verb, {"P2PDIST_PACK_JSON": "1"}),
    ):
        done = run(*arguments, **environment)
        assert json.loads(done.stdout)["status"] == 404
    assert run(*verb).stdout == ""
    (tmp_path / "file.toml").write_text("[hosts]\njson = true")  # and so of what the verb consists of
    part = ("hosts", "show", "h1", "--tracker", "http://127.0.0.1:1")
    for arguments, environment in (
        ((*part, "--config", tmp_path / "file.toml"), {}),
        (("--config", tmp_path / "file.toml", *part), {}),
        (("--config", "/dev/null", *part), {"P2PDIST_HOSTS_SHOW_JSON": "1"}),
    ):
        assert json.loads(run(*arguments, **environment).stdout)["status"] == 503
    (tmp_path / "file.toml").write_text("[hosts]\njson = true\n[hosts.show]\njson = false")
    assert run("--config", tmp_path / "file.toml", *part).stdout == "", "the part's own word comes first"
    program = ("run", "--socket", tmp_path / "none", "app:v1", "--json")
    assert run(*program).stdout == "", "it is for the program"
    for name in ("P2PDIST_JSON", "P2PDIST_RUN_JSON"):
        assert json.loads(run(*program, **{name: "1"}).stdout)["status"] == 503


def test_only_the_verb_makes_a_daemon(tmp_path: Path) -> None:
    """A directory, host or program may be called as one is: warnings are printed all the same, and
    a signal lets the command tidy up."""
    done = run("pack", tmp_path / "none", "-t", "agent", "--layout", tmp_path, P2PDIST_ORIGN="x")
    assert done.returncode == 3 and "Did you mean P2PDIST_ORIGIN?" in done.stderr
    assert [_verb(words) for words in (["--config", "agent", "ls"], ["agent"], ["-h"], [])] == ["ls", "agent", "", ""]


@pytest.mark.slow
def test_a_registry_that_is_away_is_said_in_plain_words() -> None:
    done = run("ls", "--at-origin", "--origin", "oci://127.0.0.1:1/packages")
    assert (done.returncode, "connection refused" in done.stderr, "ssl" in done.stderr) == (5, True, False), done.stderr


def test_a_service_ends_though_a_thread_of_it_hangs() -> None:
    """As one does that waits for a disk or a database that is cut off."""
    script = """
import asyncio, threading
from p2pdist.cli import daemon

daemon.THREADS_S = 0.1

async def service() -> None:
    begun, never = threading.Event(), threading.Event()
    asyncio.ensure_future(asyncio.to_thread(lambda: (begun.set(), never.wait())))
    await asyncio.to_thread(begun.wait)

daemon.run(service())
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=30, check=False).returncode == 0


def test_an_address_of_both_families_is_free_in_both() -> None:
    """And taken where only one of them is, as it is when it is listened at."""
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        with socket.create_server(("0.0.0.0", free_port())) as taken, pytest.raises(Conflict, match="in use"):
            asyncio.run(daemon.require_free(("::", taken.getsockname()[1]), "--listen"))
        return
    pytest.skip("this machine has no IPv6")
