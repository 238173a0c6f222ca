"""Where the token comes from: it is given, lies in a file, or is what a login answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvac.api.auth_methods import JWT, AppRole, Kubernetes
from pydantic import SecretStr

from parquet_keytools.errors import KmsConfigurationError
from parquet_keytools.kms.vault.connection import VaultConnection
from parquet_keytools.kms.vault.errors import BACKEND
from parquet_keytools.kms.vault.settings import (
    AppRoleSettings,
    JwtSettings,
    KubernetesSettings,
    VaultSettings,
)

_MAX_SECRET_BYTES = 64 * 1024


class GivenToken:
    """A token that someone else got and keeps: in the configuration, or in a file that is read again.

    Args:
        token: The token, or the file it is in.
    """

    def __init__(self, token: SecretStr | Path) -> None:
        self._token = token

    def read(self) -> SecretStr:
        """Return the token as it is now.

        Raises:
            KmsConfigurationError: There is none, or it is no token.
        """
        if isinstance(self._token, Path):
            return read_secret(self._token)
        return _checked(self._token, "the token")


@dataclass(frozen=True)
class Login:
    """An auth method that gives us a token of our own.

    Attributes:
        method: Its name.
        name: Who logs in, as far as that is no secret.
        ask: Logs in over a connection without a token, with the secret as it is now, and returns the answer.
    """

    method: str
    name: str
    ask: Callable[[VaultConnection], Mapping[str, Any]]


def token_source(settings: VaultSettings, folder: Path) -> GivenToken | Login:
    """Return where the settings say that the token comes from."""
    if settings.approle is not None:
        return _approle(settings.approle, folder)
    if settings.kubernetes is not None:
        return _kubernetes(settings.kubernetes, folder)
    if settings.jwt is not None:
        return _jwt(settings.jwt, folder)
    if settings.token_file is not None:
        return GivenToken(folder / settings.token_file.expanduser())
    assert settings.token is not None
    return GivenToken(settings.token)


def _approle(settings: AppRoleSettings, folder: Path) -> Login:
    def ask(connection: VaultConnection) -> Any:
        secret_id = _secret(settings.secret_id, settings.secret_id_file, folder, "the secret id")
        return AppRole(connection).login(
            settings.role_id,
            None if secret_id is None else secret_id.get_secret_value(),
            use_token=False,
            mount_point=settings.mount,
        )

    return Login("approle", settings.mount, ask)


def _kubernetes(settings: KubernetesSettings, folder: Path) -> Login:
    def ask(connection: VaultConnection) -> Any:
        # Kubernetes replaces it now and then.
        jwt = read_secret(folder / settings.jwt_path.expanduser()).get_secret_value()
        return Kubernetes(connection).login(settings.role, jwt, use_token=False, mount_point=settings.mount)

    return Login("kubernetes", f"{settings.mount} role {settings.role}", ask)


def _jwt(settings: JwtSettings, folder: Path) -> Login:
    def ask(connection: VaultConnection) -> Any:
        jwt = _secret(settings.jwt, settings.jwt_file, folder, "the JSON Web Token")
        assert jwt is not None
        return JWT(connection).jwt_login(
            settings.role, jwt.get_secret_value(), use_token=False, path=settings.mount
        )

    return Login("jwt", f"{settings.mount} role {settings.role}", ask)


def _secret(secret: SecretStr | None, file: Path | None, folder: Path, what: str) -> SecretStr | None:
    """Return a secret of the settings, or the one that is in a file now."""
    if file is not None:
        return read_secret(folder / file.expanduser())
    return None if secret is None else _checked(secret, what)


def read_secret(path: Path) -> SecretStr:
    """Return the one line in a file.

    Its mode is not looked at: Kubernetes and the agents of Vault and OpenBao write such files for other users.

    Raises:
        KmsConfigurationError: The file cannot be read, or holds no secret.
    """
    content = b""
    reason = ""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_SECRET_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
    if reason:
        raise _mistake(f"{path} cannot be read ({reason})")
    return _checked(SecretStr(content.decode("latin-1").strip()), f"the secret in {path}")


def _checked(secret: SecretStr, what: str) -> SecretStr:
    """Return a secret that can be part of a header."""
    text = secret.get_secret_value()
    if not text or len(text) > _MAX_SECRET_BYTES or not (text.isascii() and text.isprintable()) or " " in text:
        raise _mistake(f"{what} is empty, too long, or has other characters than printable ASCII without spaces")
    return secret


def _mistake(detail: str) -> KmsConfigurationError:
    return KmsConfigurationError(detail, backend=BACKEND, operation="connect")
