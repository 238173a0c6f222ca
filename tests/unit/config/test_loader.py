import base64
import os
import textwrap
import traceback
import warnings
from pathlib import Path

import pytest
from pydantic import SecretStr, field_validator

from parquet_keytools.config import loader
from parquet_keytools.config.loader import load_configuration, parse_configuration
from parquet_keytools.config.settings import ConfigurationWarning
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.kms.client import KmsSettings, SingleKeyKmsClient
from parquet_keytools.kms.in_memory import InMemorySettings

SECRET = "tHe-pAssphrase-nobody-may-see"
SECRET_KEY = base64.b64encode(b"key bytes too long to be a key").decode()
HEAD = "version: 1\nkms: {type: in_memory, keys: [footer, pii, times]}\n"
TABLE = HEAD + "tables:\n  flights:\n    footer_key: footer\n    unlisted_columns: footer_key\n"


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def parse(text, **environment):
    return parse_configuration(text, file="flights.yaml", environment=environment)


# YAML text, YAML path, line, words in the error.
MISTAKES = {
    # --- not one YAML document
    "empty": ("", "", 1, ["is empty", "version: 1"]),
    "comments only": ("# nothing\n", "", 1, ["is empty"]),
    "a text": ("hello", "", 1, ["a configuration is a mapping"]),
    "a list": ("- version: 1", "", 1, ["a configuration is a mapping"]),
    "tab": ("version: 1\nkms:\n\ttype: in_memory\n", "", 3, ["tab", "Indent with spaces"]),
    "not UTF-8": (b"version: 1\n# \xff\n", "", 2, ["not UTF-8"]),
    "UTF-16": ("version: 1".encode("utf-16"), "", 1, ["not UTF-8"]),
    "control character": ("version: 1\na: \x00\n", "", 2, ["control character"]),
    "two documents": ("version: 1\n---\nversion: 1\n", "", 2, ["another document"]),
    "open quote": (f"version: 1\nkms: {{passphrase: '{SECRET}}}\n", "", 3, ["not valid YAML", "line 2"]),
    "open bracket": ("version: 1\na: [b", "", 2, ["expected ',' or ']'"]),
    "variable within braces": (
        "version: 1\nkms: {type: keystore, path: a, passphrase: ${P}}\n",
        "",
        2,
        ["put ${NAME} in quotes"],
    ),
    "two colons": ("version: 1\na: b: c\n", "", 2, ["mapping values are not allowed here"]),
    "percent": ("version: 1\na: %b\n", "", 2, ["cannot start any token"]),
    "unknown alias": (f"version: 1\npassphrase: *{SECRET}\n", "", 2, ["undefined alias"]),
    "tag": (f"version: 1\nkms: !{SECRET} x\n", "kms", 2, ["tags"]),
    "tag on a mapping": ("version: 1\nkms: !!set {a}\n", "kms", 2, ["tags"]),
    "binary tag": (
        "version: 1\ntables: {t: {footer_key: !!binary YQ==}}\n",
        "tables.t.footer_key",
        2,
        ["tags"],
    ),
    "wrong number": ("version: !!int one\n", "version", 1, ["not a number"]),
    "too deep": ("version: 1\na: " + "[" * 60, "", 2, ["50 levels deep"]),
    "alias of itself": ("version: 1\nkms: &a [*a]\n", "", 2, ["levels deep", "alias"]),
    "too many values": ("version: 1\na: [" + "1," * 100_001 + "]", "", 2, ["more than 100000 values"]),
    "too large": ("version: 1\n#" + "x" * (1 << 20), "", 1, ["larger than 1048576 bytes"]),
    "name twice": (TABLE + "    footer_key: pii\n", "tables.flights.footer_key", 7, ["line 5 already"]),
    "list as name": ("version: 1\n? [a]\n: b\n", "", 2, ["a name is a text"]),
    "merge of a text": (
        "version: 1\nkms: {type: in_memory, <<: a, keys: [a]}\n",
        "kms",
        2,
        ["`<<`", "mapping"],
    ),
    # --- YAML 1.1's readings
    "number as a key's name": (
        TABLE + "    column_keys:\n      1234: [a]\n",
        "tables.flights.column_keys.1234".replace(".1234", '["1234"]'),
        8,
        ["a name is a text", "a number", "Put it in quotes"],
    ),
    "no as a name": (
        TABLE + "    column_keys:\n      no: [a]\n",
        "tables.flights.column_keys.no",
        8,
        ["true or false", "Put it in quotes"],
    ),
    "null as a name": (HEAD + "master_keys:\n  ~: a\n", 'master_keys["~"]', 4, ["nothing", "in quotes"]),
    "no as a column": (
        TABLE + "    column_keys:\n      pii: [yes, a]\n",
        "tables.flights.column_keys.pii[0]",
        8,
        ["has to be a text", "yes, no, on and off", "in quotes"],
    ),
    "number as a key": (
        HEAD + "tables: {t: {footer_key: 12}}\n",
        "tables.t.footer_key",
        3,
        ["has to be a text, but it is a number", "in quotes"],
    ),
    "date as a column": (
        TABLE + "    column_keys:\n      pii:\n        - a\n        - 2024-01-01\n",
        "tables.flights.column_keys.pii[1]",
        10,
        ["a date", "in quotes"],
    ),
    "time as a column": (
        TABLE + "    column_keys: {pii: [12:30]}\n",
        "tables.flights.column_keys.pii[0]",
        7,
        ["has to be a text, but it is a number", "in quotes"],
    ),
    "quoted boolean": (
        TABLE + '    plaintext_footer: "yes"\n',
        "tables.flights.plaintext_footer",
        7,
        ["true or false", "without quotes"],
    ),
    "number as a boolean": (
        TABLE + "    double_wrapping: 1\n",
        "tables.flights.double_wrapping",
        7,
        ["true or"],
    ),
    "boolean as a number": (
        TABLE + "    cache_lifetime_seconds: yes\n",
        "tables.flights.cache_lifetime_seconds",
        7,
        ["has to be a number, but YAML reads it as true or false"],
    ),
    "quoted number": (
        TABLE + '    cache_lifetime_seconds: "600"\n',
        "tables.flights.cache_lifetime_seconds",
        7,
        ["has to be a number, but it is a text", "without quotes"],
    ),
    # --- single values
    "no version": ("kms: {type: in_memory, keys: [a]}\n", "version", 1, ["required"]),
    "wrong version": ("version: 2\n", "version", 1, ["has to be 1."]),
    "version yes": ("version: yes\n", "version", 1, ["whole number", "true or false"]),
    "version 1.0": ("version: 1.0\n", "version", 1, ["whole number"]),
    "unknown section": ("version: 1\nmaster_key: {}\n", "master_key", 2, ["not known", "'master_keys'?"]),
    "nothing like it": (
        "version: 1\nqqq: {}\n",
        "qqq",
        2,
        ["not known", "Known: 'classes', 'data_keys', 'hash_keys', 'kms'"],
    ),
    "unknown field": (
        TABLE + "    unlisted_colums: footer_key\n",
        "tables.flights.unlisted_colums",
        7,
        ["not known", "Did you mean 'unlisted_columns'?"],
    ),
    "unknown reading field": (
        "version: 1\nreading:\n  keys_without_metadata:\n    colums: {}\n",
        "reading.keys_without_metadata.colums",
        4,
        ["Did you mean 'columns'?"],
    ),
    "empty section": ("version: 1\ntables:\n", "tables", 2, ["has to be a mapping", "empty", "leave it out"]),
    "table is a text": (HEAD + "tables: {t: a}\n", "tables.t", 3, ["has to be a mapping", "a text"]),
    "no footer key": (
        HEAD + "tables:\n  t:\n    algorithm: AES_GCM_V1\n",
        "tables.t.footer_key",
        4,
        ["required"],
    ),
    "unknown algorithm": (
        TABLE + "    algorithm: aes_gcm_ctr\n",
        "tables.flights.algorithm",
        7,
        ["'AES_GCM_V1' or 'AES_GCM_CTR_V1'.", "Did you mean 'AES_GCM_CTR_V1'?"],
    ),
    "unknown choice": (
        "version: 1\nreading: {denied_columns: hidden}\n",
        "reading.denied_columns",
        2,
        ["'error', 'hide', 'null' or 'hash'", "Did you mean 'hide'?"],
    ),
    "boolean as a choice": (
        "version: 1\nreading:\n  plaintext_files: no\n",
        "reading.plaintext_files",
        3,
        ["'reject' or 'allow'", "true or false"],
    ),
    "key length": (
        TABLE + "    data_key_length_bits: 512\n",
        "tables.flights.data_key_length_bits",
        7,
        ["128, 192"],
    ),
    "negative lifetime": (
        TABLE + "    cache_lifetime_seconds: -1\n",
        "tables.flights.cache_lifetime_seconds",
        7,
        ["at least 0"],
    ),
    "endless lifetime": (
        TABLE + "    cache_lifetime_seconds: .inf\n",
        "tables.flights.cache_lifetime_seconds",
        7,
        ["finite number"],
    ),
    "no list": (
        TABLE + "    column_keys:\n      pii: tailnum\n",
        "tables.flights.column_keys.pii",
        8,
        ["has to be a list, such as [a, b], but it is a text"],
    ),
    "empty list": (
        TABLE + "    column_keys: {pii: []}\n",
        "tables.flights.column_keys.pii",
        7,
        ["must not be empty"],
    ),
    "empty column": (
        TABLE + "    column_keys: {pii: [a, '']}\n",
        "tables.flights.column_keys.pii[1]",
        7,
        ["must not be empty"],
    ),
    "empty footer key": (
        HEAD + "tables: {t: {footer_key: ''}}\n",
        "tables.t.footer_key",
        3,
        ["must not be empty"],
    ),
    "percent in an identifier": (
        HEAD + "master_keys: {a: b%c}\n",
        "master_keys.a",
        3,
        ["must not contain `%`"],
    ),
    "percent in a key's name": (HEAD + "tables: {t: {footer_key: b%c}}\n", "tables.t.footer_key", 3, ["`%`"]),
    "line end in an identifier": (
        HEAD + 'master_keys:\n  a: "b\\n"\n',
        "master_keys.a",
        4,
        ["must not contain line ends or control characters"],
    ),
    "half a character": (HEAD + 'master_keys: {a: "\\ud800"}\n', "master_keys.a", 3, ["not valid Unicode"]),
    "template": (
        TABLE + "    aad_prefix: '{path}'\n",
        "tables.flights.aad_prefix",
        7,
        ["{file_name}", "{table_name}"],
    ),
    "not base64": (
        f"version: 1\ndata_keys:\n  kf: {SECRET}\n",
        "data_keys.kf",
        3,
        ["base64 of 16, 24 or 32 bytes"],
    ),
    "key too long": (f"version: 1\ndata_keys: {{kf: {SECRET_KEY}}}\n", "data_keys.kf", 2, ["base64 of 16"]),
    "base64 with a line end": (
        'version: 1\ndata_keys: {kf: "MDEyMzQ1Njc4OTAxMjM0NQ==\\n"}\n',
        "data_keys.kf",
        2,
        ["base64 of 16"],
    ),
    "base64 with bits to spare": (
        "version: 1\ndata_keys: {kf: MDEyMzQ1Njc4OTAxMjM0NR==}\n",
        "data_keys.kf",
        2,
        ["base64 of 16"],
    ),
    # --- the KMS
    "no type": ("version: 1\nkms:\n  path: a\n", "kms.type", 2, ["name of a KMS client", "'keystore'"]),
    "unknown type": ("version: 1\nkms:\n  type: key_store\n", "kms.type", 3, ["Did you mean 'keystore'?"]),
    "kms is a text": ("version: 1\nkms: vault\n", "kms", 2, ["mapping with a `type`"]),
    "unknown kms field": (
        f"version: 1\nkms:\n  type: keystore\n  path: a\n  passphrase: {SECRET}\n  instance: a\n",
        "kms.instance",
        6,
        ["not known", "Did you mean 'instance_id'?"],
    ),
    "rule of the kms": (
        f"version: 1\nkms:\n  type: keystore\n  path: a\n  passphrase: {SECRET}\n  passphrase_file: b\n",
        "kms",
        2,
        ["either passphrase or passphrase_file."],
    ),
    "wrong master key": (
        f"version: 1\nkms:\n  type: in_memory\n  keys:\n    a: {SECRET_KEY}\n",
        "kms.keys.a",
        5,
        ["base64 of 16, 24 or 32 bytes"],
    ),
    "passphrase is a number": (
        "version: 1\nkms: {type: keystore, path: a, passphrase: 98765432123}\n",
        "kms.passphrase",
        2,
        ["has to be a text", "in quotes"],
    ),
    # --- rules over several fields
    "prefix not stored": (
        TABLE + "    store_aad_prefix: false\n",
        "tables.flights.store_aad_prefix",
        7,
        ["no aad_prefix"],
    ),
    "KEK length without KEKs": (
        TABLE + "    double_wrapping: false\n    kek_length_bits: 256\n",
        "tables.flights.kek_length_bits",
        8,
        ["no KEKs"],
    ),
    "column twice": (
        TABLE + "    column_keys:\n      pii:\n      - a\n      - b\n      - a\n",
        "tables.flights.column_keys.pii[2]",
        11,
        ["'a' is listed twice"],
    ),
    "column under two keys": (
        TABLE + "    column_keys:\n      pii: [a]\n      times: [b, a]\n",
        "tables.flights.column_keys.times[1]",
        9,
        ["'a' is listed under the key 'pii' already"],
    ),
    "master and data key": (
        HEAD + "master_keys: {k: a}\ndata_keys:\n  k: MDEyMzQ1Njc4OTAxMjM0NQ==\n",
        "data_keys.k",
        5,
        ["master key", "has this name too"],
    ),
    "master keys without a kms": ("version: 1\nmaster_keys: {a: b}\n", "master_keys", 2, ["no kms"]),
    "footer without metadata": (
        "version: 1\ndata_keys: {kf: MDEyMzQ1Njc4OTAxMjM0NQ==}\nreading:\n"
        "  keys_without_metadata:\n    footer: kff\n",
        "reading.keys_without_metadata.footer",
        5,
        ["no key under data_keys is named 'kff'", "Did you mean 'kf'?"],
    ),
    "column without metadata": (
        "version: 1\nreading:\n  keys_without_metadata:\n    columns:\n      a.b: kc\n",
        'reading.keys_without_metadata.columns["a.b"]',
        5,
        ["no key under data_keys is named 'kc'"],
    ),
    "undeclared key": (
        "version: 1\ndata_keys: {kf1: MDEyMzQ1Njc4OTAxMjM0NQ==}\ntables:\n  t:\n    footer_key: kf1\n"
        "    column_keys:\n      kf2: [a]\n",
        "tables.t.column_keys.kf2",
        7,
        ["there is no key 'kf2'", "no kms", "Did you mean 'kf1'?"],
    ),
    # --- environment variables
    "variable not set": (
        "version: 1\nkms:\n  type: keystore\n  path: a\n  passphrase: a${NOT_SET}b\n",
        "kms.passphrase",
        5,
        ["environment variable NOT_SET is not set", "$${"],
    ),
    "broken reference": (
        f"version: 1\nkms: {{type: keystore, path: a, passphrase: '{SECRET}${{NAME:-x}}'}}\n",
        "kms.passphrase",
        2,
        ["`${`", "`$${`"],
    ),
    "variable in a name": (
        HEAD + "master_keys: {'${SET}': a}\n",
        'master_keys["${SET}"]',
        3,
        ["not in names"],
    ),
    "value with a line end": (HEAD + "master_keys:\n  a: ${LINE}\n", "master_keys.a", 4, ["line ends"]),
}


