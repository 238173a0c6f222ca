"""The rows of the rules about columns, what a configuration asks for, and data sets; see `rules`."""

from __future__ import annotations

_FOREIGN_MODULE = "Whoever can write to the storage can put a module of another place or file here, undetected."

COLUMN_VIOLATIONS = (
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
        "The bytes between chunks and indexes are not plaintext metadata of an encrypted column.",
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
        "All chunks, indexes and Bloom filters are between the first magic and the footer, in this file.",
        "Readers read outside of the file, or take footer bytes for data.",
    ),
    (
        "layout-overlap",
        "3, parquet.thrift",
        "No two chunks, indexes or Bloom filters overlap.",
        "One module is read as two, and a small file can keep readers busy forever.",
    ),
    (
        "module-length",
        "5.1",
        "The length field of each module is the length of what holds it.",
        "Readers that trust it read another module's bytes; nothing authenticates bytes after it.",
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
        "The header of a Bloom filter has all required fields; header and bitset fill the length stated for them.",
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
)

COLUMN_WEAKNESSES = (
    (
        "dek-distinct",
        "5.2, 5.4",
        "No DEK has two key names, and no DEK of the footer is also a column's own key.",
        "Whoever may use one of the names can read everything under the other.",
    ),
)

COLUMN_NOTES = (
    (
        "layout-gap",
        "3, 5.1",
        "Every byte between the first magic and the footer belongs to a chunk, an index or a Bloom filter.",
        "No key authenticates these bytes; anyone can have written them, or they are a leak.",
    ),
)

CONFIGURATION_VIOLATIONS = (
    (
        "wanted-columns",
        "configuration",
        "The file has the columns that the table's keys are for.",
        "It is a file of another table, or of an older version of it.",
    ),
    (
        "wanted-encryption",
        "configuration",
        "Columns that the table encrypts are encrypted.",
        "Anyone reads them.",
    ),
    (
        "wanted-keys",
        "configuration",
        "Footer and columns are under the keys that the table names.",
        "Users without permission can read the column.",
    ),
    (
        "wanted-key-length",
        "configuration",
        "DEKs that master keys wrap are at least as long as the table demands.",
        "The file is less protected than the table demands.",
    ),
    (
        "wanted-prefix",
        "configuration",
        "The AAD prefix is stored in the file only if the table stores it.",
        "Anyone reads the identity of the file; nothing encrypts this field (section 4.4.1).",
    ),
    (
        "wanted-algorithm",
        "configuration",
        "The algorithm is the table's.",
        "Pages may not be authenticated although the table demands it.",
    ),
    (
        "wanted-footer",
        "configuration",
        "The footer is encrypted unless the table has a plaintext footer.",
        "Anyone reads names, sizes and the application's own metadata.",
    ),
)

DATA_SET_VIOLATIONS = (
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
        "A part replaces another one, or is not a part: its rows are read twice, or are foreign.",
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
)

DATA_SET_WEAKNESSES = (
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
        "No plaintext Parquet file is beside encrypted ones under a name that readers skip.",
        "Anyone reads it. Interrupted jobs leave such files behind.",
    ),
    (
        "summary-file",
        "5.3",
        "There is no _metadata or _common_metadata beside encrypted files.",
        "It may show footers of all files, with statistics, in plaintext.",
    ),
)

DATA_SET_NOTES = (
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
)
