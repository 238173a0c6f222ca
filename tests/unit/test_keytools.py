"""The facade in other processes and threads, and what it reveals."""

from __future__ import annotations

import base64
import errno
import multiprocessing
import os
import pickle
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from faults import FaultyKms, TurnedClock
from key_services import key_service
from pyarrow_versions import DECRYPTS_IN_THREADS

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import ConfigurationError, KeytoolsError, UnsupportedByArrowError
from parquet_keytools.storage.locations import FileLocation

KEYS = {"kf": b"canary-canary-kf", "kc": b"canary-canary-kc"}
TABLE = pa.table({"a": range(100), "b": [f"text {i}" for i in range(100)]})

YAML = """
version: 1
kms:
  type: in_memory
  keys:
    kf: {kf}
    kc: {kc}
tables:
  t:
    footer_key: kf
    column_keys: {{kc: [b]}}
    unlisted_columns: plaintext
    {settings}
"""


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    return write_configuration(tmp_path)


def write_configuration(folder: Path, settings: str = "") -> Path:
    keys = {name: base64.b64encode(key).decode() for name, key in KEYS.items()}
    path = folder / "configuration.yaml"
    path.write_text(YAML.format(settings=settings, **keys))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def use(tools: Keytools, folder: Path) -> int:
    """Write and read in every way; returns the number of rows."""
    path = folder / f"{os.getpid()}-{threading.get_ident()}.parquet"
    tools.write_table(TABLE, path)
    assert tools.read_table(path).equals(TABLE)
    assert tools.dataset(path).to_table().equals(TABLE)
    if DECRYPTS_IN_THREADS:
        assert pq.read_table(path, decryption_properties=tools.decryption_properties(path)).equals(TABLE)
    return TABLE.num_rows


def use_beside_another(tools: Keytools, folder: Path) -> int:
    """Use it, and wait until two processes and the parent have: otherwise a fast one may do everything."""
    rows, end = use(tools, folder), time.monotonic() + 60
    while len(list(folder.glob("*.parquet"))) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    return rows


# --- making one ---


def test_from_yaml(configuration: Path, data: Path) -> None:
    assert use(Keytools.from_yaml(configuration), data) == 100
    assert use(Keytools.from_yaml(str(configuration)), data) == 100


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("footer_key: kf", "footer_key: kff"), "there is no key 'kff'.*Did you mean 'kf'"),
        (("version: 1", "version: 2"), "version"),
        (("column_keys", "column_key"), "column_key"),
        (("in_memory", "in_memroy"), "Did you mean 'in_memory'"),
        (("kc: [b]", "kc: []"), "column_keys"),
    ],
)
def test_mistakes_name_file_and_line(configuration: Path, change: tuple[str, str], words: str) -> None:
    configuration.write_text(configuration.read_text().replace(*change))
    with pytest.raises(ConfigurationError, match=words) as caught:
        Keytools.from_yaml(configuration)
    assert f"{configuration}:" in str(caught.value)
    assert_nothing_shown(str(caught.value))


def test_the_path_of_a_file_is_no_configuration() -> None:
    with pytest.raises(TypeError, match=r"not str: use Keytools\.from_yaml"):
        Keytools("people.yaml")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"not dict: use Keytools\.from_mapping"):
        Keytools({"version": 1})  # type: ignore[arg-type]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such file"):
        Keytools.from_yaml(tmp_path / "no.yaml")


@pytest.mark.parametrize("name", ["events-10:30.parquet", "x" * 255])
@pytest.mark.parametrize("key_material", ["internal", "external"])
def test_any_name_that_the_file_system_takes(tmp_path: Path, data: Path, name: str, key_material: str) -> None:
    configuration = write_configuration(tmp_path, f"key_material: {key_material}")
    with Keytools.from_yaml(configuration) as keytools:
        pq.write_table(TABLE, tmp_path / "plain.parquet")
        if len(name) == 255 and key_material == "external":
            # The name of its key material would be too long.
            with pytest.raises(OSError) as caught:
                keytools.encrypt_file(tmp_path / "plain.parquet", data / name)
            assert caught.value.errno == errno.ENAMETOOLONG
            assert list(data.iterdir()) == []
            return
        keytools.encrypt_file(tmp_path / "plain.parquet", data / name)
        assert keytools.read_table(data / name).equals(TABLE)
        assert keytools.rotate(data, new_keks=True).succeeded and keytools.rekey_in_place(data).succeeded
        keytools.write_table(TABLE, data / name)
        assert keytools.read_table(data / name).equals(TABLE)


def test_unknown_column_and_table(configuration: Path, data: Path) -> None:
    tools = Keytools.from_yaml(configuration)
    with pytest.raises(ConfigurationError, match="'b' matches no column"):
        tools.write_table(TABLE.select(["a"]), data / "x.parquet")
    with pytest.raises(ConfigurationError, match="there is no table 'u'"):
        tools.write_table(TABLE, data / "x.parquet", table_name="u")
    assert list(data.iterdir()) == []


