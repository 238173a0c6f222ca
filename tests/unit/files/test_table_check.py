import pickle
import warnings

import pytest

from parquet_keytools.config.key_policy import DataKeyReference, MasterKeyReference, configured_master_key_ids
from parquet_keytools.config.loader import parse_configuration
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption
from parquet_keytools.errors import ConfigurationError, TableMismatch, TableMismatchError
from parquet_keytools.files.table_check import SeenColumn, TableCheck, seen_key
from parquet_keytools.keys.key_material import KeyMaterial, KeyReference, parse_key_metadata

GCM, CTR = Algorithm.AES_GCM_V1, Algorithm.AES_GCM_CTR_V1
PLAINTEXT, FOOTER_KEY, COLUMN_KEY = ColumnEncryption
ARN = "arn:aws:kms:eu-west-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"


def master(name):
    return MasterKeyReference(name)


def column(path, encryption=PLAINTEXT, key=None):
    return SeenColumn(tuple(path.split("/")), encryption, key)


def check(table=None, ignores_case=False, **document):
    settings = {
        "footer_key": "footer",
        "column_keys": {"pii": ["name", "address.*"], "times": ["at"]},
        "unlisted_columns": "plaintext",
    }
    made = {
        "version": 1,
        "kms": {"type": "aws", "region": "eu-west-1"},
        "data_keys": {"kf": "MDEyMzQ1Njc4OTAxMjM0NQ==", "kc": "MDEyMzQ1Njc4OTAxMjM0NQ=="},
        "tables": {"t": settings | (table or {})},
        **document,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TableCheck(parse_configuration(made), "t", ignores_case=ignores_case)


def wrong(checked, *columns, algorithm=GCM, footer="footer"):
    key = master(footer) if isinstance(footer, str) else footer
    return [(found.what, found.column) for found in mismatches(checked, algorithm, key, columns)]


def mismatches(checked, algorithm, footer_key, columns):
    return [
        *checked.footer_mismatches(algorithm, footer_key),
        *checked.column_mismatches(footer_key, columns),
    ]


OWN = (column("name", COLUMN_KEY, master("pii")), column("at", COLUMN_KEY, master("times")), column("n"))


def test_a_file_that_is_what_the_table_says_passes():
    assert wrong(check(), *OWN) == []
    assert wrong(check()) == [], "a file without row groups does not say how its columns are encrypted"


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({"footer": "pii"}, ("footer key", None)),
        ({"footer": "ads"}, ("footer key", None)),
        ({"footer": "Footer"}, ("footer key", None)),
        ({"footer": DataKeyReference("footer")}, ("footer key", None)),
        ({"footer": None}, ("footer key", None)),
        ({"algorithm": CTR}, ("algorithm", None)),
    ],
)
def test_another_algorithm_or_footer_key_is_found(seen, expected):
    assert wrong(check(), *OWN, **seen) == [expected]


def test_the_table_of_weaker_encryption_does_not_take_the_stronger_one_for_its_own():
    assert wrong(check({"algorithm": "AES_GCM_CTR_V1"}), *OWN) == [("algorithm", None)]
    assert wrong(check({"algorithm": "AES_GCM_CTR_V1"}), *OWN, algorithm=CTR) == []


@pytest.mark.parametrize(
    ("seen", "what"),
    [
        (column("name"), "plaintext column"),
        (column("address/street"), "plaintext column"),
        (column("name", FOOTER_KEY), "column key"),
        (column("name", COLUMN_KEY, master("times")), "column key"),
        (column("name", COLUMN_KEY, master("footer")), "column key"),
        (column("name", COLUMN_KEY, master("ads")), "column key"),
        (column("name", COLUMN_KEY, DataKeyReference("pii")), "column key"),
        (column("name", COLUMN_KEY, DataKeyReference("kc")), "column key"),
        (column("name", COLUMN_KEY), "column key"),
        (column("n", COLUMN_KEY, master("ads")), "column key"),
        (column("n", COLUMN_KEY), "column key"),
        (column("n", COLUMN_KEY, DataKeyReference("footer")), "column key"),
    ],
)
def test_a_column_under_another_key_or_under_none_is_found(seen, what):
    assert wrong(check(), seen) == [(what, ".".join(seen.path))]


def test_two_columns_that_changed_their_keys_are_both_found():
    swapped = (column("name", COLUMN_KEY, master("times")), column("at", COLUMN_KEY, master("pii")))
    assert wrong(check(), *swapped) == [("column key", "name"), ("column key", "at")]


def test_what_the_table_has_in_plaintext_may_be_under_any_key_of_the_table():
    for seen in (column("n", FOOTER_KEY), *(column("n", COLUMN_KEY, master(key)) for key in ("pii", "footer"))):
        assert wrong(check(), seen) == []


