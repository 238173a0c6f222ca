"""Finds the KMS client of a name, and imports it when it is needed.

A third party's distribution offers its `KmsClient` as an entry point of the group `parquet_keytools.kms`:

    [project.entry-points."parquet_keytools.kms"]
    acme = "acme_kms:AcmeKms"
"""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from parquet_keytools.errors import ConfigurationError
from parquet_keytools.kms.client import KmsClient, KmsSettings
from parquet_keytools.kms.named import NamedKmss, NamedKmsSettings
from parquet_keytools.runtime.presentation import install_hint

ENTRY_POINT_GROUP = "parquet_keytools.kms"


BUILT_INS = {
    # with the extra that installs its dependencies
    name: EntryPoint(name, f"parquet_keytools.kms.{place}", ENTRY_POINT_GROUP)
    for name, place in {
        "in_memory": "in_memory:InMemoryKms",
        "keystore": "keystore_file:KeystoreKms",
        "aws": "aws:AwsKms [aws]",
        "vault": "vault:VaultKms [vault]",
        "gcp": "gcp:GcpKms [gcp]",
        "pkcs11": "pkcs11:Pkcs11Kms [pkcs11]",
        "azure": "azure:AzureKms [azure]",
    }.items()
}


def known_names() -> list[str]:
    """Return the names of all backends that are installed, sorted."""
    return sorted({*BUILT_INS, *(plugin.name for plugin in entry_points(group=ENTRY_POINT_GROUP))})


def is_known(name: str) -> bool:
    """Return whether a backend of this name is installed. The search for plug-ins takes milliseconds."""
    return name in BUILT_INS or name in known_names()


def client_class(name: str) -> type[KmsClient]:
    """Return the KMS client of a name. A plug-in cannot replace a client of this package."""
    if built_in := BUILT_INS.get(name):
        return _load(built_in, f"the KMS client {name!r}", "".join(map(install_hint, built_in.extras)))
    plugins = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not plugins:
        raise _unknown(name)
    if len(plugins) > 1:
        distributions = ", ".join(sorted(map(_distribution, plugins)))
        raise ConfigurationError(
            f"more than one KMS plug-in is named {name!r}: from {distributions}.",
            hint="Uninstall all but one.",
        )
    (plugin,) = plugins
    distribution = _distribution(plugin)
    extras = f"[{','.join(plugin.extras)}]" if plugin.extras else ""
    hint = f"Install the missing package, for example with: pip install '{distribution}{extras}'"
    return _load(plugin, f"the KMS plug-in {name!r} of {distribution}", hint)


def make_client(settings: KmsSettings, folder: Path) -> KmsClient:
    """Make the KMS client that the settings describe."""
    if isinstance(settings, NamedKmsSettings):
        clients = {name: make_client(one, folder) for name, one in settings.kmss.items()}
        return NamedKmss(clients, settings.default)
    client = client_class(settings.type).from_settings(settings, folder)
    client.instance_id = settings.instance_id
    client.audit_log = settings.audit_log
    client.telemetry_key_ids = settings.telemetry_key_ids
    return client


def _unknown(name: str) -> ConfigurationError:
    names = known_names()
    close = difflib.get_close_matches(name, names, n=1)
    return ConfigurationError(
        f"no KMS client is named {name!r}; there are {', '.join(names)}.",
        hint=f"Did you mean {close[0]!r}?" if close else "Is the package of a plug-in not installed?",
    )


def _load(client: EntryPoint, what: str, hint: str) -> type[KmsClient]:
    try:
        loaded = client.load()
    except ImportError as error:
        raise ConfigurationError(f"{what} cannot be imported: {error}.", hint=hint) from error
    except Exception as error:  # a plug-in may raise anything when it is imported
        raise ConfigurationError(
            f"{what} cannot be imported: {type(error).__name__}.", hint="Ask its authors, or uninstall it."
        ) from error
    if isinstance(loaded, type) and issubclass(loaded, KmsClient):
        return loaded
    raise ConfigurationError(
        f"{what} is not a subclass of KmsClient.",
        hint="Its entry point must name a class that implements parquet_keytools.kms.client.KmsClient.",
    )


def _distribution(plugin: EntryPoint) -> str:
    return plugin.dist.name if plugin.dist else plugin.value
