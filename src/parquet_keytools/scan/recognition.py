"""Recognises personal data by names of columns, in several languages, and by format and check digits of values.

The terms are in `terms.md`.

Values pass check digits by chance: one of 11 random numbers of nine digits is a valid Dutch identifier. A verdict
needs a share far above chance, and for identifiers that are only digits and weak check digits also a name.
"""

from __future__ import annotations

import importlib
import ipaddress
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import StrEnum
from functools import cache, lru_cache
from importlib import resources
from typing import Any, Literal, NamedTuple

Value = str | int | float | date
"""A sampled value. Nothing outside of this package gets one."""

TypeClass = Literal["text", "number", "date", "other"]
"""What a column may hold; `other`, such as a boolean or a time of day, is never personal data here."""

_FIRST = 40
"""How many values are checked for an identifier before the others: most columns have no identifier."""

_LEAST_WITHOUT_NAME = 8
"""Minimum number of distinct values for a verdict without a matching name."""


class Kind(StrEnum):
    """What a column looks like."""

    EMAIL = "email"
    IBAN = "iban"
    CARD_NUMBER = "card_number"
    NATIONAL_ID = "national_id"
    IP_ADDRESS = "ip_address"
    DATE_OF_BIRTH = "date_of_birth"
    PHONE = "phone"
    PERSON_NAME = "person_name"
    POSTAL_ADDRESS = "postal_address"

    @property
    def description(self) -> str:
        """What to call the values."""
        return _section(self)[0]


def _text_of_section(name: str) -> str:
    text = resources.files(__package__).joinpath("terms.md").read_text("utf-8")
    found = text.partition(f"\n## {name}: ")[2].partition("\n## ")[0]
    if not found:
        raise ValueError(f"terms.md has no section {name!r}")
    return found


@cache
def _section(name: str) -> tuple[str, frozenset[str]]:
    """Return the title and the terms of a section of `terms.md`."""
    title, _, terms = _text_of_section(name).partition("\n")
    return title, frozenset(" ".join(term.split()) for term in terms.split(","))


_LEAST_PART = 7
"""Shorter terms do not count as a part of a longer word."""

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_ACCENTS = re.compile("[\u0300-\u036f]")
_LETTERS = str.maketrans({"ł": "l", "ø": "o", "đ": "d", "ı": "i", "æ": "ae", "œ": "oe"})
_WORDS = re.compile(r"[\u0900-\u097f]+|[^\W\d_]+")


def words_of(name: str) -> list[str]:
    """Return the words of a name: lower case, without accents and digits."""
    text = _ACCENTS.sub("", unicodedata.normalize("NFKD", _CAMEL.sub(" ", name[:200])))
    text = unicodedata.normalize("NFC", text).casefold().translate(_LETTERS)
    return _WORDS.findall(text)


@cache
def _vocabulary() -> dict[Kind, frozenset[str]]:
    return {kind: frozenset("".join(words_of(term)) for term in _section(kind)[1]) for kind in Kind}


def named_parts(path: Sequence[str]) -> list[str]:
    """Return the names in a path that somebody chose, which are not parts of a list or a map."""
    return [part for part in path if part.casefold() not in _section("structure")[1]] or list(path[-1:])


@lru_cache(maxsize=4096)
def kinds_by_name(path: tuple[str, ...]) -> dict[Kind, bool]:
    """Return kind -> whether values of the usual shape are enough; otherwise they need valid check digits."""
    *parents, leaf = named_parts(path)
    own = words_of(leaf)
    above = words_of(parents[-1]) if parents else []
    if own and all(word in _section("generic")[1] for word in own) and above:
        own, above = [*above, *own], []
    found = {}
    for kind, terms in _vocabulary().items():
        if any(not _section("otherwise")[1].intersection(rest) for rest in _rests(own, above, terms)):
            found[kind] = True
    if Kind.NATIONAL_ID not in found and _section("check digits")[1].intersection(own):
        found[Kind.NATIONAL_ID] = False
    # `ip_address` and `mail_address` are not postal addresses.
    if len(found) > 1:
        found.pop(Kind.POSTAL_ADDRESS, None)
    return found


