"""Which key a name in a table means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parquet_keytools.config.mistakes import Mistake, YamlPath, did_you_mean, one_of
from parquet_keytools.config.settings import Configuration
from parquet_keytools.config.table_settings import TableSettings


@dataclass(frozen=True)
class MasterKeyReference:
    """A master key, by its identifier in the KMS."""

    master_key_id: str


@dataclass(frozen=True)
class DataKeyReference:
    """A data key that the caller manages, by its name under `data_keys`."""

    name: str


KeyReference = MasterKeyReference | DataKeyReference


def resolve_key(configuration: Configuration, name: str) -> KeyReference:
    """Return the key that a name means: one of `master_keys`, of `data_keys`, or else of the KMS.

    `data_keys` come before the KMS's keys, which often nobody can list. Where they can be listed, a name in
    both is a mistake that `check_key_names` reports, so that the order makes no difference.

    Raises:
        ConfigurationError: The name is not declared, and there is no KMS that might know it.
    """
    reference = _lookup(configuration, name)
    if reference is None:
        raise configuration.error_for([Mistake((), *_unknown(configuration, name, frozenset()))])
    return reference


def configured_master_key_ids(configuration: Configuration) -> frozenset[str]:
    """Return the identifiers of all master keys that a configuration names.

    Which of them a file may be under is a matter of its table.
    """
    used = {name for table in configuration.tables.values() for _, name in table.key_names()}
    references = [_lookup(configuration, name) for name in used]
    in_tables = {found.master_key_id for found in references if isinstance(found, MasterKeyReference)}
    of_digests = {hash_key_reference(configuration, name).master_key_id for name in configuration.hash_keys}
    moved = {new for pair in moved_master_key_ids(configuration) for new in pair}
    return frozenset(in_tables | of_digests | moved | set(configuration.master_keys.values()))


def hash_key_reference(configuration: Configuration, name: str) -> MasterKeyReference:
    """Return the master key that wraps a secret under `hash_keys`; it is never a data key."""
    master_key = configuration.hash_keys[name].master_key
    return MasterKeyReference(configuration.master_keys.get(master_key, master_key))


def moved_master_key_ids(configuration: Configuration) -> list[tuple[str, str]]:
    """Return the identifiers of the old and the new master key of each move under `rotation`."""
    names = configuration.master_keys
    return [(names.get(old, old), names.get(new, new)) for old, new in configuration.rotation.moves.items()]


def check_key_names(configuration: Configuration, known_master_key_ids: frozenset[str] | None = None) -> None:
    """Check that every key that a table uses exists, as far as that is known.

    Args:
        configuration: All of its tables are checked.
        known_master_key_ids: Identifiers of all master keys in the KMS; None where it was not asked or does
            not tell: then any name may be one of them.

    Raises:
        ConfigurationError: Reports all names that mean no key, or two.
    """
    known = known_master_key_ids
    mistakes: list[Mistake] = []
    for name in sorted(configuration.data_keys.keys() & (known or ())):
        mistakes.append(Mistake(("data_keys", name), "a master key in the KMS has this name too."))
    for name, hash_key in configuration.hash_keys.items():
        mistakes += _checked_use(configuration, known, ("hash_keys", name, "master_key"), hash_key.master_key)
    for table_name, table in configuration.tables.items():
        for path, name in table.key_names():
            mistakes += _checked_use(configuration, known, ("tables", table_name, *path), name)
        mistakes += _without_effect(configuration, table_name, table)
    if mistakes:
        raise configuration.error_for(mistakes)


def check_moves(configuration: Configuration, known_master_key_ids: frozenset[str] | None) -> None:
    """Check that the master keys under `rotation.moves` exist, as far as that is known.

    Only before a rotation: the old master key of a move that was made may be gone, and readers need it no more.

    Raises:
        ConfigurationError: Reports all names that mean no master key.
    """
    known = known_master_key_ids
    if known is None:
        return
    mistakes = [
        Mistake(("rotation", "moves", old), *_unknown(configuration, name, known))
        for old, new in configuration.rotation.moves.items()
        for name in (old, new)
        if configuration.master_keys.get(name, name) not in known
    ]
    if mistakes:
        raise configuration.error_for(mistakes)


def _lookup(configuration: Configuration, name: str) -> KeyReference | None:
    if name in configuration.master_keys:
        return MasterKeyReference(configuration.master_keys[name])
    if name in configuration.data_keys:
        return DataKeyReference(name)
    return None if configuration.kms is None else MasterKeyReference(name)


def _checked_use(
    configuration: Configuration, known: frozenset[str] | None, path: YamlPath, name: str
) -> Iterator[Mistake]:
    reference = _lookup(configuration, name)
    if reference is None:
        yield Mistake(path, *_unknown(configuration, name, frozenset()))
    elif isinstance(reference, MasterKeyReference) and known is not None:
        if reference.master_key_id in known:
            return
        if name in configuration.master_keys:
            identifier = reference.master_key_id
            message = f"the KMS has no master key {identifier!r}."
            yield Mistake(("master_keys", name), message, did_you_mean(identifier, known) or one_of(known))
        else:
            yield Mistake(path, *_unknown(configuration, name, known))


def _unknown(configuration: Configuration, name: str, known: frozenset[str]) -> tuple[str, str]:
    """Return message and hint for a name that means no key."""
    places = "master_keys, data_keys, or the KMS" if configuration.kms else "data_keys, and there is no kms"
    names = {*configuration.master_keys, *configuration.data_keys, *known}
    return f"there is no key {name!r} in {places}.", did_you_mean(name, names) or one_of(names)


def _without_effect(configuration: Configuration, table_name: str, table: TableSettings) -> Iterator[Mistake]:
    """Yield options that the table sets and that its data keys make meaningless."""
    references = [_lookup(configuration, name) for _, name in table.key_uses()]
    data_keys = [reference.name for reference in references if isinstance(reference, DataKeyReference)]
    path: YamlPath = ("tables", table_name)
    if len(data_keys) == len(references) and table.key_material == "external":
        yield Mistake((*path, "key_material"), "data keys have no key material.")
    if "data_key_length_bits" in table.model_fields_set:
        for name in data_keys:
            length_bits = configuration.data_keys[name].length_bits
            if length_bits != table.data_key_length_bits:
                message = f"the data key {name!r} has {length_bits} bits."
                yield Mistake((*path, "data_key_length_bits"), message)
