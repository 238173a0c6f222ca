"""AAD prefixes that cannot be moved: a file has only the prefix that it was written with."""

from __future__ import annotations

import io
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_files import MemorySource, NamedKeys, encrypted
from soak import how_many

from parquet_keytools.encryption.aad import (
    ExpectedAadPrefix,
    ModuleType,
    aad_prefixes,
    delimited_prefix,
    expected_aad_prefix,
    module_aad,
    prefix_bytes,
    prefix_text,
    without_delimiter,
)
from parquet_keytools.encryption.file_encryption import FileEncryption
from parquet_keytools.encryption.footer import FooterEnvelope, read_envelope, read_footer
from parquet_keytools.errors import AadPrefixError, DecryptionError, KeytoolsError, ParquetFormatError

KEYS = NamedKeys()
KEYS.new(b"kf")
UNIQUE = b"\0\x01part1\xff"


def _plain() -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table({"a": [1, 2]}), stream)
    return stream.getvalue()


PLAIN = _plain()


def _sealed(prefix: bytes | None, unique: bytes = UNIQUE, *, store: bool = True, signed: bool = False) -> bytes:
    return encrypted(
        PLAIN,
        FileEncryption(
            KEYS.deks[b"kf"],
            b"kf",
            aad_prefix=prefix,
            store_aad_prefix=store,
            aad_file_unique=unique,
            plaintext_footer=signed,
        ),
    )


def _envelope(prefix: bytes | None, unique: bytes = UNIQUE, **options: bool) -> FooterEnvelope:
    return read_envelope(MemorySource(_sealed(prefix, unique, **options)))


def _opens(envelope: FooterEnvelope, expected: ExpectedAadPrefix) -> bool:
    try:
        envelope.open(KEYS.deks[b"kf"], expected)
    except KeytoolsError:
        return False
    return True


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)


@settings(max_examples=how_many(40, 400))
@given(texts, st.booleans(), st.binary(min_size=8, max_size=8), st.data(), st.booleans())
def test_no_other_cut_of_the_aad_is_accepted(
    text: str, ends_in_nul: bool, unique: bytes, data: st.DataObject, supplied: bool
) -> None:
    written = delimited_prefix(text)
    prefix = written if ends_in_nul else without_delimiter(written)
    original = _envelope(prefix, unique)
    aad = prefix + unique
    cut = data.draw(st.integers(0, len(aad)))
    shown = replace(
        original,
        aad_prefix=None if supplied else aad[:cut],
        aad_file_unique=aad[cut:],
        supply_aad_prefix=supplied,
    )
    # A reader with another expected prefix, above all the attacker's, must not get this file.
    claims = {text, text + "0", aad[:cut].rstrip(b"\0").decode("utf-8", "ignore"), data.draw(texts)}
    claims |= {text[:length] for length in range(1, len(text))}
    for claim in claims:
        if claim and "\0" not in claim:
            accepted = _opens(shown, ExpectedAadPrefix.of(claim))
            assert accepted is (claim == text and cut == len(prefix)), (claim, cut)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("prefix", [b"part1", b"part1\0"])
def test_a_file_is_read_with_the_delimiter_and_without_it(prefix: bytes, store: bool, signed: bool) -> None:
    source = MemorySource(_sealed(prefix, store=store, signed=signed))
    footer = read_footer(source, KEYS, ExpectedAadPrefix.of("part1"))
    assert (footer.aad_prefix, footer.file_aad) == (prefix, prefix + UNIQUE)
    if store:
        assert read_footer(source, KEYS).aad_prefix == prefix
    for other in ("part", "part10", "part1 ", "q"):
        with pytest.raises(DecryptionError):
            read_footer(source, KEYS, ExpectedAadPrefix.of(other))


@pytest.mark.parametrize("signed", [False, True])
def test_these_very_bytes_can_be_expected(signed: bool) -> None:
    source = MemorySource(_sealed(b"part1\0", signed=signed))
    assert read_footer(source, KEYS, b"part1\0").aad_prefix == b"part1\0"
    with pytest.raises(AadPrefixError, match="another AAD prefix"):
        read_footer(source, KEYS, b"part1")


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("length", [0, 1, 4, 7, 9, 16, 300])
def test_another_length_of_the_file_unique_is_refused_before_a_key_is_asked_for(length: int, store: bool) -> None:
    source = MemorySource(_sealed(b"part1", bytes(length), store=store))
    with pytest.raises(AadPrefixError, match=f"the file unique has {length} bytes, not 8") as caught:
        read_footer(source, NamedKeys(), ExpectedAadPrefix.of("part1"))
    assert "reading.file_unique_lengths" in str(caught.value)
    with pytest.raises(AadPrefixError, match=f"has {length} bytes, not 8"):
        read_footer(source, NamedKeys(), b"part1")
    if length:
        anything = ExpectedAadPrefix.of("part1", any_file_unique=True)
        assert read_footer(source, KEYS, anything).aad_prefix == b"part1"