def _rests(own: list[str], above: list[str], terms: frozenset[str]) -> Iterator[list[str]]:
    """Yield the other words of a name for each term that it has; a term may begin in the parent's name."""
    words = [*above, *own]
    for start in range(len(words)):
        for end in range(max(start, len(above)) + 1, min(len(words), start + 4) + 1):
            phrase = "".join(words[start:end])
            is_part = end == start + 1 and _has_part(phrase, terms)
            if is_part or not terms.isdisjoint((phrase, phrase.removesuffix("s"), phrase.removesuffix("es"))):
                yield [*words[len(above) : start], *words[end:]]


def _has_part(word: str, terms: frozenset[str]) -> bool:
    least = _LEAST_PART if word.isascii() else 2
    return any(len(term) >= least and term.isascii() == word.isascii() and term in word for term in terms)


# --- values ---


@dataclass(frozen=True)
class Verdict:
    """What a column looks like; see `Finding`. `detail` is a national identifier, such as `pl.pesel`."""

    kind: Kind
    by: Literal["name", "values", "name and values"]
    matching: int = 0
    values: int = 0
    detail: str = ""


_BY: dict[bool, Literal["values", "name and values"]] = {False: "values", True: "name and values"}


def judge(path: tuple[str, ...], type_class: TypeClass, values: Collection[Value]) -> Verdict | None:
    """Return what a column looks like, by its distinct values; None if nothing can be recognised."""
    names = kinds_by_name(path)
    if type_class == "other" or (not names and type_class == "date"):
        return None
    if not values:
        # Without values, only a name that is convincing by itself counts, and only if the type fits.
        likely = (
            kind for kind in Kind if names.get(kind) and (kind is Kind.DATE_OF_BIRTH or type_class == "text")
        )
        kind = next(likely, None)
        return None if kind is None else Verdict(kind, "name")
    sample = list(values)
    for kind in sorted(Kind, key=lambda kind: kind not in names):
        found = _judged(kind, sample, type_class, kind in names, names.get(kind, False))
        if found is not None:
            return found
    return None


def _judged(
    kind: Kind, sample: Sequence[Value], type_class: TypeClass, is_named: bool, is_believed: bool
) -> Verdict | None:
    if kind is Kind.DATE_OF_BIRTH:
        return _birth(sample) if is_named else None
    if type_class == "date":
        return None
    texts = [text for value in sample if (text := _text(value, type_class))]
    if not texts:
        return None
    if kind is Kind.NATIONAL_ID:
        return _national(texts, type_class, is_named, is_believed)
    has_format, least, least_named = _FORMATS[kind]
    if not is_named and (least is None or len(texts) < _LEAST_WITHOUT_NAME):
        return None
    if type_class == "number" and kind is not Kind.CARD_NUMBER and not (is_named and kind is Kind.PHONE):
        return None
    needed = least_named if is_named or least is None else least
    matching = sum(map(has_format, texts))
    if matching < max(1 if is_named else 3, needed * len(texts)):
        return None
    if kind is Kind.IP_ADDRESS and not is_named and not _is_not_version(texts):
        return None
    if kind is Kind.PHONE and not is_named and not _are_written_as_phones(texts):
        return None
    return Verdict(kind, _BY[is_named], matching, len(texts))


def _text(value: Value, type_class: TypeClass) -> str:
    if type_class == "number":
        # Data frames store integers with gaps as floating-point numbers.
        return str(int(value)) if isinstance(value, int | float) and value == value // 1 and value > 0 else ""
    return str(value).strip()[:500]


# --- formats ---

_EMAIL = re.compile(
    r"(?<![\w.+-/@:])[\w.+%'&-]{1,64}@(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.)+[^\W\d_]{2,24}(?![\w@:/])"
)
_NOT_MAILBOXES = ("git@", "svn@", "hg@")
_IBAN = re.compile(r"[A-Za-z]{2}\d{2}[A-Za-z0-9 -]{11,38}")
_SEPARATORS = re.compile(r"[\s.\-/]")
_CARD = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}|3[47]\d{13}"
    r"|3(?:0[0-5]|095|[689]\d)\d{11}|3(?:0[0-5]|[689]\d)\d{13}|(?:352[89]|35[3-8]\d)\d{12}|(?:2131|1800)\d{11}"
    r"|6(?:011|5\d\d|4[4-9]\d)\d{12}(?:\d{3})?|62\d{14,17}|(?:5018|5020|5038|5[6-8]\d\d|6304|6759|676[1-3]|0604|6390)\d{8,15}"
)
_PHONE = re.compile(r"[+(]?[\d][\d\s().\-/–]{4,24}\d\)?(?:\s?(?:x|ext\.?|#|,|;)\s?\d{1,6})?", re.IGNORECASE)
_DATE = re.compile(r"(\d{4})[-/.]\d{1,2}[-/.]\d{1,2}(?:[T ].*)?|\d{1,2}[-/. ]\d{1,2}[-/. ](\d{4}|\d{2})")
_HAS_LETTER = re.compile(r"[^\W\d_]{2}")


