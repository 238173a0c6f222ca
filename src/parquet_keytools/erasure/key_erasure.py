"""Deletes the master keys of a value: plan, deletion, proof and certificate.

After an interruption, repeat the run: the KMS shows what is done.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from parquet_keytools import audit
from parquet_keytools.erasure.certificate import Certificate, Proof
from parquet_keytools.erasure.plan import GONE, ErasedKey, KeysOfValue, OnFile, Plan, Planner
from parquet_keytools.errors import ErasureRefusedError, KmsError, KmsResponseInvalidError, KmsUnavailableError
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.kms.client import KmsClient, UnwrapRequest
from parquet_keytools.kms.registry import make_client
from parquet_keytools.storage.locations import FileLocation

_MOST_NAMED = 5
_PATIENCE_SECONDS = 60.0
"""AWS takes some seconds until all of its servers refuse a key."""


class Erasure:
    """Erases the data of one value, such as `tenant=acme`, by deleting its master keys.

    Made by `Keytools.erasure`.
    """

    def __init__(
        self,
        keys: KeyService,
        location: FileLocation,
        where: Mapping[str, str],
        table_name: str | None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._service = keys
        self._location = location
        self._keys = KeysOfValue(keys, where, table_name)
        self._sleep = sleep

    @property
    def value(self) -> str:
        """The value, which a caller confirms."""
        return self._keys.value

    def states(self) -> tuple[ErasedKey, ...]:
        """Return the master keys of the value, and whether they are deleted.

        Raises:
            KmsConfigurationError: The KMS client does not delete master keys.
            KmsError: The KMS does not show the state.
        """
        return self._keys.states()

    def cancel(self) -> tuple[ErasedKey, ...]:
        """Cancel the scheduled deletion of the master keys, and return their states.

        Raises:
            KmsConfigurationError: No deletion is scheduled.
            KmsError: The KMS does not cancel it.
        """
        with audit.about(self._location):
            scheduled = [key for key in self.states() if key.deletion.state == "scheduled"] or self.states()
            return tuple(
                replace(key, deletion=self._keys.kms.cancel_key_deletion(key.deletion.key)) for key in scheduled
            )

    def plan(self, *, ignore_skipped: bool = False, on_file: OnFile = lambda _: None) -> Plan:
        """Find what is under the master keys, and what forbids their deletion. Nothing is changed.

        Args:
            ignore_skipped: Whether to leave out encrypted files that readers of data sets ignore because of their
                names.
            on_file: Called with each file.

        Raises:
            ConfigurationError: The KMS has no such master keys, and no file is under them.
            FileNotFoundError: The file or folder does not exist.
            NoParquetFilesError: The folder has no Parquet files.
            KmsError: The KMS cannot be reached, or does not show the state of the master keys.
        """
        planner = Planner(self._service, self._keys, self._location)
        planner.look(ignore_skipped=ignore_skipped, on_file=on_file)
        return planner.plan()

    def run(self, plan: Plan, *, waiting_days: int | None = None) -> Certificate:
        """Delete the master keys, or schedule their deletion, and prove that the KMS unwraps nothing with them.

        Args:
            plan: What `plan` returned.
            waiting_days: Waiting period of the KMS; None for its default.

        Raises:
            ErasureRefusedError: The plan has problems. Nothing was changed.
            KmsError: The KMS refuses, or cannot be reached. Repeat the call.
        """
        if plan.problems:
            texts = "; ".join(note.text for note in plan.problems[:_MOST_NAMED])
            raise ErasureRefusedError(
                f"nothing was erased: {texts}.",
                hint="`erase --dry-run` lists the files; in Python, `problems` of the plan has them.",
            )
        kms, started, first = self._keys.kms, datetime.now(UTC), plan.keys[0].master_key_id
        caller = kms.caller_identity(first)
        done: list[ErasedKey] = []
        requested: dict[str, str] = {}
        with audit.about(self._location):
            for key in plan.keys:
                deletion = key.deletion
                if deletion.is_gone:
                    # It may have been cancelled since the plan was made.
                    deletion = kms.key_deletion_state(deletion.key)
                if not deletion.is_gone:
                    requested[key.master_key_id] = _now()
                    # Not by an alias, which may name another key by now.
                    deletion = kms.schedule_key_deletion(deletion.key, waiting_days)
                if not deletion.is_gone:
                    failure = KmsResponseInvalidError(f"the master key is {deletion.state} after its deletion")
                    raise failure.about(kms.parts(key.master_key_id)[0].backend, "delete", key.master_key_id)
                # A KMS shows no versions of a key that it does not have any more.
                versions = deletion.versions or dict.fromkeys(key.deletion.versions, deletion.state)
                done.append(replace(key, deletion=replace(deletion, versions=versions)))
            proof = self._prove(plan.wrapped_keys)
        return Certificate(
            plan=replace(plan, keys=tuple(done)),
            requested_at=requested,
            backends={key.master_key_id: kms.parts(key.master_key_id)[0].backend for key in done},
            caller=caller,
            proof=proof,
            started_at=started.isoformat(timespec="seconds"),
            finished_at=_now(),
        )

    def _prove(self, wanted: Sequence[UnwrapRequest]) -> Proof:
        """Ask the KMS, with a new client, to unwrap each wrapped key."""
        if not wanted:
            return Proof(False, _now(), 0, {}, "no file is under these keys, so there is no wrapped key to try")
        kms, is_own = self._new_client()
        try:
            kms.trust_also({request.master_key_id for request in wanted})
            pause, end = 1.0, time.monotonic() + _PATIENCE_SECONDS
            while True:
                # Unwrapped keys are dropped at once.
                answers = [a if isinstance(a, KmsError) else None for a in kms.unwrap_many(wanted)]
                if None not in answers or time.monotonic() + pause > end:
                    break
                self._sleep(pause)
                pause *= 2
        finally:
            if is_own:
                kms.close()
        outcomes = Counter("unwrapped" if answer is None else type(answer).__name__ for answer in answers)
        others = [answer for answer in answers if not isinstance(answer, GONE)]
        reason = ""
        if None in others:
            reason = "the KMS still unwraps keys with a master key that it says is deleted: repeat the command"
        elif others:
            reason = f"the KMS did not say that the key is gone: {others[0]}"
        unreachable = any(isinstance(answer, KmsUnavailableError) for answer in others)
        return Proof(not others, _now(), len(wanted), dict(outcomes), reason, unreachable)

    def _new_client(self) -> tuple[KmsClient, bool]:
        """Return a client without memory of earlier calls, and whether it must be closed."""
        settings = self._service.configuration.kms
        if settings is None or self._service.given_kms or getattr(self._keys.kms, "has_generated_keys", False):
            return self._keys.kms, False
        return make_client(settings, self._service.configuration.folder or Path()), True


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
