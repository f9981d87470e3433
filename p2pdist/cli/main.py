"""The `p2pdist` command: one verb per module, loaded when it is asked for."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import keyword
import os
import signal
import stat
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

import click

from p2pdist.cli.references.names import ARGUMENTS, ReferenceName

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

VERBS = {
    "tracker": "Run a tracker, which decides which agent sends what to which.",
    "agent": "Run the agent of this host, which moves and keeps the bytes.",
    "pack": "Pack a directory as a package into the local layout.",
    "trace": "Show what starts of a package read, or record which files a run uses.",
    "import": "Make a package of a tar or of a container image.",
    "export": "Write a package as one file, a tar or a directory.",
    "push": "Send a packed package to an origin.",
    "pull": "Bring a package to this host through its agent.",
    "mount": "Show a package at a directory.",
    "umount": "Take a shown package away again.",
    "run": "Run the program of a package.",
    "ls": "List the packages here or at an origin.",
    "pin": "Keep a package on this host.",
    "rm": "Remove a package from this host.",
    "du": "Print what packages take on the disk of this host.",
    "prune": "Remove what nothing keeps from this host.",
    "gc": "Remove what no package on this host needs.",
    "verify": "Compare what is stored with its names.",
    "tag": "Give a package another name.",
    "torrent": "Make the torrent of a package, for any BitTorrent client.",
    "resolve": "Print which package a tag names now.",
    "inspect": "Print what a package consists of.",
    "diff": "Print what moving from one package to another takes.",
    "blob": "Push or pull a single file by its digest.",
    "preseed": "Have hosts hold a package by some time.",
    "rank": "Print which hosts lack the fewest bytes of packages.",
    "cache": "Bring compile caches of one host to all hosts like it.",
    "slurm": "Bring packages to the jobs of a Slurm cluster.",
    "evict": "Remove a package from the hosts of a fleet.",
    "hosts": "List the hosts of a fleet, and drain them.",
    "mirror": "Have container runtimes ask this host's agent before a registry.",
    "events": "Print what has happened in a fleet, and what happens.",
    "report": "Print how a package reached its hosts.",
    "top": "Watch the swarms of a fleet.",
    "doctor": "Look for what would keep this host from working.",
    "drain": "Let the agent of this host hand over to others, and end.",
    "access": "Show, rotate and revoke what a fleet's access is made of.",
    "token": "Make tokens for schedulers, operators and people.",
    "key": "Make and rotate keys of namespaces with encrypted packages.",
    "trackers": "Print how trackers share the blobs of a fleet.",
    "status": "Print what the local agent or a tracker is doing.",
    "completion": "Print what a shell needs to complete verbs, options and references.",
    "up": "Run tracker, agent and origin on this machine, for a trial.",
    "simulate": "Simulate a broadcast to many hosts.",
    "demo": "Show the whole system at work on this machine.",
}
"""Verb to its line in the list of verbs. The module p2pdist.cli.verbs.<verb> holds a click command
named `command` (with an underscore behind a verb that is a keyword of Python); a verb without a
module is not listed. Printing the list imports no verb."""

VERBS_PACKAGE = "p2pdist.cli.verbs"

OTHER_NAMES = {
    "images": "ls",
    "list": "ls",
    "packages": "ls",
    "ps": "status",
    "info": "status",
    "df": "du",
    "remove": "rm",
    "delete": "rm",
    "rmi": "rm",
    "build": "pack",
    "unmount": "umount",
    "clean": "prune",
    "show": "inspect",
    "download": "pull",
    "upload": "push",
    "exec": "run",
}
"""What other tools call a verb."""

OTHER_VARIABLES = frozenset(["CONFIG", "TOKEN", "DEBUG", "ROOT", "COMPILED", "DEMO_PLACE"])
"""What P2PDIST_ is followed by in variables that set no option: programs of packages have
P2PDIST_ROOT, and may run p2pdist."""

SHARED = frozenset(["TRACKER", "TOKEN_FILE", "JSON"])
"""Options that mean the same of a verb and of the verbs that it consists of: what variables and the
file say of them for the former holds for the latter."""

CONFIG_BYTES_MAX = 1 << 20
CONFIGURED = "p2pdist.configured"
_json_configured = False
"""Whether the file says that the command prints JSON."""
_piped: dict[Path, bytes] = {}
"""What configuration files that are pipes held: a pipe gives it once."""
_interrupted_by = 0
"""The signal that ended the command; 0 for none but SIGINT."""
DAEMONS = frozenset(["tracker", "agent"])


class Verbs(click.Group):
    """Loads verbs when needed and gives every option its variable and its place in the
    configuration file.

    An option is set, first wins, by its flag; by P2PDIST_<VERB>_<OPTION> or P2PDIST_<OPTION>; by
    the table [<verb>] of the TOML file, then by its top level, where names are written as the flags
    are (`working-dir`) or with underscores.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs that have a module."""
        spec = importlib.util.find_spec(VERBS_PACKAGE)
        places = (spec.submodule_search_locations if spec is not None else None) or ()
        there = {name.partition(".")[0] for place in places for name in os.listdir(place)}  # at once: they are many
        return [verb for verb in VERBS if _module(verb).rpartition(".")[2] in there]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a verb; None for an unknown one."""
        if cmd_name not in VERBS or importlib.util.find_spec(_module(cmd_name)) is None:
            return None
        command = importlib.import_module(_module(cmd_name)).command
        if "asyncio" in sys.modules:
            importlib.import_module("p2pdist.cli.output").silence_event_loop()
        assert isinstance(command, click.Command)
        if not getattr(command, "prepared", False):
            _prepare(command, (cmd_name,))
            command.prepared = True  # type: ignore[attr-defined]
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that a command line begins with. Raises click.UsageError, which names the verb
        that was probably meant."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if not args[0].startswith("-") and (verb := self._meant(ctx, args[0])):
                raise click.UsageError(f"{error.message} Did you mean {verb}?", ctx) from error
            raise

    def _meant(self, ctx: click.Context, word: str) -> str:
        """The verb that was meant by a word that is none; empty where no verb is similar."""
        return OTHER_NAMES.get(word) or _nearest(word, self.list_commands(ctx))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(verb, VERBS[verb]) for verb in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        """The verbs by their names alone; click would load them all."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        from click.shell_completion import CompletionItem

        return [
            CompletionItem(verb, help=VERBS[verb]) for verb in self.list_commands(ctx) if verb.startswith(incomplete)
        ]

    def main(self, args: Sequence[str] | None = None, *rest: Any, **more: Any) -> NoReturn:
        """Run, and end the process with the exit code that fits; a failure is one line on standard
        error.

        An int that a verb returns is its exit code.
        """
        if args is None:
            _use_utf8()
        if "_P2PDIST_COMPLETE" in os.environ:
            importlib.import_module("p2pdist.cli.verbs.completion")
        global _json_configured  # noqa: PLW0603
        _json_configured = False
        given = list(sys.argv[1:] if args is None else args)
        more["standalone_mode"] = False
        _conceal(given)
        if "_P2PDIST_COMPLETE" not in os.environ:
            _name_misspelt(given)
        code: Any = 0
        failure: BaseException | None = None
        try:
            _take_signals(given)  # where it is reported: until then a signal ends the process
            code = super().main(given, *rest, **more)
        except click.exceptions.Exit as error:
            code = error.exit_code
        except SystemExit:
            raise
        except BaseException as error:
            failure = error
        code = _ended(code if type(code) is int else 0, failure, as_json=_wants_json(given))
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to be tidied
        sys.exit(code)


def _take_signals(given: Sequence[str]) -> None:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does, so that it leaves nothing half done
    behind; a second one ends it at once. A verb may take them itself. A daemon takes them once it
    serves: until then they end it, however long it looks through a store, and a supervisor sees the
    signal."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # see launch.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _verb(given) not in DAEMONS:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _interrupted_by  # noqa: PLW0603 # a process runs one command
    _interrupted_by = number
    signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as of a job in the background
        signal.default_int_handler(number, frame)
    signal.raise_signal(signal.SIGINT)  # to whatever takes it by now, such as an event loop


def _ended(code: int, failure: BaseException | None, *, as_json: bool) -> int:
    """The exit code, after reporting the failure and writing all output."""
    unwritten = _flushed(sys.stdout)
    if failure is not None or unwritten is not None:
        from p2pdist.cli import output

        code = output.ended(code, failure, unwritten, as_json=as_json)
        code = 128 + _interrupted_by if code == output.INTERRUPTED and _interrupted_by else code
        _flushed(sys.stdout)
    _flushed(sys.stderr)
    return code


def _flushed(stream: TextIO) -> OSError | None:
    """Why what was written to a standard stream cannot go out. It leads nowhere from then on: the
    interpreter flushes it once more."""
    try:
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None


def _conceal(given: list[str]) -> None:
    """Keep secrets in URLs out of the process list, and say that they stood there for a moment."""
    if not any("://" in argument for argument in given):
        return
    from p2pdist.cli.command_line import conceal

    try:
        concealed, still = conceal(given), ""
    except OSError as error:
        concealed, still = True, f", and it is still there ({error.strerror})"
    if not concealed:
        return
    warning = (
        f"a password or signature was given on the command line, where every user of this host can read it{still}; give the URL in "
        "the environment (P2PDIST_ORIGIN for --origin) or in the file that --config names"
    )
    _warn(warning, given)


def _warn(warning: str, given: Sequence[str]) -> None:
    """On standard error; a daemon's is a line of its log, in the format that was asked for."""
    if _verb(given) not in DAEMONS:
        with contextlib.suppress(OSError):  # a lost warning keeps no command from running
            click.echo(f"warning: {warning}", err=True)
        return
    from p2pdist.cli import daemon

    daemon.EARLY.append(warning)


