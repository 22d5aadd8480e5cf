from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dramatiq_durable import redact

SECRETS = st.text(alphabet=st.characters(codec="ascii", categories=("L", "N")), min_size=6, max_size=40).map(
    "Zq9".__add__
)
NAMES = st.sampled_from(
    [
        "password",
        "DB_PASSWORD",
        "dbPassword",
        "token",
        "access_token",
        "secret",
        "client-secret",
        "api_key",
        "X-Api-Key",
    ]
    + ["apiKey", "authorization", "Cookie", "aws_secret_access_key", "PGPASSWORD", "credentials", "pwd", "private_key"]
)
SPELLINGS = st.sampled_from(
    [
        "{n}={s}",
        "{n}: {s}",
        "f(x=1, {n}='{s}', y=2)",
        '{{"{n}": "{s}", "y": 2}}',
        "{{'{n}': b'{s}'}}",
        "[('{n}', '{s}')]",
    ]
    + [
        '"{{\\"{n}\\": \\"{s}\\"}}"',
        "--{n} {s}",
        "os.environ['{n}'] = '{s}'",
        "https://h/?a=1&{n}={s}&b=2",
        "{n}={s};user=x",
    ]
    + ["kwargs={{'a': {{'{n}': '{s}'}}}}", '"{n}": ["{s}", {{"x": "{s}"}}]', "a\n{n} = {s}\nb"]
)
SHAPES = [
    "sk-proj-4f9aK2mQ8ZrT1bVx",
    "sk_live_51Habcdefghijkl",
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "xoxb-2345678901-abcdefghij",
    "AIzaSyD-9tSrke72PouQMnMX-a7eZSW0jkFMBWY",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----",
]


@given(name=NAMES, secret=SECRETS, spelling=SPELLINGS)
def test_a_secret_behind_a_telling_name_never_survives(name: str, secret: str, spelling: str) -> None:
    shown = redact.redact_text(spelling.format(n=name, s=secret))

    assert secret not in shown
    assert redact.HIDDEN in shown


@given(secret=st.text(alphabet=st.characters(codec="ascii", exclude_categories=("C",)), min_size=1))
def test_a_quoted_password_of_any_characters_is_hidden_whole(secret: str) -> None:
    # Given a password in a JSON object and in the repr of a dictionary
    for text in (json.dumps({"password": secret, "user": "bob"}), repr({"password": secret, "user": "bob"})):
        # When the text is shown
        shown = redact.redact_text(text)

        # Then nothing of it is left, and its neighbour is
        assert shown.replace("'", '"') == '{"password": "***", "user": "bob"}'


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("frame", ["{}", "key {} was refused", "('{}',)", "x={}", '{{"value": "{}"}}'])
def test_keys_are_known_by_their_shape(shape: str, frame: str) -> None:
    assert redact.redact_text(frame.format(shape)) == frame.format(redact.HIDDEN)


@given(secret=SECRETS, word=st.sampled_from(["Bearer", "bearer", "Basic", "BEARER"]))
def test_the_value_of_an_authorization_header_is_hidden(secret: str, word: str) -> None:
    for text in (
        f"Authorization: {word} {secret}",
        f"{{'authorization': '{word} {secret}'}}",
        f"{word} {secret}0123456789",
    ):
        assert secret not in redact.redact_text(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "postgresql://app:hunter2@db.example:5432/x?sslmode=require",
            "postgresql://***@db.example:5432/x?sslmode=require",
        ),
        ("redis://:hunter2@h:6379/0", "redis://***@h:6379/0"),
        ("https://0123456789abcdef@errors.example/1", "https://***@errors.example/1"),
        ("postgresql://app:p@ss/w?rd#1@db/x", "postgresql://***@db/x"),
        ("'redis://u:hunter2@a' and 'redis://u:hunter2@b'", "'redis://***@a' and 'redis://***@b'"),
    ],
)
def test_user_and_password_of_a_url_are_hidden(text: str, shown: str) -> None:
    assert redact.redact_text(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "Processing 3 tokens of max_tokens=4096, prompt_tokens: 12.",
        "see http://localhost:8000/@me and https://shop.example/u?email=a@b.example",
        "UNIQUE constraint failed: durable_jobs.id (pk_durable_jobs)",
        'File "/srv/app/auth.py", line 3, in reset_password',
        "monkey=1 keyboard=2 idempotency_key=job-17 the secretary: Anna",
        "def f(token: str, password: None) -> None",
        "a bearer of good news has a basic understanding of risk-assessment-reports",
        "if token == expected:",
    ],
)
def test_innocent_text_stays(text: str) -> None:
    assert redact.redact_text(text) == text


@given(st.lists(st.sampled_from(["the", "job", "failed", "after", "3", "attempts", "in", "queue", "'default'", "a,b"])))
def test_plain_words_stay(words: list[str]) -> None:
    text = " ".join(words)
    assert redact.redact_text(text) == text


@given(st.text())
@example("password=")
@example("token: ]")
def test_any_text_can_be_redacted_twice_without_change(text: str) -> None:
    once = redact.redact_text(text)
    assert redact.redact_text(once) == once


