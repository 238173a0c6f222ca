"""The rows of the rules about what is visible without a key, and about footers; see `rules`."""

from __future__ import annotations

ENVELOPE_VIOLATIONS = (
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
        "file-unique-length",
        "4.4.1, 4.4.2",
        "aad_file_unique has exactly 8 bytes, as all known writers make it.",
        "Where the AAD prefix ends is not known: a file is presented under a prefix that is not its own. "
        "Short ones also repeat by chance.",
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
        "The file was swapped for another one, or for an older version.",
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
)

ENVELOPE_WEAKNESSES = (
    (
        "no-prefix",
        "4.4.1",
        "The file has an AAD prefix.",
        "The whole file can be swapped for another one, or an older version, under keys that readers have.",
    ),
    (
        "ctr",
        "4.2.2",
        "Pages are authenticated: the algorithm is AES_GCM_V1.",
        "Whoever can write to the storage can change values bit by bit, undetected.",
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
)

ENVELOPE_NOTES = (
    (
        "crypto-fields",
        "5.4",
        "FileCryptoMetaData has no fields but those of the specification.",
        "No key authenticates this structure: anyone can have written it.",
    ),
)

FOOTER_VIOLATIONS = (
    (
        "footer-framing",
        "5.1, 5.4",
        "The encrypted footer's module has exactly the length that FileCryptoMetaData leaves it.",
        "The footer contains bytes that no key authenticates.",
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
        "Whoever has the footer key sees statistics of columns whose keys they lack.",
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
        "A plaintext footer shows of encrypted columns what the format requires and where pages lie, and "
        "nothing else: no statistics, page encodings, Bloom filters, key-value metadata, unknown fields.",
        "Anyone reads minimum, maximum and counts of a sensitive column.",
    ),
)

FOOTER_WEAKNESSES = (
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
    (
        "footer-values",
        "5.5",
        "Beside encrypted columns, a plaintext footer has no key-value metadata that may hold values (pandas, "
        "geo, all that does not say the schema only), no unknown fields, and does not say that rows are "
        "sorted by an encrypted column.",
        "Anyone reads bounds of an index, names of categories, bounding boxes, or the order of values.",
    ),
)

FOOTER_NOTES = (
    (
        "row-group-ordinal-set",
        "5.2",
        "RowGroup.ordinal is set.",
        "Readers that take the field instead of counting cannot read the file.",
    ),
    (
        "field-types",
        "parquet.thrift",
        "Optional fields of the footer have the types that the format gives them.",
        "Readers skip such a field, like an unknown one: its writer is misunderstood.",
    ),
    (
        "padding",
        "5.1, 5.4",
        "Nothing follows the Thrift structure in the plaintext of a module that is one.",
        "Nothing, for it is authentic; it takes space. parquet-java encrypts the unused rest of its buffer.",
    ),
)
