import os
from pathlib import Path

import pytest
from delegating_handler import DelegatingHandler
from pyarrow import fs as pafs

from parquet_keytools.errors import OutputError, ParquetFormatError
from parquet_keytools.files.conversion import FilePlan, plan_files
from parquet_keytools.storage.locations import FileLocation


@pytest.fixture(params=["local", "other"])
def located(request: pytest.FixtureRequest):
    """Creates locations: on this machine, and on a file system that is not known to be local."""
    if request.param == "local":
        return FileLocation.resolve
    filesystem = pafs.PyFileSystem(DelegatingHandler(pafs.LocalFileSystem()))
    return lambda path: FileLocation(filesystem, str(path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    contents = {
        "a.parquet": b"PAR1....PAR1",
        "year=1/b.parquet": b"not Parquet, and says that it is",
        "year=1/part-0": b"PARE....PARE",
        "_year=1/c": b"PAR1 without an end",
        "year=2/end": b"without a beginning PAR1",
        "year=2/short": b"PAR",
        "year=2/empty": b"",
        "year=2/_KEY_MATERIAL_FOR_end.json": b"{}",
        "year=2/_KEY_MATERIAL_FOR_gone.parquet.json": b"{}",
        "_metadata": b"PAR1....PAR1",
        "year=1/_common_metadata": b"PAR1....PAR1",
        "_SUCCESS": b"",
        "_temporary/0/d.parquet": b"PAR1....PAR1",
        ".e.parquet.tmp": b"PAR1....PAR1",
        "notes.txt": b"some notes",
    }
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "nothing").mkdir()
    return root


def relative(plan: FilePlan, root: Path) -> list[str]:
    return [str(Path(file.source.path).relative_to(root)) for file in plan.files]


def test_a_folder_is_mirrored(located, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    plan = plan_files(located(folder), located(target))
    assert plan.source_is_folder
    names = ["_year=1/c", "a.parquet", "year=1/b.parquet", "year=1/part-0", "year=2/end"]
    assert relative(plan, folder) == names
    assert [file.target.path for file in plan.files] == [str(target / name) for name in names]
    assert [file.size_bytes for file in plan.files] == [(folder / name).stat().st_size for name in names]
    assert plan.size_bytes == sum(file.size_bytes for file in plan.files)
    reasons = {str(Path(left.location.path).relative_to(folder)): left.reason for left in plan.left_out}
    assert {name: reason.split(":")[0] for name, reason in reasons.items()} == {
        ".e.parquet.tmp": "readers of data sets skip names that begin with a dot or an underscore",
        "_SUCCESS": "readers of data sets skip names that begin with a dot or an underscore",
        "_temporary/0/d.parquet": "readers of data sets skip names that begin with a dot or an underscore",
        "_metadata": "a summary of footers",
        "year=1/_common_metadata": "a summary of footers",
        "year=2/_KEY_MATERIAL_FOR_gone.parquet.json": "key material of a Parquet file that is not here",
        "notes.txt": "not a Parquet file",
        "year=2/empty": "not a Parquet file",
        "year=2/short": "not a Parquet file",
    }
    assert not target.exists()


def test_a_single_file(located, folder: Path, tmp_path: Path) -> None:
    plan = plan_files(located(folder / "a.parquet"), located(tmp_path / "x"))
    assert not plan.source_is_folder
    assert [(file.source.name, file.target.name, file.size_bytes) for file in plan.files] == [
        ("a.parquet", "x", 12)
    ]


def test_the_source_is_missing(located, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        plan_files(located(tmp_path / "missing"), located(tmp_path / "x"))


def test_a_folder_without_parquet_files(located, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "notes.txt").write_text("some notes")
    with pytest.raises(ParquetFormatError, match="no Parquet files"):
        plan_files(located(tmp_path / "source"), located(tmp_path / "x"))


def test_a_target_that_exists_needs_consent(located, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    (target / "year=1").mkdir(parents=True)
    source = located(folder)
    plan_files(source, located(target))
    (target / "a.parquet").write_text("precious")
    with pytest.raises(OutputError, match=r"not empty.*--skip-existing .*--overwrite"):
        plan_files(source, located(target))
    with pytest.raises(OutputError, match=r"exists already.*--overwrite"):
        plan_files(located(folder / "a.parquet"), located(target / "a.parquet"))
    assert plan_files(source, located(target), overwrite=True).files
    assert plan_files(located(folder / "a.parquet"), located(target / "a.parquet"), overwrite=True).files


def test_files_and_folders_do_not_replace_each_other(located, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OutputError, match="is a file"):
        plan_files(located(folder), located(tmp_path / "file"), overwrite=True)
    with pytest.raises(OutputError, match="is a folder"):
        plan_files(located(folder / "a.parquet"), located(folder / "nothing"), overwrite=True)


@pytest.mark.parametrize("name", ["", "a.parquet"])
def test_the_target_is_the_source(located, folder: Path, name: str) -> None:
    with pytest.raises(OutputError, match="is the source itself"):
        plan_files(located(folder / name), located(folder / name), overwrite=True)


def test_the_target_lies_in_the_source(located, folder: Path) -> None:
    with pytest.raises(OutputError, match="is inside the source"):
        plan_files(located(folder), located(folder / "nothing" / "new"))


def test_a_name_that_begins_alike_is_another_folder(located, folder: Path) -> None:
    assert plan_files(located(folder), located(f"{folder}2")).files


@pytest.mark.parametrize("inside", ["", "nothing/new"])
@pytest.mark.parametrize("spelling", ["link", "relative", "dots", "uri", "trailing slash"])
def test_no_spelling_hides_the_source(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str, inside: str
) -> None:
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    target = {
        "link": f"{tmp_path}/link/{inside}",
        "relative": f"source/{inside}",
        "dots": f"{folder}/../source/{inside}",
        "uri": f"{folder.as_uri()}/{inside}",
        "trailing slash": f"{folder / inside}/",
    }[spelling]
    with pytest.raises(OutputError):
        plan_files(FileLocation.resolve(folder), FileLocation.resolve(target), overwrite=True)
    with pytest.raises(OutputError, match="is the source itself"):
        name = f"{target.rstrip('/')}/a.parquet" if not inside else f"{folder}/nothing/../a.parquet"
        plan_files(FileLocation.resolve(folder / "a.parquet"), FileLocation.resolve(name), overwrite=True)


def test_a_link_in_the_source_that_leads_to_the_target(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "a.parquet").write_bytes(b"PAR1")
    (folder / "link").symlink_to(target)
    with pytest.raises(OutputError, match="is itself a source"):
        plan_files(FileLocation.resolve(folder), FileLocation.resolve(target), overwrite=True)


def test_links_are_followed_but_not_in_circles(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "x.parquet").write_bytes(b"PAR1")
    (folder / "year=3").symlink_to(other)
    (folder / "year=1" / "circle").symlink_to(folder)
    (folder / "dangling").symlink_to(tmp_path / "missing")
    (folder / "_dangling").symlink_to(tmp_path / "missing")
    (folder / "dangling.parquet").symlink_to(tmp_path / "missing")
    plan = plan_files(FileLocation.resolve(folder), FileLocation.resolve(tmp_path / "target"))
    assert relative(plan, folder)[-1] == "year=3/x.parquet"
    assert len(plan.files) == 6
    # They would be silently missing in the target.
    reasons = {str(Path(unseen.path).relative_to(folder)): unseen.reason for unseen in plan.unseen}
    assert {name: reason.split(":")[0] for name, reason in reasons.items()} == {
        "dangling": "a dangling link",
        "dangling.parquet": "a dangling link",
        "year=1/circle": "a link to a folder that contains it",
    }
    assert "_dangling" in {left.location.name for left in plan.left_out}


def test_what_is_neither_file_nor_folder(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ParquetFormatError, match="neither a file nor a folder"):
        plan_files(FileLocation.resolve(tmp_path / "pipe"), FileLocation.resolve(tmp_path / "x"))
    with pytest.raises(OutputError, match="not a regular file"):
        plan_files(FileLocation.resolve(folder / "a.parquet"), FileLocation.resolve("/dev/null"), overwrite=True)