@pytest.mark.parametrize(("text", "yaml_path", "line", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_clear_error(text, yaml_path, line, words):
    with pytest.raises(ConfigurationError) as caught:
        parse(text, SET="set", LINE=f"{SECRET}\n")
    error = caught.value
    assert error.yaml_path == yaml_path
    assert error.line == line
    assert error.file == "flights.yaml"
    assert str(error).startswith(f"flights.yaml:{line}: " + (f"{yaml_path}: " if yaml_path else ""))
    assert all(word in str(error) for word in words), str(error)
    assert "\n" not in str(error), "one mistake, one line"


# None of these documents takes longer to read.
WITHOUT_SECRETS = {"too many values"}


@pytest.mark.parametrize("name", [name for name in MISTAKES if name not in WITHOUT_SECRETS])
def test_no_error_shows_a_secret(name):
    text = MISTAKES[name][0]
    with pytest.raises(ConfigurationError) as caught:
        parse(text, SET=SECRET, LINE=f"{SECRET}\n")
    shown = "".join(traceback.format_exception(caught.value)) + repr(vars(caught.value))
    assert not any(secret in shown for secret in (SECRET, SECRET_KEY, "98765432123"))
    # Nor in its chained exceptions, which debuggers and error trackers show.
    assert caught.value.__context__ is None


def test_all_mistakes_are_reported_in_one_error():
    text = textwrap.dedent("""\
        version: 1
        kms:
          type: keystore
          pth: keystore.json
          passphrase: ${NOT_SET}
        tables:
          flights:
            footer_kye: footer
            algorithm: AES_CBC
            column_keys:
              no: [a]
        reading: {denied_columns: hid}
        """)
    with pytest.raises(ConfigurationError) as caught:
        parse(text)
    error = caught.value
    assert (error.line, error.yaml_path) == (2, "kms.path")
    lines = str(error).splitlines()
    assert lines[1] == "There are 7 more mistakes:"
    assert [line.split(": ")[0] + " " + line.split(": ")[1] for line in lines[:1] + lines[2:]] == [
        "flights.yaml:2 kms.path",
        "  flights.yaml:4 kms.pth",
        "  flights.yaml:5 kms.passphrase",
        "  flights.yaml:7 tables.flights.footer_key",
        "  flights.yaml:8 tables.flights.footer_kye",
        "  flights.yaml:9 tables.flights.algorithm",
        "  flights.yaml:11 tables.flights.column_keys.no",
        "  flights.yaml:12 reading.denied_columns",
    ]


def test_a_flood_of_mistakes_is_cut():
    with pytest.raises(ConfigurationError) as caught:
        parse("version: 1\n" + "".join(f"unknown_{number}: 1\n" for number in range(1000)))
    assert len(str(caught.value).splitlines()) == 22
    assert str(caught.value).endswith("  and 980 more.")


def test_what_a_plugin_says_of_a_secret_is_not_repeated(monkeypatch):
    def tell(value):
        raise ValueError(f"bad passphrase {SECRET}")

    class Telling(KmsSettings):
        password: str

        check = field_validator("password")(tell)

    class TellingKms(SingleKeyKmsClient):
        Settings = Telling

    monkeypatch.setattr(loader, "is_known", lambda name: name == "telling")
    monkeypatch.setattr(loader, "client_class", lambda name: TellingKms)
    with pytest.raises(ConfigurationError, match=r"kms\.password: this value is not valid\.") as caught:
        parse(f"version: 1\nkms: {{type: telling, password: {SECRET}}}")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_kms_client_that_cannot_be_loaded_is_a_mistake(monkeypatch):
    def fails(name):
        raise ConfigurationError("needs a package that is not installed.", hint="Install it.")

    monkeypatch.setattr(loader, "client_class", fails)
    with pytest.raises(ConfigurationError) as caught:
        parse("version: 1\nkms:\n  type: in_memory\n")
    assert str(caught.value) == "flights.yaml:3: kms.type: needs a package that is not installed. Install it."


# --- files


def test_a_file_is_loaded(tmp_path):
    file = tmp_path / "flights.yaml"
    file.write_text(TABLE)
    made = load_configuration(file)
    assert made.tables["flights"].footer_key == "footer"
    assert made.folder == tmp_path
    assert load_configuration(str(file)) == made


def test_a_byte_order_mark_is_skipped(tmp_path):
    file = tmp_path / "flights.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + TABLE.encode())
    assert load_configuration(file).kms == InMemorySettings(keys=["footer", "pii", "times"])


def test_a_missing_file_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigurationError, match=r"missing.yaml: there is no such file\.") as caught:
        load_configuration(tmp_path / "missing.yaml")
    assert caught.value.file == str(tmp_path / "missing.yaml")


def test_a_folder_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigurationError, match=r"this is a folder\."):
        load_configuration(tmp_path)


