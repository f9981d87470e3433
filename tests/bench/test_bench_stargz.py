"""The benchmark of containerd's starts: its arguments, its image and its table, without a start."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from bench.lazy_package import MADE, Made
from bench.stargz import LAZY, MIB, OPTIMISED, PROGRAMS, WAYS, WHOLE, Image, Row, arguments, manifest, table
from bench.stargz_image import libraries, put_layer, site, write_layout


def test_the_table_has_the_medians_and_the_best_and_names_what_is_missing() -> None:
    rows = [Row(WHOLE, seconds, 5.0, 600 * MIB) for seconds in (9.0, 7.0, 8.0)]
    rows.append(Row(LAZY, 6.0, 1.0, 100 * MIB))
    shown = table(rows, Made(Path("package"), 1000, 2000 * MIB, 500 * MIB), {WHOLE: 600 * MIB, LAZY: 610 * MIB}, 400.0)
    lines = shown.splitlines()
    assert lines[1] == "== 1,000 files, 2,000 MiB, at 400 Mbit/s"
    assert lines[4].removeprefix(WHOLE).split() == ["8.00", "7.00", "5.00", "600.0", "600.0"]
    assert lines[5].removeprefix(LAZY).split() == ["6.00", "6.00", "1.00", "100.0", "610.0"]
    assert lines[6:] == [f"not measured: {OPTIMISED}"]


def test_a_tag_is_one_of_a_registry_and_an_optimised_image_is_of_its_modules() -> None:
    image = Image(Path("source"), "numpy,a.b", 6)
    assert [image.tag(way) for way in WAYS] == ["plain-gzip6", "estargz-gzip6", "optimised-numpy-a-b-gzip6"]


def test_a_directory_without_a_package_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--package", str(tmp_path)])
    assert "no package of bench.lazy_package" in capsys.readouterr().err


def test_a_missing_program_is_named_by_its_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / MADE).write_text("{}")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        arguments(["--package", str(tmp_path)])
    assert f"install {' '.join(PROGRAMS.values())}" in capsys.readouterr().err


def test_a_tag_that_the_registry_has_not_is_none(tmp_path: Path) -> None:
    assert manifest(tmp_path, "plain") is None


def test_a_layer_has_the_files_of_root_and_is_the_same_again(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "module").mkdir(parents=True)
    (source / "module" / "__init__.py").write_text("here = True")
    (source / "link").symlink_to("module")
    descriptor, diff_id = put_layer(tmp_path, site(source), 6)
    assert put_layer(tmp_path, site(source), 6) == (descriptor, diff_id)
    data = (tmp_path / descriptor["digest"].partition(":")[2]).read_bytes()
    assert len(data) == descriptor["size"]
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(data))) as tar:
        assert tar.getnames() == ["site", "site/link", "site/module", "site/module/__init__.py"]
        assert all(member.uid == member.gid == 0 for member in tar)
        assert tar.getmember("site/link").linkname == "module"


@pytest.mark.slow
def test_the_image_has_the_interpreter_its_libraries_and_directories_above_them(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_layout(tmp_path / "layout", source, "host:5000/app:plain", 1)
    blobs = tmp_path / "layout" / "blobs" / "sha256"

    def blob(digest: str) -> bytes:
        return (blobs / digest.partition(":")[2]).read_bytes()

    (entry,) = json.loads((tmp_path / "layout" / "index.json").read_text())["manifests"]
    layers = json.loads(blob(entry["digest"]))["layers"]
    assert entry["annotations"] == {"io.containerd.image.name": "host:5000/app:plain"} and len(layers) == 2
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(blob(layers[0]["digest"])))) as tar:
        members = {f"/{member.name}": member for member in tar}
    python = Path(sys.executable).resolve()
    needed = {python, Path(sysconfig.get_path("stdlib"), "os.py"), *libraries([python])}
    assert len(needed) > 2 and all(members[str(path)].isfile() for path in needed)
    assert all(members[str(above)].isdir() for path in needed for above in path.parents[:-1])
    assert shutil.which("ldd") is not None and set(map(str, needed)) <= set(members)
