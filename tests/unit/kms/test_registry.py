import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from parquet_keytools.errors import ConfigurationError
from parquet_keytools.kms import registry
from parquet_keytools.kms.in_memory import InMemoryKms, InMemorySettings
from parquet_keytools.kms.keystore_file import KeystoreKms

PLUGIN = """
from parquet_keytools.kms.in_memory import InMemoryKms
class AcmeKms(InMemoryKms):
    backend = "acme"
class NoKms:
    pass
def factory():
    return AcmeKms({})
"""


def install(folder: Path, distribution: str, entry_points: dict[str, str], files: dict[str, str]) -> None:
    """Put an installed distribution into a folder of sys.path."""
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{registry.ENTRY_POINT_GROUP}]", *lines]) + "\n")
    for name, text in files.items():
        (folder / name).write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return tmp_path


def test_built_ins() -> None:
    assert registry.client_class("in_memory") is InMemoryKms
    assert registry.client_class("keystore") is KeystoreKms
    assert set(registry.known_names()) >= {"in_memory", "keystore"}


@pytest.mark.parametrize("name", ["in_memory", "keystore"])
def test_built_ins_call_themselves_what_they_are_called(name: str) -> None:
    cls = registry.client_class(name)
    assert cls.backend == name
    assert cls.Settings.model_json_schema()["properties"]["type"]["const"] == name


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    program = """
import sys
from parquet_keytools.kms import registry
def backends():
    return {name.rpartition(".")[2] for name in sys.modules if name.startswith("parquet_keytools.kms.")}
print(sorted(backends() & {"in_memory", "keystore"}), "cryptography" in sys.modules)
registry.known_names()
registry.client_class("in_memory")
print(sorted(backends() & {"in_memory", "keystore"}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[] False", "['in_memory']"]


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ConfigurationError) as caught:
        registry.client_class("inmemory")
    assert "'inmemory'" in str(caught.value) and "in_memory, keystore" in str(caught.value)
    assert "Did you mean 'in_memory'?" in caught.value.hint
    with pytest.raises(ConfigurationError) as caught:
        registry.client_class("zzz")
    assert "Did you mean" not in str(caught.value)


def test_a_plugin_is_found_and_loaded_on_use(site: Path) -> None:
    install(site, "acme-kms", {"acme": "acme_found:AcmeKms"}, {"acme_found.py": PLUGIN})
    assert "acme" in registry.known_names()
    assert "acme_found" not in sys.modules
    assert registry.client_class("acme").backend == "acme"


def test_a_plugin_cannot_replace_a_built_in(site: Path) -> None:
    install(site, "evil-kms", {"keystore": "evil_kms:AcmeKms"}, {"evil_kms.py": PLUGIN})
    assert registry.client_class("keystore") is KeystoreKms
    assert "evil_kms" not in sys.modules
    assert registry.known_names().count("keystore") == 1


def test_two_plugins_of_one_name(site: Path) -> None:
    install(site / "a", "first-kms", {"twin": "twin_a:AcmeKms"}, {"twin_a.py": PLUGIN})
    install(site / "b", "second-kms", {"twin": "twin_b:AcmeKms"}, {"twin_b.py": PLUGIN})
    sys.path[:0] = [str(site / "a"), str(site / "b")]
    try:
        with pytest.raises(ConfigurationError, match="first-kms, second-kms"):
            registry.client_class("twin")
    finally:
        del sys.path[:2]


@pytest.mark.parametrize("attribute", ["NoKms", "factory"])
def test_a_plugin_that_offers_no_kms_client(site: Path, attribute: str) -> None:
    install(site, "wrong-kms", {"wrong": f"wrong_kms:{attribute}"}, {"wrong_kms.py": PLUGIN})
    with pytest.raises(ConfigurationError, match="not a subclass of KmsClient"):
        registry.client_class("wrong")


def test_a_plugin_that_misses_an_extra(site: Path) -> None:
    files = {"poor_kms.py": "import a_library_that_is_missing\n"}
    install(site, "poor-kms", {"poor": "poor_kms:AcmeKms [cloud]"}, files)
    with pytest.raises(ConfigurationError, match="a_library_that_is_missing") as caught:
        registry.client_class("poor")
    assert "pip install 'poor-kms[cloud]'" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [("raise ValueError('at import')", "ValueError"), ("x = 1", "AttributeError"), ("(", "SyntaxError")],
)
def test_a_plugin_that_breaks(site: Path, text: str, said: str) -> None:
    name = f"broken_{said.lower()}"
    install(site, "broken-kms", {"broken": f"{name}:AcmeKms"}, {f"{name}.py": text})
    with pytest.raises(ConfigurationError, match=said) as caught:
        registry.client_class("broken")
    assert "broken-kms" in str(caught.value)


def test_a_built_in_that_misses_an_extra(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "needy_backend.py").write_text("import a_library_that_is_missing\n")
    needy = importlib.metadata.EntryPoint("needy", "needy_backend:NeedyKms [needy]", "parquet_keytools.kms")
    monkeypatch.setitem(registry.BUILT_INS, "needy", needy)
    with pytest.raises(ConfigurationError, match="a_library_that_is_missing") as caught:
        registry.client_class("needy")
    assert caught.value.hint == "Install the extra [needy]"


def test_entry_points_of_other_groups_and_names_are_no_backends(site: Path) -> None:
    """A plug-in of another program is not loaded, and no key is given to a backend of another name."""
    files = {"acme_grouped.py": PLUGIN, "other_program.py": "raise SystemExit('loaded')"}
    install(site, "acme-kms", {"acme": "acme_grouped:AcmeKms"}, files)
    entry_points = site / "acme_kms-1.0.dist-info" / "entry_points.txt"
    entry_points.write_text(f"{entry_points.read_text()}[console_scripts]\nother = other_program:main\n")
    assert registry.client_class("acme").__name__ == "AcmeKms"
    assert registry.is_known("acme") and not registry.is_known("other")
    for name in ("other", "acm", "acme2"):
        with pytest.raises(ConfigurationError, match=f"no KMS client is named {name!r}"):
            registry.client_class(name)


def test_every_client_gets_what_settings_say_of_all(tmp_path: Path) -> None:
    given = {"instance_id": "somewhere", "audit_log": True, "telemetry_key_ids": True}
    client = registry.make_client(InMemorySettings.model_validate({"keys": ["k"], **given}), tmp_path)
    assert isinstance(client, InMemoryKms)
    assert {name: getattr(client, name) for name in given} == given
    client = registry.make_client(InMemorySettings.model_validate({"keys": ["k"]}), tmp_path)
    assert not client.audit_log and not client.telemetry_key_ids and client.instance_id == "DEFAULT"