def test_a_file_that_cannot_be_read_is_one_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"the file cannot be read: Not a directory\."):
        load_configuration(tmp_path / "file" / "flights.yaml")


def test_only_as_much_as_the_limit_is_read():
    with pytest.raises(ConfigurationError, match="larger than"):
        load_configuration(Path("/dev/zero"))


# --- environment variables


@pytest.mark.parametrize(
    ("written", "expanded"),
    [
        ("${A}", "1"),
        ("x${A}y${LONG_NAME_2}z", "x1y2z"),
        ("$${A}", "${A}"),
        ("$$${A}", "$${A}"),
        ("$A ${A}$", "$A 1$"),
        ("${EMPTY}", ""),
        ("${BRACES}", "${A}"),
    ],
)
def test_environment_variables(written, expanded):
    environment = {"A": "1", "LONG_NAME_2": "2", "EMPTY": "", "BRACES": "${A}"}
    document = {"version": 1, "kms": {"type": "keystore", "path": "a", "passphrase": written}}
    made = parse_configuration(document, environment=environment)
    assert made.kms.passphrase.get_secret_value() == expanded


def test_environment_variables_are_texts_always():
    assert parse(HEAD + "master_keys: {a: '${ID}'}", ID="1234").master_keys == {"a": "1234"}


