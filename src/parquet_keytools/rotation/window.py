"""Some files of a rotation at a time: the KMS is asked for all of them together, then each is replaced."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from parquet_keytools.errors import KmsError, OutputError, value_or_raise
from parquet_keytools.keys.file_key_retriever import DataKeys
from parquet_keytools.keys.kek import Kek
from parquet_keytools.rotation.external_material import replace_external_material
from parquet_keytools.rotation.file_keys import FileKeys, stated_aad_prefix
from parquet_keytools.rotation.file_work import FileWork, RotatedOrChanged, step, step_each
from parquet_keytools.rotation.held_key import HeldKey
from parquet_keytools.rotation.kept_keys import Kind, keep, may_be_in_place
from parquet_keytools.rotation.master_key_versions import MasterKeyVersions
from parquet_keytools.rotation.new_material import KmsInstance, NewMaterial, new_material
from parquet_keytools.rotation.new_tail import check_new_tail, new_tail
from parquet_keytools.rotation.report import FileRotation, KeyChange, Outcome
from parquet_keytools.rotation.rewrap_task import Rewrapped, RewrapTask, WrappedKey
from parquet_keytools.rotation.rewrapper import Rewrapper
from parquet_keytools.rotation.rotation_plan import RotationPlan
from parquet_keytools.rotation.tail_rewriter import ReplacedTail, tail_rewriter
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage import FileLocation


@dataclass(frozen=True)
class RotationContext:
    """What all files of a run share.

    Attributes:
        plan: What the rotation is asked for.
        rewrapper: Asks the KMS.
        versions: Of master keys and wrapped keys.
        data_keys: The data keys that the caller manages.
        aad_prefix_of: Returns the AAD prefix of a file that does not store it, given what `stated_aad_prefix`
            says; None for another one.
        instance: What footer key material says of the KMS from now on; None leaves that as it is.
        kms_digest: What tells the KMSs from others; for the journal.
        keep_old: The id of this rotation if old key material is to be kept; else None.
        dry_run: Whether nothing is to be changed.
    """

    plan: RotationPlan
    rewrapper: Rewrapper
    versions: MasterKeyVersions
    data_keys: DataKeys
    aad_prefix_of: Callable[[FileLocation, bytes | None], bytes | None]
    instance: KmsInstance | None = None
    kms_digest: str = ""
    keep_old: str | None = None
    dry_run: bool = False


class Window:
    """Files that are rotated together.

    Args:
        context: What all files of the run share.
        pool: Reads and writes files.
        locked_folder: Path of a folder whose lock the caller has.
    """

    def __init__(self, context: RotationContext, pool: Executor, *, locked_folder: str | None = None) -> None:
        self._context = context
        self._pool = pool
        self._locked_folder = locked_folder
        self._rewrapped: dict[RewrapTask, Rewrapped | KmsError] = {}
        self._unwrapped: dict[WrappedKey, SecretBytes | KmsError] = {}

    def rotate(self, works: Sequence[FileWork]) -> Iterator[tuple[FileLocation, RotatedOrChanged]]:
        """Yield what became of each file, in their order; one that changed meanwhile wants another turn."""
        going = [work for work in works if work.failure is None]
        self._plan(going)
        self._ask_footer_keys(going)
        going = list(step(self._pool, self._open, going))
        self._plan([work for work in going if work.read_keys.footer is not None])
        waited_for = {id(work) for work in going}
        finished = step_each(self._pool, self._finish, going)
        for work in works:
            if id(work) in waited_for:
                next(finished)
            yield work.location, work.outcome()
            # What was parsed takes much memory.
            work.keys = None

    # --- keys ---

    def _plan(self, works: Sequence[FileWork]) -> None:
        """Find what shall change among the keys that are known by now, and have it wrapped anew."""
        context = self._context
        for work in works:
            for held in work.read_keys.held:
                old = held.wrapped_key
                target = context.plan.new_master_key_id(
                    old.master_key_id,
                    version=context.versions.of(old),
                    current_version=context.versions.current,
                    has_kek=held.material.double_wrapping,
                )
                if target is not None:
                    work.tasks[id(held)] = (held, RewrapTask(old, target, held.material.double_wrapping))
        tasks = dict.fromkeys(task for work in works for _, task in work.tasks.values())
        self._rewrapped.update(context.rewrapper.rewrap(task for task in tasks if task not in self._rewrapped))

    def _ask_footer_keys(self, works: Sequence[FileWork]) -> None:
        """Unwrap the footer keys that stay as they are, where the footer has to be opened."""
        dry_run = self._context.dry_run
        wanted, staying = [], []
        for work in works:
            held = work.read_keys.footer_key
            if held is None:
                continue
            if self._must_open(work, dry_run=False) and id(held) not in work.tasks:
                staying.append(held.wrapped_key)
            if self._must_open(work, dry_run=True):
                wanted.append(held.wrapped_key)
        if dry_run:
            self._context.rewrapper.expect_unwraps(staying)
        self._unwrapped = self._context.rewrapper.unwrap(wanted if dry_run else staying)

    def _must_open(self, work: FileWork, *, dry_run: bool) -> bool:
        """Whether the footer is needed: to see the keys of columns, or to be encrypted or signed anew."""
        if not work.read_keys.is_encrypted:
            return False
        changes_tail = any(held.reference is None for held, _ in work.tasks.values())
        return work.read_keys.hides_columns or (changes_tail and not dry_run)

    def _open(self, work: FileWork) -> None:
        keys = work.read_keys
        if not self._must_open(work, dry_run=self._context.dry_run):
            return
        # What is wrong with the AAD is told before what is wrong with the keys.
        work.aad_prefix = self._context.aad_prefix_of(keys.location, stated_aad_prefix(keys.envelope))
        keys.envelope.file_aad(work.aad_prefix)
        work.footer_dek = self._footer_dek(work)
        keys.take_footer(keys.envelope.open(work.footer_dek, work.aad_prefix))

    def _footer_dek(self, work: FileWork) -> SecretBytes:
        """Return the DEK of the footer, by way of the new key material where there is one: that proves it."""
        held = work.read_keys.footer_key
        if held is None:
            return work.read_keys.data_key(self._context.data_keys)
        if id(held) in work.tasks and not self._context.dry_run:
            return self._new(work, held).dek
        key = value_or_raise(self._unwrapped[held.wrapped_key])
        kek_id = held.material.kek_id
        return key if kek_id is None else Kek(kek_id, key).unwrap_dek(held.material.wrapped_dek)

    def _new(self, work: FileWork, held: HeldKey) -> NewMaterial:
        if id(held) not in work.new:
            _, task = work.tasks[id(held)]
            rewrapped = value_or_raise(self._rewrapped[task])
            work.new[id(held)] = new_material(held.text, held.material, rewrapped, self._context.instance)
        return work.new[id(held)]

    # --- files ---

    def _finish(self, work: FileWork) -> None:
        """Replace what shall be replaced: all keys of a file or none."""
        path, keys = str(work.location), work.read_keys
        staying = len(keys.held) > len(work.tasks)
        self._leave_moved_before(work)
        if (reason := self._nothing_to_rotate(keys)) is not None:
            work.result = FileRotation(path, Outcome.NOTHING_TO_ROTATE, how=reason)
        elif not work.tasks:
            work.result = FileRotation(path, Outcome.ALREADY_CURRENT)
        elif self._context.plan.other_kms and staying:
            raise OutputError(
                f"{path}: some of its keys would move to the other KMS, and some stay: nobody could read it.",
                hint="Leave out what selects some keys.",
            )
        elif self._context.dry_run:
            work.result = FileRotation(path, Outcome.WOULD_ROTATE, self._changes(work))
        else:
            for held, _ in work.tasks.values():
                self._new(work, held)
            changes = self._changes(work)
            done = [*self._replace_external(work), *self._replace_tail(work)]
            work.result = FileRotation(
                path,
                Outcome.ROTATED,
                changes,
                "; ".join(part.how for part in done),
                sum(part.bytes_written for part in done),
                sum(part.bytes_copied for part in done),
            )

    def _leave_moved_before(self, work: FileWork) -> None:
        """Leave keys alone that an earlier run, which was cut off, moved to the other KMS."""
        for held, task in list(work.tasks.values()):
            outcome = self._rewrapped.get(task)
            if isinstance(outcome, Rewrapped) and outcome.was_there:
                del work.tasks[id(held)]

    def _nothing_to_rotate(self, keys: FileKeys) -> str | None:
        if not keys.is_encrypted:
            return "not encrypted"
        if not keys.held:
            return "data keys only"
        if not any(self._context.plan.concerns(held.wrapped_key.master_key_id) for held in keys.held):
            return "none of the master keys"
        return None

    def _replace_external(self, work: FileWork) -> Iterator[ReplacedTail]:
        external = work.read_keys.external
        texts = {
            held.reference: self._new(work, held).text
            for held, _ in work.tasks.values()
            if held.reference is not None
        }
        if external is None or not texts:
            return
        old, new = external.content, external.with_new(texts)
        with self._kept(work, external.location, "key_material", 0, old, new):
            replace_external_material(external.location, old, new, locked_folder=self._locked_folder)
        yield ReplacedTail("new key material file", len(new), 0)

    def _replace_tail(self, work: FileWork) -> Iterator[ReplacedTail]:
        keys, dek = work.read_keys, work.footer_dek
        metadata = {
            held.text: self._new(work, held).text.encode()
            for held, _ in work.tasks.values()
            if held.reference is None and isinstance(held.text, bytes)
        }
        if not metadata:
            return
        assert keys.footer is not None and dek is not None
        footer, tail = keys.footer, keys.tail
        new = new_tail(tail, footer, metadata)
        with self._kept(work, keys.location, "tail", tail.offset, tail.data, new):
            yield tail_rewriter(keys.location).replace(
                keys.location,
                tail,
                new,
                lambda source: check_new_tail(source, tail.offset, new, dek, work.aad_prefix, footer),
                locked_folder=self._locked_folder,
            )

    @contextlib.contextmanager
    def _kept(
        self, work: FileWork, replaced: FileLocation, kind: Kind, offset: int, old: bytes, new: bytes
    ) -> Iterator[None]:
        """Keep old bytes, if that is wanted, while they are replaced and after."""
        if self._context.keep_old is None:
            yield
            return
        kept = keep(work.location, replaced, kind, offset, old, new, self._context.keep_old)
        try:
            yield
        except BaseException:
            # What took its place all the same, before the error, cannot be undone without them.
            if not may_be_in_place(replaced, offset, new):
                with contextlib.suppress(OSError):
                    kept.filesystem.delete_file(kept.path)
            raise

    def _changes(self, work: FileWork) -> tuple[KeyChange, ...]:
        """Count the keys of a file by what changes of them."""
        versions = self._context.versions
        counts: Counter[tuple[str, str, str | None, str | None]] = Counter()
        for _, task in work.tasks.values():
            outcome = self._rewrapped.get(task)
            if isinstance(outcome, Rewrapped):
                new_version = versions.of_new(WrappedKey(task.new_master_key_id, outcome.wrapped_key))
            else:
                new_version = versions.current_new(task.new_master_key_id)
            counts[task.old.master_key_id, task.new_master_key_id, versions.of(task.old), new_version] += 1
        changes = [KeyChange(*names, number) for names, number in counts.items()]
        return tuple(sorted(changes, key=lambda change: (change.master_key_id, change.version or "")))