def test_what_arrow_cannot_do_is_said(tmp_path: Path, data: Path) -> None:
    tools = Keytools.from_yaml(write_configuration(tmp_path, "aad_prefix: x"))
    with pytest.raises(UnsupportedByArrowError, match="AAD prefix") as caught:
        tools.encryption_properties("t", TABLE.schema, data / "x.parquet")
    assert "Keytools.writer and Keytools.filesystem can" in caught.value.hint


def test_properties_for_two_files_share_no_dek(configuration: Path, data: Path) -> None:
    tools = Keytools.from_yaml(configuration)
    for name in ("x", "y"):
        path = data / f"{name}.parquet"
        pq.write_table(TABLE, path, encryption_properties=tools.encryption_properties("t", TABLE.schema, path))
    first, second = ((data / f"{name}.parquet").read_bytes() for name in ("x", "y"))
    wrapped = [content.split(b'"wrappedDEK":"')[1].split(b'"')[0] for content in (first, second)]
    assert wrapped[0] != wrapped[1]


# --- closing ---


class ClosingKms(FaultyKms):
    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_close(data: Path) -> None:
    kms = ClosingKms(KEYS)
    with with_kms(kms) as tools:
        tools.write_table(TABLE, data / "x.parquet")
        tools.read_table(data / "x.parquet")
    assert kms.closed == 1
    tools.close()
    kms.fail("refused")
    with pytest.raises(KeytoolsError):  # No cached key replaces the KMS.
        tools.read_table(data / "x.parquet")
    with pytest.raises(KeytoolsError):
        tools.write_table(TABLE, data / "x.parquet")


def test_close_without_a_kms() -> None:
    with Keytools.from_mapping({"version": 1}) as tools:
        assert tools.kms is None


# --- a client of the caller's own ---


def test_a_configuration_needs_no_kms_where_a_client_is_given(tmp_path: Path) -> None:
    kms = FaultyKms(KEYS)
    table = "{footer_key: kf, column_keys: {pii: [b]}, plaintext_columns: [a]}"
    text = f"version: 1\nmaster_keys: {{pii: kc}}\ntables: {{t: {table}}}\n"
    (tmp_path / "c.yaml").write_text(text)
    kms.instance_id = "theirs"
    for tools in (
        Keytools.from_yaml(tmp_path / "c.yaml", kms=kms),
        Keytools.from_mapping(yaml.safe_load(text), kms=kms),
        Keytools(parse_configuration(text, kms=kms), kms=kms),
    ):
        tools.write_table(TABLE, tmp_path / "x.parquet")
        assert tools.read_table(tmp_path / "x.parquet") == TABLE
        assert tools.configuration.kms is not None and tools.configuration.kms.instance_id == "theirs"
        for thing in (tools, tools.configuration):
            with pytest.raises(ConfigurationError, match="pickled"):
                pickle.loads(pickle.dumps(thing))
    with pytest.raises(ConfigurationError, match="no kms"):
        Keytools.from_mapping(yaml.safe_load(text))
    wrong = {"version": 1, "tables": {"t": {"footer_key": "kx", "unlisted_columns": "plaintext"}}}
    with pytest.raises(ConfigurationError, match="'kx'"):
        Keytools.from_mapping(wrong, kms=kms)


# --- what it reveals ---


def with_kms(kms: FaultyKms) -> Keytools:
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(KEYS)},
        "tables": {"t": {"footer_key": "kf", "column_keys": {"kc": ["b"]}, "unlisted_columns": "plaintext"}},
    }
    return Keytools(parse_configuration(document), kms=kms, clock=TurnedClock())


def assert_nothing_shown(text: str | bytes) -> None:
    content = text if isinstance(text, bytes) else text.encode()
    for key in KEYS.values():
        for spelling in (key, key.hex().encode(), base64.b64encode(key)[:20]):
            assert spelling not in content


def test_repr_shows_nothing(configuration: Path, data: Path) -> None:
    tools = Keytools.from_yaml(configuration)
    use(tools, data)
    assert_nothing_shown(repr(tools) + str(tools) + repr(tools.configuration) + repr(tools.kms))
    assert "in_memory" in repr(tools) and "'t'" in repr(tools)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_holds_no_key_and_works(configuration: Path, data: Path, protocol: int) -> None:
    tools = Keytools.from_yaml(configuration)
    use(tools, data)
    pickled = pickle.dumps(tools, protocol)
    assert_nothing_shown(pickled)
    again = pickle.loads(pickled)
    assert use(again, data) == 100
    assert again.kms is not tools.kms


def test_what_cannot_be_pickled_is_said(configuration: Path) -> None:
    with pytest.raises(ConfigurationError, match="passed in cannot be pickled"):
        pickle.dumps(with_kms(FaultyKms(KEYS)))
    with pytest.raises(ConfigurationError, match="random master keys"):
        pickle.dumps(Keytools.from_mapping({"version": 1, "kms": {"type": "in_memory", "keys": ["k"]}}))


# --- threads ---


def test_many_threads(configuration: Path, data: Path) -> None:
    tools = Keytools.from_yaml(configuration)
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda _: use(tools, data), range(48), timeout=120)) == [100] * 48
    assert tools.kms is not None
    assert tools.kms.call_counts == {"wrap": 2, "unwrap": 2}


