"""What a configuration may say of Vault or OpenBao."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from parquet_keytools.kms.settings import RemoteKmsSettings, bytes_of_context
from parquet_keytools.kms.transport import is_loopback, mistake_in_url

_MOUNT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_NAMESPACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]*(/[A-Za-z0-9_][A-Za-z0-9_. -]*)*/?")
_HOST = re.compile(r"[A-Za-z0-9.-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")


def _checked_mount(mount: str) -> str:
    # It becomes part of a path: dots in a row would leave the mount.
    if not _MOUNT.fullmatch(mount) or ".." in mount:
        raise ValueError("a mount point is a path such as `transit` or `team/transit`")
    return mount


def _checked_namespace(namespace: str) -> str:
    if not _NAMESPACE.fullmatch(namespace) or ".." in namespace:
        raise ValueError("a namespace is a path such as `team` or `org/team`")
    return namespace


def _checked_host(host: str) -> str:
    if not _HOST.fullmatch(host):
        raise ValueError("a host is a name or an address, with a port where it is not the usual one")
    return host.lower()


Mount = Annotated[str, AfterValidator(_checked_mount)]
Namespace = Annotated[str, AfterValidator(_checked_namespace)]
Host = Annotated[str, AfterValidator(_checked_host)]


class _LoginSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class AppRoleSettings(_LoginSettings):
    """Login of a service that has a role id and a secret id."""

    role_id: str = Field(min_length=1, description="The role id.")
    secret_id: SecretStr | None = Field(default=None, description="The secret id, best as `${VARIABLE}`; or")
    secret_id_file: Path | None = Field(
        default=None, description="a file with the secret id, read at each login. A role may need neither."
    )
    mount: Mount = Field(default="approle", description="Where the auth method is mounted.")

    @model_validator(mode="after")
    def _one_secret_id(self) -> Self:
        if self.secret_id is not None and self.secret_id_file is not None:
            raise ValueError("give either secret_id or secret_id_file")
        return self


class KubernetesSettings(_LoginSettings):
    """Login of a pod with the token of its service account."""

    role: str = Field(min_length=1, description="The role to log in to.")
    jwt_path: Path = Field(
        default=Path("/var/run/secrets/kubernetes.io/serviceaccount/token"),
        description="The file with the service account's token, read at each login.",
    )
    mount: Mount = Field(default="kubernetes", description="Where the auth method is mounted.")


class JwtSettings(_LoginSettings):
    """Login with a JSON Web Token that someone else issued, such as a CI service."""

    role: str = Field(min_length=1, description="The role to log in to.")
    jwt: SecretStr | None = Field(default=None, description="The JSON Web Token, best as `${VARIABLE}`; or")
    jwt_file: Path | None = Field(default=None, description="a file with it, read at each login.")
    mount: Mount = Field(default="jwt", description="Where the auth method is mounted.")

    @model_validator(mode="after")
    def _one_jwt(self) -> Self:
        if (self.jwt is None) == (self.jwt_file is None):
            raise ValueError("give either jwt or jwt_file")
        return self


class VaultSettings(RemoteKmsSettings):
    """Settings of Vault and OpenBao; relative paths start at the configuration's folder."""

    type: Literal["vault"] = "vault"
    url: str = Field(description="Address of the server, such as `https://vault.example:8200`.")
    allow_http: bool = Field(
        default=False, description="Allow an address without TLS that is not on this machine."
    )
    redirect_hosts: tuple[Host, ...] = Field(
        default=(), description="Other hosts that the server may redirect to, such as the nodes of its cluster."
    )
    proxy: SecretStr | None = Field(
        default=None,
        description="Address of a proxy, best as `${VARIABLE}` where it holds a password. Proxies in "
        "environment variables are not used.",
    )
    namespace: Namespace | None = Field(default=None, description="The namespace that mounts and logins are in.")
    mount_point: Mount = Field(default="transit", description="Where the transit engine is mounted.")
    token: SecretStr | None = Field(default=None, description="A token, best as `${VAULT_TOKEN}`; or")
    token_file: Path | None = Field(
        default=None, description="a file with a token that something else keeps fresh; or"
    )
    approle: AppRoleSettings | None = Field(default=None, description="a login with AppRole; or")
    kubernetes: KubernetesSettings | None = Field(default=None, description="a login with Kubernetes; or")
    jwt: JwtSettings | None = Field(default=None, description="a login with a JSON Web Token.")
    ca_file: Path | None = Field(
        default=None, description="PEM file of certificates to trust instead of the public ones."
    )
    client_cert: Path | None = Field(default=None, description="A client certificate (PEM).")
    client_key: Path | None = Field(default=None, description="Its key (PEM), where it is not in the same file.")
    context: str | dict[str, str] | None = Field(
        default=None, description="Context of derived keys. With it all master keys must be derived ones."
    )
    batch_size: int = Field(default=100, ge=1, le=1000, description="Maximum number of keys in one call.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ways = (self.token, self.token_file, self.approle, self.kubernetes, self.jwt)
        if sum(way is not None for way in ways) != 1:
            raise ValueError("give one of token, token_file, approle, kubernetes and jwt")
        if self.client_key is not None and self.client_cert is None:
            raise ValueError("client_key needs client_cert")
        if mistake := mistake_in_url(self.url, "url", allow_http=self.allow_http):
            raise ValueError(mistake)
        if self.proxy is not None:
            _check_proxy(self.proxy.get_secret_value(), self.url, self.allow_http)
        return self

    def context_bytes(self) -> bytes | None:
        """Return the context as the server gets it, or None."""
        return None if self.context is None else bytes_of_context(self.context)


def _check_proxy(proxy: str, url: str, allow_http: bool) -> None:
    try:
        parts = urlsplit(proxy)
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError("proxy has to be an address such as http://proxy.example:3128")
    # Through TLS a proxy sees nothing; without, it gets token and keys.
    if urlsplit(url).scheme == "http" and not allow_http and not is_loopback(host):
        raise ValueError("url is without TLS, so that the proxy can read the keys: leave out proxy, or use https")