def test_the_environment_is_that_of_the_process_unless_given(monkeypatch):
    monkeypatch.setenv("KEYTOOLS_TEST_ID", "from the process")
    text = HEAD + "master_keys: {a: '${KEYTOOLS_TEST_ID}'}"
    assert parse_configuration(text).master_keys == {"a": "from the process"}
    assert parse_configuration(text, environment={"KEYTOOLS_TEST_ID": "b"}).master_keys == {"a": "b"}


def test_a_variable_that_is_not_utf8_is_a_mistake(monkeypatch):
    monkeypatch.setitem(os.environ, "KEYTOOLS_TEST_ID", os.fsdecode(b"\xff"))
    with pytest.raises(ConfigurationError, match="not valid Unicode"):
        parse_configuration(HEAD + "master_keys: {a: '${KEYTOOLS_TEST_ID}'}")


def test_every_variable_that_is_missing_is_named():
    with pytest.raises(ConfigurationError) as caught:
        parse(HEAD + "master_keys:\n  a: ${ONE}\n  b: ${TWO}${THREE}\n")
    assert all(name in str(caught.value) for name in ("ONE", "TWO", "THREE"))


# --- anchors, merges, quotes


def test_aliases_and_merges():
    text = HEAD + textwrap.dedent("""\
        tables:
          flights: &flights
            footer_key: footer
            column_keys: &columns {pii: [tailnum]}
          weather:
            <<: *flights
            footer_key: times
          planes:
            footer_key: pii
            column_keys: *columns
        """)
    tables = parse(text).tables
    assert tables["weather"].footer_key == "times"
    assert tables["planes"].footer_key == "pii"
    assert all(table.column_keys == {"pii": ("tailnum",)} for table in tables.values())


