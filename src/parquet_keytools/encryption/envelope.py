"""The envelope of a file: what it says before any key is used (spec 5.2, 5.4, 5.5); and what finds its keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from parquet_keytools.encryption.protection import Algorithm, FooterMode
from parquet_keytools.errors import DraftFormatError, KeytoolsError, ParquetFormatError
from parquet_keytools.format.file_layout import FooterBytes, refuse_draft_crypto_metadata, refuse_draft_footer
from parquet_keytools.format.structs import Aes, EncryptionAlgorithm, FileCryptoMetaData, FileMetaData
from parquet_keytools.secret_bytes import SecretBytes


class UnknownAlgorithmError(ParquetFormatError):
    """The union of encryption algorithms does not hold exactly one known one."""


@dataclass(frozen=True)
class Envelope:
    """What a file says before any key is used; nothing of it is authenticated, so decide by it only which key.

    Attributes:
        path: The file's name, for error texts.
        mode: As the magic and the footer's fields say.
        algorithm: None in a file that is not encrypted. With an encrypted footer no key ever authenticates it
            (spec 5.4): who does not want CTR compares it with what he expects.
        aad_prefix: As stored, or None.
        aad_file_unique: As stored, or None.
        supply_aad_prefix: Whether a prefix was used that is not stored.
        key_metadata: Of the key that encrypts or signs the footer, or None where the file carries none.
        footer_offset: Where the footer begins, in bytes; pages and indexes lie before it.
        footer_length: Of all that the footer's length covers, in bytes.
        body: With an encrypted footer its module; with a plaintext footer the serialised footer as read. A part of
            `tail`.
        signature: What follows a plaintext footer.
        tail: The file from the footer on, as it was read. Who wants these bytes takes them from here: another read
            may return those of another file.
    """

    path: str
    mode: FooterMode
    algorithm: Algorithm | None
    aad_prefix: bytes | None
    aad_file_unique: bytes | None
    supply_aad_prefix: bool
    key_metadata: bytes | None
    footer_offset: int
    footer_length: int
    body: memoryview = field(repr=False)
    signature: bytes = field(repr=False)
    tail: bytes = field(repr=False)

    @classmethod
    def of(cls, footer: FooterBytes, path: str, read: tuple[FileMetaData, int] | None = None) -> Self:
        """Return the envelope in the bytes of a footer.

        Args:
            footer: The bytes.
            path: The file's name, for error texts.
            read: A plaintext footer and where it ends, where all of it was read already.

        Raises:
            UnknownAlgorithmError: It states no algorithm that is known, or two.
            DraftFormatError: The file follows a draft of the encryption specification.
            ParquetFormatError: The footer is not what the format says.
        """
        data = footer.data
        if footer.is_encrypted:
            crypto, end = FileCryptoMetaData.read(data)
            refuse_draft_crypto_metadata(crypto)
            algorithm, parameters = _algorithm_of(crypto.encryption_algorithm)
            mode, key_metadata = FooterMode.ENCRYPTED_FOOTER, crypto.key_metadata
            body, signature = data[end:], b""
        else:
            protection, end = read or FileMetaData.read_protection(bytes(data))
            refuse_draft_footer(protection)
            body, signature = data[:end], bytes(data[end:])
            key_metadata = protection.footer_signing_key_metadata
            mode, algorithm, parameters = FooterMode.UNENCRYPTED, None, Aes()
            stored = protection.encryption_algorithm
            if stored is not None:
                mode = FooterMode.PLAINTEXT_FOOTER
                algorithm, parameters = _algorithm_of(stored)
        return cls(
            path=path,
            mode=mode,
            algorithm=algorithm,
            # An empty prefix is none: some writers store the field empty.
            aad_prefix=parameters.aad_prefix or None,
            aad_file_unique=parameters.aad_file_unique,
            supply_aad_prefix=bool(parameters.supply_aad_prefix),
            key_metadata=key_metadata,
            footer_offset=footer.offset,
            footer_length=len(data),
            body=body,
            signature=signature,
            tail=footer.tail,
        )


def _algorithm_of(stored: EncryptionAlgorithm) -> tuple[Algorithm, Aes]:
    gcm, ctr = stored.aes_gcm_v1, stored.aes_gcm_ctr_v1
    if gcm is not None and len(stored.struct.fields) == 1:
        return Algorithm.AES_GCM_V1, gcm
    if ctr is not None and len(stored.struct.fields) == 1:
        return Algorithm.AES_GCM_CTR_V1, ctr
    raise UnknownAlgorithmError("the encryption algorithm is none of AES_GCM_V1 and AES_GCM_CTR_V1 (spec 5.2).")


@contextlib.contextmanager
def naming_file(path: str) -> Iterator[None]:
    """Name a file in errors about its format."""
    try:
        yield
    except DraftFormatError as error:
        raise DraftFormatError(str(error), path=path) from None
    except ParquetFormatError as error:
        raise ParquetFormatError(str(error), path=path) from None


class KeyRetriever(Protocol):
    """Finds the DEK that key metadata stands for (spec 4.3)."""

    def footer_dek(self, key_metadata: bytes | None) -> SecretBytes:
        """Return the DEK of the footer.

        Args:
            key_metadata: As the file carries it, or None where it carries none.

        Raises:
            KeytoolsError: The key is unavailable; the error says why.
        """
        ...

    def column_deks(
        self, columns: Sequence[tuple[tuple[str, ...], bytes | None]]
    ) -> list[SecretBytes | KeytoolsError]:
        """Return the DEKs of columns, asked for together so that a KMS can be asked once.

        Args:
            columns: For each column its path in the schema and its key metadata, None where there is none.

        Returns:
            In the same order the DEK, or the error that says why it is unavailable.
        """
        ...
