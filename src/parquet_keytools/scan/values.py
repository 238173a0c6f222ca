"""What the values of a column look like: by format, check digits, and the share of values that have them.

Values pass check digits by chance: one of 11 random numbers of nine digits is a valid Dutch identifier. A verdict
needs a share far above chance, and for identifiers that are only digits and weak check digits also a name.
"""

from __future__ import annotations

import importlib
import ipaddress
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import cache, lru_cache
from typing import Any, Literal

from parquet_keytools.scan.names import Kind, kinds_by_name

Value = str | int | float | date
"""A sampled value. Nothing outside of this package gets one."""

TypeClass = Literal["text", "number", "date", "other"]
"""What a column may hold; `other`, such as a boolean or a time of day, is never personal data here."""

_FIRST = 40
"""How many values are checked for an identifier before the others: most columns have no identifier."""

_LEAST_WITHOUT_NAME = 8
"""How many distinct values a verdict needs that no name supports."""


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
        # Only a name that needs no values to be believed, of a column that could have them.
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


@dataclass(frozen=True)
class _Identifier:
    """A national identifier.

    Attributes:
        module: Its module in python-stdnum; empty if the format is all there is.
        shape: Its format, without separators.
        is_strong: Whether at most 1 of 50 texts of this format passes by chance.
        written: How it is written if only separators tell it from a number; None if that does not matter.
    """

    module: str
    shape: re.Pattern[str]
    is_strong: bool
    written: re.Pattern[str] | None = None

    @property
    def length(self) -> int:
        digits = re.fullmatch(r"\\d\{(\d+)\}", self.shape.pattern)
        return int(digits[1]) if digits else 0


def _identifier(module: str, shape: str, is_strong: bool, written: str = "") -> _Identifier:
    return _Identifier(module, re.compile(shape), is_strong, re.compile(written) if written else None)


_IDENTIFIERS = (
    _identifier("at.vnr", r"\d{10}", False),
    _identifier("be.nn", r"\d{11}", True),
    _identifier("bg.egn", r"\d{10}", True),
    _identifier("br.cpf", r"\d{11}", True),
    _identifier("ca.sin", r"\d{9}", False, r"\d{3}[ -]\d{3}[ -]\d{3}"),
    _identifier("ch.ssn", r"756\d{10}", True),
    _identifier("cl.rut", r"\d{7,8}[\dK]", False, r"[\d.]{7,10}-[\dKk]"),
    _identifier("cn.ric", r"\d{17}[\dX]", True),
    _identifier("cz.rc", r"\d{9,10}", False, r"\d{6}/\d{3,4}"),
    _identifier("de.idnr", r"\d{11}", True),
    _identifier("dk.cpr", r"\d{10}", False, r"\d{6}-\d{4}"),
    _identifier("ee.ik", r"\d{11}", True),
    _identifier("es.dni", r"\d{8}[A-Z]", True),
    _identifier("es.nie", r"[XYZ]\d{7}[A-Z]", True),
    _identifier("fi.hetu", r"\d{6}[A-FU-Y+]?\d{3}[0-9A-Y]", True, r"\d{6}[-+A-FU-Y]\d{3}[0-9A-Y]"),
    _identifier("fr.nir", r"[12]\d{4}[\dAB]\d{9}", True),
    _identifier("gb.nhs", r"\d{10}", False),
    _identifier("gr.amka", r"\d{11}", True),
    _identifier("hr.oib", r"\d{11}", False),
    _identifier("ie.pps", r"\d{7}[A-W][A-IW]?", True),
    _identifier("il.idnr", r"\d{9}", False),
    _identifier("in_.aadhaar", r"\d{12}", False, r"\d{4} \d{4} \d{4}"),
    _identifier("in_.pan", r"[A-Z]{3}[ABCFGHLJPT][A-Z]\d{4}[A-Z]", True),
    _identifier("is_.kennitala", r"\d{10}", True),
    _identifier("it.codicefiscale", r"[A-Z]{6}[\dL-V]{2}[A-EHLMPR-T][\dL-V]{2}[A-Z][\dL-V]{3}[A-Z]", True),
    _identifier("jp.in_", r"\d{12}", False),
    _identifier("kr.rrn", r"\d{13}", True),
    _identifier("lt.asmens", r"\d{11}", True),
    _identifier("mx.curp", r"[A-Z]{4}\d{6}[HM][A-Z]{5}[A-Z\d]\d", True),
    _identifier("nl.bsn", r"\d{9}", False),
    _identifier("no.fodselsnummer", r"\d{11}", True),
    _identifier("pl.pesel", r"\d{11}", True),
    _identifier("pt.cc", r"\d{9}[A-Z0-9]{2}\d", True),
    _identifier("pt.nif", r"\d{9}", False),
    _identifier("ro.cnp", r"\d{13}", True),
    _identifier("se.personnummer", r"(?:\d{2})?\d{10}", True),
    _identifier("si.emso", r"\d{13}", True),
    _identifier("th.pin", r"\d{13}", False, r"\d-\d{4}-\d{5}-\d{2}-\d"),
    _identifier("tr.tckimlik", r"\d{11}", True),
    _identifier("us.ssn", r"\d{9}", False, r"\d{3}-\d{2}-\d{4}"),
    _identifier("za.idnr", r"\d{13}", True),
    # The United Kingdom's national insurance number has no check digits.
    _identifier("", r"(?!BG|GB|KN|NK|NT|TN|ZZ)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z]\d{6}[A-D]", True),
)

_LEAST_STRONG, _LEAST_NAMED = 0.8, 0.5
_SHAPED = re.compile(r"(?=(?:.*\d){5})[A-Z0-9]{6,20}")
"""What an identifier without known check digits looks like, such as the number of a passport."""


def _national(texts: Sequence[str], type_class: TypeClass, is_named: bool, is_believed: bool) -> Verdict | None:
    if not is_named and len(texts) < _LEAST_WITHOUT_NAME:
        return None
    compact = [_SEPARATORS.sub("", text).upper() for text in texts]
    best, matching = "", 0
    for identifier in _IDENTIFIERS:
        needed = _LEAST_NAMED if is_named else _LEAST_STRONG
        if not is_named and not identifier.is_strong and identifier.written is None:
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
    length = identifier.length

    def passes(position: int) -> bool:
        number = compact[position]
        if fills and length - 2 <= len(number) < length:
            number = number.zfill(length)  # Numbers have lost their leading zeros.
        if identifier.shape.fullmatch(number) is None:
            return False
        if identifier.written is None:
            return valid(number)
        is_written = identifier.written.fullmatch(texts[position]) is not None
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
