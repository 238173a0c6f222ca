"""KmsClient as the guard of its backend: arguments, results, and what must not leak."""

import copy
import io
import logging
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from pydantic import Field, SecretStr

from parquet_keytools.errors import (
    KmsError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.client import (
    KmsSettings,
    MasterKeyDescription,
    RewrapRequest,
    SingleKeyKmsClient,
    UnwrapRequest,
    WrapRequest,
)
from parquet_keytools.kms.contract_tests import rewrap_one, unwrap_one, wrap_one
from parquet_keytools.secret_bytes import SecretBytes

KEY = SecretBytes(b"canary-key-bytes")
SECRET = "s.token and canary-key-bytes in a response body"


class SdkError(Exception):
    """As SDKs raise them: with the response in text, arguments and attributes."""

    def __init__(self) -> None:
        super().__init__(SECRET)
        self.response = SECRET


class FakeKms(SingleKeyKmsClient):
    """Answers as a test chooses; `behave` gets the name of the hook and its arguments."""

    backend = "fake"

    def __init__(self, behave: Callable[..., Any]) -> None:
        super().__init__()
        self.behave = behave

    @classmethod
    def from_settings(cls, settings: KmsSettings, folder: Path) -> Self:
        raise NotImplementedError

    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        return self.behave("wrap", key, master_key_id)

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        return self.behave("unwrap", wrapped_key, master_key_id)

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        return self.behave("describe", master_key_id)


class FakeBatchKms(FakeKms):
    """The same with a call for many keys."""

    def _wrap_many(self, requests):
        return self.behave("wrap_many", requests)

    def _unwrap_many(self, requests):
        return self.behave("unwrap_many", requests)

    def _rewrap_many(self, requests):
        return self.behave("rewrap_many", requests)


OPERATIONS = {
    "wrap": lambda kms: wrap_one(kms, KEY, "m"),
    "unwrap": lambda kms: unwrap_one(kms, "wrapped", "m"),
    "rewrap": lambda kms: rewrap_one(kms, "wrapped", "m", "n"),
    "describe": lambda kms: kms.describe("m"),
}


def plain(*_: object) -> None:
    raise SdkError


def inside_another(*_: object) -> None:
    try:
        raise SdkError
    except SdkError as error:
        raise RuntimeError(SECRET) from error


def ours_from_it(*_: object) -> None:
    try:
        raise SdkError
    except SdkError as error:
        raise KmsThrottledError(backend="fake", operation="wrap") from error


def ours_in_its_context(*_: object) -> None:
    try:
        raise SdkError
    except SdkError:
        raise KmsThrottledError(backend="fake", operation="wrap")  # noqa: B904 - what is tested


def ours_twice(*_: object) -> None:
    try:
        ours_in_its_context()
    except KmsThrottledError:
        ours_from_it()


def all_texts(error: BaseException) -> str:
    """All that a program may print, log or send of an error."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.error("failed", exc_info=error)
    # Debuggers and error trackers print local variables; the tests' own variables do not count.
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), capture_locals=True)
    locals_of_ours = [frame.locals for frame in frames if "parquet_keytools" in frame.filename]
    return "\n".join(
        [
            str(error),
            repr(error),
            repr(error.__dict__),
            repr(error.args),
            repr(pickle.dumps(error)),
            "".join(traceback.format_exception(error)),
            repr(locals_of_ours),
            log.getvalue(),
        ]
    )


def related(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    waiting = [error]
    while waiting:
        if (one := waiting.pop()) is not None and one not in found:
            found.append(one)
            waiting += [one.__cause__, one.__context__]
    return found


@pytest.mark.parametrize("client", [FakeKms, FakeBatchKms])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("behave", [plain, inside_another, ours_from_it, ours_in_its_context, ours_twice])
def test_foreign_exceptions_stay_inside(client, operation, behave) -> None:
    with pytest.raises(KmsError) as caught:
        OPERATIONS[operation](client(behave))
    assert related(caught.value) == [caught.value]
    texts = all_texts(caught.value)
    assert "canary" not in texts and "s.token" not in texts
    expected = KmsThrottledError if behave.__name__.startswith("ours") else KmsResponseInvalidError
    assert type(caught.value) is expected
    if expected is KmsResponseInvalidError:
        assert "unexpected SdkError" in str(caught.value) or "unexpected RuntimeError" in str(caught.value)


def test_the_check_above_can_fail() -> None:
    with pytest.raises(KmsThrottledError) as caught:
        ours_in_its_context()
    assert "canary" in all_texts(caught.value)
    assert len(related(caught.value)) == 2


@pytest.mark.parametrize("foreign", [OSError(SECRET), TimeoutError(SECRET), ConnectionResetError(SECRET)])
def test_the_network_is_worth_a_retry(foreign: Exception) -> None:
    def fail(*_: object) -> None:
        raise foreign

    with pytest.raises(KmsUnavailableError) as caught:
        unwrap_one(FakeKms(fail), "wrapped", "m")
    assert caught.value.retryable
    assert (caught.value.backend, caught.value.operation, caught.value.master_key_id) == ("fake", "unwrap", "m")
    assert "canary" not in all_texts(caught.value)


def test_a_translation_that_fails_does_not_leak_either() -> None:
    class Translating(FakeKms):
        def _translate(self, error: Exception, operation: str, master_key_id: str | None) -> KmsError:
            raise KeyError(str(error))

    with pytest.raises(KmsResponseInvalidError, match="unexpected SdkError") as caught:
        wrap_one(Translating(plain), KEY, "m")
    assert "canary" not in all_texts(caught.value)


def test_what_is_no_error_passes() -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wrap_one(FakeKms(stop), KEY, "m")


def test_an_outcome_keeps_no_frames() -> None:
    """The backend's frames hold keys, for as long as a caller keeps the outcome."""
    kms = FakeKms(ours_in_its_context)
    (outcome,) = kms.unwrap_many([UnwrapRequest("wrapped", "m")])
    assert isinstance(outcome, KmsThrottledError)
    assert outcome.__traceback__ is None
    answers = FakeBatchKms(lambda *_: [caught_error()]).unwrap_many([UnwrapRequest("wrapped", "m")])
    assert related(answers[0]) == answers and answers[0].__traceback__ is None


def caught_error() -> KmsError:
    try:
        ours_from_it()
    except KmsThrottledError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    "answer",
    [None, b"bytes", 5, "", "é", "two\nlines", "\0", "A" * 16_385, ["x"], KEY, SdkError(), object()],
    ids=lambda answer: type(answer).__name__,
)
@pytest.mark.parametrize("operation", ["wrap", "rewrap"])
def test_garbage_for_a_wrapped_key(answer: object, operation: str) -> None:
    def behave(hook: str, *_: object) -> object:
        return KEY if hook == "unwrap" else answer

    with pytest.raises(KmsResponseInvalidError) as caught:
        OPERATIONS[operation](FakeKms(behave))
    assert "canary" not in all_texts(caught.value)