def test_which_key_counts_and_not_which_dek():
    table = {"column_keys": {"footer": ["name"], "pii": ["at"]}, "unlisted_columns": "footer_key"}
    columns = (column("name", FOOTER_KEY), column("n", COLUMN_KEY, master("footer")))
    assert wrong(check(table), *columns) == []
    assert wrong(check(table), column("n")) == [("plaintext column", "n")]
    assert wrong(check(table), column("n", COLUMN_KEY, master("pii"))) == [("column key", "n")]


def test_data_keys_are_told_apart_by_name():
    checked = check({"footer_key": "kf", "column_keys": {"kc": ["name"]}, "unlisted_columns": "plaintext"})
    name = column("name", COLUMN_KEY, DataKeyReference("kc"))
    assert wrong(checked, name, footer=DataKeyReference("kf")) == []
    assert wrong(checked, name, footer=DataKeyReference("kc")) == [("footer key", None)]
    assert wrong(checked, name, footer="kf") == [("footer key", None)], "a master key of that name is another one"
    swapped = column("name", COLUMN_KEY, DataKeyReference("kf"))
    assert wrong(checked, swapped, footer=DataKeyReference("kf")) == [("column key", "name")]


def test_a_name_stands_for_its_identifier_and_two_names_may_be_one_key():
    aliases = {"footer": ARN, "pii": ARN, "times": "alias/times"}
    checked = check(master_keys=aliases)
    assert wrong(checked, column("name", FOOTER_KEY), footer=ARN) == []
    assert wrong(checked, column("at", FOOTER_KEY), footer=ARN) == [("column key", "at")]
    assert wrong(checked, footer="footer") == [("footer key", None)], "the name is none of the KMS"


def test_both_ends_of_a_move_are_good_for_what_names_one_of_them():
    moves = {"moves": {"pii_2024": "pii", "times": "times_2026", "other": "elsewhere"}}
    checked = check(rotation=moves)
    for key in ("pii", "pii_2024"):
        assert wrong(checked, column("name", COLUMN_KEY, master(key))) == []
    for key in ("times", "times_2026"):
        assert wrong(checked, column("at", COLUMN_KEY, master(key))) == []
    assert wrong(checked, column("n", COLUMN_KEY, master("pii_2024"))) == []
    for seen in (
        column("at", COLUMN_KEY, master("pii_2024")),
        column("name", COLUMN_KEY, master("times_2026")),
        column("name", COLUMN_KEY, master("elsewhere")),
        column("n", COLUMN_KEY, master("other")),
    ):
        assert wrong(checked, seen) == [("column key", seen.path[0])]


def test_keys_that_moved_to_the_same_one_do_not_stand_for_each_other():
    checked = check(rotation={"moves": {"pii": "all", "times": "all"}})
    assert wrong(checked, column("name", COLUMN_KEY, master("all"))) == []
    assert wrong(checked, column("name", COLUMN_KEY, master("times"))) == [("column key", "name")]


def test_a_move_may_be_written_with_names_or_identifiers():
    checked = check(master_keys={"pii": ARN, "old": "alias/old"}, rotation={"moves": {"old": ARN}})
    assert wrong(checked, column("name", COLUMN_KEY, master("alias/old"))) == []


def test_what_is_also_trusted_is_good_for_every_key_of_the_table_and_of_no_other():
    checked = check({"also_trusted": ["before", "kc"]})
    assert wrong(checked, column("name", COLUMN_KEY, master("before")), footer="before") == []
    assert wrong(checked, column("name", COLUMN_KEY, DataKeyReference("kc"))) == []
    assert wrong(checked, column("n", COLUMN_KEY, master("before"))) == []
    assert wrong(checked, column("name")) == [("plaintext column", "name")]
    assert wrong(checked, column("name", COLUMN_KEY, master("kc"))) == [("column key", "name")]


def test_the_kms_unwraps_with_all_keys_that_some_table_may_trust():
    document = {
        "version": 1,
        "kms": {"type": "aws", "region": "eu-west-1"},
        "tables": {
            "t": {
                "footer_key": "footer",
                "column_keys": {"pii": ["a"]},
                "unlisted_columns": "plaintext",
                "also_trusted": ["before"],
            }
        },
        "rotation": {"moves": {"old": "pii"}},
    }
    assert configured_master_key_ids(parse_configuration(document)) == {"footer", "pii", "before", "old"}


def test_a_key_that_is_also_trusted_has_to_be_declared():
    document = {
        "version": 1,
        "data_keys": {"kf": "MDEyMzQ1Njc4OTAxMjM0NQ=="},
        "tables": {
            "t": {
                "footer_key": "kf",
                "column_keys": {"kf": ["a"]},
                "unlisted_columns": "plaintext",
                "also_trusted": ["kx", "kx"],
            }
        },
    }
    with pytest.raises(ConfigurationError, match="the key 'kx' is listed twice") as twice:
        parse_configuration(document)
    assert twice.value.yaml_path == "tables.t.also_trusted[1]"
    document["tables"]["t"]["also_trusted"] = ["kx"]
    with pytest.raises(ConfigurationError, match="there is no key 'kx'") as unknown:
        parse_configuration(document)
    assert unknown.value.yaml_path == "tables.t.also_trusted[0]"


