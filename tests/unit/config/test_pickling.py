import base64
import os
import pickle
import subprocess
import sys
import warnings

import pytest
from pydantic import BaseModel, Field, SecretStr

from parquet_keytools.config import loader
from parquet_keytools.config.loader import load_configuration, parse_configuration
from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.kms.client import KmsSettings, SingleKeyKmsClient

PASSPHRASE = "cAnary-passphrase-0123456789"
KEY = b"cAnary-key-bytes"
KEY_TEXT = base64.b64encode(KEY).decode()
MASTER_KEY = b"cAnary-masterkey"
MASTER_KEY_TEXT = base64.b64encode(MASTER_KEY).decode()

FROM_ENVIRONMENT = """\
version: 1
kms: {type: keystore, path: keystore.json, passphrase: "${KEYTOOLS_TEST_PASSPHRASE}"}
data_keys: {kf: "${KEYTOOLS_TEST_KEY}"}
tables:
  flights: {footer_key: kf, unlisted_columns: footer_key, aad_prefix: "{file_name}"}
"""
LITERAL_PASSPHRASE = FROM_ENVIRONMENT.replace("${KEYTOOLS_TEST_PASSPHRASE}", PASSPHRASE)
LITERAL_KEY = FROM_ENVIRONMENT.replace("${KEYTOOLS_TEST_KEY}", KEY_TEXT)
# Literal text around a variable is part of the secret as well.
MIXED = FROM_ENVIRONMENT.replace("${KEYTOOLS_TEST_PASSPHRASE}", PASSPHRASE + "${EMPTY}")
IN_MEMORY = f"version: 1\nkms: {{type: in_memory, keys: {{footer: {MASTER_KEY_TEXT}}}}}\n"
IN_MEMORY_VERSIONS = f"version: 1\nkms: {{type: in_memory, keys: {{a: null, b: [{MASTER_KEY_TEXT}]}}}}\n"
LITERAL = [LITERAL_PASSPHRASE, LITERAL_KEY, MIXED, IN_MEMORY, IN_MEMORY_VERSIONS]


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("KEYTOOLS_TEST_PASSPHRASE", PASSPHRASE)
    monkeypatch.setenv("KEYTOOLS_TEST_KEY", KEY_TEXT)
    monkeypatch.setenv("EMPTY", "")


def spellings(secret):
    """Plain, hex, and base64 at any offset of the secret within a larger text."""
    yield secret
    yield secret.hex().encode()
    yield secret.hex().upper().encode()
    for offset in range(3):
        encoded = base64.b64encode(b"\0" * offset + secret)
        yield encoded[4 if offset else 0 : -4]


def assert_no_secret(content):
    for secret in (PASSPHRASE.encode(), KEY, MASTER_KEY):
        assert not any(spelling in content for spelling in spellings(secret))


def saved(tmp_path, text):
    file = tmp_path / "flights.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("text", [FROM_ENVIRONMENT, *LITERAL])
def test_a_pickle_holds_no_secret_and_comes_back_equal(tmp_path, text, protocol):
    made = load_configuration(saved(tmp_path, text))
    content = pickle.dumps(made, protocol)
    assert_no_secret(content)
    restored = pickle.loads(content)
    assert restored == made
    assert restored.folder == made.folder
    assert pickle.dumps(restored, protocol) == content


def test_the_canary_test_can_fail():
    for secret in (KEY, MASTER_KEY, PASSPHRASE.encode()):
        for content in (
            secret,
            secret.hex().encode(),
            base64.b64encode(secret),
            base64.b64encode(b"ab" + secret),
        ):
            with pytest.raises(AssertionError):
                assert_no_secret(pickle.dumps({"x": content}))


class Account(BaseModel):
    password: SecretStr


class PluginSettings(KmsSettings):
    token: SecretStr = Field(alias="api-token")
    accounts: tuple[Account, ...] = ()
    region: str = ""


class PluginKms(SingleKeyKmsClient):
    Settings = PluginSettings


@pytest.mark.parametrize(
    "field", [f"api-token: {PASSPHRASE}", f"api-token: '${{EMPTY}}', accounts: [{{password: {PASSPHRASE}}}]"]
)
def test_secrets_of_a_plugin_are_found_by_their_type(tmp_path, monkeypatch, field):
    monkeypatch.setattr(loader, "is_known", lambda name: name == "plugin")
    monkeypatch.setattr(loader, "client_class", lambda name: PluginKms)
    made = load_configuration(saved(tmp_path, f"version: 1\nkms: {{type: plugin, region: the-region, {field}}}\n"))
    content = pickle.dumps(made)
    assert_no_secret(content)
    assert b"the-region" in content
    assert pickle.loads(content) == made


def test_a_pickle_within_something_else_holds_no_secret_either(tmp_path):
    made = load_configuration(saved(tmp_path, LITERAL_KEY))
    assert_no_secret(pickle.dumps({"configuration": [made]}))