@pytest.mark.parametrize(
    "answer",
    [None, b"canary-key-bytes", "canary-key-bytes", SecretBytes(b""), SecretBytes(bytes(15)), SdkError()],
    ids=lambda answer: type(answer).__name__,
)
def test_garbage_for_a_key(answer: object) -> None:
    with pytest.raises(KmsResponseInvalidError) as caught:
        unwrap_one(FakeKms(lambda *_: answer), "wrapped", "m")
    assert caught.value.master_key_id == "m"
    assert "canary" not in all_texts(caught.value)


@pytest.mark.parametrize("answer", [None, {}, "m", SdkError()], ids=lambda answer: type(answer).__name__)
def test_garbage_for_a_description(answer: object) -> None:
    with pytest.raises(KmsResponseInvalidError) as caught:
        FakeKms(lambda *_: answer).describe("m")
    assert caught.value.master_key_id == "m"
    assert "canary" not in all_texts(caught.value)


@pytest.mark.parametrize("answers", [None, [], [KEY], [KEY] * 3, "ab", {1: KEY, 2: KEY}, iter([KEY, KEY])])
def test_the_number_of_answers_must_be_right(answers: object) -> None:
    kms = FakeBatchKms(lambda *_: answers)
    outcomes = kms.unwrap_many([UnwrapRequest("x", "m"), UnwrapRequest("y", "m")])
    assert [type(outcome) for outcome in outcomes] == [KmsResponseInvalidError] * 2
    assert "canary" not in all_texts(outcomes[0])