def test_the_first_of_several_merges_wins():
    text = HEAD + textwrap.dedent("""\
        tables:
          a: &a {footer_key: footer, key_material: external}
          b: &b {footer_key: pii, plaintext_footer: true}
          c: {<<: [*a, *b]}
        """)
    table = parse(text).tables["c"]
    assert (table.footer_key, table.key_material, table.plaintext_footer) == ("footer", "external", True)


def test_a_mistake_in_an_alias_has_the_line_where_it_is_written():
    text = HEAD + "tables:\n  a:\n    footer_key: footer\n    column_keys: &c\n      pii:\n      - 1\n"
    text += "  b: {footer_key: pii, column_keys: *c}\n"
    with pytest.raises(ConfigurationError) as caught:
        parse(text)
    assert "flights.yaml:8: tables.b.column_keys.pii[0]" in str(caught.value)


@pytest.mark.parametrize("item", ["*a{0}", "{{<<: [*a{0}, *a{0}]}}"])
def test_aliases_cannot_blow_up(item):
    lines = ["version: 1", "a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    if "<<" in item:
        lines[1] = "a0: &a0 {}"
        lines += [f"a{n + 1}: &a{n + 1} {item.format(n)}" for n in range(30)]
    else:
        lines += [f"a{n + 1}: &a{n + 1} [{', '.join([item.format(n)] * 9)}]" for n in range(12)]
    with pytest.raises(ConfigurationError, match="more than 100000 values"):
        parse("\n".join(lines))


def test_quotes_make_texts():
    text = HEAD + 'tables: {t: {footer_key: "1234", column_keys: {"no": ["2024-01-01", "=", =]}}}\n'
    made = parse(text.replace(", =]", "]"))
    assert made.tables["t"].footer_key == "1234"
    assert made.tables["t"].column_keys == {"no": ("2024-01-01", "=")}
    assert parse(HEAD + "master_keys: {a: !!str 12, b: =}").master_keys == {"a": "12", "b": "="}


def test_names_that_look_like_references_can_be_written():
    made = parse(TABLE + "    column_keys: {pii: ['$${a}', 'b$']}")
    assert made.tables["flights"].column_keys == {"pii": ("${a}", "b$")}
    text = "version: 1\ndata_keys: {'$${k}': MDEyMzQ1Njc4OTAxMjM0NQ==}"
    assert list(parse(text).data_keys) == ["${k}"]


# --- mappings from Python


def test_a_mapping_says_the_same_as_yaml():
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": ("footer", "pii", "times")},
        "tables": {"flights": {"footer_key": "footer", "unlisted_columns": "footer_key"}},
    }
    made = parse_configuration(document)
    assert made.model_dump() == parse(TABLE).model_dump()