def test_the_worker_expands_its_own_environment(monkeypatch):
    content = pickle.dumps(parse_configuration(FROM_ENVIRONMENT))
    monkeypatch.setenv("KEYTOOLS_TEST_PASSPHRASE", "of the worker")
    assert pickle.loads(content).kms.passphrase.get_secret_value() == "of the worker"


def test_a_variable_that_the_worker_does_not_have_is_named(tmp_path, monkeypatch):
    file = saved(tmp_path, FROM_ENVIRONMENT)
    content = pickle.dumps(load_configuration(file))
    monkeypatch.delenv("KEYTOOLS_TEST_PASSPHRASE")
    file.unlink()
    with pytest.raises(ConfigurationError, match="KEYTOOLS_TEST_PASSPHRASE is not set") as caught:
        pickle.loads(content)
    assert (caught.value.file, caught.value.line) == (str(file), 2)
    assert caught.value.yaml_path == "kms.passphrase"


def test_without_literal_secrets_the_file_is_not_needed(tmp_path):
    file = saved(tmp_path, FROM_ENVIRONMENT)
    made = load_configuration(file)
    content = pickle.dumps(made)
    file.unlink()
    assert pickle.loads(content) == made


@pytest.mark.parametrize("text", LITERAL)
def test_with_literal_secrets_the_file_must_be_there(tmp_path, text):
    file = saved(tmp_path, text)
    content = pickle.dumps(load_configuration(file))
    file.unlink()
    with pytest.raises(ConfigurationError, match=r"no such file.*environment variable") as caught:
        pickle.loads(content)
    assert caught.value.file == str(file)


@pytest.mark.parametrize(
    "change",
    [
        ("{file_name}", "{table_name}"),
        ("keystore.json", "other.json"),
        ("footer_key", "'footer_key'  ", "\n"),
    ],
)
def test_with_literal_secrets_the_file_must_say_the_same(tmp_path, change):
    file = saved(tmp_path, LITERAL_KEY)
    made = load_configuration(file)
    content = pickle.dumps(made)
    file.write_text(LITERAL_KEY.replace(*change[:2]))
    if len(change) == 3:  # another spelling of the same document
        assert pickle.loads(content) == made
        return
    with pytest.raises(
        ConfigurationError, match=r"changed after it was sent to this process.*environment variable"
    ):
        pickle.loads(content)


def test_a_relative_path_works_from_another_folder(tmp_path, monkeypatch):
    saved(tmp_path, LITERAL_KEY)
    monkeypatch.chdir(tmp_path)
    made = load_configuration("flights.yaml")
    content = pickle.dumps(made)
    monkeypatch.chdir("/")
    assert pickle.loads(content) == made
    assert pickle.loads(content).folder == tmp_path


def test_a_mapping_without_literal_secrets_pickles():
    made = parse_configuration({"version": 1, "data_keys": {"kf": "${KEYTOOLS_TEST_KEY}"}})
    content = pickle.dumps(made)
    assert_no_secret(content)
    assert pickle.loads(content) == made


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"version": 1, "data_keys": {"kf": KEY_TEXT}}, "data_keys.kf"),
        ({"version": 1, "kms": {"type": "in_memory", "keys": {"a": [MASTER_KEY_TEXT]}}}, r"kms.keys.a\[0\]"),
        (
            {"version": 1, "kms": {"type": "keystore", "path": "a", "passphrase": SecretStr(PASSPHRASE)}},
            "kms.passphrase",
        ),
    ],
)
def test_a_mapping_with_literal_secrets_says_why_it_does_not_pickle(document, place):
    made = parse_configuration(document)
    with pytest.raises(
        ConfigurationError, match=f"{place}.*Put each secret into an environment variable"
    ) as caught:
        pickle.dumps(made)
    assert_no_secret(str(caught.value).encode())


def test_a_configuration_of_models_says_why_it_does_not_pickle():
    with pytest.raises(ConfigurationError, match="parse_configuration"):
        pickle.dumps(Configuration(version=1))


def test_a_changed_copy_does_not_come_back_as_the_original():
    made = parse_configuration({"version": 1})
    assert pickle.loads(pickle.dumps(made.model_copy())) == made
    with pytest.raises(ConfigurationError, match="cannot be pickled"):
        pickle.dumps(made.model_copy(update={"tables": {}}))


def test_warnings_are_not_repeated_in_workers():
    with pytest.warns(UserWarning):
        made = parse_configuration(
            {"version": 1, "kms": {"type": "in_memory", "keys": ["a"]}, "tables": {"t": {"footer_key": "a"}}}
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pickle.loads(pickle.dumps(made)).warnings == made.warnings


def test_another_process_can_load_it(tmp_path):
    made = load_configuration(saved(tmp_path, LITERAL_KEY))
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer).data_keys['kf'].length_bits)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(made),
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.strip() == b"128"
