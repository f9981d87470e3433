"""The verbs that make packages of more than a directory: pack with a project, trace, import,
export."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import programs
import pytest
from test_cli_main import run
from waits import wait_until

from p2pdist.cli.verbs.blob import NOWHERE, named_file
from p2pdist.model.errors import UsageError
from p2pdist.model.manifest import SQUASHFS_TYPE, TREE_TYPE
from p2pdist.mount import kernel


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "src/sub").mkdir(parents=True)
    (tmp_path / "src/run").write_text('#!/bin/sh\necho "$A $P2PDIST_ROOT"\ncat "$P2PDIST_ROOT/data"\n')
    (tmp_path / "src/run").chmod(0o755)
    (tmp_path / "src/data").write_text("data\n")
    (tmp_path / "src/x.log").write_text("log")
    (tmp_path / "src/sub/deep").write_text("deep")
    return tmp_path


def done(place: Path, *arguments: str | Path, code: int = 0, cwd: Path | None = None) -> Any:
    """Run a verb with --json on the layout of the test."""
    before = os.getcwd()
    os.chdir(cwd or place)
    try:
        finished = run(*arguments[:1], "--json", *arguments[1:], P2PDIST_LAYOUT=str(place / "layout"))
    finally:
        os.chdir(before)
    assert finished.returncode == code, finished.stderr
    return json.loads(finished.stdout)


def contents(place: Path, reference: str) -> dict[str, str]:
    """The files of a package, by exporting it."""
    target = place / f"exported-{len(list(place.iterdir()))}"
    done(place, "export", reference, "--dir", "-o", target)
    return {str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file()}


@pytest.mark.parametrize("form", ["squashfs", "tree"])
def test_what_is_ignored_is_left_out(place: Path, form: str) -> None:
    (place / "src/.p2pdistignore").write_text("*.log\n/sub/\n")
    packed = done(place, "pack", place / "src", "-t", "a:1", "--format", form, "--ignore", "!sub", "--ignore", "data")
    assert packed["layers"][0]["mediaType"] == (TREE_TYPE if form == "tree" else SQUASHFS_TYPE)
    assert set(contents(place, "a:1")) == {"run", "sub/deep", ".p2pdistignore"}


def test_a_project_of_several_layers(place: Path) -> None:
    """Without options: names, formats, parts and places of layers come from p2pdist.toml; options
    win over it."""
    (place / "p2pdist.toml").write_text("""
        name = "team/app"
        tag = "v7"
        entrypoint = ["${P2PDIST_ROOT}/app/run"]
        format = "tree"
        ignore = ["*.log"]
        [env]
        A = "1"
        [[layer]]
        source = "src"
        only = ["/data", "/sub/"]
        format = "squashfs"
        [[layer]]
        source = "src"
        ignore = ["sub"]
        target = "app/code"
    """)
    packed = done(place, "pack", "--env", "B=2")
    assert packed["reference"] == "team/app:v7"
    assert [layer["mediaType"] for layer in packed["layers"]] == [SQUASHFS_TYPE, TREE_TYPE]
    assert set(contents(place, "team/app:v7")) == {"data", "sub/deep", "app/code/run", "app/code/data"}
    found = done(place, "inspect", "team/app:v7")
    assert (found["entrypoint"], found["env"]) == (["${P2PDIST_ROOT}/app/run"], ["A=1", "B=2"])
    again = done(place, "pack", "--project", place / "p2pdist.toml", "--env", "B=2", "-t", "other:1", cwd=place / "src")
    assert again["digest"] == packed["digest"]
    (place / "p2pdist.toml").write_text('nam = "x"')
    assert "nam" in done(place, "pack", code=2)["detail"]
    assert "p2pdist.toml" in done(place, "pack", code=2, cwd=place / "src")["detail"]
    assert "name" in done(place, "pack", place / "src", code=2)["detail"]


@pytest.mark.slow
def test_options_that_do_not_fit(place: Path) -> None:
    assert "pyvenv.cfg" in done(place, "pack", place / "src", "-t", "a:1", "--split", code=2)["detail"]
    assert "--split" in done(place, "pack", place / "src", "-t", "a:1", "--first-party", "x", code=2)["detail"]
    done(place, "pack", place / "src", "-t", "a:1", "--only-used", "absent.json", code=3)
    done(place, "pack", place / "src", "-t", "a:1", "--ignore", "!", code=2)
    done(place, "export", "a:1", "-o", "x", code=2)
    done(place, "export", "a:1", "--xar", "-o", "x", code=3)
    done(place, "import", place / "absent", "-t", "a:1", code=3)


@pytest.mark.slow
def test_reproducible_packages_are_equal_everywhere(place: Path) -> None:
    """Two checkouts at different times and places."""
    digests = set()
    for name, time_s in (("one", 1_600_000_000), ("two/longer", 1_700_000_000)):
        shutil.copytree(place / "src", place / name)
        for path in (place / name).rglob("*"):
            os.utime(path, (time_s, time_s))
        (place / name / "m.py").write_text("x = 1\n")
        subprocess.run([sys.executable, "-m", "compileall", "-q", place / name], check=True)
        for form in ("tree", "squashfs"):
            packed = done(place, "pack", place / name, "-t", f"{form}:1", "--format", form, "--reproducible")
            digests.add((form, packed["digest"]))
    assert len(digests) == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_only_what_a_run_used(place: Path) -> None:
    """The output of the traced program is its own; its exit code is that of the verb."""
    script = f"cat {place}/src/data; exit 5"
    finished = run("trace", "-o", place / "t.json", "--root", place / "src", "--", "sh", "-c", script)
    if "ptrace" in finished.stderr:
        pytest.skip("needs ptrace")
    assert (finished.returncode, finished.stdout) == (5, "data\n")
    assert "1 files" in finished.stderr
    said = done(place, "trace", "-o", place / "u.json", "--root", place / "src", "--", "cat", place / "src/sub/deep")
    assert (said["files"], said["exit_code"]) == (1, 0)
    for form in ("tree", "squashfs"):
        traces = ["--only-used", place / "t.json", "--only-used", place / "u.json"]
        packed = done(place, "pack", place / "src", "-t", f"{form}:1", "--format", form, *traces)
        assert packed["files"] == 2
        assert set(contents(place, f"{form}:1")) == {"data", "sub/deep"}
    done(place, "trace", "-o", place / "v.json", "--", "no-such-program", code=3)
    (place / "src/data").write_text("changed\n")
    (place / "src/x.log").write_text("changed")
    for number, source in (("1", "other"), ("2", "src")):
        shutil.copytree(place / "src", place / "other", dirs_exist_ok=True)
        (place / "other/data").write_text("data\n")
        (place / "other/x.log").write_text("log")
        done(place, "pack", place / source, "-t", f"whole:{number}", "--format", "tree")
    assert done(place, "diff", "whole:1", "whole:2")["changed"] == ["data", "x.log"]
    assert done(place, "diff", "whole:1", "whole:2", "--only-used", place / "t.json")["changed"] == ["data"]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["squashfs", "tree"])
def test_a_tar_goes_in_and_out(place: Path, form: str) -> None:
    with tarfile.open(place / "in.tar.gz", "w:gz") as archive:
        archive.add(place / "src", ".")
    os.mkfifo(place / "fifo")
    with tarfile.open(place / "more.tar", "w") as archive:
        archive.add(place / "fifo", "fifo")
        archive.add(place / "src/data", "data")
    imported = done(place, "import", place / "in.tar.gz", "-t", "a:1", "--format", form, "--env", "A=1")
    assert (imported["kind"], imported["files"]) == ("tar", 4)
    assert done(place, "inspect", "a:1")["env"] == ["A=1"]
    assert done(place, "import", place / "more.tar", "-t", "b:1")["dropped"] == [{"path": "fifo", "what": "FIFO"}]
    exported = done(place, "export", "a:1", "--tar", "-o", place / "out.tar")
    assert exported["size"] == (place / "out.tar").stat().st_size
    piped = run("export", "a:1", "--tar", "-o", "-", P2PDIST_LAYOUT=str(place / "layout"))
    assert piped.stdout.encode() == (place / "out.tar").read_bytes()
    again = done(place, "import", place / "out.tar", "-t", "a:2", "--format", form, "--env", "A=1")
    assert again["digest"] == imported["digest"]
    assert not [path for path in (place / "layout/.incoming").iterdir() if path.name.startswith("stage")]


def saved_image(place: Path, run: dict[str, Any]) -> Path:
    """What `docker save` writes, unpacked: an image of one layer with one program."""
    image = place / "saved"
    image.mkdir()
    with tarfile.open(image / "layer.tar", "w") as archive:
        archive.add(place / "src/run", "usr/local/bin/tool")
    digest = hashlib.sha256((image / "layer.tar").read_bytes()).hexdigest()
    config = {"config": run, "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]}}
    (image / "config.json").write_text(json.dumps(config))
    saved = [{"Config": "config.json", "RepoTags": ["a:1"], "Layers": ["layer.tar"]}]
    (image / "manifest.json").write_text(json.dumps(saved))
    return image


def test_what_of_an_image_is_not_as_in_a_container_is_said(place: Path) -> None:
    """Its user, and that it is not entered. An image without PATH has the usual one; a user of
    root's number needs no word."""
    entered = "p2pdist run starts the image's program from where the package is seen, and does not enter the image"
    image = saved_image(place, {"Cmd": ["tool"], "User": "app:app", "Env": ["A=1"]})
    imported = done(place, "import", image, "-t", "a:1")
    assert [note.partition(":")[0] for note in imported["notes"]] == [entered, "the image's user app"]
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert done(place, "inspect", "a:1")["env"] == [path, "A=1"]
    shutil.rmtree(image)
    for name, reason in {"/bin/sh": "takes /bin/sh of the host", "gone": "gone cannot be run"}.items():
        imported = done(place, "import", saved_image(place, {"Cmd": [name]}), "-t", "a:1")
        assert reason in imported["notes"][1]
        shutil.rmtree(image)
    quiet = done(place, "import", saved_image(place, {"User": "0", "Env": ["PATH=/bin"]}), "-t", "a:2")
    assert quiet["notes"] == []
    assert done(place, "inspect", "a:2")["env"] == ["PATH=/bin"]