def test_many_answers_are_checked_one_by_one() -> None:
    throttled = KmsThrottledError(backend="fake", operation="unwrap")
    kms = FakeBatchKms(lambda *_: [KEY, None, throttled, KEY])
    outcomes = kms.unwrap_many([UnwrapRequest(text, "m") for text in "abcd"])
    assert outcomes[0] == outcomes[3] == KEY
    assert isinstance(outcomes[1], KmsResponseInvalidError)
    assert outcomes[2] is throttled


def test_a_failure_of_all_is_the_outcome_of_each() -> None:
    def fail(*_: object) -> None:
        raise ConnectionError(SECRET)

    outcomes = FakeBatchKms(fail).wrap_many([WrapRequest(KEY, "m"), WrapRequest(KEY, "n")])
    assert [type(outcome) for outcome in outcomes] == [KmsUnavailableError] * 2


def test_equal_requests_to_unwrap_are_one_and_each_wrap_is_its_own() -> None:
    asked: list[str] = []

    def behave(hook: str, *arguments: object) -> object:
        asked.append(hook)
        return KEY if hook == "unwrap" else f"wrapped{len(asked)}"

    kms = FakeKms(behave)
    unwraps = [UnwrapRequest("x", "m"), UnwrapRequest("x", "n"), UnwrapRequest("x", "m")]
    assert kms.unwrap_many(unwraps) == [KEY] * 3
    assert asked == ["unwrap"] * 2
    assert kms.wrap_many([WrapRequest(KEY, "m"), WrapRequest(KEY, "m")]) == ["wrapped3", "wrapped4"]
    assert kms.call_counts == {"unwrap": 2, "wrap": 2}


def test_what_cannot_be_a_wrapped_key_is_not_asked_for() -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    kms = FakeKms(fail)
    texts = ["", "é", "a\nb", "\0", "A" * 16_385, "\ud800"]
    outcomes = kms.unwrap_many([UnwrapRequest(text, "m") for text in texts])
    outcomes += kms.rewrap_many([RewrapRequest(text, "m", "n") for text in texts])
    assert [type(outcome) for outcome in outcomes] == [WrappedKeyInvalidError] * 12
    assert not kms.call_counts


def test_outcomes_keep_their_order_around_what_was_not_asked_for() -> None:
    kms = FakeKms(lambda hook, wrapped_key, _: SecretBytes(wrapped_key.encode() * 16))
    outcomes = kms.unwrap_many([UnwrapRequest(text, "m") for text in ["a", "", "b", "a", "\n"]])
    assert [o.reveal()[:1] if isinstance(o, SecretBytes) else None for o in outcomes] == [
        b"a",
        None,
        b"b",
        b"a",
        None,
    ]


def test_rewrap_without_a_new_master_key_keeps_the_old_one() -> None:
    seen: list[object] = []

    def behave(hook: str, *arguments: object) -> object:
        seen.append((hook, arguments[-1]))
        return KEY if hook == "unwrap" else "wrapped"

    assert rewrap_one(FakeKms(behave), "x", "m") == "wrapped"
    assert seen == [("unwrap", "m"), ("wrap", "m")]


def test_call_counts_are_a_copy() -> None:
    kms = FakeKms(lambda *_: KEY)
    unwrap_one(kms, "x", "m")
    kms.call_counts.clear()
    assert kms.call_counts == {"unwrap": 1}


def test_settings_do_not_repeat_what_they_refuse() -> None:
    with pytest.raises(ValueError) as caught:
        KmsSettings.model_validate({"type": "x", "tokken": SECRET})
    assert "tokken" in str(caught.value)
    assert "canary" not in str(caught.value)


class SettingsWithSecrets(KmsSettings):
    login: dict[str, list[SecretStr]] = Field(default_factory=dict)


def test_settings_with_a_secret_do_not_pickle() -> None:
    settings = SettingsWithSecrets.model_validate({"type": "x", "login": {"a": [SECRET]}})
    with pytest.raises(TypeError, match="hold a secret"):
        pickle.dumps(settings)
    assert copy.deepcopy(settings) == settings
    without = SettingsWithSecrets(type="x")
    assert pickle.loads(pickle.dumps(without)) == without
