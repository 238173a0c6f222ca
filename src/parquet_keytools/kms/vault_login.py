"""Where the token comes from: it is given, lies in a file, or is what a login answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvac.api.auth_methods import JWT, AppRole, Kubernetes
from pydantic import SecretStr

from parquet_keytools.errors import KmsConfigurationError
from parquet_keytools.kms.vault_connection import VaultConnection
from parquet_keytools.kms.vault_errors import BACKEND
from parquet_keytools.kms.vault_settings import (
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
        self.is_in_file = isinstance(token, Path)

    def read(self) -> SecretStr:
        """Return the token as it is now.

        Raises:
            KmsConfigurationError: There is none, or it is no token.
        """
        if isinstance(self._token, Path):
            return read_secret(self._token)
        return _checked(self._token, "the token")


class Login(ABC):
    """An auth method that gives us a token of our own."""

    method: str

    @abstractmethod
    def ask(self, connection: VaultConnection) -> Mapping[str, Any]:
        """Log in over a connection without a token, and return the answer."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Who logs in, as far as that is no secret."""


class AppRoleLogin(Login):
    """Logs in with a role id and, mostly, a secret id."""

    method = "approle"

    def __init__(self, settings: AppRoleSettings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder

    @property
    def name(self) -> str:
        """Who logs in."""
        return self._settings.mount

    def ask(self, connection: VaultConnection) -> Mapping[str, Any]:
        """Log in; the secret id's file is read now."""
        secret_id = self._settings.secret_id
        if self._settings.secret_id_file is not None:
            secret_id = read_secret(self._folder / self._settings.secret_id_file.expanduser())
        answer: Mapping[str, Any] = AppRole(connection).login(
            self._settings.role_id,
            None if secret_id is None else _checked(secret_id, "the secret id").get_secret_value(),
            use_token=False,
            mount_point=self._settings.mount,
        )
        return answer


class KubernetesLogin(Login):
    """Logs in with the token of a service account, which Kubernetes replaces now and then."""

    method = "kubernetes"

    def __init__(self, settings: KubernetesSettings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder

    @property
    def name(self) -> str:
        """Who logs in."""
        return f"{self._settings.mount} role {self._settings.role}"

    def ask(self, connection: VaultConnection) -> Mapping[str, Any]:
        """Log in with the token that the pod has now."""
        jwt = read_secret(self._folder / self._settings.jwt_path.expanduser())
        answer: Mapping[str, Any] = Kubernetes(connection).login(
            self._settings.role, jwt.get_secret_value(), use_token=False, mount_point=self._settings.mount
        )
        return answer


class JwtLogin(Login):
    """Logs in with a JSON Web Token."""

    method = "jwt"

    def __init__(self, settings: JwtSettings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder

    @property
    def name(self) -> str:
        """Who logs in."""
        return f"{self._settings.mount} role {self._settings.role}"

    def ask(self, connection: VaultConnection) -> Mapping[str, Any]:
        """Log in; the file is read now."""
        if self._settings.jwt_file is not None:
            jwt = read_secret(self._folder / self._settings.jwt_file.expanduser())
        else:
            assert self._settings.jwt is not None
            jwt = _checked(self._settings.jwt, "the JSON Web Token")
        answer: Mapping[str, Any] = JWT(connection).jwt_login(
            self._settings.role, jwt.get_secret_value(), use_token=False, path=self._settings.mount
        )
        return answer


def token_source(settings: VaultSettings, folder: Path) -> GivenToken | Login:
    """Return where the settings say that the token comes from."""
    if settings.approle is not None:
        return AppRoleLogin(settings.approle, folder)
    if settings.kubernetes is not None:
        return KubernetesLogin(settings.kubernetes, folder)
    if settings.jwt is not None:
        return JwtLogin(settings.jwt, folder)
    if settings.token_file is not None:
        return GivenToken(folder / settings.token_file.expanduser())
    assert settings.token is not None
    return GivenToken(settings.token)


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