def test_patterns_that_cover_nothing_in_a_file_are_no_mistake():
    assert wrong(check(), column("other")) == []


def test_a_column_with_the_name_of_a_glob_does_not_take_the_key_from_the_others():
    forged = (column("address.*", COLUMN_KEY, master("pii")), column("address/street"))
    assert wrong(check(), *forged) == [("plaintext column", "address.street")]
    parent = (column("address.*/x", COLUMN_KEY, master("pii")), column("address/street"))
    assert wrong(check(), *parent) == [("plaintext column", "address.street")]


def test_a_reader_that_ignores_case_finds_a_column_of_another_case():
    for name in ("NAME", "Address/Street"):
        seen = column(name)
        assert wrong(check(), seen) == []
        assert wrong(check(ignores_case=True), seen) == [("plaintext column", ".".join(seen.path))]
    twins = {"column_keys": {"pii": ["name"], "times": ["NAME"]}}
    own = (column("name", COLUMN_KEY, master("pii")), column("NAME", COLUMN_KEY, master("times")))
    assert wrong(check(twins, ignores_case=True), *own) == []


def test_the_error_says_what_and_where_and_what_to_do():
    checked = check(master_keys={"pii": ARN})
    columns = [column("name", COLUMN_KEY, master("times")), column("at")]
    with pytest.raises(TableMismatchError) as caught:
        checked.refuse("x/a.parquet", mismatches(checked, CTR, master("ads"), columns))
    error = caught.value
    assert (error.path, error.table) == ("x/a.parquet", "t")
    assert error.mismatches[2] == TableMismatch(
        "column key", "name", f"the master key {ARN!r} ('pii')", "the master key 'times'"
    )
    assert str(error).startswith(
        "x/a.parquet: this is not a file of the table 't': "
        "the algorithm is AES_GCM_CTR_V1, and the table has AES_GCM_V1; "
        "the footer is under the master key 'ads', and the table has the master key 'footer'; "
        f"column 'name' is under the master key 'times', and the table has the master key {ARN!r} ('pii'); "
        "column 'at' is in plaintext, and the table has the master key 'times'. Name the table"
    )
    assert all(word in error.hint for word in ("also_trusted", "moves", "rekey"))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.mismatches, copy.table) == (str(error), error.mismatches, "t")
    checked.refuse("x/a.parquet", [])


def test_the_error_of_many_columns_stays_short():
    checked = check({"column_keys": {"pii": ["*"]}})
    mismatches = checked.column_mismatches(master("footer"), [column(f"c{number}") for number in range(500)])
    assert len(mismatches) == 500
    with pytest.raises(TableMismatchError, match="and 495 more") as caught:
        checked.refuse("a", mismatches)
    assert len(str(caught.value)) < 1500


def test_the_error_about_keys_without_metadata_says_where_they_are_named():
    checked = check()
    with pytest.raises(TableMismatchError, match="under a key that the file does not name") as caught:
        checked.refuse("a", checked.footer_mismatches(GCM, None))
    assert "reading.keys_without_metadata" in caught.value.hint


# --- which key it is ---


def material(master_key_id, **fields):
    return KeyMaterial(is_footer_key=False, master_key_id=master_key_id, wrapped_dek="x", **fields)


class Beside:
    """A source of key material beside a file."""

    def __init__(self, key_materials, footer_without_metadata):
        self.key_materials = key_materials or {}
        self.footer_without_metadata = footer_without_metadata

    def material(self, key_metadata):
        parsed = parse_key_metadata(key_metadata)
        if isinstance(parsed, KeyReference):
            return self.key_materials[parsed.reference]
        return parsed if isinstance(parsed, KeyMaterial) else None

    def name_without_metadata(self, column_path):
        return self.footer_without_metadata


def footer_key_seen(key_metadata, key_materials=None, footer_without_metadata=None):
    return seen_key(Beside(key_materials, footer_without_metadata), key_metadata, None)


def test_key_metadata_means_a_master_key_or_a_data_key():
    internal = material("pii").serialise(internal=True).encode()
    assert footer_key_seen(internal) == master("pii")
    assert footer_key_seen(b"pii") == DataKeyReference("pii")
    assert footer_key_seen(None) is None
    without = {"footer_without_metadata": "kf"}
    assert footer_key_seen(b"", **without) == DataKeyReference("kf")
    assert footer_key_seen(b"kc", **without) == DataKeyReference("kc"), "what the file names comes first"


def test_a_reference_means_what_lies_beside_the_file():
    reference = KeyReference("columnKey0").serialise()
    assert footer_key_seen(reference, {"columnKey0": material("pii")}) == master("pii")
