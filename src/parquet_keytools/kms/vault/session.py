"""Where the token comes from, given, in a file or by a login, and how it is kept working.

It is renewed in time, and replaced by another login where it cannot be renewed.

Nothing runs in the background: whoever needs the token next does what is due, and the others do not wait for it
while the old token is good.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import requests
from hvac.api.auth_methods import JWT, AppRole, Kubernetes, Token
from pydantic import SecretStr

from parquet_keytools.errors import KmsConfigurationError, KmsError
from parquet_keytools.kms.vault.connection import (
    AppRoleSettings,
    JwtSettings,
    KubernetesSettings,
    VaultConnection,
    VaultSettings,
)
from parquet_keytools.kms.vault.errors import CONNECT, Reason, VaultRefusal
from parquet_keytools.runtime.fork_safety import ForkSafeLock
from parquet_keytools.runtime.presentation import expanded

_MAX_SECRET_BYTES = 64 * 1024


GivenToken = Callable[[], SecretStr]
"""Returns a token that someone else got and keeps, as it is now: in the configuration, or in a file."""


@dataclass(frozen=True)
class Login:
    """An auth method that gives us a token of our own.

    Attributes:
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
        return partial(read_secret, folder / expanded(settings.token_file))
    assert settings.token is not None
    return partial(_checked, settings.token, "the token")


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
        jwt = read_secret(folder / expanded(settings.jwt_path)).get_secret_value()
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
        return read_secret(folder / expanded(file))
    return None if secret is None else _checked(secret, what)


def read_secret(path: Path) -> SecretStr:
    """Return the one line in a file.

    Others may read it: Kubernetes and the agents of Vault and OpenBao decide the mode of what they write. The
    configuration warns of it.

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
        raise CONNECT.error(KmsConfigurationError, f"{path} cannot be read ({reason})")
    return _checked(SecretStr(content.decode("latin-1").strip()), f"the secret in {path}")


def _checked(secret: SecretStr, what: str) -> SecretStr:
    """Return a secret that can be part of a header."""
    text = secret.get_secret_value()
    if not text or len(text) > _MAX_SECRET_BYTES or not (text.isascii() and text.isprintable()) or " " in text:
        raise CONNECT.error(
            KmsConfigurationError,
            f"{what} is empty, too long, or has other characters than printable ASCII without spaces",
        )
    return secret


# --- the token of a process, kept working ---


_RENEWED_AFTER = 2 / 3
"""Of its life. Early enough for more attempts, late enough to cost little."""

_NEXT_ATTEMPT_SECONDS = 5.0
_LEAST_SECONDS_BETWEEN_LOGINS = 30.0


@dataclass(frozen=True)
class HeldToken:
    """A token, and what is known of it.

    Attributes:
        got_at: When it came, on the clock.
        lifetime_seconds: How long it lived when it came; 0 where it never ends, or nobody knows.
        renewable: Whether the server renews it.
        may_look_itself_up: Whether it may ask whether it is valid.
        ends_at: When it ends, on the clock, as far as is known.
        due_at: When it has to be renewed or replaced.
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
        """Return this token with a new end."""
        return replace(self, ends_at=now + seconds, due_at=now + seconds * _RENEWED_AFTER)