def _name_misspelt(given: Sequence[str]) -> None:
    """Warn of variables that set nothing and are called nearly as one that does. Others are left
    alone: Kubernetes makes some for each service (P2PDIST_TRACKER_PORT_7070_TCP)."""
    for name in sorted(os.environ):
        if name.startswith("P2PDIST_") and (meant := _meant_variable(name.removeprefix("P2PDIST_"))):
            _warn(f"{name} sets nothing and is ignored. Did you mean P2PDIST_{meant}?", given)


def _meant_variable(name: str) -> str:
    """What was probably meant by a variable's name without its prefix; empty where it is that of an
    option, or similar to none. Verbs are not imported: for an option of any verb it passes."""
    from p2pdist.cli.options import NAMES

    if name in OTHER_VARIABLES or not name or name.lower() in NAMES:
        return ""
    verb, _, rest = name.lower().partition("_")
    words = rest.split("_")
    if verb in VERBS and any("_".join(words[first:]) in NAMES for first in range(len(words))):
        return ""
    if rest in NAMES and (near := _nearest(verb, VERBS, 0.75)):
        return f"{near}_{rest}".upper()
    if verb in VERBS and (near := _nearest(rest, NAMES, 0.75)):
        return f"{verb}_{near}".upper()
    return _nearest(name.lower(), [*NAMES, *map(str.lower, OTHER_VARIABLES)], 0.75).upper()