def test_where_no_prefix_is_expected_any_length_will_do() -> None:
    assert read_footer(MemorySource(_sealed(b"part1", bytes(9))), KEYS).aad_prefix == b"part1"
    assert read_footer(MemorySource(_sealed(None, bytes(9))), KEYS).aad_prefix == b""


def test_a_whole_prefix_in_the_file_unique_is_no_prefix() -> None:
    shown = replace(_envelope(b"part1\0"), aad_prefix=None, aad_file_unique=b"part1\0" + UNIQUE)
    with pytest.raises(AadPrefixError, match="written without one"):
        shown.open(KEYS.deks[b"kf"], ExpectedAadPrefix.of("part1"))
    # A reader who expects no prefix cannot detect that; `verify` does.
    shown.open(KEYS.deks[b"kf"])


def test_a_signed_footer_holds_its_own_aad_fields() -> None:
    """Moving bytes there changes signed bytes, too."""
    data = _sealed(b"part10", signed=True)
    moved = data.replace(b"\x06part10\x18\x08" + UNIQUE, b"\x05part1\x18\x090" + UNIQUE)
    assert moved != data and len(moved) == len(data)
    source = MemorySource(moved)
    assert read_envelope(source).aad_prefix == b"part1"
    with pytest.raises(AadPrefixError, match="9 bytes, not 8"):
        read_footer(source, NamedKeys(), ExpectedAadPrefix.of("part1"))
    with pytest.raises(DecryptionError, match="signature"):
        read_footer(source, KEYS, ExpectedAadPrefix.of("part1", any_file_unique=True))


def test_what_neither_form_opens_is_an_error() -> None:
    for signed in (False, True):
        source = MemorySource(_sealed(b"part1", store=False, signed=signed))
        with pytest.raises(DecryptionError):
            read_footer(source, KEYS, ExpectedAadPrefix.of("part2"))


def test_a_file_without_file_unique() -> None:
    shown = replace(_envelope(b"p"), aad_file_unique=None)
    with pytest.raises(ParquetFormatError, match="no aad_file_unique"):
        shown.file_aads(ExpectedAadPrefix.of("p"))


@pytest.mark.parametrize(
    ("text", "message"), [("", "empty"), ("a\0", "contains NUL"), ("\0", "NUL"), ("a\0b", "NUL")]
)
def test_texts_that_are_no_prefix(text: str, message: str) -> None:
    with pytest.raises(AadPrefixError, match=message):
        delimited_prefix(text)
    with pytest.raises(AadPrefixError, match=message):
        expected_aad_prefix(text, ["t"], any_file_unique=False)


def test_what_is_expected() -> None:
    forms = (b"t/x\0", b"t/x")
    assert expected_aad_prefix(None, [], any_file_unique=False) is None
    for any_file_unique in (False, True):
        of_table = expected_aad_prefix(None, ["t/x"], any_file_unique=any_file_unique)
        assert of_table == ExpectedAadPrefix(forms, any_file_unique)
        assert expected_aad_prefix("t/x", ["t/x"], any_file_unique=any_file_unique) == of_table
    assert expected_aad_prefix("t/x", ["u/x"], any_file_unique=False) == ExpectedAadPrefix(forms)
    # It was compared with no other prefix: only the delimiter says where it ends.
    assert expected_aad_prefix("t/x", ["u/x"], any_file_unique=True) == ExpectedAadPrefix(forms[:1], True)


@pytest.mark.parametrize("length", [3, 8, 9])
def test_with_any_length_a_given_prefix_needs_the_delimiter(length: int) -> None:
    given_alone = expected_aad_prefix("part1", [], any_file_unique=True)
    source = MemorySource(_sealed(b"part1\0", bytes(length)))
    assert read_footer(source, KEYS, given_alone).aad_prefix == b"part1\0"
    with pytest.raises(AadPrefixError, match="has to be the table"):
        read_footer(MemorySource(_sealed(b"part1", bytes(length))), KEYS, given_alone)
    # Moved bytes do not become a delimiter.
    shown = replace(_envelope(b"part10", bytes(7)), aad_prefix=b"part1", aad_file_unique=b"0" + bytes(7))
    with pytest.raises(AadPrefixError):
        shown.open(KEYS.deks[b"kf"], given_alone)


