import pytest

from parquet_keytools.config.key_policy import (
    DataKeyReference,
    MasterKeyReference,
    check_key_names,
    resolve_key,
)
from parquet_keytools.config.loader import parse_configuration
from parquet_keytools.errors import ConfigurationError

ARN = "arn:aws:kms:eu-west-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"
WITH_KMS = f"""\
version: 1
kms: {{type: in_memory, keys: [footer]}}
master_keys:
  pii: {ARN}
data_keys: {{kf: MDEyMzQ1Njc4OTAxMjM0NQ==}}
tables:
  flights:
    footer_key: footer
    column_keys:
      pii: [tailnum]
      kf: [origin]
"""
WITHOUT_KMS = """\
version: 1
data_keys: {kf: MDEyMzQ1Njc4OTAxMjM0NQ==, kc: MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz}
tables:
  flights:
    footer_key: kf
    column_keys: {kc: [tailnum]}
"""


def parse(text):
    return parse_configuration(text, file="flights.yaml")


def test_a_name_under_master_keys_stands_for_its_identifier():
    assert resolve_key(parse(WITH_KMS), "pii") == MasterKeyReference(ARN)


def test_a_name_that_is_not_declared_is_an_identifier_in_the_kms():
    assert resolve_key(parse(WITH_KMS), "footer") == MasterKeyReference("footer")
    assert resolve_key(parse(WITH_KMS), "never heard of") == MasterKeyReference("never heard of")


@pytest.mark.parametrize("text", [WITH_KMS, WITHOUT_KMS])
def test_a_name_under_data_keys_is_a_data_key(text):
    assert resolve_key(parse(text), "kf") == DataKeyReference("kf")


def test_without_a_kms_a_name_that_is_not_declared_is_a_mistake():
    with pytest.raises(ConfigurationError, match="there is no key 'kx' in data_keys, and there is no kms"):
        resolve_key(parse(WITHOUT_KMS), "kx")


def test_known_names_pass():
    check_key_names(parse(WITH_KMS))
    check_key_names(parse(WITH_KMS), frozenset({"footer", ARN, "unused"}))
    check_key_names(parse(WITHOUT_KMS))


def mistake(text, known):
    with pytest.raises(ConfigurationError) as caught:
        check_key_names(parse(text), known)
    return caught.value


def test_a_name_that_the_kms_does_not_know_is_a_mistake_where_it_is_used():
    error = mistake(WITH_KMS.replace("footer_key: footer", "footer_key: footr"), frozenset({"footer", ARN}))
    assert (error.file, error.line, error.yaml_path) == ("flights.yaml", 8, "tables.flights.footer_key")
    assert "there is no key 'footr' in master_keys, data_keys, or the KMS. Did you mean 'footer'?" in str(error)


def test_a_declared_name_may_be_meant_too():
    error = mistake(WITH_KMS.replace("pii: [tail", "pij: [tail"), frozenset({"footer", ARN}))
    assert (error.line, error.yaml_path) == (10, "tables.flights.column_keys.pij")
    assert "Did you mean 'pii'?" in str(error)


def test_an_identifier_that_the_kms_does_not_know_is_a_mistake_where_it_is_declared():
    error = mistake(WITH_KMS.replace(ARN, "pii-key-of-2024"), frozenset({"footer", "pii-key-of-2025"}))
    assert (error.line, error.yaml_path) == (4, "master_keys.pii")
    assert "the KMS has no master key 'pii-key-of-2024'. Did you mean 'pii-key-of-2025'?" in str(error)


def test_an_identifier_that_two_tables_use_is_reported_once():
    text = WITH_KMS + "  weather: {footer_key: pii, unlisted_columns: footer_key}\n"
    assert "There" not in str(mistake(text, frozenset({"footer"})))


def test_a_data_key_must_not_have_the_name_of_a_master_key_in_the_kms():
    error = mistake(WITH_KMS, frozenset({"footer", ARN, "kf"}))
    assert (error.line, error.yaml_path) == (5, "data_keys.kf")
    assert "a master key in the KMS has this name too." in str(error)


def test_an_empty_kms_knows_no_name():
    error = mistake(WITH_KMS, frozenset())
    assert all(f"{path}: " in str(error) for path in ("tables.flights.footer_key", "master_keys.pii"))


def test_data_keys_have_no_key_material():
    with pytest.raises(ConfigurationError, match="data keys have no key material") as caught:
        parse(WITHOUT_KMS + "    key_material: external\n")
    assert (caught.value.line, caught.value.yaml_path) == (7, "tables.flights.key_material")
    # If one key is a master key, there is key material.
    parse(WITH_KMS + "    key_material: external\n")


def test_a_length_that_data_keys_do_not_have_is_a_mistake():
    with pytest.raises(ConfigurationError, match="the data key 'kc' has 192 bits") as caught:
        parse(WITHOUT_KMS + "    data_key_length_bits: 128\n")
    assert (caught.value.line, caught.value.yaml_path) == (7, "tables.flights.data_key_length_bits")
    assert "'kf'" not in str(caught.value)