def _use_utf8() -> None:
    """Where the locale has another encoding than UTF-8, begin anew in the UTF-8 mode of Python (PEP
    540). Names of files are bytes: only with one encoding for arguments, files, archives and
    messages between processes do they stay what they are. The locale of the programs that this one
    starts stays as it is."""
    if sys.getfilesystemencoding() != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606 # itself
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")


def _module(verb: str) -> str:
    return f"{VERBS_PACKAGE}.{verb}_" if keyword.iskeyword(verb) else f"{VERBS_PACKAGE}.{verb}"


def _verb(given: Sequence[str]) -> str:
    """The verb of a command line; empty where it names none."""
    words = iter(given)
    for word in words:
        if word == "--config":
            next(words, "")
        elif not word.startswith("-"):
            return word
    return ""


def _wants_json(args: list[str]) -> bool:
    verb, own = _verb(args), args[: args.index("--")] if "--" in args else args
    part = "".join(own[own.index(verb) + 1 :][:1]) if verb in own else ""
    names = ["P2PDIST_JSON", *(f"P2PDIST_{name}_JSON".upper() for name in (verb, f"{verb}_{part}") if verb)]
    given = (os.environ.get(name, "").strip().lower() in ("1", "true", "t", "yes", "y", "on") for name in names)
    return ("--json" in own and verb != "run") or any(given) or _json_configured  # run has none: its program may


