"""The rules that files and data sets are checked against: one table, from which the documentation is made."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """How bad it is when a rule is broken."""

    VIOLATION = "violation"
    """The file breaks the specification, or is not what was asked for."""
    WEAKNESS = "weakness"
    """The file is legal and protects less than it could."""
    NOTE = "note"
    """Legal and not weak, and still worth knowing."""


class Scope(Enum):
    """What has to be readable before a rule can be checked."""

    ENVELOPE = "envelope"
    """What is visible without any key."""
    FOOTER = "footer"
    """The footer: with an encrypted one, its key."""
    COLUMN = "column"
    """The modules of columns: the keys of these."""
    CONFIGURATION = "configuration"
    """What a table of the configuration asks for; and the footer."""
    DATA_SET = "data set"
    """All files of a folder together."""


@dataclass(frozen=True)
class Rule:
    """One thing that must hold.

    Attributes:
        id: Short and lasting name.
        section: Of the encryption specification, or what else says so.
        severity: How bad it is when it is broken.
        scope: What has to be readable to check it.
        holds: What must hold.
        gain: What an attacker gains, or who suffers, where it does not.
    """

    id: str
    section: str
    severity: Severity
    scope: Scope
    holds: str
    gain: str


def _rules(severity: Severity, scope: Scope, *rows: tuple[str, str, str, str]) -> tuple[Rule, ...]:
    return tuple(Rule(rule_id, section, severity, scope, holds, gain) for rule_id, section, holds, gain in rows)


_FOREIGN_MODULE = "Whoever can write to the store puts a module of another place or file here, unnoticed."

RULES: tuple[Rule, ...] = (
    *_rules(
        Severity.VIOLATION,
        Scope.ENVELOPE,
        (
            "magic",
            "5.4, 5.5",
            "The file begins and ends with the same magic: PARE with an encrypted footer, else PAR1.",
            "Readers take the file for one of the other kind, or refuse it.",
        ),
        (
            "footer-length",
            "5.4, 5.5",
            "The combined length of footer and crypto metadata or signature fits between the magic bytes.",
            "Readers that trust it read outside of the file.",
        ),
        (
            "footer-thrift",
            "5.2, 5.4, 5.5",
            "FileCryptoMetaData and FileMetaData are Thrift structures with all required fields.",
            "The file is lost: nothing can be found without them.",
        ),
        (
            "draft-2018",
            "5.4",
            "FileCryptoMetaData is not that of the 2018 draft (encrypted_footer, footer_offset, iv_prefix).",
            "No current reader can open the file; drafts bind modules to less, or to nothing.",
        ),
        (
            "draft-2019",
            "5.5",
            "The plaintext footer is not that of the 2019 draft (signed_footer in field 9).",
            "No current reader can open the file; in the draft the signature may be left out.",
        ),
        (
            "encrypted",
            "3",
            "The file is encrypted.",
            "Everything is in plaintext, and anyone can have put the file there.",
        ),
        (
            "algorithm",
            "5.2",
            "Exactly one encryption algorithm is stated, and it is AES_GCM_V1 or AES_GCM_CTR_V1.",
            "Readers cannot know how to decrypt, or two readers take two different algorithms.",
        ),
        (
            "file-unique",
            "4.4.2",
            "aad_file_unique is there: it is part of every AAD suffix.",
            "Modules can be exchanged between files with the same key; other engines cannot read the file.",
        ),
        (
            "prefix-flag",
            "5.2",
            "A file stores its AAD prefix, or says that readers must supply it; never both.",
            "Some readers take the stored prefix where the writer wanted it to come from elsewhere.",
        ),
        (
            "prefix-expected",
            "4.4.1",
            "The AAD prefix is the one that is expected of this file.",
            "The file was exchanged for another one, or for an older version.",
        ),
        (
            "key-material",
            "4.3, PKMT1",
            "Key metadata with a keyMaterialType is PKMT1 key material, or a reference to it, with all fields.",
            "The key cannot be found; readers that are less strict may take another one.",
        ),
        (
            "key-material-kind",
            "4.3, PKMT1",
            "isFooterKey is true in the footer's key material and false in that of columns.",
            "Key material was exchanged between footer and columns.",
        ),
        (
            "key-material-file",
            "4.3, PKMT1",
            "Key material that key metadata refers to is in the key material file beside the Parquet file.",
            "The data is lost: nobody can find its keys.",
        ),
        (
            "key-wrap",
            "4.3, PKMT1",
            "A wrapped DEK unwraps, by its KEK or master key, to an AES key of 128, 192 or 256 bits.",
            "Key material was exchanged or damaged; without that key the data is lost.",
        ),
    ),
    *_rules(
        Severity.WEAKNESS,
        Scope.ENVELOPE,
        (
            "file-unique-length",
            "4.4.2",
            "aad_file_unique has 8 bytes at least, as all known writers make it.",
            "Two files get the same one by chance, and modules can be exchanged between them.",
        ),
        (
            "no-prefix",
            "4.4.1",
            "The file has an AAD prefix.",
            "The whole file can be exchanged for another one, or an older version, with keys that readers have.",
        ),
        (
            "ctr",
            "4.2.2",
            "Pages are authenticated: the algorithm is AES_GCM_V1.",
            "Whoever can write to the store changes values bit by bit, unnoticed.",
        ),
        (
            "kms-named",
            "4.3, PKMT1",
            "Key material names no KMS instance and no KMS URL.",
            "Readers that follow it hand their token to a server of the attacker's choice.",
        ),
        (
            "kek-length",
            "4.3, PKMT1",
            "A KEK is at least as long as the DEKs that it wraps.",
            "The protection of the data is that of the shorter key.",
        ),
    ),
    *_rules(
        Severity.NOTE,
        Scope.ENVELOPE,
        (
            "crypto-fields",
            "5.4",
            "FileCryptoMetaData has no fields but those of the specification.",
            "No key authenticates this structure: what stands there can be anyone's.",
        ),
    ),
    *_rules(
        Severity.VIOLATION,
        Scope.FOOTER,
        (
            "footer-framing",
            "5.1, 5.4",
            "The encrypted footer's module has exactly the length that FileCryptoMetaData leaves it.",
            "Bytes that no key authenticates stand in the footer.",
        ),
        (
            "footer-authentic",
            "4.4.2, 5.4",
            "The encrypted footer authenticates with the AAD of module type 0.",
            "The footer was replaced or altered, and with it all that the file says of itself.",
        ),
        (
            "signature-present",
            "5.5",
            "A plaintext footer is followed by its signature: 12 bytes of nonce and 16 of tag.",
            "Anyone can rewrite the footer: statistics, offsets, which columns are encrypted.",
        ),
        (
            "signature-valid",
            "5.5",
            "The signature of a plaintext footer verifies over the footer's bytes.",
            "The footer was altered: statistics, offsets, which columns are encrypted.",
        ),
        (
            "algorithm-place",
            "5.4, 5.5",
            "encryption_algorithm and footer_signing_key_metadata are set in plaintext footers only.",
            "Two statements of the algorithm can contradict each other.",
        ),
        (
            "algorithm-stated",
            "5.2, 5.5",
            "A plaintext footer with encrypted columns, a key for signing or a signature states the algorithm.",
            "The field was removed, and with it the signature: readers see a file that needs none.",
        ),
        (
            "schema",
            "4.4.2, parquet.thrift",
            "Each row group has one column chunk for each leaf of the schema, in its order.",
            "Column ordinals, and with them AADs, mean different columns to different readers.",
        ),
        (
            "row-group-ordinal",
            "4.4.2, 5.2",
            "RowGroup.ordinal is the position of the row group.",
            "Readers that take the field, and readers that count, build different AADs.",
        ),
        (
            "ordinal-limit",
            "4.4.2",
            "Ordinals of row groups, columns and pages are at most 32,767, the most that a signed short holds.",
            "Ordinals that wrap around give two modules one AAD: they can be exchanged.",
        ),
        (
            "row-count",
            "parquet.thrift",
            "The file's number of rows is the sum of those of its row groups, none of which is negative.",
            "Rows are missing, or counted that are not there.",
        ),
        (
            "crypto-metadata",
            "5.2",
            "Exactly one kind of encryption is set in a chunk's crypto_metadata.",
            "Readers take different keys for one column, or none.",
        ),
        (
            "crypto-metadata-path",
            "5.2",
            "path_in_schema of a column key's crypto metadata is the path of the column.",
            "Readers that look up keys by it take that of another column.",
        ),
        (
            "crypto-metadata-same",
            "3, 5.2",
            "A column is encrypted in the same way, with the same key metadata, in all row groups.",
            "Some row groups of a sensitive column are in plaintext, or under a key that others have.",
        ),
        (
            "crypto-metadata-set",
            "5.2",
            "crypto_metadata is set in each chunk with encrypted column metadata.",
            "Readers take an encrypted column for a plaintext one.",
        ),
        (
            "metadata-hidden",
            "5.4",
            "With an encrypted footer, meta_data is not set for columns with a column key.",
            "Whoever has the footer key sees statistics of columns whose key he lacks.",
        ),
        (
            "metadata-in-place",
            "5.4",
            "With an encrypted footer, columns with the footer key have meta_data and no second, encrypted copy.",
            "Two copies can contradict each other, and readers differ in which one they take.",
        ),
        (
            "metadata-visible",
            "5.5",
            "With a plaintext footer, meta_data is set for all columns.",
            "Older readers cannot find the columns that they may read.",
        ),
        (
            "metadata-encrypted",
            "5.3, 5.5",
            "Columns with a column key, and with a plaintext footer all encrypted ones, have encrypted metadata.",
            "Readers must take what is visible, which is not bound to its place by the column's key.",
        ),
        (
            "metadata-stripped",
            "5.5",
            "A plaintext footer shows no statistics, page encodings or Bloom filter offsets of encrypted columns.",
            "Anyone reads minimum, maximum and counts of a sensitive column.",
        ),
    ),
    *_rules(
        Severity.WEAKNESS,
        Scope.FOOTER,
        (
            "columns-encrypted",
            "3",
            "At least one column of an encrypted file is encrypted.",
            "Anyone reads every value, and may change it: only the footer is protected.",
        ),
        (
            "names-visible",
            "5.4, 5.5",
            "Names and sizes of encrypted columns, and key-value metadata, are hidden by an encrypted footer.",
            "Anyone reads the schema, numbers of values and the application's own metadata.",
        ),
    ),
    *_rules(
        Severity.NOTE,
        Scope.FOOTER,
        (
            "row-group-ordinal-set",
            "5.2",
            "RowGroup.ordinal is set.",
            "Readers that take the field instead of counting cannot read the file.",
        ),
        (
            "padding",
            "5.1, 5.4",
            "Nothing follows the Thrift structure in the plaintext of a module that is one.",
            "Nothing, for it is authentic; it takes space. parquet-java encrypts the unused rest of its buffer.",
        ),
    ),
    *_rules(
        Severity.VIOLATION,
        Scope.COLUMN,
        *(
            (
                f"{name}-authentic",
                "4.4.2, 5.1",
                f"Each {title} authenticates with the AAD of module type {number} and its ordinals.",
                _FOREIGN_MODULE,
            )
            for number, name, title in (
                (1, "column-metadata", "encrypted column metadata"),
                (2, "data-page", "data page (not with AES_GCM_CTR_V1)"),
                (3, "dictionary-page", "dictionary page (not with AES_GCM_CTR_V1)"),
                (4, "data-page-header", "data page header"),
                (5, "dictionary-page-header", "dictionary page header"),
                (6, "column-index", "column index"),
                (7, "offset-index", "offset index"),
                (8, "bloom-filter-header", "Bloom filter header"),
                (9, "bloom-filter-bitset", "Bloom filter bitset"),
            )
        ),
        (
            "metadata-leaked",
            "5.3",
            "What lies between chunks and indexes is not the metadata, in plaintext, of an encrypted column.",
            "Anyone reads minimum, maximum and counts of a sensitive column.",
        ),
        (
            "metadata-path",
            "5.3, parquet.thrift",
            "The metadata of a chunk has all required fields; type and path_in_schema are those of its column.",
            "Readers find columns by different names: values of one column are read as another's.",
        ),
        (
            "metadata-agrees",
            "5.5",
            "What a plaintext footer shows of an encrypted column agrees with its encrypted metadata.",
            "Readers with and without the column key read different bytes.",
        ),
        (
            "layout-range",
            "parquet.thrift",
            "All chunks, indexes and Bloom filters lie between the first magic and the footer, in this file.",
            "Readers read outside of the file, or take footer bytes for data.",
        ),
        (
            "layout-overlap",
            "3, parquet.thrift",
            "No two chunks, indexes or Bloom filters overlap.",
            "One module is read as two, and a small file keeps readers busy for ever.",
        ),
        (
            "module-length",
            "5.1",
            "The length field of each module is the length of what holds it.",
            "Readers that trust it read another module's bytes; bytes after it are authenticated by nobody.",
        ),
        (
            "page-v2-whole",
            "3, 5.1",
            "A data page V2, its levels and its values, is one module.",
            "Levels, which say which values are null and how long lists are, stand in plaintext, authenticated by "
            "nobody. parquet-java is known to write such pages; other engines cannot read them.",
        ),
        (
            "page-header",
            "parquet.thrift",
            "Each page header is a Thrift structure with all required fields and sizes that can be.",
            "The rest of the chunk is lost.",
        ),
        (
            "page-type",
            "4.4.2",
            "A page header's type is that of its module, and only the first page is a dictionary page.",
            "A dictionary page and a data page are taken for each other.",
        ),
        (
            "dictionary-offset",
            "parquet.thrift",
            "dictionary_page_offset is set where an encrypted chunk begins with a dictionary page, only there.",
            "Readers choose the AAD of the first page by it, and fail.",
        ),
        (
            "data-page-offset",
            "parquet.thrift",
            "data_page_offset is where the first data page begins.",
            "Readers that go there first find no page.",
        ),
        (
            "chunk-size",
            "5.1, parquet.thrift",
            "The pages of a chunk, with framing, fill total_compressed_size exactly.",
            "Pages are missing, or bytes follow that belong to no module.",
        ),
        (
            "page-crc",
            "data-pages.md",
            "Where a page header states a CRC, it is that of the page as stored, after encryption.",
            "The page is damaged; with AES_GCM_CTR_V1 nothing else would show that.",
        ),
        (
            "page-size",
            "4.2, parquet.thrift",
            "Without compression, a page's plaintext has the length that its header states.",
            "Framing is counted wrongly, or the page was encrypted with the other algorithm.",
        ),
        (
            "algorithm-of-pages",
            "4.2, 5.4",
            "The pages of a file that states AES_GCM_CTR_V1 were not encrypted with AES-GCM.",
            "The algorithm was exchanged in FileCryptoMetaData, which no key authenticates: readers take garbage "
            "for data.",
        ),
        (
            "page-content",
            "4.1.3, 4.2.2",
            "Pages compressed with Snappy, gzip or Zstandard begin as the output of that codec, for Snappy with "
            "the length in the header; those of AES_GCM_CTR_V1 when they are decrypted with a counter from 1 on.",
            "Readers get garbage: another codec, counter or key was used, or a page without a tag was altered.",
        ),
        (
            "value-count",
            "parquet.thrift",
            "The data pages of a chunk have as many values as its metadata says; those of a column that does not "
            "repeat, as many as its row group has rows.",
            "Pages were left out or added at the end of the chunk.",
        ),
        (
            "offset-index",
            "parquet.thrift",
            "The offset index has offset and size, with framing, of each data page.",
            "Readers that skip by it read other pages than they think.",
        ),
        (
            "offset-index-rows",
            "parquet.thrift",
            "The offset index's first row indexes begin at 0, never decrease, and stay below the number of rows; "
            "in a column that does not repeat, they are the sums of the values before.",
            "Filters select the wrong rows.",
        ),
        (
            "column-index",
            "parquet.thrift",
            "The column index has all required fields, and one entry for each data page in each of its lists.",
            "Filters leave out pages that hold matching rows.",
        ),
        (
            "bloom-filter",
            "parquet.thrift",
            "The header of a Bloom filter has all required fields; header and bitset fill the length stated for "
            "them.",
            "Readers take other bytes for the filter and leave out chunks that hold matching rows.",
        ),
        (
            "row-group-offset",
            "parquet.thrift",
            "RowGroup.file_offset is where the first page of the row group begins.",
            "Spark splits files by it, and reads row groups twice or never.",
        ),
        (
            "row-group-size",
            "parquet.thrift",
            "RowGroup.total_compressed_size is the sum of those of its chunks.",
            "Spark splits files by it where column metadata is hidden.",
        ),
        (
            "nonce-reuse",
            "4.1.3",
            "No two modules under one DEK have the same nonce.",
            "The difference of two plaintexts shows, and with AES-GCM modules can be forged.",
        ),
        (
            "invocations",
            "4.1.4",
            "One DEK encrypts at most 2^32 modules, of which 2^31 are pages.",
            "Random nonces repeat with a probability that is no longer negligible.",
        ),
    ),
    *_rules(
        Severity.WEAKNESS,
        Scope.COLUMN,
        (
            "dek-distinct",
            "5.2, 5.4",
            "No DEK stands under two key names, and none that encrypts the footer is the key of a column's own.",
            "Whoever may read under one of the names reads all that is under the other one.",
        ),
    ),
    *_rules(
        Severity.NOTE,
        Scope.COLUMN,
        (
            "layout-gap",
            "3, 5.1",
            "Every byte between the first magic and the footer belongs to a chunk, an index or a Bloom filter.",
            "No key authenticates what lies between; it can be anyone's, or a leak.",
        ),
    ),
    *_rules(
        Severity.VIOLATION,
        Scope.CONFIGURATION,
        (
            "wanted-columns",
            "configuration",
            "The file has the columns that the table's keys are for.",
            "It is a file of another table, or of an older version of it.",
        ),
        (
            "wanted-encryption",
            "configuration",
            "Columns that the table wants encrypted are encrypted.",
            "Anyone reads them.",
        ),
        (
            "wanted-keys",
            "configuration",
            "Footer and columns are under the keys that the table names.",
            "Others than those who may can read the column.",
        ),
        (
            "wanted-key-length",
            "configuration",
            "DEKs that master keys wrap are as long as the table wants them, at least.",
            "The file is less protected than the table's rules ask for.",
        ),
        (
            "wanted-prefix",
            "configuration",
            "The AAD prefix is not stored in the file where the table does not want it stored.",
            "Anyone reads the identity of the file; nothing encrypts this field (section 4.4.1).",
        ),
        (
            "wanted-algorithm",
            "configuration",
            "The algorithm is the table's.",
            "Pages may not be authenticated where the table wants them to be.",
        ),
        (
            "wanted-footer",
            "configuration",
            "The footer is encrypted where the table does not ask for a plaintext footer.",
            "Anyone reads names, sizes and the application's own metadata.",
        ),
    ),
    *_rules(
        Severity.VIOLATION,
        Scope.DATA_SET,
        (
            "part-missing",
            "4.4.1",
            "All parts of the data set are there: as many as are expected, and all that have key material.",
            "Somebody removed a part: rows are missing, and every file that is left is authentic.",
        ),
        (
            "part-doubled",
            "4.4.1",
            "Where the number of parts is known, each file is one of them, and no number of a part comes twice.",
            "A part stands in the place of another one, or is none: its rows are read twice, or are a stranger's.",
        ),
        (
            "file-copied",
            "4.4.2",
            "No two files have the same aad_file_unique, which is random for each file.",
            "A file was copied, or a writer repeats itself: modules can be exchanged between the two.",
        ),
        (
            "nonce-shared",
            "4.1.3",
            "No two modules of two files under one DEK have the same nonce, unless one is a copy of the other.",
            "The difference of two plaintexts shows, and with AES-GCM modules can be forged.",
        ),
        (
            "invocations-shared",
            "4.1.4",
            "One DEK encrypts at most 2^32 modules of all files together, of which 2^31 are pages.",
            "Random nonces repeat with a probability that is no longer negligible.",
        ),
    ),
    *_rules(
        Severity.WEAKNESS,
        Scope.DATA_SET,
        (
            "prefix-shared",
            "4.4.1",
            "No two files have the same AAD prefix.",
            "One of them can be exchanged for the other, where readers have the keys of both.",
        ),
        (
            "dek-shared",
            "4.1.4, 4.4.2",
            "No DEK encrypts two files.",
            "Nonces and invocations of all of them count together; only AADs keep modules apart.",
        ),
        (
            "plaintext-among",
            "2, 4.4.1",
            "No plaintext file is among encrypted ones.",
            "Anyone reads it, and anyone can have put it there.",
        ),
        (
            "plaintext-passed-over",
            "2",
            "No plaintext Parquet file lies beside encrypted ones under a name that readers pass over.",
            "Anyone reads it. Jobs that were broken off leave such files behind.",
        ),
        (
            "summary-file",
            "5.3",
            "There is no _metadata or _common_metadata beside encrypted files.",
            "It may show footers of all files, with statistics, in plaintext.",
        ),
    ),
    *_rules(
        Severity.NOTE,
        Scope.DATA_SET,
        (
            "part-gap",
            "4.4.1",
            "The numbers of parts, in AAD prefixes or else in names, have no gaps.",
            "A part may have been removed. Some writers leave out numbers of parts without rows.",
        ),
        (
            "part-listed",
            "4.4.1",
            "All files that a _metadata file lists are there.",
            "A part may have been removed; or the list, which nothing authenticates, is an old one.",
        ),
        (
            "same-columns",
            "4.4.1",
            "All files of a data set have the same columns.",
            "A file may be another table's; or the table has changed.",
        ),
    ),
)

RULES_BY_ID = {rule.id: rule for rule in RULES}

FILE_SCOPES = (Scope.ENVELOPE, Scope.FOOTER, Scope.COLUMN, Scope.CONFIGURATION)
"""The scopes of rules that are about one file."""