# --- a page in place of the footer ---

PAGE = (ModuleType.DATA_PAGE, 3, 4, 5)


@pytest.mark.parametrize("stored", [None, b"part1"])
@pytest.mark.parametrize("expected", [None, ExpectedAadPrefix.of("part1", any_file_unique=True)])
def test_a_file_unique_that_ends_like_the_aad_of_a_page(
    stored: bytes | None, expected: ExpectedAadPrefix | None
) -> None:
    """Its footer could be a page, whose bytes an attacker had written as values."""
    moved = module_aad(UNIQUE, *PAGE)[:-1]
    with pytest.raises(DecryptionError, match="a data page is in the place of the footer") as caught:
        aad_prefixes(expected, stored, moved, "a.parquet", supply_aad_prefix=expected is not None and not stored)
    assert "a.parquet: the file unique has 14 bytes, not 8, and ends" in str(caught.value)


def test_a_prefix_and_a_file_unique_that_end_together_like_the_aad_of_a_page() -> None:
    """A writer's random bytes can look like this, too: a reader who knows the prefix can read the file."""
    whole = module_aad(UNIQUE, *PAGE)[:-1]
    prefix, unique = whole[:-8], whole[-8:]
    with pytest.raises(DecryptionError, match="the AAD prefix and the file unique together") as caught:
        aad_prefixes(None, prefix, unique, "a.parquet", supply_aad_prefix=False)
    assert "a.parquet" in str(caught.value) and "supply it" in str(caught.value)
    assert aad_prefixes(prefix, prefix, unique, "a.parquet", supply_aad_prefix=False) == (prefix,)
    for any_file_unique in (False, True):
        expected = ExpectedAadPrefix((prefix,), any_file_unique)
        assert aad_prefixes(expected, prefix, unique, "a.parquet", supply_aad_prefix=False) == (prefix,)


def test_a_refusal_names_the_file() -> None:
    expected = ExpectedAadPrefix.of("part1")
    for stored, unique in ((b"other", UNIQUE), (None, UNIQUE), (b"part1", bytes(9)), (b"part1", None)):
        with pytest.raises(KeytoolsError, match=r"a\.parquet"):
            aad_prefixes(expected, stored, unique, "a.parquet", supply_aad_prefix=False)


BYTES = b"\xff\x00\x80prefix"


@pytest.mark.parametrize("given", [BYTES, "base64:/wCAcHJlZml4"])
def test_a_prefix_may_be_bytes(given: str | bytes) -> None:
    assert prefix_bytes(given) == BYTES
    assert delimited_prefix(given) == BYTES + b"\0"
    assert ExpectedAadPrefix.of(given).candidates == (BYTES + b"\0", BYTES)
    assert prefix_text(BYTES) == prefix_text(BYTES + b"\0") == "base64:/wCAcHJlZml4"


@pytest.mark.parametrize("stored", [b"t/part", b"t/part\0", b"a\0b", b"\0", b"x\0\0", b"base64:x", b"\xff", BYTES])
def test_the_text_of_a_prefix_is_accepted_for_it(stored: bytes) -> None:
    assert stored in ExpectedAadPrefix.of(prefix_text(stored)).candidates
    assert stored in ExpectedAadPrefix.of(stored).candidates


def test_bytes_that_end_in_nul_say_how_the_prefix_ends() -> None:
    assert ExpectedAadPrefix.of(b"x\0").candidates == (b"x\0",)
    assert delimited_prefix(b"x\0") == b"x\0"
    # Only the end shows where a file unique of any length begins.
    assert expected_aad_prefix(b"a\0b", ["t"], any_file_unique=True) == ExpectedAadPrefix((b"a\0b\0",), True)


@pytest.mark.parametrize("wrong", ["base64:", "base64:x", "base64:/wCAcHJlZml4=", b""])
def test_what_is_no_base64_is_refused(wrong: str | bytes) -> None:
    with pytest.raises(AadPrefixError, match=r"not base64|empty"):
        prefix_bytes(wrong)