class _NamedPath(click.ParamType):  # type: ignore[type-arg] # older releases of click take none
    """A path that is not empty: `--layout "$UNSET"` does not mean the working directory."""

    def __init__(self, path: click.Path) -> None:
        self._path, self.name = path, path.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. Raises click.BadParameter."""
        if value in ("", b""):
            self.fail("The path is empty.", param, ctx)
        return self._path.convert(value, param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        """As in help of the path."""
        return self._path.get_metavar(param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
        """As of the path."""
        return self._path.shell_complete(ctx, param, incomplete)


def _prepare(command: click.Command, path: tuple[str, ...]) -> None:
    """Give the options of a verb their variables, and the verb its --config."""
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            _prepare(child, (*path, name))
        if not command.params:
            return
    for option in command.params:
        if isinstance(option, click.Argument) and option.name in ARGUMENTS and option.type is click.STRING:
            option.type = ReferenceName()
        if isinstance(option.type, click.Path):
            option.type = _NamedPath(option.type)
        if isinstance(option, click.Option) and option.name and not option.envvar:
            names = {flag.lstrip("-").replace("-", "_").upper() for flag in option.opts if flag.startswith("--")}
            verbs = ["_".join(path[:length]).upper() for length in range(len(path), 0, -1)]
            option.envvar = [
                f"P2PDIST_{verb}_{name}" for name in names for verb in (verbs if name in SHARED else verbs[:1])
            ]
            option.envvar += [f"P2PDIST_{name}" for name in names - OTHER_VARIABLES]
            option.show_envvar = False
    command.params.append(
        click.Option(
            ["--config"],
            type=click.Path(path_type=Path),
            envvar="P2PDIST_CONFIG",
            is_eager=True,
            expose_value=False,
            callback=lambda ctx, param, value: _apply(ctx, value, path),
            help="A TOML file with values for options.",
        )
    )
    for name, child in getattr(command, "subcommands", {}).items():
        _prepare(child, (*path, name))


def _apply(ctx: click.Context, file: Path | None, path: tuple[str, ...]) -> None:
    """Let the file's values be the defaults of this verb's options. A file named before the verb,
    or for the verb that it is part of, is used where the verb names none."""
    file = file or ctx.find_root().params.get("config") or ctx.meta.get(CONFIGURED, (None,))[0]
    ctx.meta[CONFIGURED] = (file, path)
    if file is None:
        return
    body = _read_config(file)
    verbs = cast(Verbs, ctx.find_root().command)
    settings = settings_of(ctx.command)
    _check_top(ctx, file, body)
    values = {key: value for key, value in body.items() if key in settings and not isinstance(value, dict)}
    command, table = cast(click.Command, verbs), cast(Any, body)
    for depth, name in enumerate(path, 1):
        command = cast(click.Command, verbs.get_command(ctx, name)) if depth == 1 else parts_of(command)[name]
        table = table.get(name, {})
        if isinstance(table, list) and _is_table(table):
            raise click.UsageError(f"{file}: [[{name}]] is a list of tables. Write [{name}]", ctx)
        table = table if isinstance(table, dict) else {}
        _check_table(ctx, file, ".".join(path[:depth]), table, command)
        own = settings if depth == len(path) else settings.keys() & {name.lower() for name in SHARED}
        values.update((key, value) for key, value in table.items() if key in own)
    global _json_configured  # noqa: PLW0603 # a process runs one command; its failure is reported outside of it
    if "json" in values:  # else it may have been said for the verb of which this one is part
        _json_configured = values["json"] is True
    _warn_of_readers(file, values.values(), path)
    ctx.default_map = {settings[key].name or "": _as_given(settings[key], value) for key, value in values.items()}


def _warn_of_readers(file: Path, values: Iterable[Any], path: tuple[str, ...]) -> None:
    """Warn of a URL with a password in a file that every user of the host may read. A group may be
    the service's own."""
    from p2pdist.model.url import secrets_in

    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    secret = any(isinstance(text, str) and "://" in text and secrets_in(text) for text in texts)
    if secret and file.stat().st_mode & stat.S_IROTH:
        _warn(f"{file} holds a password or signature, and every user of this host may read it: chmod o= it", path)


def _is_table(value: Any) -> bool:
    """Whether a TOML value is a table or a list of tables."""
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))


def _check_table(ctx: click.Context, file: Path, name: str, table: dict[str, Any], command: click.Command) -> None:
    """Raises click.UsageError where the table of a verb has a key that is none of its options, nor
    the table of a verb that it consists of."""
    settings, parts = settings_of(command), parts_of(command)
    for key, value in table.items():
        if key not in (parts if isinstance(value, dict) and parts else settings):
            raise _misspelt(f"{file}: [{name}] has no option {key!r}", key, [*settings, *parts], ctx)


def _check_top(ctx: click.Context, file: Path, body: dict[str, Any]) -> None:
    """Raises click.UsageError where the top level of the file has a table that is of no verb, or a
    key that is an option of none."""
    from p2pdist.cli.options import NAMES

    for key, value in body.items():
        if _is_table(value) and key not in VERBS:
            raise _misspelt(f"{file}: there is no verb for the table [{key}]", key, VERBS, ctx)
        if not _is_table(value) and key not in NAMES:
            raise _misspelt(f"{file}: no verb has an option {key!r}", key, NAMES, ctx)


def settings_of(command: click.Command) -> dict[str, click.Option]:
    """The options of a verb by what they are called in a configuration file."""
    options = [option for option in command.params if isinstance(option, click.Option)]
    flags = [(flag, option) for option in options for flag in option.opts if flag.startswith("--")]
    return {flag.lstrip("-").replace("-", "_"): option for flag, option in flags}