def _is_email(text: str) -> bool:
    found = _EMAIL.search(text) if "@" in text else None
    return found is not None and not found[0].startswith(_NOT_MAILBOXES) and "://" not in text[: found.end()]


def _is_iban(text: str) -> bool:
    from stdnum import iban

    return _IBAN.fullmatch(text) is not None and bool(iban.is_valid(text, check_country=False))


def _is_card(text: str) -> bool:
    from stdnum import luhn

    digits = text.replace(" ", "").replace("-", "")
    return _CARD.fullmatch(digits) is not None and bool(luhn.is_valid(digits))


def _is_ip(text: str) -> bool:
    if text.count(".") != 3 and text.count(":") < 2:
        return False
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_not_version(texts: Sequence[str]) -> bool:
    """Return whether addresses have numbers that versions of programs rarely have."""
    octets = [[int(part) for part in text.split(".")] for text in texts if _is_ip(text) and ":" not in text]
    return not octets or sum(max(parts) >= 100 for parts in octets) >= len(octets) / 2


def _is_phone(text: str) -> bool:
    if _PHONE.fullmatch(text) is None or _DATE.fullmatch(text):
        return False
    return 6 <= sum(map(str.isdigit, re.split(r"(?i)x|ext|#|,|;", text)[0])) <= 16


def _are_written_as_phones(texts: Sequence[str]) -> bool:
    """Return whether texts are telephone numbers even if nothing else says so: by country codes, or separators."""
    if sum(map(_is_international, texts)) >= 0.15 * len(texts):
        return True
    return sum(map(_has_separators, texts)) >= 0.8 * len(texts)


def _is_international(text: str) -> bool:
    import phonenumbers

    if not text.startswith("+"):
        return False
    try:
        return bool(phonenumbers.is_possible_number(phonenumbers.parse(text)))
    except phonenumbers.NumberParseException:
        return False


def _has_separators(text: str) -> bool:
    digits = sum(map(str.isdigit, text))
    return text.startswith(("(", "0", "+")) and 8 <= digits <= 20 and len(text) > digits and text.count(".") != 1


def _is_person(text: str) -> bool:
    return 2 <= len(text) <= 80 and _HAS_NO_DIGIT.fullmatch(text) is not None


_HAS_NO_DIGIT = re.compile(r"[^\d_@/\\:;<>{}\[\]=#%&*+|~^$]+")


def _is_address(text: str) -> bool:
    has_letters = _HAS_LETTER.search(text) is not None or not text.isascii()
    is_other = "@" in text or "://" in text or ":" in text or _UUID_OR_HASH.fullmatch(text) is not None
    return 4 <= len(text) <= 300 and has_letters and not is_other and (" " in text or not text.isascii())


_UUID_OR_HASH = re.compile(r"[0-9a-fA-F-]{16,}")

_FORMATS: dict[Kind, tuple[Callable[[str], bool], float | None, float]] = {
    # Kind -> format, share that is needed without a name (None: never), and with one.
    Kind.EMAIL: (_is_email, 0.1, 0.05),
    Kind.IBAN: (_is_iban, 0.1, 0.05),
    Kind.CARD_NUMBER: (_is_card, 0.6, 0.3),
    Kind.IP_ADDRESS: (_is_ip, 0.9, 0.5),
    Kind.PHONE: (_is_phone, 0.9, 0.6),
    Kind.PERSON_NAME: (_is_person, None, 0.8),
    Kind.POSTAL_ADDRESS: (_is_address, None, 0.6),
}


# --- dates of birth ---


def _birth(sample: Sequence[Value]) -> Verdict | None:
    latest = datetime.now(UTC).year
    years = [_year(value) for value in sample]
    matching = sum(year is not None and latest - 130 <= year <= latest for year in years)
    if matching < max(1, 0.9 * len(years)):
        return None
    return Verdict(Kind.DATE_OF_BIRTH, "name and values", matching, len(years))