def test_a_mapping_has_yaml_paths_but_no_lines():
    with pytest.raises(ConfigurationError) as caught:
        parse_configuration({"version": 1, "tables": {"a.b": {"footer_key": 1}}})
    assert (caught.value.file, caught.value.line) == (None, None)
    assert str(caught.value).startswith('tables["a.b"].footer_key: this has to be a text')


def test_a_mapping_may_hold_secret_objects_and_ready_settings():
    made = parse_configuration(
        {"version": 1, "kms": {"type": "keystore", "path": "a", "passphrase": SecretStr(SECRET)}}
    )
    assert made.kms.passphrase.get_secret_value() == SECRET
    settings = InMemorySettings(keys=["a"])
    assert parse_configuration({"version": 1, "kms": settings}).kms == settings


@pytest.mark.parametrize("name", [1, None, True, (1, 2)])
def test_names_in_a_mapping_are_texts(name):
    with pytest.raises(ConfigurationError):
        parse_configuration({"version": 1, name: 1})
    with pytest.raises(ConfigurationError):
        parse_configuration({"version": 1, "tables": {name: {"footer_key": "a"}}})


@pytest.mark.parametrize(
    ("mode", "text"), [(0o644, "every user of this machine"), (0o640, "its group"), (0o600, None), (0o400, None)]
)
def test_secrets_in_a_file_that_others_may_read(tmp_path: Path, mode: int, text: str | None) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(
        "version: 1\ndata_keys: {kf: MDEyMzQ1Njc4OTAxMjM0NQ==}\n"
        "tables: {t: {footer_key: kf, column_keys: {}, unlisted_columns: footer_key}}\n"
    )
    path.chmod(mode)
    found = [warning for warning in load_configuration(path).warnings if "secret" in warning]
    if text is None:
        assert found == []
    else:
        (warning,) = found
        assert f"{path}:2: data_keys.kf" in warning and text in warning and "chmod 600" in warning
        assert "MDEy" not in warning


