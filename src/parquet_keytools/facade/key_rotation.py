"""New keys: master keys rotated, data keys replaced, which keys are in use, and secrets of digests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from parquet_keytools.config.key_policy import MasterKeyReference, hash_key_reference, resolve_key
from parquet_keytools.config.settings import HashKeySettings
from parquet_keytools.errors import ConfigurationError, KmsResponseInvalidError
from parquet_keytools.facade import Configured
from parquet_keytools.files import conversion
from parquet_keytools.files.denied_columns import SECRET_LENGTH_BITS, unwrapped_secret
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.kms.contract import CallFacts
from parquet_keytools.rotation import rekeying, restoring
from parquet_keytools.rotation.data_set_run import OnFile
from parquet_keytools.rotation.inventory import FileKeyUses, Inventory
from parquet_keytools.rotation.report import RotationReport
from parquet_keytools.rotation.request import RotationRequest, master_key_id, prefix_of, run_rotation
from parquet_keytools.rotation.restoring import RestoredCheck
from parquet_keytools.rotation.rotation_plan import same_master_key
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, PathLike


class KeyRotation(Configured):
    """Rotates master keys, replaces data keys, lists the keys in use, and makes secrets of digests."""

    def rekey_in_place(
        self,
        path: PathLike | FileLocation,
        *,
        table_name: str | None = None,
        new_table_name: str | None = None,
        new_keytools: Self | None = None,
        aad_prefix: str | bytes | None = None,
        verify: bool = True,
        journal: PathLike | None = None,
        filesystem: Any = None,
        keep_results: bool = True,
        on_file: OnFile | None = None,
        on_progress: conversion.Progress | None = None,
        processes: int | None = 1,
        follow_links: bool = False,
    ) -> RotationReport:
        """Encrypt a file, or all files under a folder, with new data keys, each in its place.

        Each file is written again beside the old one, checked, and takes its place in one step, only while the old
        one is what was read. Without another table or other tools a file keeps its AAD prefix, and nothing that is
        encrypted comes to lie in plaintext.

        Args:
            path: A path or URI of a file or a folder.
            table_name: The table of the files, whose policy and AAD prefix they have.
            new_table_name: The table whose policy they follow from now on; `table_name` if not given.
            new_keytools: Of another configuration, whose keys and tables they use from now on.
            aad_prefix: The AAD prefix that they must have.
            verify: Authenticate every page of the new file; else its footer and metadata of columns alone.
            journal: A local path for a journal: a run that was cut off then goes on when it is called again.
                Without one, all files are re-encrypted.
            filesystem: A `pyarrow.fs` or fsspec file system.
            keep_results: Whether the report has all files, or only those that failed.
            on_file: Called with what became of each file.
            on_progress: Called with the number of bytes after each write, by any thread.
            processes: How many processes share the small files; None takes as many as pay. More than one need a
                `Keytools` that can be pickled, and files that other processes see; otherwise this process does
                all.
            follow_links: Whether files are changed, too, that links lead to outside of `path`. If not, each such
                file is in the report as one that failed.

        Raises:
            ValueError: `processes` is less than 1.
            FileNotFoundError: There is no such file or folder.
            ConfigurationError: There is no such table.
            KeytoolsError: The one file failed; what fails of a folder is in the report.
        """
        is_other = new_keytools is not None
        # KEKs of this process may be what leaked.
        self.clear_caches()
        request = rekeying.RekeyRequest(
            table_name=table_name,
            new_table_name=new_table_name or (None if is_other else table_name),
            aad_prefix=aad_prefix,
            as_before=new_table_name in (None, table_name) and not is_other,
            verify=verify,
            journal=None if journal is None else Path(journal),
            keep_results=keep_results,
            on_file=on_file,
            on_progress=on_progress,
            processes=processes,
            follow_links=follow_links,
        )
        return rekeying.rekey_data_set(
            self._keys, (new_keytools or self)._keys, FileLocation.resolve(path, filesystem), request
        )

    def rotate(
        self,
        path: PathLike | FileLocation,
        *,
        moves: Mapping[str, str] | None = None,
        only_master_keys: Collection[str] | None = None,
        older_than: str | None = None,
        new_keks: bool = False,
        keep_old: bool | None = None,
        dry_run: bool = False,
        journal: PathLike | None = None,
        to: Self | KmsClient | None = None,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
        keep_results: bool = True,
        on_file: OnFile | None = None,
        follow_links: bool = False,
    ) -> RotationReport:
        """Re-wrap the keys of a file, or of all files under a folder; their data stays as it is.

        Without options: with the current version of their master keys, where they are not known to be. Each file
        is replaced in one step after its new keys were proven, and what fails with one is in the report. A run
        that was cut off goes on when it is called again in the same way.

        Args:
            path: A path or URI of a file or a folder.
            moves: Old master key -> the one that takes its place; names of the configuration, or identifiers.
                Then other master keys stay as they are. None takes those of the configuration.
            only_master_keys: The master keys that are rotated.
            older_than: Only keys that an older version wrapped, or one that nobody can tell.
            new_keks: Make fresh KEKs, as after a leak of one; without, KEKs that the KMS re-wraps stay the same.
            keep_old: Keep the old keys beside the files, for `undo_rotation`, until `drop_old_keys`; None does as
                the configuration says.
            dry_run: Change nothing; the report says what would change and what the KMS would be asked for.
            journal: A local path for the journal, outside of the data set; data sets have theirs in the folder of
                this user's state if it is not given.
            to: Another KMS, or the tools of another configuration, whose master keys wrap from now on. A journal
                tells configurations apart, and not KMS clients without one.
            table_name: Table of the files, for an AAD prefix that they do not store.
            aad_prefix: The AAD prefix that they must have.
            filesystem: A `pyarrow.fs` or fsspec file system.
            keep_results: Whether the report has all files, or only those that failed: a million take memory.
            on_file: Called with what became of each file.
            follow_links: Whether files are changed, too, that links lead to outside of `path`. If not, each such
                file is in the report as one that failed.

        Raises:
            ConfigurationError: There is no KMS, or the moves are not possible.
            KmsError: A master key to move to does not exist, or is disabled.
            FileNotFoundError: There is no such file or folder.
            OutputError: The journal is of a rotation with other parameters, or cannot be written.
        """
        request = RotationRequest(
            moves=moves,
            only_master_keys=only_master_keys,
            older_than=older_than,
            new_keks=new_keks,
            keep_old=keep_old,
            dry_run=dry_run,
            journal=None if journal is None else Path(journal),
            new_kms=to.kms if isinstance(to, Configured) else to,
            new_configuration=to.configuration if isinstance(to, Configured) else None,
            table_name=table_name,
            aad_prefix=aad_prefix,
            keep_results=keep_results,
            on_file=on_file,
            follow_links=follow_links,
        )
        return run_rotation(self._keys, FileLocation.resolve(path, filesystem), request)

    def undo_rotation(
        self,
        path: PathLike | FileLocation,
        *,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
        follow_links: bool = False,
    ) -> RotationReport:
        """Put back the keys that `rotate` kept of a file, or of all files under a folder.

        A file that changed since is left as it is, and reported; so is one whose old keys the KMS does not unwrap.
        Several rotations are undone one a call.

        Args:
            path: A path or URI of a file or a folder.
            table_name: Table of the files, for an AAD prefix that they do not store.
            aad_prefix: The AAD prefix that they must have.
            filesystem: A `pyarrow.fs` or fsspec file system.
            follow_links: Whether files are changed, too, that links lead to outside of `path`. If not, each such
                file is in the report as one that failed.

        Raises:
            FileNotFoundError: There is no such file or folder.
        """
        check = RestoredCheck(self._keys, prefix_of(self._keys, table_name, aad_prefix))
        return restoring.restore_data_set(FileLocation.resolve(path, filesystem), check, follow_links=follow_links)

    def drop_old_keys(
        self,
        path: PathLike | FileLocation,
        *,
        filesystem: Any = None,
        on_left: Callable[[str, str], None] | None = None,
        follow_links: bool = False,
    ) -> int:
        """Remove the keys that `rotate` kept of a file, or of all files under a folder.

        Args:
            path: A path or URI of a file or a folder.
            filesystem: A `pyarrow.fs` or fsspec file system.
            on_left: Called with the path of what is named like old keys and is none, such as a link, and why; it
                is left in place.
            follow_links: Whether old keys are removed, too, that lie outside of `path`, behind a link.

        Returns:
            How many kept files were removed.

        Raises:
            FileNotFoundError: There is no such file or folder.
        """
        return restoring.drop_data_set(FileLocation.resolve(path, filesystem), on_left, follow_links=follow_links)

    def key_inventory(
        self,
        path: PathLike | FileLocation,
        *,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
        ignore_passed_over: bool = False,
    ) -> Iterator[FileKeyUses]:
        """Yield which master keys and versions a file, or each file under a folder, depends on.

        What could not be looked into, such as a link to what is not there, comes with `unknown`.

        Args:
            path: A path or URI of a file or a folder.
            table_name: Table of the files, for an AAD prefix that they do not store.
            aad_prefix: The AAD prefix that they must have.
            filesystem: A `pyarrow.fs` or fsspec file system.
            ignore_passed_over: Whether encrypted files are left out that readers of data sets pass over, for their
                name or that of a folder begins with a dot or an underscore. Else they come with `unknown`.

        Raises:
            FileNotFoundError: There is no such file or folder.
            NoParquetFilesError: The folder has no Parquet files.
        """
        inventory = Inventory(self._keys, prefix_of(self._keys, table_name, aad_prefix))
        return inventory.list(FileLocation.resolve(path, filesystem), ignore_passed_over=ignore_passed_over)

    def files_using(
        self,
        key: str,
        path: PathLike | FileLocation,
        *,
        version: str | None = None,
        table_name: str | None = None,
        aad_prefix: str | bytes | None = None,
        filesystem: Any = None,
    ) -> Iterator[FileKeyUses]:
        """Yield the files that need a master key, or a version of it, and those of which that cannot be told.

        Args:
            key: Name of the master key in the configuration, or its identifier.
            path: A path or URI of a file or a folder.
            version: The version; None means any.
            table_name: Table of the files, for an AAD prefix that they do not store.
            aad_prefix: The AAD prefix that they must have.
            filesystem: A `pyarrow.fs` or fsspec file system.

        Raises:
            FileNotFoundError: There is no such file or folder.
            NoParquetFilesError: The folder has no Parquet files.
        """
        wanted, same = master_key_id(self.configuration, key), same_master_key(self.kms)
        for file in self.key_inventory(path, table_name=table_name, aad_prefix=aad_prefix, filesystem=filesystem):
            if file.depends_on(wanted, version, same) is not False:
                yield file

    # --- secrets of digests that are shown in place of values ---

    def check_hash_keys(self) -> None:
        """Unwrap each secret under `hash_keys`.

        Raises:
            ConfigurationError: What the KMS unwraps is no secret of digests.
            KmsError: The KMS does not unwrap one.
        """
        for name in self.configuration.hash_keys:
            unwrapped_secret(self.configuration, name, self._keys.kms_keys())

    def wrap_hash_key(self, name: str, master_key: str | None = None) -> HashKeySettings:
        """Return what the configuration shall say of a secret under `hash_keys`.

        A secret that the configuration has is re-wrapped under the current version of its master key, or under
        another one, and digests stay the same. Otherwise it is a new one, of random bytes.

        Args:
            name: Of the secret.
            master_key: Name of the master key that wraps it; None for the one that the configuration says.

        Raises:
            ConfigurationError: The master key is unknown, a data key, or not given for a new secret.
            KmsResponseInvalidError: What the KMS returned does not unwrap to the secret.
            KmsError: The KMS does not wrap or unwrap it.
        """
        known = self.configuration.hash_keys.get(name)
        if master_key is None:
            if known is None:
                raise ConfigurationError(
                    f"the configuration has no secret {name!r} under hash_keys.",
                    hint="Name the master key that shall wrap a new one: --master-key on the command line.",
                )
            master_key = known.master_key
            reference = hash_key_reference(self.configuration, name)
        else:
            found = resolve_key(self.configuration, master_key)
            if not isinstance(found, MasterKeyReference):
                raise ConfigurationError(f"{master_key!r} is a data key: master keys wrap secrets of digests.")
            reference = found
        if known is None:
            secret = SecretBytes.random(SECRET_LENGTH_BITS)
        else:
            secret = unwrapped_secret(self.configuration, name, self._keys.kms_keys())
        assert self.kms is not None
        master_key_id = reference.master_key_id
        wrapped = self.kms.wrap(secret, master_key_id)
        # All digests would be lost with a wrapped secret that does not open.
        if self.kms.unwrap(wrapped, master_key_id) != secret:
            call = CallFacts(self.kms.backend, "wrap", master_key_id)
            raise call.error(KmsResponseInvalidError, "the wrapped secret does not unwrap to the secret")
        return HashKeySettings(master_key=master_key, wrapped_key=wrapped)