class VaultSession:
    """The connections and the token of one process, for all its threads."""

    def __init__(
        self, settings: VaultSettings, folder: Path, connections: requests.Session, clock: Callable[[], float]
    ) -> None:
        self.connections = connections
        self._settings = settings
        self._source = token_source(settings, folder)
        self._clock = clock
        self._lock = ForkSafeLock()
        self._held: HeldToken | None = None

    @property
    def principal(self) -> str:
        """Who we are, as far as that is known without asking."""
        if self._held is not None:
            return self._held.principal
        return self._source.name if isinstance(self._source, Login) else "token"

    def connect(self, token: SecretStr | None, deadline: float) -> VaultConnection:
        """Return a connection that sends a token, and has until a time on the clock."""
        return VaultConnection(self.connections, self._settings, token, deadline, self._clock)

    def token(self, deadline: float) -> HeldToken:
        """Return a token that should work.

        Raises:
            VaultRefusal: The login was refused, or the given token has ended.
            KmsConfigurationError: A secret cannot be read.
            TimeoutError: Other threads did not get one in time.
        """
        held = self._held
        if held is not None and self._clock() < held.due_at:
            return held
        if held is not None and self._clock() < held.ends_at:
            with contextlib.suppress(TimeoutError), self._lock.held_within(0):
                return self._kept(held, deadline)
            return held  # another thread renews it
        return self._another(held, deadline)

    def replace(self, held: HeldToken, deadline: float) -> HeldToken | None:
        """Return another token after one was refused, or None if that one is good.

        Raises:
            VaultRefusal: There is no other one.
        """
        if self._held is not held and self._held is not None:
            return self._held
        if held.may_look_itself_up:
            if self._looked_up(held.value, deadline) is not None:
                return None
        elif self._clock() - held.got_at < _LEAST_SECONDS_BETWEEN_LOGINS or not isinstance(self._source, Login):
            return self._from_file(held, deadline)
        return self._another(held, deadline)

    def revoke(self, deadline: float) -> None:
        """Revoke a token that a login gave us; one that was given to us is not ours to revoke."""
        held, self._held = self._held, None
        if held is not None and isinstance(self._source, Login):
            self._of(held.value, deadline).revoke_self()

    def _of(self, value: SecretStr, deadline: float) -> Any:
        """Return hvac's methods on a token itself."""
        return Token(self.connect(value, deadline))

    def _hold(self, held: HeldToken) -> HeldToken:
        self._held = held
        return held

    def _kept(self, held: HeldToken, deadline: float) -> HeldToken:
        """Renew a token that is still good, or log in again. If neither goes, it serves until its end."""
        if self._held is not held:
            return self._held or held
        with contextlib.suppress(VaultRefusal, KmsError, OSError):
            renewed = self._renewed(held, deadline) if held.renewable else None
            if renewed is not None:
                return self._hold(renewed)
            return self._hold(self._fresh(held, deadline))
        pause = min(_NEXT_ATTEMPT_SECONDS, held.lifetime_seconds / 20)
        return self._hold(replace(held, due_at=self._clock() + pause))

    def _renewed(self, held: HeldToken, deadline: float) -> HeldToken | None:
        """Return the token with a new end, or None where only another login helps."""
        asked_at = self._clock()
        try:
            auth = _part(self._of(held.value, deadline).renew_self(), "auth")
        except VaultRefusal as refusal:
            if not refusal.is_final:
                raise
            return None
        seconds = _seconds(auth.get("lease_duration"))
        # Near its maximal life the server renews a token for what is left of that.
        enough = not isinstance(self._source, Login) or seconds > held.lifetime_seconds / 2
        if not seconds or not enough:
            return None
        return replace(held.lives_for(seconds, asked_at), renewable=auth.get("renewable") is True)

    def _another(self, held: HeldToken | None, deadline: float) -> HeldToken:
        """Return the token that another thread got meanwhile, or a fresh one."""
        with self._lock.held_within(deadline - self._clock()):
            if self._held is not held and self._held is not None:
                return self._held
            return self._hold(self._fresh(held, deadline))

    def _fresh(self, previous: HeldToken | None, deadline: float) -> HeldToken:
        if isinstance(self._source, Login):
            return self._logged_in(self._source, deadline)
        return self._given(self._source, previous, deadline)

    def _logged_in(self, login: Login, deadline: float) -> HeldToken:
        asked_at = self._clock()
        try:
            auth = _part(login.ask(self.connect(None, deadline)), "auth")
        except VaultRefusal as refusal:
            raise replace(refusal, login=login.method) from None
        token = auth.get("client_token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable() or not token:
            raise VaultRefusal(200, Reason.NOT_JSON)
        value = SecretStr(token)
        known = None
        # The login has happened: that this goes wrong must not cost another one.
        with contextlib.suppress(VaultRefusal, OSError):
            known = self._looked_up(value, deadline)
        return self._token(value, asked_at, known, login.name, auth.get("lease_duration"), auth.get("renewable"))

    def _given(self, given: GivenToken, previous: HeldToken | None, deadline: float) -> HeldToken:
        asked_at = self._clock()
        value = given()
        known = self._looked_up(value, deadline)
        if known is None and previous is not None and previous.value == value and previous.may_look_itself_up:
            raise VaultRefusal(403, Reason.TOKEN_DEAD)
        facts = known or {}
        return self._token(value, asked_at, known, "token", facts.get("ttl"), facts.get("renewable"))

    def _token(
        self,
        value: SecretStr,
        asked_at: float,
        known: Mapping[str, Any] | None,
        name: str,
        lifetime: object,
        renewable: object,
    ) -> HeldToken:
        """Return a token with what the server says of it."""
        seconds = _seconds(lifetime)
        held = HeldToken(
            value,
            principal=_principal(known) or name,
            got_at=asked_at,
            lifetime_seconds=seconds,
            renewable=renewable is True,
            may_look_itself_up=known is not None,
        )
        return held.lives_for(seconds, asked_at) if seconds else held

    def _from_file(self, held: HeldToken, deadline: float) -> HeldToken | None:
        """Return the token that a file has by now, or None where it is the same or there is no file."""
        if isinstance(self._source, Login):
            return None
        if self._source() == held.value:
            raise VaultRefusal(403, self.connect(held.value, deadline).reason_of_refusals())
        with self._lock.held_within(deadline - self._clock()):
            return self._hold(self._given(self._source, held, deadline))

    def _looked_up(self, value: SecretStr, deadline: float) -> Mapping[str, Any] | None:
        """Return what the server knows of a token, or None where it does not say: mostly it has none such."""
        try:
            return _part(self._of(value, deadline).lookup_self(), "data")
        except VaultRefusal as refusal:
            if not refusal.is_final:
                raise
            return None


def _part(answer: object, name: str) -> Mapping[str, Any]:
    part = answer.get(name) if isinstance(answer, Mapping) else None
    if not isinstance(part, Mapping):
        raise VaultRefusal(200, Reason.NOT_JSON)
    return part


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0.0


def _principal(known: Mapping[str, Any] | None) -> str:
    """Return who a token is for, in one line that nobody can break."""
    if known is None:
        return ""
    details = known.get("meta")
    role = details.get("role_name") if isinstance(details, Mapping) else None
    parts = [known.get("display_name"), f"role {role}" if role else None]
    text = " ".join(part for part in parts if isinstance(part, str))
    return "".join(c if c.isprintable() else "?" for c in text)[:200]