SECRET_FILES = {
    "token_file": "{type: vault, url: 'https://vault.example', token_file: secret file}",
    "approle.secret_id_file": "{type: vault, url: 'https://vault.example', approle: {role_id: r, secret_id_file: "
    "secret file}}",
    "jwt.jwt_file": "{type: vault, url: 'https://vault.example', jwt: {role: r, jwt_file: secret file}}",
    "client_key": "{type: vault, url: 'https://vault.example', token: '${T}', client_cert: c, client_key: secret "
    "file}",
    "client_cert": "{type: vault, url: 'https://vault.example', token: '${T}', client_cert: secret file}",
    "credentials_file": "{type: gcp, credentials_file: secret file}",
}


@pytest.mark.parametrize("setting", SECRET_FILES)
@pytest.mark.parametrize(
    ("mode", "text"), [(0o644, "every user of this machine"), (0o640, "its group"), (0o600, None), (None, None)]
)
def test_a_secret_in_a_file_of_its_own_that_others_may_read(
    tmp_path: Path, setting: str, mode: int | None, text: str | None
) -> None:
    path, secret = tmp_path / "kms.yaml", tmp_path / "secret file"
    path.write_text(f"version: 1\nkms: {SECRET_FILES[setting]}\n")
    if mode is not None:
        secret.write_text("s3cr3t")
        secret.chmod(mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = load_configuration(path, environment={"T": "t"})
    found = [str(warning.message) for warning in caught if issubclass(warning.category, ConfigurationWarning)]
    assert found == list(made.warnings)
    if text is None:
        assert found == []
    else:
        (warning,) = found
        assert warning == (
            f"{path}:2: kms.{setting}: the file {secret} holds a secret, and {text} may read it. "
            f"Run: chmod 600 '{secret}'"
        )


def test_who_may_read_the_token_of_a_pod_is_not_for_us_to_say(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cr3t")
    (tmp_path / "token").chmod(0o644)
    kms = {"type": "vault", "url": "https://vault.example", "kubernetes": {"role": "r", "jwt_path": "token"}}
    assert parse_configuration({"version": 1, "kms": kms}).warnings == ()


def test_names_of_secrets_are_none(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(
        "version: 1\ndata_keys: {kf: '${KF}'}\n"
        "tables: {t: {footer_key: kf, column_keys: {}, unlisted_columns: footer_key}}\n"
    )
    path.chmod(0o644)
    configuration = load_configuration(path, environment={"KF": "MDEyMzQ1Njc4OTAxMjM0NQ=="})
    assert not [warning for warning in configuration.warnings if "secret" in warning]


def test_a_path_may_begin_at_the_home_folder(tmp_path, monkeypatch):
    """No shell expands the `~` of an environment variable, or of `--config=~/x.yaml`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "flights.yaml").write_text(TABLE)
    configuration = load_configuration("~/flights.yaml")
    assert configuration.folder == tmp_path
    with pytest.raises(ConfigurationError, match=rf"{tmp_path}/none\.yaml: there is no such file"):
        load_configuration("~/none.yaml")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}["no such user"])
    with pytest.raises(ConfigurationError, match=r"~/flights\.yaml: this user has no home folder: set HOME"):
        load_configuration("~/flights.yaml")