def parts_of(command: click.Command) -> dict[str, click.Command]:
    """The verbs that a verb consists of, by name."""
    parts = command.commands if isinstance(command, click.Group) else getattr(command, "subcommands", {})
    return dict(parts)


def _nearest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """The word that was probably meant; empty where none is similar, from 0 to 1, by `cutoff`."""
    import difflib

    near = difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return near[0] if near else ""


def _misspelt(what: str, word: str, words: Iterable[str], ctx: click.Context) -> click.UsageError:
    """The failure of a name in a configuration file that is none of `words`."""
    meant = _nearest(word, words)
    return click.UsageError(f"{what}. {f'Did you mean {meant}?' if meant else '--help lists them'}", ctx)


def read_again(ctx: click.Context, name: str) -> Any:
    """The value that a verb's option has by now: what was given by flag or variable, else what the
    file says when it is read again, else its default. Raises UsageError, NotFound,
    click.UsageError."""
    if ctx.get_parameter_source(name) in (
        click.core.ParameterSource.COMMANDLINE,
        click.core.ParameterSource.ENVIRONMENT,
    ):
        return ctx.params[name]
    _apply(ctx, *ctx.meta[CONFIGURED])
    option = next(option for option in ctx.command.params if option.name == name)
    return option.type_cast_value(ctx, option.get_default(ctx))


def _read_config(file: Path) -> dict[str, Any]:
    import tomllib

    from p2pdist.files import PIPE_S, decoded, read_content
    from p2pdist.model.errors import NotFound, TooLarge, UsageError

    try:
        # It may hold secrets, which may come from a pipe; /dev/null is a file without settings.
        data = b"" if _is_null(file) else _piped.get(file)
        if data is None:
            data, mode = read_content(file, CONFIG_BYTES_MAX, pipe_s=PIPE_S)
            if stat.S_ISFIFO(mode):
                _piped[file] = data
    except FileNotFoundError as error:
        raise NotFound(f"there is no configuration file {file}", remedy="Check --config and P2PDIST_CONFIG") from error
    except OSError as error:
        raise UsageError(
            f"cannot read the configuration file {file}: {error.strerror}",
            remedy="Name a file that this user may read with --config",
        ) from error
    if len(data) > CONFIG_BYTES_MAX:
        raise TooLarge(
            f"the configuration file {file} is over {CONFIG_BYTES_MAX} bytes",
            remedy="Name the right file with --config",
        )
    try:
        return _underscored(tomllib.loads(decoded(data)))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{file} is not a TOML file: {error}", remedy="Correct that place; see https://toml.io"
        ) from error


def _is_null(file: Path) -> bool:
    with contextlib.suppress(OSError):
        return file.samefile(os.devnull)
    return False


def _underscored(body: dict[str, Any]) -> dict[str, Any]:
    return {
        key.replace("-", "_"): _underscored(value) if isinstance(value, dict) else value for key, value in body.items()
    }


def _as_given(option: click.Option, value: Any) -> Any:
    """A TOML value as the text that the flag takes, so that it is checked as that is: a list of
    texts for an option that may be repeated, and of lists for one that takes several values each
    time; a list of texts with commas between where the flag takes that; else JSON text of lists and
    tables."""
    if not isinstance(value, (list, dict)) and option.multiple and option.nargs == 1:
        value = [value]
    if isinstance(value, list) and option.multiple and option.nargs > 1:
        return [list(map(str, item)) if isinstance(item, list) else str(item) for item in value]
    if isinstance(value, list) and option.multiple:
        return [_text_of(item) for item in value]
    if isinstance(value, list) and "[," in (option.metavar or "") and option.nargs == 1:
        return ",".join(map(_text_of, value))
    return _text_of(value)


def _text_of(value: Any) -> str:
    return json.dumps(value, default=str) if isinstance(value, (bool, list, dict)) else str(value)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="p2pdist", prog_name="p2pdist")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar="P2PDIST_CONFIG",
    help="A TOML file with values for options; flags and P2PDIST_* variables win over it.",
)
def main(config: Path | None) -> None:
    """Bring packages and model weights to thousands of hosts at once.

    \b
    Example:
      p2pdist pack ./app -t trainer:v1 --entrypoint '["python", "train.py"]'
      p2pdist push trainer:v1 --origin file:///srv/packages
      p2pdist run trainer:v1
    """


if __name__ == "__main__":
    main()
