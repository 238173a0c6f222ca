"""The token: its source (configuration, file or login), its renewal, and its replacement.

A token is renewed in time, or replaced by another login if it cannot be renewed. Nothing runs in the background:
the next call renews the token, and other calls use the old token meanwhile.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from parquet_keytools.errors import KmsConfigurationError, KmsError
from parquet_keytools.kms.vault.connection import NOT_JSON, TOKEN_DEAD, VaultRefusal, VaultServer, VaultSettings
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.runtime.threads_and_forks import ForkSafeLock

_MAX_SECRET_BYTES = 64 * 1024


GivenToken = Callable[[], SecretStr]
"""Returns the current token from the configuration, or from a file that another program maintains."""


@dataclass(frozen=True)
class Login:
    """An auth method that issues a token to this client.

    Attributes:
        name: Identity of the login, without secrets.
        fields: Returns the fields of the request, with the current secret.
    """

    method: str
    mount: str
    name: str
    fields: Callable[[], dict[str, str]]


def token_source(settings: VaultSettings, folder: Path) -> GivenToken | Login:
    """Return the source of the token in the settings."""

    def secret(setting: SecretStr | None, file: Path | None, what: str) -> SecretStr:
        """Return a secret from the settings, or the current secret in a file: other programs replace it."""
        return _checked(setting, what) if setting is not None else read_secret(folder / expanded(file or ""))

    def approle_fields() -> dict[str, str]:
        assert approle is not None
        if approle.secret_id is None and approle.secret_id_file is None:
            return {"role_id": approle.role_id}
        secret_id = secret(approle.secret_id, approle.secret_id_file, "the secret id")
        return {"role_id": approle.role_id, "secret_id": secret_id.get_secret_value()}

    def jwt_fields(role: str, jwt: SecretStr | None, file: Path | None) -> dict[str, str]:
        return {"role": role, "jwt": secret(jwt, file, "the JSON Web Token").get_secret_value()}

    approle, pod, jwt = settings.approle, settings.kubernetes, settings.jwt
    if approle is not None:
        return Login("approle", approle.mount, approle.mount, approle_fields)
    if pod is not None:
        fields = partial(jwt_fields, pod.role, None, pod.jwt_path)
        return Login("kubernetes", pod.mount, f"{pod.mount} role {pod.role}", fields)
    if jwt is not None:
        fields = partial(jwt_fields, jwt.role, jwt.jwt, jwt.jwt_file)
        return Login("jwt", jwt.mount, f"{jwt.mount} role {jwt.role}", fields)
    return partial(secret, settings.token, settings.token_file, "the token")


def read_secret(path: Path) -> SecretStr:
    """Return the single line in a file.

    The file may be readable for other users: Kubernetes and the agents of Vault and OpenBao choose its mode. The
    configuration warns about it.

    Raises:
        KmsConfigurationError: The file cannot be read, or contains no secret.
    """
    content = b""
    reason = ""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_SECRET_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
    if reason:
        raise KmsConfigurationError(f"{path} cannot be read ({reason})", operation="connect")
    return _checked(SecretStr(content.decode("latin-1").strip()), f"the secret in {path}")


def _checked(secret: SecretStr, what: str) -> SecretStr:
    """Return a secret after a check that it can be part of a header."""
    text = secret.get_secret_value()
    if not text or len(text) > _MAX_SECRET_BYTES or not (text.isascii() and text.isprintable()) or " " in text:
        detail = f"{what} is empty, too long, or has characters other than printable ASCII without spaces"
        raise KmsConfigurationError(detail, operation="connect")
    return secret


# --- the token of a process ---


_RENEWED_AFTER = 2 / 3
"""Of the lifetime: early enough for more attempts, late enough to cost little."""

_NEXT_ATTEMPT_SECONDS = 5.0
_LEAST_SECONDS_BETWEEN_LOGINS = 30.0


@dataclass(frozen=True)
class HeldToken:
    """A token and its properties. Times are on the clock.

    Attributes:
        got_at: When it was issued or read.
        lifetime_seconds: Its TTL at that time; 0 if it does not expire, or if the TTL is unknown.
        renewable: Whether the server renews it.
        may_look_itself_up: Whether its policies allow it to look itself up.
        ends_at: When it expires, if known.
        due_at: When it must be renewed or replaced.
    """

    value: SecretStr
    principal: str
    got_at: float
    lifetime_seconds: float
    renewable: bool
    may_look_itself_up: bool
    ends_at: float = math.inf
    due_at: float = math.inf

    def lives_for(self, seconds: float, now: float) -> HeldToken:
        """Return this token with a new expiry."""
        return replace(self, ends_at=now + seconds, due_at=now + seconds * _RENEWED_AFTER)


class VaultSession:
    """The token of one process, for all its threads."""

    def __init__(self, source: GivenToken | Login, server: VaultServer, clock: Callable[[], float]) -> None:
        self._source = source
        self._server = server
        self._clock = clock
        self._lock = ForkSafeLock()
        self._held: HeldToken | None = None

    @property
    def principal(self) -> str:
        """The identity of the token, if it is known without a call."""
        if self._held is not None:
            return self._held.principal
        return self._source.name if isinstance(self._source, Login) else "token"

    def token(self, deadline: float) -> HeldToken:
        """Return a token that is expected to be valid.

        Raises:
            VaultRefusal: The login was refused, or the configured token has expired.
            KmsConfigurationError: A secret cannot be read.
            TimeoutError: Another thread did not get a token in time.
        """
        held = self._held
        if held is not None and self._clock() < held.due_at:
            return held
        if held is not None and self._clock() < held.ends_at:
            with contextlib.suppress(TimeoutError), self._lock.held_within(0):
                self._held = self._kept(held, deadline) if self._held is held else self._held
            return self._held or held  # another thread may be renewing it
        return self._another(held, deadline)

    def replace(self, held: HeldToken, deadline: float) -> HeldToken | None:
        """Return another token after a token was refused, or None if the refused token is valid.

        Raises:
            VaultRefusal: There is no other token.
        """
        if self._held is not held and self._held is not None:
            return self._held
        is_login = isinstance(self._source, Login)
        if held.may_look_itself_up:
            if self._looked_up(held.value, deadline) is not None:
                return None
        elif is_login and self._clock() - held.got_at < _LEAST_SECONDS_BETWEEN_LOGINS:
            return None
        elif not isinstance(self._source, Login) and self._source() == held.value:
            raise VaultRefusal(403, self._server.meaning_of_refusals(held.value, deadline))
        return self._another(held, deadline)

    def revoke(self, deadline: float) -> None:
        """Revoke the token of a login. A configured token is not revoked: other programs may use it."""
        held, self._held = self._held, None
        if held is not None and isinstance(self._source, Login):
            self._server.request("POST", "/v1/auth/token/revoke-self", held.value, deadline, {})

    def _another(self, held: HeldToken | None, deadline: float) -> HeldToken:
        """Return the token that another thread got meanwhile, or a fresh token."""
        with self._lock.held_within(deadline - self._clock()):
            if self._held is held or self._held is None:
                self._held = self._fresh(held, deadline)
            return self._held

    def _kept(self, held: HeldToken, deadline: float) -> HeldToken:
        """Renew a valid token, or log in again. If both fail, the token is used until it expires."""
        with contextlib.suppress(VaultRefusal, KmsError, OSError):
            renewed = self._renewed(held, deadline) if held.renewable else None
            return renewed or self._fresh(held, deadline)
        pause = min(_NEXT_ATTEMPT_SECONDS, held.lifetime_seconds / 20)
        return replace(held, due_at=self._clock() + pause)

    def _renewed(self, held: HeldToken, deadline: float) -> HeldToken | None:
        """Return the token with a new expiry, or None if another login is needed."""
        asked_at = self._clock()
        try:
            answer = self._server.request("POST", "/v1/auth/token/renew-self", held.value, deadline, {})
        except VaultRefusal as refusal:
            if not refusal.is_final:
                raise
            return None
        auth = _part(answer, "auth")
        seconds = _seconds(auth.get("lease_duration"))
        # Near its maximum TTL, the server renews a token only for the time left.
        enough = not isinstance(self._source, Login) or seconds > held.lifetime_seconds / 2
        if not seconds or not enough:
            return None
        return replace(held.lives_for(seconds, asked_at), renewable=auth.get("renewable") is True)

    def _fresh(self, previous: HeldToken | None, deadline: float) -> HeldToken:
        """Log in, or read the configured token again, and look up the properties of the token."""
        asked_at = self._clock()
        known = None
        if isinstance(self._source, Login):
            name, facts = self._source.name, self._logged_in(self._source, deadline)
            value, lifetime = SecretStr(facts["client_token"]), facts.get("lease_duration")
            # The login succeeded: if the lookup fails, no further login may follow from it.
            with contextlib.suppress(VaultRefusal, OSError):
                known = self._looked_up(value, deadline)
        else:
            name, value = "token", self._source()
            known = self._looked_up(value, deadline)
            was_known = previous is not None and previous.value == value and previous.may_look_itself_up
            if known is None and was_known:
                raise VaultRefusal(403, TOKEN_DEAD)
            facts = known or {}
            lifetime = facts.get("ttl")
        seconds = _seconds(lifetime)
        held = HeldToken(
            value,
            principal=_principal(known) or name,
            got_at=asked_at,
            lifetime_seconds=seconds,
            renewable=facts.get("renewable") is True,
            may_look_itself_up=known is not None,
        )
        return held.lives_for(seconds, asked_at) if seconds else held

    def _logged_in(self, login: Login, deadline: float) -> Mapping[str, Any]:
        """Log in. Returns the answer, which holds a token."""
        try:
            path = f"/v1/auth/{login.mount}/login"
            answer = self._server.request("POST", path, None, deadline, login.fields())
        except VaultRefusal as refusal:
            raise replace(refusal, login=login.method) from None
        auth = _part(answer, "auth")
        token = auth.get("client_token")
        # It becomes a header.
        if not isinstance(token, str) or not token.isascii() or not token.isprintable() or not token:
            raise VaultRefusal(200, NOT_JSON)
        return auth

    def _looked_up(self, value: SecretStr, deadline: float) -> Mapping[str, Any] | None:
        """Return the properties of a token, or None if the server refuses: usually the token is invalid."""
        try:
            return _part(self._server.request("GET", "/v1/auth/token/lookup-self", value, deadline), "data")
        except VaultRefusal as refusal:
            if not refusal.is_final:
                raise
            return None


def _part(answer: object, name: str) -> Mapping[str, Any]:
    part = answer.get(name) if isinstance(answer, Mapping) else None
    if not isinstance(part, Mapping):
        raise VaultRefusal(200, NOT_JSON)
    return part


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0.0


def _principal(known: Mapping[str, Any] | None) -> str:
    """Return the identity of a token, in one line of printable characters."""
    if known is None:
        return ""
    details = known.get("meta")
    role = details.get("role_name") if isinstance(details, Mapping) else None
    parts = [known.get("display_name"), f"role {role}" if role else None]
    text = " ".join(part for part in parts if isinstance(part, str))
    return "".join(c if c.isprintable() else "?" for c in text)[:200]