@pytest.mark.root
@pytest.mark.parametrize("form", ["squashfs", "tree"])
def test_a_self_mounting_file(place: Path, form: str) -> None:
    """Also of several layers, of which the upper one wins."""
    (place / "upper").mkdir()
    (place / "upper/data").write_text("upper\n")
    done(place, "pack", place / "src", "-t", "a:1", "--entrypoint", '["${P2PDIST_ROOT}/run"]', "--env", "A=1")
    done(place, "pack", place / "upper", "-t", "a:2", "--base", "a:1", "--format", form)
    exported = done(place, "export", "a:2", "--xar", "-o", place / "app")
    assert exported["size"] == (place / "app").stat().st_size
    environ = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(place)}
    finished = subprocess.run([place / "app"], env=environ, capture_output=True, text=True, timeout=30, check=True)
    value, _, root = finished.stdout.splitlines()[0].partition(" ")
    assert (value, finished.stdout.splitlines()[1]) == ("1", "upper")
    assert root.startswith(str(place))
    first = (place / "app").read_bytes()
    done(place, "export", "a:2", "--xar", "-o", place / "app")
    assert (place / "app").read_bytes() == first


def test_a_damaged_layer_is_not_exported(place: Path) -> None:
    for form in ("squashfs", "tree"):
        (place / "src/large").write_bytes(os.urandom(300_000))
        packed = done(place, "pack", place / "src", "-t", f"{form}:1", "--format", form)
        blobs = sorted((place / "layout/blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
        data = bytearray(blobs[-1].read_bytes())
        data[1000] ^= 1
        blobs[-1].write_bytes(data)
        done(place, "export", packed["reference"], "--dir", "-o", place / f"out-{form}", code=6)
        assert not (place / f"out-{form}").exists()
        shutil.rmtree(place / "layout")


def test_one_format_and_one_output(place: Path) -> None:
    """Of two formats neither is guessed; /dev/stdout is standard output, and stays what it is."""
    done(place, "pack", place / "src", "-t", "a/b:v1", "--format", "tree")
    layout = ("--layout", place / "layout")
    both = run("export", "a/b:v1", "--xar", "--tar", "-o", place / "out", *layout)
    assert (both.returncode, "several formats" in both.stderr, (place / "out").exists()) == (2, True, False)
    out = place / "standard"
    out.symlink_to("/proc/self/fd/1")
    with (place / "tar").open("wb") as file:
        command = [sys.executable, "-m", "p2pdist", "export", "a/b:v1", "--tar", "-o", out, *layout]
        subprocess.run(command, stdout=file, check=True)
    with tarfile.open(place / "tar", "r:") as archive:
        assert archive.getnames()
    assert not (place / "tar").read_bytes()[-512:].strip(b"\0")
    assert out.is_symlink()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_import_that_waits_for_a_pipe_can_be_ended(place: Path, number: signal.Signals) -> None:
    """Within a file that has begun to come, and before anything has: nothing is left of either."""
    os.mkfifo(place / "pipe")
    begun = io.BytesIO()
    with tarfile.open(fileobj=begun, mode="w") as archive:
        member = tarfile.TarInfo("file")
        member.size = 1 << 20
        archive.addfile(member, io.BytesIO(bytes(1 << 20)))
    for first in (b"", begun.getvalue()[:300_000]):
        words = ("import", place / "pipe", "-t", "a:1", "--layout", place / "layout")
        with (
            programs.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
            (place / "pipe").open("wb") as pipe,
        ):
            pipe.write(first)
            pipe.flush()
            wanted = "*/*/archive/file" if first else "*/*/archive"
            wait_until(lambda: list((place / "layout/.incoming").glob(wanted)), "the import has begun")  # noqa: B023
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
        assert (process.returncode, said.strip()) == (128 + number, "p2pdist: interrupted")
        assert list((place / "layout/.incoming").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_export_whose_reader_stands_still_can_be_ended(place: Path, number: signal.Signals) -> None:
    (place / "src/large").write_bytes(os.urandom(1 << 20))
    done(place, "pack", place / "src", "-t", "a/b:v1", "--format", "tree")
    words = ("export", "a/b:v1", "--tar", "-o", "-", "--layout", place / "layout")
    with programs.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(512)
        process.send_signal(number)
        assert process.wait(60) == 128 + number


@pytest.mark.parametrize("variables", [{}, {"PYTHONWARNINGS": "default"}], ids=["at_once", "started_again"])
def test_no_tar_goes_where_standard_output_is_closed(place: Path, variables: dict[str, str]) -> None:
    """Under whichever name; a file is written as ever."""
    environ = {**os.environ, **variables}
    done(place, "pack", place / "src", "-t", "a/b:v1", "--format", "tree")
    command = f"exec {sys.executable} -m p2pdist export a/b:v1 --tar --layout {place}/layout -o"
    for target, code in (("-", 1), ("/dev/stdout", 1), (place / "tar", 0)):
        words = ["sh", "-c", f"{command} {target} >&-"]
        made = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
        assert (made.returncode, "standard output is closed" in made.stderr) == (code, bool(code))
    assert tarfile.is_tarfile(place / "tar")


@pytest.mark.root
@pytest.mark.parametrize("form", ["squashfs", "tree"])
def test_a_layout_that_may_only_be_read_is_exported(place: Path, form: str) -> None:
    """As one that a team has on a file server."""
    done(place, "pack", place / "src", "-t", "a/b:v1", "--format", form)
    (place / "shared").mkdir()
    kernel.mount("shared", place / "shared", "tmpfs")
    try:
        shutil.copytree(place / "layout", place / "shared/layout")
        subprocess.run(["mount", "-o", "remount,ro", place / "shared"], check=True)
        layout = ("--layout", place / "shared/layout")
        for kind in ("dir", "tar", "xar"):
            made = run("export", "a/b:v1", f"--{kind}", "-o", place / kind, *layout)
            assert made.returncode == 0, made.stderr
        streamed = run("export", "a/b:v1", "--tar", "-o", "-", *layout, "-q")
        assert streamed.returncode == 0, streamed.stderr
        assert sorted(path.name for path in place.iterdir()) == ["dir", "layout", "shared", "src", "tar", "xar"]
        assert (place / "dir/sub/deep").read_text() == "deep"
    finally:
        kernel.unmount(place / "shared")


@pytest.mark.parametrize("form", ["squashfs", "tree"])
def test_a_layer_that_is_elsewhere_is_said(place: Path, form: str) -> None:
    """As the base of a package that was packed onto one at the origin."""
    packed = done(place, "pack", place / "src", "-t", "a/b:v1", "--format", form)
    (place / "layout/blobs/sha256" / packed["layers"][0]["digest"][7:]).unlink()
    problem = done(place, "export", "a/b:v1", "--tar", "-o", place / "tar", code=3)
    assert "layer sha256:" in problem["detail"] and "base" in problem["remedy"]


def test_what_is_no_image_has_none_to_choose(place: Path) -> None:
    subprocess.run(["tar", "-C", place / "src", "-cf", place / "a.tar", "."], check=True)
    for source in ("src", "a.tar"):
        for choice in (("--image", "team/app:v1"), ("--platform", "linux/arm64")):
            made = run("import", place / source, "-t", "a:1", *choice, "--layout", place / "layout")
            assert (made.returncode, "is no image" in made.stderr) == (2, True), made.stderr


@pytest.mark.parametrize("option", ["--env", "--working-dir", "--entrypoint"])
def test_settings_that_are_no_text_are_refused(place: Path, option: str) -> None:
    value = os.fsdecode(b'["\xff"]' if option == "--entrypoint" else b"A=\xff")
    packed = run("pack", place / "src", "-t", "a:1", option, value, "--layout", place / "layout")
    assert packed.returncode == 2, packed.stderr
    assert "unexpected" not in packed.stderr


def test_a_directory_beside_the_layers_of_a_project_file_is_not_passed_over(place: Path) -> None:
    (place / "project").mkdir()
    (place / "project/p2pdist.toml").write_text('name = "a/b"\n[[layer]]\nsource = "../src"\n')
    named = ("--project", place / "project/p2pdist.toml")
    (place / "src/of it").mkdir()
    for source in (place / "src/of it", place / "layout"):
        source.mkdir(exist_ok=True)
        problem = done(place, "pack", source, *named, code=2)
        assert f"{source} does not hold all of them" in problem["detail"]
    for source in (("project",), (place / "project/../project/",), (), ("src",), (place,)):
        done(place, "pack", *source, *named)
    assert "data" in contents(place, "a/b")


def test_a_model_leaves_out_what_its_project_file_says(place: Path) -> None:
    """It may be a secret. A file that packs something else is refused."""
    file = place / "src/p2pdist.toml"
    (place / "src/secret.key").write_text("secret")
    file.write_text('name = "models/a"\nignore = ["*.key", "/p2pdist.toml"]\n')
    done(place, "pack", place / "src", "--format", "modelpack", "--ignore", "sub")
    done(place, "export", "models/a", "--dir", "-o", place / "out")
    kept = {path.name for path in (place / "src").iterdir()} - {"secret.key", "p2pdist.toml", "sub"}
    assert {path.name for path in (place / "out").iterdir()} == kept
    for line in ('base = "a/b:1"', '[[layer]]\nsource = "."'):
        file.write_text(f'name = "models/a"\n{line}\n')
        problem = done(place, "pack", place / "src", "--format", "modelpack", code=2)
        assert "says nothing of a model" in problem["detail"] and str(file) in problem["detail"]


def test_a_program_of_the_project_file_is_none_of_a_model(place: Path) -> None:
    """A directory may be packed as both, by one file."""
    file = place / "src/p2pdist.toml"
    file.write_text('name = "models/a"\nentrypoint = ["x"]\nworking_dir = "sub"\n[env]\nA = "b"\n')
    packed = done(place, "pack", place / "src", "--format", "modelpack")
    assert packed["notes"] == [f"{file}: a model has no entrypoint, env, working_dir"]


@pytest.mark.parametrize("form", ["squashfs", "tree"])
def test_nothing_is_packed_on_a_model(place: Path, form: str) -> None:
    """Hosts show a model, and nothing above it."""
    done(place, "pack", place / "src", "-t", "models/a:v1", "--format", "modelpack")
    problem = done(place, "pack", place / "src", "-t", "a/b:v1", "--base", "models/a:v1", "--format", form, code=2)
    assert "models/a:v1 is a model, on which no package can be stacked" in problem["detail"]
    file = place / "blob"
    file.write_text("x")
    assert run("blob", "push", file, "--origin", (place / "layout").as_uri()).returncode == 0
    name = f"blob:sha256-{hashlib.sha256(b'x').hexdigest()}"
    problem = done(place, "pack", place / "src", "-t", "a/b:v1", "--base", name, "--format", form, code=2)
    assert "is of a layer of type application/octet-stream" in problem["detail"]


@pytest.mark.parametrize("form", ["squashfs", "tree"])
def test_what_a_model_cannot_hold_of_a_package_is_named(place: Path, form: str) -> None:
    """Models have no links: of a package that is exported as one they are missing."""
    (place / "src/link").symlink_to("file")
    done(place, "pack", place / "src", "-t", "a/b:v1", "--format", form)
    exported = done(place, "export", "a/b:v1", "--modelpack", "-o", place / "out")
    assert (exported["dropped"], exported["dropped_total"]) == ([{"path": "link", "what": "symbolic link"}], 1)
    said = run("export", "a/b:v1", "--modelpack", "-o", place / "again", "--layout", place / "layout")
    assert (said.returncode, "left out: link (symbolic link)" in said.stderr) == (0, True)


@pytest.mark.parametrize("kind", ["--dir", "--modelpack", "--tar"])
def test_an_export_to_nowhere_names_where_it_was_to_go(place: Path, kind: str) -> None:
    done(place, "pack", place / "src", "-t", "a/b:v1")
    problem = done(place, "export", "a/b:v1", kind, "-o", place / "nowhere/out", code=1)
    assert f"cannot write {place / 'nowhere/out'}: No such file" in problem["detail"]
    assert problem["remedy"].startswith("Name another")


def test_attributes_that_a_file_system_cannot_hold_are_named(place: Path) -> None:
    """ext4 says that no space is left."""
    (place / "probe").touch()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as source:
        for name in ("file", "directory"):
            path = Path(source, name)
            path.touch() if name == "file" else path.mkdir()
            try:
                os.setxattr(path, "user.long", bytes(60_000))
            except OSError:
                pytest.skip("needs extended attributes in memory")
        try:
            os.setxattr(place / "probe", "user.long", bytes(60_000))
            pytest.skip("needs a file system with short extended attributes")
        except OSError:
            pass
        for left_out, named in (("directory", "file"), ("file", "directory")):
            words = ("--format", "tree", "--xattrs", "--ignore", left_out)
            done(place, "pack", source, "-t", "a/b:v1", *words)
            problem = done(place, "export", "a/b:v1", "--dir", "-o", place / "out", code=1)
            assert f"{named} has the extended attribute user.long of 60000 bytes" in problem["detail"]
            assert "XFS 64 KiB" in problem["remedy"], "and Btrfs holds no such long ones"


@pytest.mark.root
def test_a_disk_that_is_full_keeps_nothing_of_an_export(place: Path) -> None:
    (place / "src/large").write_bytes(os.urandom(3 << 20))
    done(place, "pack", place / "src", "-t", "a/b:v1")
    (place / "small").mkdir()
    kernel.mount("small", place / "small", "tmpfs", 0, "size=1m")
    try:
        for kind in ("--dir", "--modelpack", "--tar"):
            made = run("export", "a/b:v1", kind, "-o", place / "small/out", "--layout", place / "layout")
            assert (made.returncode, "lacks space" in made.stderr, "retry" in made.stderr) == (1, True, False)
            assert list((place / "small").iterdir()) == []
        packed = run("pack", place / "src", "-t", "a:1", "--format", "tree", "--layout", place / "small/layout")
        needed = int(packed.stderr.partition(" bytes needed")[0].rpartition(" ")[2])
        assert 3 << 20 <= needed < 4 << 20
    finally:
        kernel.unmount(place / "small")


def test_a_blob_becomes_a_file_and_nothing_else(tmp_path: Path) -> None:
    """/dev/stdout is a link: a file took its place."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "to fifo").symlink_to("fifo")
    (tmp_path / "to file").symlink_to("new")
    socket = tmp_path / "agent.sock"
    digest = f"sha256:{'0' * 64}"
    for output in ("-", tmp_path / "fifo", tmp_path / "to fifo"):
        refused = run("blob", "pull", digest, "-o", output, "--socket", socket)
        assert (refused.returncode, "is no file" in refused.stderr) == (2, True), refused.stderr
    for output in (f"{tmp_path}/none/", f"{tmp_path}/none/.", f"{tmp_path}/"):
        refused = run("blob", "pull", digest, "-o", output, "--socket", socket)
        assert (refused.returncode, f"{output} names a directory" in refused.stderr) == (2, True), refused.stderr
    with (tmp_path / "file").open("wb") as file:  # as standard output may lead to one
        for output in (f"/dev/fd/{file.fileno()}", f"/proc/self/fd/{file.fileno()}"):
            with pytest.raises(UsageError, match="is no file but"):
                named_file(Path(output))
    assert named_file(tmp_path / "to file") == tmp_path / "new"
    assert named_file(tmp_path / "plain") == tmp_path / "plain"
    (tmp_path / "to nowhere").symlink_to("/dev/null")
    assert named_file(Path("/dev/null")) == named_file(tmp_path / "to nowhere") == NOWHERE
