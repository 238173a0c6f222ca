"""Some files of a rotation at a time: the KMS is asked for all of them together, then each is replaced.

1. The key of each footer is re-wrapped, or unwrapped where it stays. With the DEK that it leads to the footer is
   authenticated. Nothing is decided by what a footer says before.
2. The keys of columns that the authentic footer refers to are re-wrapped or unwrapped. Each DEK is proven by
   metadata of its column. What else is in a key material file is nobody's.
3. Each file is replaced: all of its keys or none.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace

from parquet_keytools.errors import KeytoolsError, KmsError, KmsUnavailableError, OutputError, value_or_raise
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import FileIdentities
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.rotation.data_set_run import (
    FileChange,
    FileOutcome,
    RunOptions,
    change_data_set,
    outcome_of,
)
from parquet_keytools.rotation.file_keys import BatchFile, FileKey, read_batch, step, step_each
from parquet_keytools.rotation.replaced_keys import replace_external_material, replace_tail
from parquet_keytools.rotation.report import FileRotation, KeyChange, RotationOutcome, RotationReport
from parquet_keytools.rotation.rewrapper import (
    NewMaterial,
    Rewrapped,
    Rewrapper,
    RewrapTask,
    WrappedKey,
    new_material,
)
from parquet_keytools.rotation.rotation_plan import MasterKeyVersions, RotationPlan, TableMembership, prefix_of
from parquet_keytools.rotation.tail import ReplacedTail, check_new_tail, check_unchanged, new_tail
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.failures import storage_failure
from parquet_keytools.storage.locations import FileLocation


def rotate_data_set(path: FileLocation, rewrapping: Rewrapping, options: RunOptions) -> RotationReport:
    """Rotate the master keys of a file, or of all Parquet files under a folder.

    Raises:
        FileNotFoundError: There is no such file or folder.
        NoParquetFilesError: The folder has no Parquet files.
    """
    report = RotationReport(dry_run=rewrapping.plan.dry_run)
    change_data_set(path, rewrapping, report, options)
    report.kms_calls = rewrapping.rewrapper.calls + rewrapping.versions.calls
    if report.dry_run:
        # Describing master keys changes nothing, so it was done.
        report.expected_kms_calls = rewrapping.rewrapper.expected_calls + rewrapping.versions.calls
    return report


class Rewrapping(FileChange):
    """Re-wraps the keys of files as planned, of some files together at a time; see `FileChange`.

    Args:
        keys: Of the configuration; it has a KMS.
        new_kms: The KMS that wraps the keys from now on; None for the same one.
        rewrapper: Asks the KMS; None makes one.
    """

    def __init__(
        self,
        keys: KeyService,
        plan: RotationPlan,
        new_kms: KmsClient | None = None,
        rewrapper: Rewrapper | None = None,
    ) -> None:
        assert keys.kms is not None
        self.plan = plan
        self.versions = MasterKeyVersions(keys.kms, new_kms, plan.known_versions)
        self.rewrapper = rewrapper or Rewrapper(keys.kms, new_kms, new_keks=plan.new_keks, only_count=plan.dry_run)
        self.data_keys = keys.data_keys
        self.aad_prefix_of = prefix_of(
            keys, plan.table_name, plan.aad_prefix, opens_to_others=plan.opens_to_others
        )
        self.membership = TableMembership.of(keys, plan)
        # Files that share data keys and file unique.
        self.identities = FileIdentities(refuses=False)

    def change(
        self, pool: Executor, locations: Iterator[FileLocation], locked_folder: str | None
    ) -> Iterator[tuple[FileLocation, FileOutcome]]:
        """Re-wrap the keys of the next files."""
        return _Batch(self, pool, locked_folder).rotate(read_batch(pool, locations))

    def take_end(self) -> KmsUnavailableError | None:
        """Return the KMS's last error if it answered nothing at all since this was asked last."""
        return self.rewrapper.take_unreachable()

    # --- decisions ---

    def concerns(self, master_key_id: str) -> bool:
        """Whether keys under this master key may change at all, whichever of its names a file uses."""
        return self.plan.concerns(self.versions.as_named(master_key_id, self.plan.named))

    def target_of(self, old: WrappedKey, *, has_kek: bool) -> str | None:
        """Return the master key that re-wraps a key, or None where the key stays as it is."""
        named = self.versions.as_named(old.master_key_id, self.plan.named)
        target = self.plan.new_master_key_id(
            named, version=self.versions.of(old), current_version=self.versions.current, has_kek=has_kek
        )
        return old.master_key_id if target == named else target


