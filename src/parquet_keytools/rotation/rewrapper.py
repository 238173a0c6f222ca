"""Re-wraps wrapped keys, each distinct one once in a run, and unwraps what came back.

Where the KMS re-wraps by itself, the old key is never unwrapped here; the new one is. It is proven by what it
opens: a KEK by the DEKs that it unwraps, and a DEK by the footer or the column metadata that it decrypts.

Where it does not, and on the way to another KMS, the old key has to be unwrapped here. Then fresh KEKs, one for
each master key, replace the old ones: an old KEK costs one request in place of three, and no KEK is valid in two
KMSs. A DEK that the KMS itself wrapped costs three: it is unwrapped, wrapped, and unwrapped again as the proof.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from parquet_keytools.errors import (
    KeyMaterialError,
    KmsError,
    KmsResponseInvalidError,
    KmsUnavailableError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
)
from parquet_keytools.keys.kek import Kek, dek_of
from parquet_keytools.keys.key_material import KeyMaterial, parse_object
from parquet_keytools.keys.key_wrapping import decode_master_key_id, encode_master_key_id
from parquet_keytools.kms.client import KmsClient, RewrapRequest, UnwrapRequest, WrapRequest
from parquet_keytools.rotation.report import KmsCalls
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.strict_base64 import encode


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """A wrapped key, and the master key that wrapped it, as the KMS knows it."""

    master_key_id: str
    wrapped_key: str


@dataclass(frozen=True, slots=True)
class RewrapTask:
    """A wrapped key to re-wrap.

    Attributes:
        new_master_key_id: The master key whose current version shall wrap it.
        is_kek: Whether it is a KEK: then the wrapped DEK proves what it unwraps to, else it is compared.
    """

    old: WrappedKey
    new_master_key_id: str
    is_kek: bool


@dataclass(frozen=True)
class Rewrapped:
    """What a wrapped key became.

    Attributes:
        new_kek: The fresh KEK that took the place of the old one; None where the key is the same.
        old_key: With a fresh KEK the old one, else the same as `key`.
        was_there: Whether an earlier run did it: the wrapped key is that of the new KMS already.
    """

    wrapped_key: str
    new_master_key_id: str
    key: SecretBytes
    new_kek: Kek | None
    old_key: SecretBytes
    was_there: bool = False


REMEMBERED_KEYS = 100_000
"""How many distinct keys a run remembers, so that a KEK of many files is rewrapped once."""

K = TypeVar("K")
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """What was found last; what was not used for longest goes first."""

    def __init__(self) -> None:
        self._values: OrderedDict[K, V] = OrderedDict()

    def split(self, wanted: Iterable[K], found: dict[K, V] | dict[K, V | KmsError]) -> list[K]:
        """Put into `found` what is known, and return the rest, each once."""
        missing = []
        for key in dict.fromkeys(wanted):
            if key in self._values:
                self._values.move_to_end(key)
                found[key] = self._values[key]
            else:
                missing.append(key)
        return missing

    def remember(self, key: K, value: V) -> None:
        """Keep what was found."""
        self._values[key] = value
        if len(self._values) > REMEMBERED_KEYS:
            self._values.popitem(last=False)


class Rewrapper:
    """Rewraps for one run; forgets everything with it.

    Args:
        kms: The KMS whose master keys wrapped what is there.
        new_kms: The one whose master keys shall wrap it; None for the same.
        new_keks: Whether fresh KEKs take the place of all that are there, also where the KMS could re-wrap them.
        only_count: Whether to count what would be asked, and ask nothing.
        given: What the KMS has re-wrapped already, or refused to; it is proven here all the same.
    """

    def __init__(
        self,
        kms: KmsClient,
        new_kms: KmsClient | None = None,
        *,
        new_keks: bool = False,
        only_count: bool = False,
        given: Mapping[RewrapTask, str | KmsError] | None = None,
    ) -> None:
        self._kms = kms
        self._new_kms = kms if new_kms is None else new_kms
        self._new_keks = new_keks
        self._only_count = only_count
        self._given = given or {}
        self._rewrapped: Remembered[RewrapTask, Rewrapped] = Remembered()
        self._unwrapped: Remembered[WrappedKey, SecretBytes] = Remembered()
        self._counted: Remembered[RewrapTask, None] = Remembered()
        self._counted_staying: Remembered[WrappedKey, None] = Remembered()
        self._counted_keks: set[str] = set()
        self._fresh_keks: dict[tuple[str, int], tuple[Kek, str, SecretBytes]] = {}
        self._calls: Counter[str] = Counter()
        self._expected: Counter[str] = Counter()
        self._answers = 0
        self._unreachable: KmsUnavailableError | None = None

    @property
    def calls(self) -> KmsCalls:
        """What the KMS was asked for."""
        return KmsCalls(**self._calls)

    @property
    def expected_calls(self) -> KmsCalls:
        """What a dry run would have asked for."""
        return KmsCalls(**self._expected)

    def take_unreachable(self) -> KmsUnavailableError | None:
        """Return the KMS's last error if it answered nothing at all since this was asked last."""
        error = self._unreachable if self._answers == 0 else None
        self._answers, self._unreachable = 0, None
        return error

    def unwrap(self, wanted: Iterable[WrappedKey]) -> dict[WrappedKey, SecretBytes | KmsError]:
        """Return what the KMS unwraps keys to that stay as they are."""
        found: dict[WrappedKey, SecretBytes | KmsError] = {}
        missing = self._unwrapped.split(wanted, found)
        for key, outcome in zip(missing, self._unwrap(self._kms, missing), strict=True):
            found[key] = outcome
            if not isinstance(outcome, KmsError):
                self._unwrapped.remember(key, outcome)
        return found

    def expect_unwraps(self, wanted: Iterable[WrappedKey]) -> None:
        """Count keys that stay as they are, and that the rotation itself would have to unwrap all the same."""
        for key in self._counted_staying.split(wanted, {}):
            self._counted_staying.remember(key, None)
            self._expected.update(unwrap=1)

    def rewrap(self, wanted: Iterable[RewrapTask]) -> dict[RewrapTask, Rewrapped | KmsError]:
        """Return what wrapped keys became; the KMS is asked for all that are new together."""
        if self._only_count:
            self._count(wanted)
            return {}
        found: dict[RewrapTask, Rewrapped | KmsError] = {}
        missing = self._rewrapped.split(wanted, found)
        moved = [task for task in missing if self.is_unwrapped(task)]
        inside = [task for task in missing if not self.is_unwrapped(task)]
        found.update(zip(moved, self._wrap_anew(moved), strict=True))
        found.update(zip(inside, self._rewrap_inside(inside), strict=True))
        for task in missing:
            outcome = found[task]
            if not isinstance(outcome, KmsError):
                self._rewrapped.remember(task, outcome)
        return found

    def is_unwrapped(self, task: RewrapTask) -> bool:
        """Return whether a key has to be seen here: another KMS wraps it, or another KEK takes its place."""
        if self._new_kms is not self._kms:
            return True
        old, new = task.old.master_key_id, task.new_master_key_id
        return task.is_kek and (self._new_keks or not self._kms.rewraps_by_itself(old, new))

    def _count(self, wanted: Iterable[RewrapTask]) -> None:
        for task in self._counted.split(wanted, {}):
            self._counted.remember(task, None)
            if not self.is_unwrapped(task):
                self._expected.update(rewrap=1, unwrap=1)
            elif not task.is_kek:
                self._expected.update(unwrap=2, wrap=1)
            else:
                self._expected.update(unwrap=1)
                # A fresh KEK for each master key; its length is that of the old one, which only the KMS can show.
                if task.new_master_key_id not in self._counted_keks:
                    self._counted_keks.add(task.new_master_key_id)
                    self._expected.update(unwrap=1, wrap=1)

    def _rewrap_inside(self, tasks: Sequence[RewrapTask]) -> list[Rewrapped | KmsError]:
        """Have the KMS rewrap, and unwrap what it made."""
        wrapped = {task: self._given[task] for task in tasks if task in self._given}
        missing = [task for task in tasks if task not in wrapped]
        requests = [
            RewrapRequest(task.old.wrapped_key, task.old.master_key_id, task.new_master_key_id) for task in missing
        ]
        if requests:
            wrapped |= zip(missing, self._asked("rewrap", self._kms.rewrap_many(requests)), strict=True)
        return self._proven(self._kms, tasks, [wrapped[task] for task in tasks])

    def _wrap_anew(self, tasks: Sequence[RewrapTask]) -> list[Rewrapped | KmsError]:
        """Unwrap, and have the KMS wrap fresh KEKs or the same DEKs, and unwrap what it made."""
        old_keys = self._unwrap(self._kms, [task.old for task in tasks])
        usable: dict[RewrapTask, SecretBytes] = {}
        outcomes: dict[RewrapTask, Rewrapped | KmsError] = {}
        for task, key in zip(tasks, old_keys, strict=True):
            if isinstance(key, KmsError):
                outcomes[task] = key
            else:
                usable[task] = key
        outcomes.update(self._moved_before(outcomes))
        outcomes.update(self._with_fresh_keks({task: key for task, key in usable.items() if task.is_kek}))
        same = [task for task in usable if not task.is_kek]
        wrapped = self._wrap([WrapRequest(usable[task], task.new_master_key_id) for task in same])
        for task, outcome in zip(same, self._proven(self._new_kms, same, wrapped), strict=True):
            is_other = isinstance(outcome, Rewrapped) and outcome.key != usable[task]
            outcomes[task] = self._not_the_same("rewrap", task.new_master_key_id) if is_other else outcome
        return [outcomes[task] for task in tasks]

    def _with_fresh_keks(self, old_keys: dict[RewrapTask, SecretBytes]) -> dict[RewrapTask, Rewrapped | KmsError]:
        """Give each master key one fresh KEK of each length for the whole run."""
        wanted = {(task.new_master_key_id, key.length_bits) for task, key in old_keys.items()}
        missing = sorted(wanted - self._fresh_keks.keys())
        keks = [Kek.generate(length_bits) for _, length_bits in missing]
        new_ids = [master_key_id for master_key_id, _ in missing]
        wrapped = self._wrap([WrapRequest(kek.key, new_id) for kek, new_id in zip(keks, new_ids, strict=True)])
        keys = self._unwrap_new(self._new_kms, new_ids, wrapped)
        failed: dict[tuple[str, int], KmsError] = {}
        for kind, kek, new, key in zip(missing, keks, wrapped, keys, strict=True):
            if isinstance(new, KmsError):
                failed[kind] = new
            elif isinstance(key, KmsError):
                failed[kind] = key
            elif key != kek.key:
                failed[kind] = self._not_the_same("wrap", kind[0])
            else:
                self._fresh_keks[kind] = (kek, new, key)
        outcomes: dict[RewrapTask, Rewrapped | KmsError] = {}
        for task, old_key in old_keys.items():
            kind = (task.new_master_key_id, old_key.length_bits)
            if kind in failed:
                outcomes[task] = failed[kind]
            else:
                kek, new_wrapped, fresh = self._fresh_keks[kind]
                outcomes[task] = Rewrapped(new_wrapped, task.new_master_key_id, fresh, kek, old_key)
        return outcomes

    def _moved_before(self, failed: Mapping[RewrapTask, Rewrapped | KmsError]) -> dict[RewrapTask, Rewrapped]:
        """Find the keys that an earlier run, which was cut off, moved to the other KMS."""
        if self._new_kms is self._kms:
            return {}
        unknown = [
            task
            for task, error in failed.items()
            if isinstance(error, WrappedKeyInvalidError | MasterKeyNotFoundError)
        ]
        # What was moved says where it is, which in the KMS that it came from may be the name of another key.
        keys = self._unwrap(self._new_kms, [task.old for task in unknown])
        return {
            task: Rewrapped(task.old.wrapped_key, task.old.master_key_id, key, None, key, was_there=True)
            for task, key in zip(unknown, keys, strict=True)
            if not isinstance(key, KmsError)
        }

    def _proven(
        self, kms: KmsClient, tasks: Sequence[RewrapTask], wrapped: Sequence[str | KmsError]
    ) -> list[Rewrapped | KmsError]:
        """Return what wrapped keys became, given the new ones: what the KMS unwraps these to is the proof."""
        keys = self._unwrap_new(kms, [task.new_master_key_id for task in tasks], wrapped)
        return [
            new
            if isinstance(new, KmsError)
            else (key if isinstance(key, KmsError) else Rewrapped(new, task.new_master_key_id, key, None, key))
            for task, new, key in zip(tasks, wrapped, keys, strict=True)
        ]

    def _not_the_same(self, operation: str, master_key_id: str) -> KmsError:
        return KmsResponseInvalidError(
            "the new wrapped key does not unwrap to the same key",
            backend=self._new_kms.backend,
            operation=operation,
            master_key_id=master_key_id,
        )

    # --- the KMS, counted ---

    def _wrap(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return self._asked("wrap", self._new_kms.wrap_many(requests)) if requests else []

    def _unwrap(self, kms: KmsClient, keys: Sequence[WrappedKey]) -> list[SecretBytes | KmsError]:
        if not keys:
            return []
        requests = [UnwrapRequest(key.wrapped_key, key.master_key_id) for key in keys]
        return self._asked("unwrap", kms.unwrap_many(requests))

    def _unwrap_new(
        self, kms: KmsClient, new_master_key_ids: Sequence[str], wrapped: Sequence[str | KmsError]
    ) -> list[SecretBytes | KmsError]:
        """Unwrap what was just made; where there is nothing, the error is that."""
        made = [
            WrappedKey(new_id, new)
            for new_id, new in zip(new_master_key_ids, wrapped, strict=True)
            if not isinstance(new, KmsError)
        ]
        keys = iter(self._unwrap(kms, made))
        return [new if isinstance(new, KmsError) else next(keys) for new in wrapped]

    def _asked(self, operation: str, outcomes: list[V | KmsError]) -> list[V | KmsError]:
        self._calls[operation] += len(outcomes)
        for outcome in outcomes:
            if isinstance(outcome, KmsUnavailableError):
                self._unreachable = outcome
            else:
                self._answers += 1
        return outcomes


# --- key material ---


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