def _year(value: Value) -> int | None:
    if isinstance(value, date):
        return value.year
    text = str(int(value)) if isinstance(value, int | float) and value == value // 1 else str(value).strip()
    if re.fullmatch(r"\d{4}|(?:19|20)\d{6}", text):
        return int(text[:4])
    found = _DATE.fullmatch(text)
    if found is None:
        return None
    year = found[1] or found[2]
    return int(year) if len(year) == 4 else 1900 + int(year)


# --- national identifiers ---


class _Identifier(NamedTuple):
    """A national identifier: its module in python-stdnum, if any, and its format without separators.

    It is strong if at most 1 of 50 texts of this format passes by chance. `written` is how it is written, if only
    separators tell it from a number.
    """

    module: str
    shape: str
    is_strong: bool
    written: str = ""


_ROW = re.compile(r"\| ([a-z_.]+) \| (yes|no) \| `(.+?)` \| (?:`(.+?)` )?\|")


@cache
def _identifiers() -> tuple[_Identifier, ...]:
    _, _, *lines = re.findall(r"^\|.*", _text_of_section("identifiers"), re.MULTILINE)
    rows = [_ROW.fullmatch(line) for line in lines]
    if None in rows:
        raise ValueError(f"terms.md: {lines[rows.index(None)]!r} describes no identifier")
    found = [_Identifier(row[1], row[3], row[2] == "yes", row[4] or "") for row in rows if row is not None]
    # The United Kingdom's national insurance number has no check digits.
    nino = r"(?!BG|GB|KN|NK|NT|TN|ZZ)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z]\d{6}[A-D]"
    return (*found, _Identifier("", nino, True))


_LEAST_STRONG, _LEAST_NAMED = 0.8, 0.5
_SHAPED = re.compile(r"(?=(?:.*\d){5})[A-Z0-9]{6,20}")
"""What an identifier without known check digits looks like, such as the number of a passport."""


def _national(texts: Sequence[str], type_class: TypeClass, is_named: bool, is_believed: bool) -> Verdict | None:
    if not is_named and len(texts) < _LEAST_WITHOUT_NAME:
        return None
    compact = [_SEPARATORS.sub("", text).upper() for text in texts]
    best, matching = "", 0
    for identifier in _identifiers():
        needed = _LEAST_NAMED if is_named else _LEAST_STRONG
        if not is_named and not identifier.is_strong and not identifier.written:
            continue
        # The United States' number has no check digits: any nine digits would do under a name such as `pan`.
        needs_separators = not is_named or (not is_believed and identifier.module == "us.ssn")
        fills = is_named and type_class == "number"
        passed = _passed(identifier, texts, compact, needed, needs_separators=needs_separators, fills=fills)
        if passed >= needed * len(texts) and passed > matching:
            best, matching = identifier.module or "gb.nino", passed
    if not matching and is_believed:
        matching = sum(_SHAPED.fullmatch(text) is not None for text in compact)
        if matching < 0.8 * len(texts):
            return None
    if matching < (1 if is_named else 3):
        return None
    return Verdict(Kind.NATIONAL_ID, _BY[is_named], matching, len(texts), best)


def _passed(
    identifier: _Identifier,
    texts: Sequence[str],
    compact: Sequence[str],
    needed: float,
    *,
    needs_separators: bool,
    fills: bool,
) -> int:
    """Return how many texts are such an identifier; 0 as soon as the first ones are far from what is needed."""
    valid = _validator(identifier.module)
    shape, written = re.compile(identifier.shape), re.compile(identifier.written)
    digits = re.fullmatch(r"\\d\{(\d+)\}", identifier.shape)
    length = int(digits[1]) if digits else 0

    def passes(position: int) -> bool:
        number = compact[position]
        if fills and length - 2 <= len(number) < length:
            number = number.zfill(length)  # Numbers have lost their leading zeros.
        if shape.fullmatch(number) is None:
            return False
        if not identifier.written:
            return valid(number)
        is_written = written.fullmatch(texts[position]) is not None
        return (is_written or not needs_separators) and valid(texts[position] if is_written else number)

    count = len(texts)
    first = sum(map(passes, range(min(_FIRST, count))))
    if first < needed * min(_FIRST, count) / 3:
        return 0
    return first + sum(map(passes, range(_FIRST, count)))


@cache
def _validator(module: str) -> Callable[[str], bool]:
    if not module:
        return lambda _: True
    found: Any = importlib.import_module(f"stdnum.{module}")
    return lru_cache(maxsize=1024)(lambda number: bool(found.is_valid(number)))