class _Batch:
    """Some files, for whose keys the KMS is asked together."""

    def __init__(self, run: Rewrapping, pool: Executor, locked_folder: str | None) -> None:
        self._run = run
        self._pool = pool
        self._locked_folder = locked_folder
        self._rewrapped: dict[RewrapTask, Rewrapped | KmsError] = {}
        self._unwrapped: dict[WrappedKey, SecretBytes | KmsError] = {}
        self._lock = threading.Lock()
        # Set when nothing can be written any more; then the files that are left are not processed.
        self._stopped = threading.Event()

    def rotate(self, works: Sequence[BatchFile]) -> Iterator[tuple[FileLocation, FileOutcome]]:
        """Yield what became of each file, in their order; a file that changed meanwhile needs another attempt.

        When nothing can be written any more, the files that were not processed are not among them.
        """
        # What is wrong with the AAD is reported before the KMS is asked for keys.
        going = list(step(self._pool, self._expect_prefix, [work for work in works if work.failure is None]))
        self._ask_footers(going)
        going = list(step(self._pool, self._open, going))
        self._ask_columns(going)
        waited_for = {id(work) for work in going}
        finished = step_each(self._pool, self._finish, going)
        for work in works:
            if id(work) in waited_for:
                next(finished)
            if work.result is not None:
                yield work.location, replace(work.result, shares_keys_with=work.shares_keys_with)
            elif work.failure is not None:
                yield work.location, outcome_of(work.location, work.failure)
            # What was parsed takes much memory.
            work.keys = None

    # --- keys ---

    def _ask_footers(self, works: Sequence[BatchFile]) -> None:
        """Have the footers' keys re-wrapped, or unwrapped where they stay or nothing is to be changed."""
        staying = []
        for work in works:
            held = work.read_keys.footer_key
            if held is not None and (not self._plan(work, held) or self._run.plan.dry_run):
                staying.append((held.wrapped_key, id(held) not in work.tasks))
        self._ask_kms(works, staying)

    def _ask_columns(self, works: Sequence[BatchFile]) -> None:
        """Do the same with the keys of columns, as far as the footer does not vouch for them itself.

        What the authentic footer holds is as the writer, or the last rotation, left it: with internal key material
        the names of master keys are believed where they put a key beyond this rotation.
        """
        staying = []
        for work in works:
            keys = work.read_keys
            for held in keys.referenced:
                if held is keys.footer_key or self._plan(work, held):
                    continue
                if held.reference is not None or self._concerns(held):
                    staying.append((held.wrapped_key, True))
                    work.unwrapped.add(id(held))
        self._ask_kms(works, staying)

    def _ask_kms(self, works: Sequence[BatchFile], staying: Iterable[tuple[WrappedKey, bool]]) -> None:
        rewrapper = self._run.rewrapper
        tasks = dict.fromkeys(task for work in works for _, task in work.tasks.values())
        self._rewrapped.update(rewrapper.rewrap(task for task in tasks if task not in self._rewrapped))
        staying = [(key, is_staying) for key, is_staying in staying if key not in self._unwrapped]
        if self._run.plan.dry_run:
            rewrapper.expect_unwraps(key for key, is_staying in staying if is_staying)
        self._unwrapped.update(rewrapper.unwrap(key for key, _ in staying))

    def _plan(self, work: BatchFile, held: FileKey) -> bool:
        """Decide whether a key shall change; what is said of it is proven when it is unwrapped."""
        old = held.wrapped_key
        target = self._run.target_of(old, has_kek=held.material.double_wrapping)
        if target is None:
            return False
        work.tasks[id(held)] = (held, RewrapTask(old, target, held.material.double_wrapping))
        return True

    def _concerns(self, held: FileKey) -> bool:
        return self._run.concerns(held.wrapped_key.master_key_id)

    def _expect_prefix(self, work: BatchFile) -> None:
        work.aad_prefix = work.read_keys.expected_prefix(self._run.aad_prefix_of)
        self._run.membership.check_footer(work.read_keys)

    def _open(self, work: BatchFile) -> None:
        """Authenticate the footer."""
        keys = work.read_keys
        if not keys.is_encrypted:
            # It says so itself; what contradicts it is an error.
            keys.open(None, None)
            return
        held = keys.footer_key
        if held is not None and id(held) in work.tasks and not self._run.plan.dry_run:
            work.footer_dek = self._new(work, held).dek
        else:
            work.footer_dek = keys.footer_dek(self._unwrapped, self._run.data_keys)
        keys.open(work.footer_dek, work.aad_prefix)
        file_unique = keys.envelope.aad_file_unique or b""
        other = self._run.identities.other(work.location, work.footer_dek, file_unique)
        work.shares_keys_with = None if other is None else str(other)
        self._run.membership.check_columns(keys)

    def _prove_columns(self, work: BatchFile) -> None:
        """Prove that each DEK that is known by now is that of its column."""
        for column, held in work.read_keys.column_keys():
            if id(held) in work.unwrapped:
                work.read_keys.prove(column, work.read_keys.dek(held, self._unwrapped))
            elif id(held) in work.tasks and not self._run.plan.dry_run:
                work.read_keys.prove(column, self._new(work, held).dek)

    def _new(self, work: BatchFile, held: FileKey) -> NewMaterial:
        if id(held) not in work.new:
            _, task = work.tasks[id(held)]
            rewrapped = value_or_raise(self._rewrapped[task])
            work.new[id(held)] = new_material(held.text, held.material, rewrapped, self._run.plan.instance)
        return work.new[id(held)]

    # --- files ---

    def _finish(self, work: BatchFile) -> None:
        """Replace what shall be replaced: all keys of a file or none."""
        if self._stopped.is_set():
            return
        try:
            self._replace(work)
        except (KeytoolsError, OSError) as error:
            failure = storage_failure(error, work.location)
            if failure is None:
                raise
            with self._lock:
                is_first = not self._stopped.is_set()
                self._stopped.set()
            if is_first:
                # The others would say the same: they count as not processed.
                raise failure from None

    def _replace(self, work: BatchFile) -> None:
        path, keys = str(work.location), work.read_keys
        self._prove_columns(work)
        staying = len(keys.referenced) > len(work.tasks)
        self._leave_moved_before(work)
        dropped = self._dropped(work)
        if not work.tasks and not dropped:
            work.result = self._unchanged(work)
        elif work.tasks and self._run.plan.other_kms and staying:
            raise OutputError(
                f"{path}: some of its keys would move to the other KMS, and some stay: nobody could read it.",
                hint="Do not select keys.",
            )
        elif self._run.plan.other_kms and len({held.reference is None for held, _ in work.tasks.values()}) > 1:
            # After a crash between the two, some keys would be in either KMS.
            raise OutputError(
                f"{path}: some of its keys are in the footer, and some in the key material file. Two files cannot "
                "be replaced in one step.",
                hint="Re-encrypt it with `rekey --in-place`, and repeat the rotation.",
            )
        elif self._run.plan.dry_run:
            work.result = FileRotation(
                path, RotationOutcome.WOULD_ROTATE, self._changes(work), _dropped_text(dropped)
            )
        else:
            changes = self._changes(work)
            done = [*self._replace_external(work, dropped), *self._replace_tail(work)]
            work.result = FileRotation(
                path,
                RotationOutcome.ROTATED,
                changes,
                "; ".join([*(part.how for part in done), *filter(None, [_dropped_text(dropped)])]),
                sum(part.bytes_written for part in done),
                sum(part.bytes_copied for part in done),
            )

    def _leave_moved_before(self, work: BatchFile) -> None:
        """Leave keys alone that an earlier run, which was cut off, moved to the other KMS."""
        for held, task in list(work.tasks.values()):
            outcome = self._rewrapped.get(task)
            if isinstance(outcome, Rewrapped) and outcome.was_there:
                del work.tasks[id(held)]

    def _dropped(self, work: BatchFile) -> frozenset[str]:
        """Return the entries of the key material file that are left out: they are nobody's.

        Nor are they re-wrapped: a key that was put there must not outlive its master key.
        """
        unreferenced = work.read_keys.unreferenced
        external = work.read_keys.external
        if not unreferenced or external is None or external.may_be_in_the_making:
            return frozenset()
        return frozenset(held.reference for held in unreferenced if held.reference is not None)

    def _unchanged(self, work: BatchFile) -> FileRotation:
        path, keys = str(work.location), work.read_keys
        if not keys.is_encrypted:
            return FileRotation(path, RotationOutcome.NOTHING_TO_ROTATE, how="not encrypted")
        if not keys.referenced:
            return FileRotation(path, RotationOutcome.NOTHING_TO_ROTATE, how="data keys only")
        if not any(self._concerns(held) for held in keys.referenced):
            return FileRotation(path, RotationOutcome.NOTHING_TO_ROTATE, how="none of the master keys")
        return FileRotation(path, RotationOutcome.ALREADY_CURRENT)

    def _replace_external(self, work: BatchFile, dropped: frozenset[str]) -> Iterator[ReplacedTail]:
        keys = work.read_keys
        texts = {
            held.reference: self._new(work, held).text
            for held, _ in work.tasks.values()
            if held.reference is not None
        }
        if keys.external is None or not (texts or dropped):
            return
        material, old, new = keys.external.location, keys.external.content, keys.external.with_new(texts, dropped)
        replace_external_material(
            material,
            old,
            new,
            lambda: check_unchanged(keys.location, keys.tail),
            locked_folder=self._locked_folder,
        )
        yield ReplacedTail("new key material file", len(new), 0)

    def _replace_tail(self, work: BatchFile) -> Iterator[ReplacedTail]:
        keys, dek = work.read_keys, work.footer_dek
        metadata = {
            held.text: self._new(work, held).text.encode()
            for held, _ in work.tasks.values()
            if held.reference is None and isinstance(held.text, bytes)
        }
        if not metadata:
            return
        assert keys.footer is not None
        assert dek is not None
        footer, tail = keys.footer, keys.tail
        new = new_tail(tail, footer, metadata)
        yield replace_tail(
            keys.location,
            tail,
            new,
            lambda source: check_new_tail(source, tail.offset, new, dek, work.aad_prefix, footer, metadata),
            locked_folder=self._locked_folder,
        )

    def _changes(self, work: BatchFile) -> tuple[KeyChange, ...]:
        """Count the keys of a file by what changes of them."""
        versions = self._run.versions
        counts: Counter[tuple[str, str, str | None, str | None]] = Counter()
        for _, task in work.tasks.values():
            outcome = self._rewrapped.get(task)
            if isinstance(outcome, Rewrapped):
                new_version = versions.of(WrappedKey(task.new_master_key_id, outcome.wrapped_key), new=True)
            else:
                new_version = versions.current(task.new_master_key_id, new=True)
            counts[task.old.master_key_id, task.new_master_key_id, versions.of(task.old), new_version] += 1
        changes = [KeyChange(*names, number) for names, number in counts.items()]
        return tuple(sorted(changes, key=lambda change: (change.master_key_id, change.version or "")))


def _dropped_text(dropped: frozenset[str]) -> str:
    """Say that entries were nobody's."""
    if not dropped:
        return ""
    number = "1 entry" if len(dropped) == 1 else f"{len(dropped)} entries"
    return f"{number} of the key material file dropped that its footer does not refer to"