def test_patterns_of_ones_own_are_hidden_too() -> None:
    assert redact.redact_text("customer C-1234 paid", [r"C-\d+"]) == "customer *** paid"
    assert redact.redact_value({"who": ["C-1234"]}, [r"C-\d+"]) == {"who": ["***"]}


@pytest.mark.parametrize(
    "text",
    [
        "password=[\n",
        "a://b:c",
        "\\",
        "token ",
        ", ",
        "sk-",
        "://",
        "a.b-c",
        "-----BEGIN ",
        "x='",
        "password='\\",
        "\\'password",
    ],
)
def test_text_made_to_be_slow_is_not(text: str) -> None:
    # Given as much of it as is ever searched
    text = text * (redact.MAX_SEARCHED // len(text))

    # When it is redacted
    began = time.thread_time()
    redact.redact_text(text)

    # Then that takes a moment of this thread's time, however busy the machine is (a quadratic search would take hours)
    assert time.thread_time() - began < 15


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["a", "b c"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "count"]), inner, max_size=3)
    ),
)


@given(value=JSON, name=NAMES, secret=SECRETS | SECRETS.map(lambda s: [s]) | SECRETS.map(lambda s: {"a": {"b": s}}))
def test_a_secret_argument_never_survives_however_deep(value: object, name: str, secret: object) -> None:
    shown = redact.redact_value({"args": [value, {"x": [{name: secret}]}]})

    assert shown == {"args": [redact.redact_value(value), {"x": [{name: "***"}]}]}
    assert "Zq9" not in repr(shown)


@given(JSON)
def test_innocent_arguments_stay(value: object) -> None:
    assert redact.redact_value(value) == value


def test_values_that_json_does_not_know_are_shown_as_text() -> None:
    value: list[object] = []
    value.append(value)

    assert redact.redact_value((1, {"b"}, b"password=x", 1j)) == [1, ["b"], "b'password=***'", "1j"]
    assert "..." in repr(redact.redact_value(value))
    assert redact.redact_value({"max_tokens": 4096, "token": 123456}) == {"max_tokens": 4096, "token": "***"}
    assert redact.redact_value([("Authorization", "Basic x")]) == [["Authorization", "***"]]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:///jobs.sqlite3", "sqlite:///jobs.sqlite3"),
        ("postgresql://db/jobs", "postgresql://db/jobs"),
        (
            "postgresql://app:x@db/jobs?password=y&sslmode=require",
            "postgresql://***@db/jobs?password=***&sslmode=require",
        ),
        ("postgresql:/app:x@db/jobs", "postgresql:/***@db/jobs"),
        ("app:x@db/jobs", "***@db/jobs"),
        ("postgresql://a:b?c@d/e@db/jobs", "postgresql://***@db/jobs"),
        ("", ""),
    ],
)
def test_a_url_is_safe_to_show_however_malformed(url: str, shown: str) -> None:
    assert redact.safe_url(url) == shown


@given(user=st.text(), password=st.text(min_size=1), host=st.sampled_from(["db", "10.0.0.1:5432"]))
def test_no_password_survives_in_a_url(user: str, password: str, host: str) -> None:
    assert redact.safe_url(f"postgresql://{user}:{password}@{host}/x") == f"postgresql://***@{host}/x"


def broken(password: str) -> None:
    local = f"{password} in a local variable"
    raise ValueError(f"cannot log in with password={password}" + local[:0])


def test_an_error_is_described_without_secrets_and_without_local_variables() -> None:
    # Given an error that was raised with a secret in its message and in the variables around it
    with pytest.raises(ValueError) as caught:
        broken("hunter" + str(2))

    # When it is described
    kind, message, traceback = redact.describe(caught.value)

    # Then it says what and where, and not the secret
    assert (kind, message) == ("ValueError", "cannot log in with password=***")
    assert "in broken" in traceback and "test_redact.py" in traceback
    assert "hunter2" not in traceback


def test_a_huge_error_keeps_its_head_and_its_tail() -> None:
    error = ValueError("first " + "x" * 10_000_000 + " last")

    _, message, traceback = redact.describe(error)

    assert len(message.encode()) <= redact.MAX_MESSAGE and len(traceback.encode()) <= redact.MAX_TRACEBACK
    assert message.startswith("first ") and message.endswith(" last")


def test_an_error_that_cannot_be_read_is_described_all_the_same() -> None:
    class Unreadable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    kind, message, _ = redact.describe(Unreadable())

    assert kind.endswith("Unreadable")
    assert message == "(its message could not be read: RuntimeError)"


@given(st.text(alphabet=st.characters(exclude_categories=())), st.integers(64, 200))
def test_what_is_kept_fits_and_can_be_stored_anywhere(text: str, limit: int) -> None:
    _, message, _ = redact.describe(ValueError(text))

    assert "\x00" not in message
    message.encode("utf-8")
    assert len(redact.clip(text, limit).encode("utf-8", "backslashreplace")) <= limit


def test_no_pattern_repeats_a_group_possessively() -> None:
    """Python before 3.11.5 is wrong about ``(...)*+``, and what it is wrong about here is a secret that is shown."""
    patterns = [value.pattern for value in vars(redact).values() if isinstance(value, re.Pattern)]
    assert len(patterns) > 5
    for pattern in patterns:
        assert not re.search(r"(?<!\\)\)(?:[*+?]|\{[\d,]+\})\+", pattern), pattern
