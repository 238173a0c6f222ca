"""What the name of a column says about its values, in several languages.

Terms are phrases. `birth date` also stands for `birthDate`, `BIRTH_DATE` and `birthdate`: names are split into
words, accents are left out, and digits are ignored.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from enum import StrEnum


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
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    Kind.EMAIL: "e-mail addresses",
    Kind.IBAN: "bank accounts (IBAN)",
    Kind.CARD_NUMBER: "payment card numbers",
    Kind.NATIONAL_ID: "national identifiers",
    Kind.IP_ADDRESS: "IP addresses",
    Kind.DATE_OF_BIRTH: "dates of birth",
    Kind.PHONE: "telephone numbers",
    Kind.PERSON_NAME: "names of persons",
    Kind.POSTAL_ADDRESS: "postal addresses",
}


def _words_in(text: str) -> frozenset[str]:
    return frozenset(text.split())


# English, German, French, Spanish, Italian, Portuguese, Dutch, Polish, Swedish, Turkish; Japanese, Chinese, Hindi.
_TERMS = {
    Kind.EMAIL: """
        email, e mail, mail, mail address, email address, mailadresse, emailadresse, courriel, adresse mail,
        adresse electronique, correo, correo electronico, posta elettronica, indirizzo email, correio
        eletronico, endereco eletronico, emailadres, poczta, adres email, epost, e post, epostadress,
        eposta, e posta, meru, denshi meeru, youxiang, dianzi youjian,
        メール, メールアドレス, 电子邮件, 邮箱, 電子郵件, ईमेल""",
    Kind.IBAN: """
        iban, bank account, account number, bank account number, bankverbindung, kontonummer, compte
        bancaire, numero compte, rib, cuenta bancaria, numero cuenta, conto corrente, coordinate bancarie,
        conta bancaria, rekeningnummer, bankrekening, numer konta, rachunek bankowy, bankkonto, hesap no,
        banka hesabi, koza bango, yinhang zhanghao, khata sankhya, 口座番号, 银行账号, खाता संख्या""",
    Kind.CARD_NUMBER: """
        card number, card no, cardnumber, credit card, creditcard, debit card, payment card, cc number, cc
        num, ccn, pan, kartennummer, kreditkarte, kreditkartennummer, carte bancaire, numero carte, carte
        credit, tarjeta, tarjeta credito, numero tarjeta, carta credito, numero carta, cartao, cartao
        credito, numero cartao, creditcardnummer, kaartnummer, karta kredytowa, numer karty, kortnummer,
        kreditkort, kart no, kart numarasi, kredi karti, kado bango, xinyongka, カード番号, 信用卡, 信用卡号, कार्ड
        संख्या""",
    Kind.NATIONAL_ID: """
        ssn, social security, social security number, social insurance number, national insurance number,
        nino, national id, national identifier, identity number, identity card, id card, id number, nhs
        number, passport, passport number, tax id, taxpayer id, tax file number, personal id, personal
        number, driver license, drivers license, driving licence, sozialversicherungsnummer,
        versichertennummer, steuer id, steuernummer, steueridentifikationsnummer, personalausweis,
        ausweisnummer, reisepass, passnummer, numero securite sociale, securite sociale, num secu, carte
        identite, passeport, dni, nif, documento identidad, seguridad social, cedula, cedula identidad,
        curp, pasaporte, codice fiscale, cod fiscale, codicefiscale, carta identita, passaporto, cpf, cartao
        cidadao, numero contribuinte, passaporte, bsn, burgerservicenummer, sofinummer, paspoort, pesel,
        numer pesel, dowod osobisty, paszport, personnummer, personnr, tc kimlik, tckn, tc no, kimlik no,
        kimlik numarasi, pasaport, my number, mynumber, kojin bango, shenfenzheng, shenfenzheng hao,
        aadhaar, aadhar, pahchan sankhya, マイナンバー, 個人番号, 身份证, 身份证号, आधार, आधार संख्या""",
    Kind.IP_ADDRESS: """
        ip, ipv, ip address, ip addr, ipaddress, ipaddr, client ip, remote ip, remote addr, source ip, user
        ip, host ip, ip adresse, adresse ip, direccion ip, indirizzo ip, endereco ip, ip adres, adres ip, ip
        adress, ip adresi, aipi adoresu, ip dizhi, ipアドレス, ip地址, आईपी""",
    Kind.DATE_OF_BIRTH: """
        birth, birth date, birthday, birth year, birth dt, date of birth, dob, born, born on, year of birth,
        geburtsdatum, geburtstag, geburtsjahr, geb datum, gebdat, date naissance, date de naissance,
        naissance, annee naissance, ne le, fecha nacimiento, fecha de nacimiento, nacimiento, f nacimiento,
        data nascita, data di nascita, nascita, data nascimento, data de nascimento, nascimento, dt
        nascimento, geboortedatum, geboorte, geboortejaar, data urodzenia, urodzenia, fodelsedatum,
        fodelsedag, fodelsear, dogum tarihi, dogum, seinengappi, tanjobi, chusheng riqi, shengri, janm
        tithi, janmtithi, janmdin, 生年月日, 誕生日, 出生日期, 生日, जन्म तिथि, जन्मतिथि""",
    Kind.PHONE: """
        phone, phone number, phone no, telephone, tel, tel no, mobile, mobile number, mobile phone, cell,
        cell phone, cellphone, fax, msisdn, whatsapp, telefon, telefonnummer, tel nr, handy, handynummer,
        mobilnummer, rufnummer, mobiltelefon, telephone portable, num tel, numero telephone, portable,
        telefono, numero telefono, celular, movil, telefono movil, cellulare, recapito, telefone, telemovel,
        telefoon, telefoonnummer, mobiel, gsm, numer telefonu, nr tel, komorka, telefonu, mobil, telefon no,
        telefon numarasi, cep telefonu, cep tel, denwa, denwa bango, keitai, dianhua, shouji, shouji hao,
        fon, durbhash, mobail, 電話, 電話番号, 携帯, 电话, 电话号码, 手机, 手机号, फोन, मोबाइल, दूरभाष""",
    Kind.PERSON_NAME: """
        first name, firstname, fname, given name, last name, lastname, lname, surname, forename, family
        name, middle name, maiden name, full name, fullname, person name, customer name, contact name,
        patient name, employee name, passenger name, guest name, member name, client name, recipient name,
        sender name, owner name, cardholder, cardholder name, account holder, subscriber name, applicant
        name, student name, author name, vorname, nachname, familienname, geburtsname, kundenname,
        ansprechpartner, prenom, nom famille, nom de famille, nom complet, nom client, nom prenom, apellido,
        apellidos, primer apellido, segundo apellido, primer nombre, segundo nombre, nombre completo, nombre
        apellidos, nombre cliente, cognome, nome battesimo, nome di battesimo, nome cognome, nome completo,
        nome cliente, sobrenome, apelido, primeiro nome, prenome, voornaam, achternaam, volledige naam,
        klantnaam, tussenvoegsel, imie, nazwisko, imie nazwisko, imie i nazwisko, fornamn, efternamn, hela
        namn, hela namnet, kundnamn, adi soyadi, ad soyad, soyad, soyadi, musteri adi, shimei, namae,
        xingming, pura naam, upnaam, 氏名, 名前, 姓名, 苗字, पूरा नाम, उपनाम""",
    Kind.POSTAL_ADDRESS: """
        street, street address, address, address line, addr line, home address, postal address, mailing
        address, billing address, shipping address, delivery address, residence, strasse, strasse
        hausnummer, str hausnummer, anschrift, postanschrift, adresse, wohnanschrift, rue, adresse postale,
        adresse domicile, direccion, direccion postal, calle, domicilio, indirizzo, indirizzo residenza,
        residenza, via civico, endereco, logradouro, rua, morada, adres, straat, straatnaam, woonadres,
        ulica, adres zamieszkania, gatuadress, adress, gata, bostadsadress, adresi, ev adresi, sokak, jusho,
        dizhi, zhuzhi, pata, 住所, 地址, 住址, पता""",
}

_NEED_CHECK_DIGITS = _words_in("sin nir nie nss rg pan cf tin nit nik rfc ric cpr egn cnp rut hetu oib jmbg")
"""National identifiers whose names are also ordinary abbreviations: they need valid check digits."""

_OTHERWISE = _words_in(
    """
    hash hashed sha md digest token count cnt counts flag is has had type status state domain provider
    verified valid sent opt optin optout version format template length len subject campaign enabled score
    rate price cost fee amount pct percent avg average sum code carrier model brand plan country region
    category ratio error bounce bounced opened clicked preference preferred language lang locale size weight
    order place rank class category tag label group kind typ typen anzahl statut nombre tipo soort aantal
    rodzaj antal tur bucket scheme file path url uri host port table column schema product company airport
    airline event game song film title species
    """
)
"""Words beside a term with which a column is about something else, such as `email_sent` or `birth_country`."""

_GENERIC = _words_in("value number nr no num text raw primary main home work private string data full")
"""Names of fields that say nothing: their parent counts."""

_STRUCTURE = _words_in("list element item items array bag array_element key_value map entries key value")
"""Names that Parquet gives to the parts of lists and maps."""

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


@functools.cache
def _vocabulary() -> dict[Kind, frozenset[str]]:
    return {
        kind: frozenset("".join(words_of(term)) for term in terms.split(",")) for kind, terms in _TERMS.items()
    }


def named_parts(path: Sequence[str]) -> list[str]:
    """Return the names in a path that somebody chose, which are not parts of a list or a map."""
    return [part for part in path if part.casefold() not in _STRUCTURE] or list(path[-1:])


@functools.lru_cache(maxsize=4096)
def kinds_by_name(path: tuple[str, ...]) -> dict[Kind, bool]:
    """Return kind -> whether values of the usual shape are enough; otherwise they need valid check digits."""
    *parents, leaf = named_parts(path)
    own = words_of(leaf)
    above = words_of(parents[-1]) if parents else []
    if own and all(word in _GENERIC for word in own) and above:
        own, above = [*above, *own], []
    found = {}
    for kind, terms in _vocabulary().items():
        if any(not _OTHERWISE.intersection(rest) for rest in _rests(own, above, terms)):
            found[kind] = True
    if Kind.NATIONAL_ID not in found and _NEED_CHECK_DIGITS.intersection(own):
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
