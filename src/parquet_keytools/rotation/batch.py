"""A file on its way through a rotation, and the steps that many files take at a time."""

from __future__ import annotations

import contextvars
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

from parquet_keytools.encryption.aad import AadPrefix
from parquet_keytools.errors import KeyMaterialError, KeytoolsError
from parquet_keytools.keys.kek import Kek, dek_of
from parquet_keytools.keys.key_material import KeyMaterial, parse_object
from parquet_keytools.keys.key_wrapping import decode_master_key_id, encode_master_key_id
from parquet_keytools.rotation.data_set_run import FileOutcome, outcome_of
from parquet_keytools.rotation.held_keys import HeldKey, HeldKeys, read_file_keys
from parquet_keytools.rotation.report import FileRotation
from parquet_keytools.rotation.rewrapper import Rewrapped, RewrapTask, WrappedKey
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.strict_base64 import encode


@dataclass(frozen=True)
class KmsInstance:
    """What footer key material says of the KMS, for people."""

    instance_id: str = "DEFAULT"
    instance_url: str = "DEFAULT"


@dataclass(frozen=True)
class NewMaterial:
    """New key material.

    Attributes:
        dek: The DEK that it leads to, by way of what the KMS unwrapped.
    """

    text: str
    dek: SecretBytes


def new_material(
    text: str | bytes, material: KeyMaterial, rewrapped: Rewrapped, instance: KmsInstance | None
) -> NewMaterial:
    """Return key material with its wrapped key replaced; fields that we do not know stay.

    Raises:
        KeyMaterialError: What the KMS unwrapped is not the KEK of the wrapped DEK.
    """
    fields = parse_object(text, "key material")
    fields["masterKeyID"] = _in_the_same_form(material.master_key_id, rewrapped.new_master_key_id)
    dek = dek_of(material, rewrapped.old_key)
    fields["wrappedDEK" if material.kek_id is None else "wrappedKEK"] = rewrapped.wrapped_key
    kek = rewrapped.new_kek
    if kek is not None:
        fields["keyEncryptionKeyID"] = encode(kek.kek_id)
        fields["wrappedDEK"] = kek.wrap_dek(dek)
        if Kek(kek.kek_id, rewrapped.key).unwrap_dek(fields["wrappedDEK"]) != dek:
            raise KeyMaterialError("wrappedDEK: the new KEK does not lead to the same DEK")
    if instance is not None and material.is_footer_key:
        fields["kmsInstanceID"] = instance.instance_id
        fields["kmsInstanceURL"] = instance.instance_url
    return NewMaterial(json.dumps(fields, separators=(",", ":")), dek)


def _in_the_same_form(stored: str, new_master_key_id: str) -> str:
    """Return a master key id percent-encoded if the one before it was: so the file's readers expect it."""
    was_encoded = decode_master_key_id(stored) != stored
    if decode_master_key_id(stored) == new_master_key_id:
        return stored
    return encode_master_key_id(new_master_key_id) if was_encoded else new_master_key_id


FILES_PER_BATCH = 1000
"""For how many files, about, the KMS is asked together."""

BYTES_PER_BATCH = 8 * 1024 * 1024
"""To how many bytes, about, their footers and key material may come; parsed they take many times that."""

FILES_PER_READ = 64


@dataclass
class BatchFile:
    """A file on its way.

    Attributes:
        tasks: For each wrapped key that shall change, what is to be done.
        aad_prefix: The AAD prefix that is expected of the file; None takes what it stores.
        footer_dek: The DEK of its footer, once that is needed and known.
        new: For each wrapped key that changed, what it became.
        unwrapped: The keys of columns that stay, and that the KMS is asked to unwrap.
        was_finished: Whether a key stays because an earlier run of the same rotation made it.
        shares_keys_with: See `FileRotation`.
    """

    location: FileLocation
    keys: HeldKeys | None = None
    tasks: dict[int, tuple[HeldKey, RewrapTask]] = field(default_factory=dict)
    aad_prefix: AadPrefix = None
    footer_dek: SecretBytes | None = None
    new: dict[int, NewMaterial] = field(default_factory=dict)
    unwrapped: set[int] = field(default_factory=set)
    was_finished: bool = False
    made: list[WrappedKey] = field(default_factory=list)
    shares_keys_with: str | None = None
    result: FileRotation | None = None
    failure: KeytoolsError | OSError | None = None

    @property
    def read_keys(self) -> HeldKeys:
        """Its keys; only after they were read."""
        assert self.keys is not None
        return self.keys

    @property
    def size_bytes(self) -> int:
        """How much of the file is kept in memory, before it is parsed."""
        if self.keys is None:
            return 0
        return len(self.keys.tail.data) + len(self.keys.external.content if self.keys.external else b"")

    def outcome(self) -> FileOutcome:
        """What became of it."""
        if self.result is not None:
            return replace(self.result, shares_keys_with=self.shares_keys_with)
        assert self.failure is not None
        return outcome_of(self.location, self.failure)


def read_batch(pool: Executor, locations: Iterator[FileLocation]) -> list[BatchFile]:
    """Read the keys of the next files, as many as one window takes; of none when there are no more."""
    works: list[BatchFile] = []
    size_bytes = 0
    while len(works) < FILES_PER_BATCH and size_bytes < BYTES_PER_BATCH:
        batch = [BatchFile(location) for location in itertools.islice(locations, FILES_PER_READ)]
        if not batch:
            break
        size_bytes += sum(work.size_bytes for work in step(pool, _read, batch))
        works += batch
    return works


def _read(work: BatchFile) -> None:
    work.keys = read_file_keys(work.location)


def step(pool: Executor, function: Callable[[BatchFile], None], works: Sequence[BatchFile]) -> Iterator[BatchFile]:
    """Do a step with each file by itself; yield those that go on: what fails is nothing to the others."""
    return (work for work in step_each(pool, function, works) if work.failure is None)


def step_each(
    pool: Executor, function: Callable[[BatchFile], None], works: Sequence[BatchFile]
) -> Iterator[BatchFile]:
    """Do a step with each file, by several threads; yield each when it is done."""

    def guarded(work: BatchFile) -> BatchFile:
        try:
            function(work)
        except KeyMaterialError as error:
            # What unwraps a key does not know of which file it is.
            named = error.path is not None
            work.failure = error if named else KeyMaterialError(str(error), path=str(work.location))
        except (KeytoolsError, OSError) as error:
            work.failure = error
        return work

    # What is said of the run, such as which files keys are for, is known in its threads, too.
    context = contextvars.copy_context()
    return pool.map(lambda work: context.copy().run(guarded, work), works)