# --- processes ---


def in_child(work: Callable[[], object], seconds: float = 60) -> None:
    """Run a function in a forked child, and fail if it fails or hangs."""
    process_id = os.fork()
    if process_id == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    descriptor = os.pidfd_open(process_id)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    ended = poll.poll(seconds * 1000)
    if not ended:
        os.kill(process_id, 9)
    _, status = os.waitpid(process_id, 0)
    os.close(descriptor)
    assert ended, "the child hangs"
    assert os.waitstatus_to_exitcode(status) == 0


def test_after_a_fork(configuration: Path, data: Path) -> None:
    """The child inherits full caches, a CryptoFactory, and Arrow's threads, which do not run there."""
    tools = Keytools.from_yaml(configuration)
    use(tools, data)
    in_child(lambda: use(tools, data))
    use(tools, data)


def test_a_child_uses_its_own_keks(data: Path) -> None:
    """Two processes with one KEK would count its invocations separately."""
    kms = FaultyKms(KEYS)
    tools = with_kms(kms)
    tools.write_table(TABLE, data / "x.parquet")
    assert kms.call_counts["wrap"] == 2

    def child() -> None:
        tools.write_table(TABLE, data / "y.parquet")
        assert kms.call_counts["wrap"] == 4

    in_child(child)


@pytest.mark.parametrize("aad_prefix", ["", "aad_prefix: x"])
def test_after_a_fork_while_threads_hold_locks(tmp_path: Path, data: Path, aad_prefix: str) -> None:
    """One thread of the parent is inside the KMS while it wraps, another while it unwraps."""
    tools = Keytools.from_yaml(write_configuration(tmp_path, aad_prefix))
    path = data / "x.parquet"
    tools.write_table(TABLE, path)
    tools.clear_caches()
    kms: Any = tools.kms
    inside, go_on = threading.Semaphore(0), threading.Event()
    wrap, unwrap, parent = kms._wrap, kms._unwrap, os.getpid()

    def wait() -> None:
        if os.getpid() == parent:
            inside.release()
            assert go_on.wait(60)

    def slow_wrap(*arguments: Any) -> Any:
        wait()
        return wrap(*arguments)

    def slow_unwrap(*arguments: Any) -> Any:
        wait()
        return unwrap(*arguments)

    kms._wrap, kms._unwrap = slow_wrap, slow_unwrap
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(tools.write_table, TABLE, data / "z.parquet"),
            pool.submit(tools.read_table, path),
        ]
        try:
            assert inside.acquire(timeout=30) and inside.acquire(timeout=30)

            def child() -> None:
                assert tools.read_table(path).equals(TABLE)
                tools.write_table(TABLE, data / "y.parquet")
                assert tools.read_table(data / "y.parquet").equals(TABLE)

            in_child(child)
        finally:
            go_on.set()
        for future in futures:
            future.result(60)
    assert tools.read_table(data / "y.parquet").equals(TABLE)


def refused(tools: Keytools, path: Path) -> int:
    assert tools.kms is not None
    tools.kms.deny("kc")  # type: ignore[attr-defined]
    return tools.read_table(path).num_rows


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1)])
def test_workers_of_a_pool(configuration: Path, data: Path, method: str, workers: int) -> None:
    """As Dask, Ray and Spark send it: by pickle, several times to the same worker."""
    tools = Keytools.from_yaml(configuration)
    use(tools, data)
    tools.write_table(TABLE, data / "x.parquet")
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context(method)) as pool:
        futures = [pool.submit(use_beside_another, tools, data) for _ in range(4)]
        assert [future.result(90) for future in futures] == [100] * 4
        # An exception that cannot be unpickled would break the whole pool.
        with pytest.raises(KeytoolsError, match="access denied") as caught:
            pool.submit(refused, tools, data / "x.parquet").result(90)
    assert caught.value.columns == ("b",)  # type: ignore[attr-defined]
    assert tools.read_table(data).num_rows >= 300


def test_a_data_key_for_footer_and_column_is_the_footers(tmp_path: Path) -> None:
    """Such a column has no key metadata of its own (spec 5.4); `verify` and other readers rely on that."""
    key = base64.b64encode(bytes(range(16))).decode()
    tools = Keytools.from_mapping(
        {
            "version": 1,
            "data_keys": {"k": key, "other": base64.b64encode(bytes(16)).decode()},
            "tables": {
                "t": {
                    "footer_key": "k",
                    "column_keys": {"k": ["a"], "other": ["b"]},
                    "unlisted_columns": "plaintext",
                }
            },
        }
    )
    path = tmp_path / "x.parquet"
    tools.write_table(pa.table({"a": [1], "b": [2]}), path)
    footer = key_service(tools).open_files([FileLocation.resolve(path)])[0].footer
    kinds = {column.path: column.encryption.name for column in footer.columns}
    assert kinds == {("a",): "FOOTER_KEY", ("b",): "COLUMN_KEY"}
    assert tools.read_table(path).to_pydict() == {"a": [1], "b": [2]}
    assert tools.verify_file(path).conforms
