"""Files by their words: of this machine without Java, and of Hadoop's file systems through it."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from keylane import InvalidArgument
from keylane_spark.files import Entry, Files, HadoopFiles, LocalFiles, check_written, files_at, local_at


@pytest.fixture(params=["here", "hadoop"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Files, str]:
    """Files of this machine, and the same folder as another file system."""
    if request.param == "here":
        return LocalFiles(), f"file://{tmp_path}"
    root = request.getfixturevalue("elsewhere")
    return HadoopFiles(request.getfixturevalue("spark"), root), root


def test_a_file_is_written_read_moved_and_deleted(files: tuple[Files, str]) -> None:
    disk, root = files
    assert disk.read(f"{root}/deep/one") is None
    assert disk.entries(f"{root}/deep") == []
    disk.make_folder(f"{root}/deep/er")
    disk.write(f"{root}/deep/one", "first")
    disk.write(f"{root}/deep/one", "häßlich")
    assert disk.read(f"{root}/deep/one") == "häßlich"
    names = [entry for entry in disk.entries(f"{root}/deep") if not entry.name.startswith(".")]
    assert names == [Entry("er", names[0].size, True), Entry("one", 9, False)]
    disk.move(f"{root}/deep/one", f"{root}/deep/er/two")
    assert not disk.exists(f"{root}/deep/one")
    assert disk.read(f"{root}/deep/er/two") == "häßlich"
    disk.delete(f"{root}/deep")
    disk.delete(f"{root}/deep")
    assert not disk.exists(f"{root}/deep/er/two")


def test_nothing_is_ever_moved_over_what_is_there(files: tuple[Files, str]) -> None:
    disk, root = files
    disk.write(f"{root}/one", "1")
    disk.write(f"{root}/two", "2")
    with pytest.raises(FileExistsError):
        disk.move(f"{root}/one", f"{root}/two")
    assert (disk.read(f"{root}/one"), disk.read(f"{root}/two")) == ("1", "2")
    with pytest.raises(OSError, match="none"):
        disk.move(f"{root}/none", f"{root}/three")


def test_of_two_that_create_a_file_one_does(files: tuple[Files, str]) -> None:
    disk, root = files
    assert disk.create(f"{root}/note", "mine")
    assert not disk.create(f"{root}/note", "yours")
    assert disk.read(f"{root}/note") == "mine"
    assert [entry.name for entry in disk.entries(root) if not entry.name.startswith(".")] == ["note"]


def test_which_files_a_path_means(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(files_at("/data", spark), LocalFiles)
    assert isinstance(files_at("data", spark), LocalFiles)
    assert isinstance(files_at("file:///data", spark), LocalFiles)
    for path in ("/data", "data", "file:/data", "file:///data", "/data/a:b"):
        assert local_at(path) is not None
    for path in ("hdfs://name/data", "s3a://bucket", "viewfs:/data"):
        assert local_at(path) is None
    monkeypatch.setenv("HADOOP_CONF_DIR", "/etc/hadoop")  # it may say that paths are of another file system
    assert local_at("/data") is None
    assert local_at("file:///data") is not None


@pytest.mark.parametrize("path", ["/data/x", "file:/data/x", "file:///data/x"])
def test_a_local_path_is_that_of_the_system(path: str) -> None:
    assert LocalFiles().plain(path) == "/data/x"


def test_rows_that_executors_wrote_elsewhere_are_missed(tmp_path: Path) -> None:
    folder = tmp_path / "staging" / "topic=a"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"n": [1, 2, 3]}), folder / "part-0.parquet")
    pq.write_table(pa.table({"n": [1]}), folder / "_metadata.parquet")
    check_written(LocalFiles(), str(tmp_path / "staging"), 3)
    with pytest.raises(InvalidArgument, match=r"Spark wrote 5 rows to .*, but 3 are there"):
        check_written(LocalFiles(), str(tmp_path / "staging"), 5)


def test_where_the_system_has_no_such_step_nothing_is_moved_over_what_is_there_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    disk = LocalFiles()
    disk.write(f"{tmp_path}/one", "1")
    disk.write(f"{tmp_path}/two", "2")
    with pytest.raises(FileExistsError):
        disk.move(f"{tmp_path}/one", f"{tmp_path}/two")
    disk.move(f"{tmp_path}/one", f"{tmp_path}/three")
    assert [entry.name for entry in disk.entries(str(tmp_path))] == ["three", "two"]
