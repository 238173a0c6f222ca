"""Several KMSs of one configuration behind one client: the identifier of a master key begins with its KMS's name.

`eu::alias/pii` is the master key `alias/pii` in the KMS named `eu`. A file names the KMS of its footer's key as
parquet-java does, in `kmsInstanceID`. Identifiers in the file without a name are in this KMS; see docs/adr/0016.
"""

from __future__ import annotations

import contextvars
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import SerializeAsAny

from parquet_keytools.errors import (
    KeyNotAvailableError,
    KmsConfigurationError,
    KmsError,
    KmsUnavailableError,
    value_or_raise,
    without_frames,
)
from parquet_keytools.kms.client import (
    CallerIdentity,
    KeyDeletion,
    KmsClient,
    KmsSettings,
    MasterKeyDescription,
    R,
    RewrapRequest,
    UnwrapRequest,
    WrapRequest,
)
from parquet_keytools.secret_bytes import SecretBytes

T = TypeVar("T")

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""The name of a KMS. It stands in files, so it is no place for a secret."""

RESERVED_NAMES = ("default", "DEFAULT", "type")
UNNAMED = (None, "DEFAULT", "")
"""What files say that do not name their KMS."""

_MARK = "::"
_SHORTEST_REST_SECONDS = 60.0


def with_name(kms: str, master_key_id: str) -> str:
    """Return the identifier of a master key with the name of its KMS."""
    return f"{kms}{_MARK}{master_key_id}"


def split_name(master_key_id: str) -> tuple[str | None, str]:
    """Return the name of the KMS, None if there is none, and the identifier within it."""
    name, mark, within = master_key_id.partition(_MARK)
    return (name, within) if mark and within and NAME.fullmatch(name) else (None, master_key_id)


class NamedKmsSettings(KmsSettings):
    """Several KMSs: the settings under `kms:` without a `type`."""

    type: Literal["named"] = "named"
    kmss: dict[str, SerializeAsAny[KmsSettings]]
    default: str | None = None  # for master keys and files that name none; without it, these are an error

    def secret_files(self) -> Mapping[tuple[str, ...], Path]:
        """Return the files that hold secrets of any of the KMSs."""
        return {
            (name, *names): path
            for name, settings in self.kmss.items()
            for names, path in settings.secret_files().items()
        }


def kmss_of(settings: KmsSettings | None) -> list[KmsSettings]:
    """Return the settings of each KMS of a configuration."""
    if isinstance(settings, NamedKmsSettings):
        return list(settings.kmss.values())
    return [] if settings is None else [settings]


def each_kms(settings: KmsSettings, change: Callable[[KmsSettings], KmsSettings]) -> KmsSettings:
    """Return settings with one KMS, or each of several, changed; the same object if nothing changes."""
    if not isinstance(settings, NamedKmsSettings):
        return change(settings)
    changed = {name: change(one) for name, one in settings.kmss.items()}
    same = all(changed[name] is one for name, one in settings.kmss.items())
    return settings if same else settings.model_copy(update={"kmss": changed})


class NamedKmss(KmsClient):
    """Sends each request to the KMS that the identifier of its master key names; several answer at the same time.

    A KMS that could not be reached is not called again for as long as it was waited for, at least for a minute:
    requests fail at once then. The other KMSs answer as before. A data set takes the time of one wait, not of one
    for each of its files.
    """

    backend = "kms"
    Settings = NamedKmsSettings

    def __init__(self, clients: Mapping[str, KmsClient], default: str | None = None) -> None:
        super().__init__()
        self._clients = dict(clients)
        for name, client in clients.items():
            client.instance_id, client.is_one_of_several = name, True
        self._default = default
        self._unreachable: dict[str, tuple[float, KmsUnavailableError]] = {}

    @classmethod
    def from_settings(cls, settings: KmsSettings, folder: Path) -> Self:
        """Not supported: `registry.make_client` makes the clients of all KMSs."""
        raise NotImplementedError

    @property
    def has_generated_keys(self) -> bool:
        """Whether one of them made its master keys itself, so that no other process has them."""
        return any(getattr(client, "has_generated_keys", False) for client in self._clients.values())

    @property
    def call_counts(self) -> Counter[str]:
        """Number of keys sent to all KMSs, by operation."""
        return sum((client.call_counts for client in self._clients.values()), Counter())

    # --- identifiers ---

    @property
    def instances(self) -> frozenset[str]:
        """The names of the KMSs."""
        return frozenset(self._clients)

    def parts(self, master_key_id: str) -> tuple[KmsClient, str]:
        """Return the client of a master key, and the identifier of the master key in its KMS."""
        name, within = self._split(master_key_id)
        return self._clients[name], within

    def instance_of(self, master_key_id: str) -> str:
        """Return the name of the KMS."""
        return self._split(master_key_id)[0]

    def id_in_file(self, master_key_id: str, instance_id: str | None) -> str:
        """Return the identifier without the name of its KMS if the file's footer names this KMS."""
        name, within = self._split(master_key_id)
        named = self._default if instance_id in UNNAMED else instance_id
        # What follows must not look like a name.
        return within if name == named and split_name(within)[0] is None else with_name(name, within)

    def id_of_file(self, master_key_id: str, instance_id: str | None) -> str:
        """Return the identifier with the name of its KMS."""
        name, within = split_name(master_key_id)
        if name is None:
            name = instance_id if instance_id not in UNNAMED else self._default
        if name in self._clients:
            return with_name(name, within)
        if name is None:
            raise KeyNotAvailableError(
                f"the file does not name the KMS of the master key {master_key_id[:200]!r}, and the configuration "
                "has several.",
                hint="Name the KMS of these files: `default:` under `kms:`.",
            )
        raise KeyNotAvailableError(
            f"the file names the KMS {name[:64]!r} for the master key {within[:200]!r}, and the configuration has "
            "no KMS of this name.",
            hint=f"Add it under `kms:`, which names {', '.join(self._clients)}, if you trust it.",
        )

    def _split(self, master_key_id: str) -> tuple[str, str]:
        name, within = split_name(master_key_id)
        name = self._default if name is None else name
        if name in self._clients:
            return name, within
        raise KmsConfigurationError(
            f"there is no KMS named {name!r}" if name else "its KMS is not named, and there is no default",
            backend=self.backend,
            operation="find",
            master_key_id=master_key_id,
            hint=f"Write the name of one of the KMSs, {', '.join(self._clients)}, and `::` in front.",
        )

    # --- requests ---

    def master_key_ids(self) -> frozenset[str] | None:
        """Return all identifiers, with names; None if one of the KMSs does not list its master keys."""
        found: set[str] = set()
        for name, client in self._clients.items():
            try:
                known = client.master_key_ids()
            except KmsError:
                return None
            if known is None:
                return None
            found |= {with_name(name, within) for within in known}
        return frozenset(found)

    def trust(self, master_key_ids: Iterable[str], others: Callable[[str], object] | None = None) -> None:
        """Trust these master keys, each in its own KMS only."""

        def in_kms(name: str, within: str) -> bool:
            assert others is not None
            return bool(others(with_name(name, within)) or (name == self._default and others(within)))

        for (client, ids), name in zip(self._by_kms(master_key_ids), self._clients, strict=True):
            client.trust(ids, None if others is None else partial(in_kms, name))

    def trust_also(self, master_key_ids: Iterable[str]) -> None:
        """Trust these master keys, too, each in its own KMS only."""
        for client, within in self._by_kms(master_key_ids):
            client.trust_also(within)

    def _by_kms(self, master_key_ids: Iterable[str]) -> list[tuple[KmsClient, list[str]]]:
        split = list(map(self._split, master_key_ids))
        return [
            (client, [within for kms, within in split if kms == name]) for name, client in self._clients.items()
        ]

    def wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        """Wrap keys; see `KmsClient.wrap_many`."""
        return self._routed(requests, lambda kms, some: kms.wrap_many(some))

    def unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        """Unwrap keys; see `KmsClient.unwrap_many`."""
        return self._routed(requests, lambda kms, some: kms.unwrap_many(some))

    def rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        """Re-wrap keys; between two KMSs, they are unwrapped here."""
        within = [request for request in requests if not self._crosses(request)]
        across = [request for request in requests if self._crosses(request)]
        done = dict(zip(within, self._routed(within, lambda kms, some: kms.rewrap_many(some)), strict=True))
        done |= zip(across, self._rewrap_many(across), strict=True)
        return [done[request] for request in requests]

    def _crosses(self, request: RewrapRequest) -> bool:
        try:
            return self._split(request.master_key_id)[0] != self._split(request.new_master_key_id)[0]
        except KmsError:
            return True

    def wrap_raw(self, key: SecretBytes, master_key_id: str) -> bytes:
        """Wrap a key in the form of Iceberg; see `KmsClient.wrap_raw`."""
        return self._one(master_key_id, lambda kms, within: kms.wrap_raw(key, within))

    def unwrap_raw(self, wrapped_key: bytes, master_key_id: str) -> SecretBytes:
        """Unwrap a key in the form of Iceberg; see `KmsClient.unwrap_raw`."""
        return self._one(master_key_id, lambda kms, within: kms.unwrap_raw(wrapped_key, within))

    def describe(self, master_key_id: str) -> MasterKeyDescription:
        """Describe a master key; see `KmsClient.describe`."""
        found = self._one(master_key_id, lambda kms, within: kms.describe(within))
        return replace(found, master_key_id=with_name(self._split(master_key_id)[0], found.master_key_id))

    def create_master_key(
        self, master_key_id: str, tags: Mapping[str, str] | None = None, policy: str | None = None
    ) -> bool:
        """Create a master key; see `KmsClient.create_master_key`."""
        return self._one(master_key_id, lambda kms, within: kms.create_master_key(within, tags, policy))

    def version_dates(self, master_key_id: str) -> dict[str | None, datetime]:
        """Return when each version was created; see `KmsClient.version_dates`."""
        return self._one(master_key_id, lambda kms, within: kms.version_dates(within))

    def schedule_key_deletion(self, master_key_id: str, waiting_days: int | None = None) -> KeyDeletion:
        """Delete a master key; see `KmsClient.schedule_key_deletion`."""
        return self._deletion(master_key_id, lambda kms, within: kms.schedule_key_deletion(within, waiting_days))

    def key_deletion_state(self, master_key_id: str) -> KeyDeletion:
        """Return whether a master key is deleted; see `KmsClient.key_deletion_state`."""
        return self._deletion(master_key_id, lambda kms, within: kms.key_deletion_state(within))

    def cancel_key_deletion(self, master_key_id: str) -> KeyDeletion:
        """Cancel a deletion; see `KmsClient.cancel_key_deletion`."""
        return self._deletion(master_key_id, lambda kms, within: kms.cancel_key_deletion(within))

    def _deletion(self, master_key_id: str, call: Callable[[KmsClient, str], KeyDeletion]) -> KeyDeletion:
        found = self._one(master_key_id, call)
        return replace(found, key=with_name(self._split(master_key_id)[0], found.key))

    def caller_identity(self, master_key_id: str) -> CallerIdentity:
        """Return who calls the KMS of a master key; see `KmsClient.caller_identity`."""
        return self._one(master_key_id, lambda kms, within: kms.caller_identity(within))

    def wrapped_key_version(self, wrapped_key: str, master_key_id: str) -> str | None:
        """Return the version that wrapped a key, or None; no call is made."""
        try:
            client, within = self.parts(master_key_id)
        except KmsError:
            return None
        return client.wrapped_key_version(wrapped_key, within)

    def identity(self, master_key_id: str) -> str | None:
        """Return the unique name of a master key, with the first name of its KMS; None if the KMS does not say."""
        try:
            name, within = self._split(master_key_id)
        except KmsError:
            return None
        found = None if self._why_not_now(name) is not None else self._clients[name].identity(within)
        places = {other: client.place() for other, client in self._clients.items()}
        first = next(other for other in places if places[other] == places[name])
        return None if found is None else with_name(first, found)

    def rewraps_by_itself(self, master_key_id: str, new_master_key_id: str) -> bool:
        """Return whether both master keys are in one KMS that re-wraps."""
        (name, old), (new_name, new) = self._split(master_key_id), self._split(new_master_key_id)
        return name == new_name and self._clients[name].rewraps_by_itself(old, new)

    def probe(self, master_key_id: str) -> str | None:
        """Return a wrapped key to find out what a caller may do; see `KmsClient.probe`."""
        client, within = self.parts(master_key_id)
        return client.probe(within)

    def end_within(self, seconds: float) -> None:
        """Let all later operations together take at most `seconds`."""
        for client in self._clients.values():
            client.end_within(seconds)

    def close(self) -> None:
        """Close the connections of all KMSs."""
        for client in self._clients.values():
            client.close()

    # --- routing ---

    def _routed(
        self, requests: Sequence[R], send: Callable[[KmsClient, list[R]], Sequence[T | KmsError]]
    ) -> list[T | KmsError]:
        """Send each request to its KMS, all KMSs at the same time."""
        outcomes: dict[int, T | KmsError] = {}
        groups: dict[str, list[int]] = {}
        for position, request in enumerate(requests):
            try:
                groups.setdefault(self._split(request.master_key_id)[0], []).append(position)
            except KmsError as error:
                outcomes[position] = without_frames(error)

        def ask(name: str) -> Sequence[T | KmsError]:
            return self._asked(name, [requests[position] for position in groups[name]], send)

        answers = self._at_the_same_time(ask, groups) if len(groups) > 1 else [ask(name) for name in groups]
        for positions, some in zip(groups.values(), answers, strict=True):
            outcomes.update(zip(positions, some, strict=True))
        return [outcomes[position] for position in range(len(requests))]

    def _at_the_same_time(self, ask: Callable[[str], T], names: Collection[str]) -> list[T]:
        """Return what a function returns for each KMS. When interrupted, the KMSs are not called again."""
        pool = ThreadPoolExecutor(len(names), thread_name_prefix="parquet-keytools-kmss")
        try:
            # Each thread has the context of the caller, such as which file the keys are for.
            futures = [pool.submit(contextvars.copy_context().run, ask, name) for name in names]
            return [future.result() for future in futures]
        except KeyboardInterrupt:
            for name in names:
                self._clients[name].end_within(0)
            pool.shutdown()
            for name in names:
                self._clients[name].end_within(math.inf)
            raise
        finally:
            pool.shutdown()

    def _asked(
        self, name: str, requests: list[R], send: Callable[[KmsClient, list[R]], Sequence[T | KmsError]]
    ) -> Sequence[T | KmsError]:
        if refusal := self._why_not_now(name):
            return [self._named(refusal, name, request.master_key_id) for request in requests]
        started = time.monotonic()
        answers = send(self._clients[name], list(map(_within, requests)))
        failures = [answer for answer in answers if isinstance(answer, KmsUnavailableError)]
        if failures and len(failures) == len(answers):
            rest_seconds = max(time.monotonic() - started, _SHORTEST_REST_SECONDS)
            self._unreachable[name] = time.monotonic() + rest_seconds, failures[0]
        return [
            self._named(answer, name, _id_in(answer, request)) if isinstance(answer, KmsError) else answer
            for answer, request in zip(answers, requests, strict=True)
        ]

    def _one(self, master_key_id: str, call: Callable[[KmsClient, str], T]) -> T:
        """Return what the KMS of one master key answers; errors have the name of the KMS."""

        def send(client: KmsClient, requests: list[UnwrapRequest]) -> list[T | KmsError]:
            try:
                return [call(client, requests[0].master_key_id)]
            except KmsError as error:
                return [error]

        name, _ = self._split(master_key_id)
        return value_or_raise(self._asked(name, [UnwrapRequest("", master_key_id)], send)[0])

    def _why_not_now(self, name: str) -> KmsUnavailableError | None:
        """Return why a KMS is not called now, or None."""
        until, failure = self._unreachable.get(name, (0.0, None))
        return failure.not_attempted() if failure is not None and time.monotonic() < until else None

    def _named(self, error: KmsError, name: str, master_key_id: str) -> KmsError:
        others_may_answer = any(self._why_not_now(other) is None for other in self._clients.keys() - {name})
        return without_frames(error.of_kms(name, master_key_id, others_may_answer=others_may_answer))

    # --- hooks, which the public methods here do not call ---

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return self.wrap_many(requests)

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        return self.unwrap_many(requests)

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        return self.describe(master_key_id)


def _id_in(error: KmsError, request: WrapRequest | UnwrapRequest | RewrapRequest) -> str:
    """Return the master key of a request that an error is about."""
    if isinstance(request, RewrapRequest) and error.master_key_id == split_name(request.new_master_key_id)[1]:
        return request.new_master_key_id
    return request.master_key_id


def _within(request: R) -> R:
    """Return a request with identifiers as the KMS itself knows them."""
    changes: dict[str, Any] = {"master_key_id": split_name(request.master_key_id)[1]}
    if isinstance(request, RewrapRequest):
        changes["new_master_key_id"] = split_name(request.new_master_key_id)[1]
    return replace(request, **changes)
