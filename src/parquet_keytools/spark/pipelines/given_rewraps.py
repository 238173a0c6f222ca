"""Wrapped keys that the driver had wrapped anew, once each, and their proof where they are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from parquet_keytools.errors import KmsError, MasterKeyNotFoundError, WrappedKeyInvalidError
from parquet_keytools.kms.client import KmsClient, RewrapRequest, UnwrapRequest, WrapRequest
from parquet_keytools.rotation.master_key_versions import MasterKeyVersions
from parquet_keytools.rotation.rewrap_task import Rewrapped, RewrapTask
from parquet_keytools.rotation.rewrapper import Rewrapper

KEYS_A_BATCH = 1000
"""For so many the KMS client is asked together."""


@dataclass(frozen=True, slots=True)
class GivenKey:
    """What the driver got for a wrapped key. No secret.

    Attributes:
        wrapped_key: The new one.
        was_there: Whether an earlier run did it: it is that of the new KMS already.
    """

    wrapped_key: str
    was_there: bool = False


Given = Mapping[RewrapTask, GivenKey | KmsError]


def rewrap_each_once(
    kms: KmsClient, new_kms: KmsClient, tasks: Sequence[RewrapTask]
) -> dict[RewrapTask, GivenKey | KmsError]:
    """Have each wrapped key wrapped anew, once; what came back is proven where it is used."""
    found: dict[RewrapTask, GivenKey | KmsError] = {}
    for start in range(0, len(tasks), KEYS_A_BATCH):
        batch = tasks[start : start + KEYS_A_BATCH]
        if new_kms is kms:
            requests = [RewrapRequest(t.old.wrapped_key, t.old.master_key_id, t.new_master_key_id) for t in batch]
            for task, new in zip(batch, kms.rewrap_many(requests), strict=True):
                found[task] = new if isinstance(new, KmsError) else GivenKey(new)
        else:
            found |= _move(kms, new_kms, batch)
    return found


def _move(
    kms: KmsClient, new_kms: KmsClient, tasks: Sequence[RewrapTask]
) -> dict[RewrapTask, GivenKey | KmsError]:
    """Unwrap with one KMS and wrap with another one."""
    old = kms.unwrap_many([UnwrapRequest(task.old.wrapped_key, task.old.master_key_id) for task in tasks])
    found: dict[RewrapTask, GivenKey | KmsError] = {}
    keys = {}
    unknown = []
    for task, key in zip(tasks, old, strict=True):
        if not isinstance(key, KmsError):
            keys[task] = key
        else:
            found[task] = key
            if isinstance(key, WrappedKeyInvalidError | MasterKeyNotFoundError):
                unknown.append(task)
    # An earlier run that was cut off may have moved some: these say where they are.
    there = new_kms.unwrap_many([UnwrapRequest(t.old.wrapped_key, t.old.master_key_id) for t in unknown])
    for task, key in zip(unknown, there, strict=True):
        if not isinstance(key, KmsError):
            found[task] = GivenKey(task.old.wrapped_key, was_there=True)
    wrapped = new_kms.wrap_many([WrapRequest(key, task.new_master_key_id) for task, key in keys.items()])
    for task, new in zip(keys, wrapped, strict=True):
        found[task] = new if isinstance(new, KmsError) else GivenKey(new)
    return found


class GivenRewrapper(Rewrapper):
    """Takes new wrapped keys from the driver, and unwraps them: that proves them, and opens footers.

    A wrapped key that the driver did not see, of a file that changed since, is wrapped anew here.

    Args:
        kms: See `Rewrapper`.
        new_kms: See `Rewrapper`.
        given: What the driver got.
    """

    def __init__(self, kms: KmsClient, new_kms: KmsClient, given: Given) -> None:
        super().__init__(kms, new_kms, new_keks=False, only_count=False)
        self._given = given

    def rewrap(self, wanted: Iterable[RewrapTask]) -> dict[RewrapTask, Rewrapped | KmsError]:
        """Return what wrapped keys became; see `Rewrapper.rewrap`."""
        found: dict[RewrapTask, Rewrapped | KmsError] = {}
        missing = self._rewrapped.split(wanted, found)
        given = {task: self._given[task] for task in missing if task in self._given}
        found.update(super().rewrap([task for task in missing if task not in given]))
        there = [task for task, new in given.items() if isinstance(new, GivenKey) and new.was_there]
        for task, there_key in zip(there, self._unwrap(self._new_kms, [task.old for task in there]), strict=True):
            found[task] = (
                there_key
                if isinstance(there_key, KmsError)
                else Rewrapped(
                    task.old.wrapped_key, task.old.master_key_id, there_key, None, there_key, was_there=True
                )
            )
            del given[task]
        news = [new if isinstance(new, KmsError) else new.wrapped_key for new in given.values()]
        keys = self._unwrap_new(self._new_kms, list(given), news)
        # A KEK is proven by the DEKs that it unwraps; a DEK only by the old one.
        compared = [task for task, new in given.items() if not task.is_kek and isinstance(new, GivenKey)]
        old_keys = dict(zip(compared, self._unwrap(self._kms, [task.old for task in compared]), strict=True))
        for task, wrapped_key, key in zip(given, news, keys, strict=True):
            old_key = old_keys.get(task, key)
            if isinstance(key, KmsError):
                found[task] = key
            elif isinstance(old_key, KmsError):
                found[task] = old_key
            else:
                found[task] = self._proven(task, wrapped_key, key, old_key)
        for task in missing:
            proven = found[task]
            if isinstance(proven, Rewrapped):
                self._rewrapped.remember(task, proven)
        return found


class KnownVersions(MasterKeyVersions):
    """Versions of master keys as the driver found them: executors do not ask for them again.

    Args:
        kms: See `MasterKeyVersions`.
        new_kms: See `MasterKeyVersions`.
        known: What another one knows, from `all_known`.
    """

    def __init__(self, kms: KmsClient, new_kms: KmsClient, known: Mapping[tuple[bool, str], str | None]) -> None:
        super().__init__(kms, new_kms)
        self._current.update(known)


def all_known(versions: MasterKeyVersions) -> dict[tuple[bool, str], str | None]:
    """Return what a `MasterKeyVersions` has found so far."""
    return dict(versions._current)
