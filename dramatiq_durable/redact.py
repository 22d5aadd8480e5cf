"""Hides what nobody but the code may see: passwords, tokens and keys, wherever text is shown, logged or kept.

Pure functions over text and plain values.  When in doubt they hide: a word too many costs a look into the database, a
password too few costs its rotation.  What they can't know is a secret without a telling name or shape; *patterns* are
for those.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from traceback import TracebackException
from typing import Any

__all__ = [
    "HIDDEN",
    "MAX_MESSAGE",
    "MAX_TRACEBACK",
    "clip",
    "describe",
    "is_secret",
    "redact_text",
    "redact_value",
    "safe_url",
]

#: What stands where a secret was.
HIDDEN = "***"

#: The most that is kept of an error's message, in bytes.
MAX_MESSAGE = 4 * 1024

#: The most that is kept of a traceback, in bytes: enough for the first and the last frames of a deep recursion.
MAX_TRACEBACK = 32 * 1024

#: Longer texts are cut before they are searched: an error that quotes a whole file must not hold a worker up.
MAX_SEARCHED = 256 * 1024

#: Values nested deeper than this are not shown.
MAX_DEPTH = 32

# A name is split into words at underscores, dashes, dots and capitals: "X-Api-Key" is x, api, key.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_START = ("password", "passwd", "passphrase", "passcode", "credential", "secret", "apikey", "cookie")
_SECRET_END = ("password", "passwd", "secret", "token", "apikey", "accesskey", "privatekey", "sessionid")
_SECRET_WORDS = frozenset({"authorization", "bearer", "jwt", "otp", "cvv", "cvc", "pwd", "tokens", "signature"})
_SECRET_LAST = frozenset({"pass", "auth", "pin", "sig", "dsn"})
_SECRET_PAIRS = frozenset(
    {(first, "key") for first in ("api", "access", "private", "account", "signing", "encryption", "master", "shared")}
    | {("session", "id"), ("card", "number")}
)
_INNOCENT = frozenset({"secretary", "secretaries", "cookiecutter"})

_SHAPES = re.compile(
    r"""
      -----BEGIN[ ][A-Z0-9 ]*PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z0-9 ]*PRIVATE[ ]KEY-----|\Z)
    | (?<![A-Za-z0-9])(?:
        sk-[\w-]{8,} | [srp]k_(?:live|test)_\w{8,}              # model APIs, payments
      | (?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}                    # AWS
      | gh[opsur]_[A-Za-z0-9]{16,} | github_pat_\w{16,} | glpat-[\w-]{16,}
      | xox[a-z]-[\w-]{8,} | xapp-[\w-]{8,}                     # Slack
      | AIza[\w-]{24,} | ya29\.[\w-]{8,}                        # Google
      | hf_[A-Za-z0-9]{16,} | npm_[A-Za-z0-9]{24,} | pypi-[\w-]{32,} | whsec_[\w+/=]{16,}
      | SG\.[\w-]{16,}\.[\w-]{16,}                              # SendGrid
      | eyJ[\w-]{6,}(?:\.[\w-]+){1,4}                           # JSON web tokens
      )
    """,
    re.VERBOSE | re.DOTALL,
)

# What stands before an "@": with a password that someone may have forgotten to encode, or as the standard has it.  In
# the first form "host.name:8000/@me" must not be taken for a user called "host.name".
_USER_INFO = re.compile(
    r"""
    (?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]*+://)
    (?:(?!(?:localhost|[\w-]+(?:\.[\w-]+)+|\[[0-9a-fA-F:.]+\]):\d{1,5}[/?\#])[^\s/?\#@"'<>:]*+:[^\s"'<>]{0,512}@
      |[^\s/?\#"'<>]*@)
    """,
    re.VERBOSE,
)
_HEADER = re.compile(
    r"""(?<![\w-])((?:proxy-|set-)?(?:authorization|cookie)\s*[:=]\s*)(?![\\"'])[^\n\r"'\\]+""", re.IGNORECASE
)
_BEARER = re.compile(r"\b(bearer|basic|digest|token)(\s+)(?=\S*\d|\S{16})[\w.~+/=-]{8,}", re.IGNORECASE)

# A name and what separates it from its value: password=, "password": , ["password"] =, ("password", , --password .
_NAME = re.compile(
    r"""
    (?<![\w.-])
    (?:(?P<flag>--?[A-Za-z][\w.-]*+)[ ](?=[^\s:=-])
      |(?P<name>[\w.-]++)(?:[\\"'\])]{0,4}\s*+(?::=|=>|[:=](?!=))\s*+|["']\s*+,\s*+(?=[bBrRuU]{0,2}["'])))
    """,
    re.VERBOSE,
)
# NOTE: Groups are repeated inside (?>...), not with *+ or ++: Python before 3.11.5 matches too much or too little with
# those (python/cpython#106052), and Debian 12 has such a Python.
_VALUE = re.compile(
    r"""
      \\{1,8}(?P<escaped>["']).*?(?:\\{1,8}(?P=escaped)|$)
    | [bBrRuU]{0,2}(?P<quote>["'])(?>(?:(?!(?P=quote))[^\\\n]|\\.)*)(?:(?P=quote)|$)
    | (?P<plain>(?>(?:(?![&;,]\s*["']?[\w.-]++["']?\s*[=:])\S)+))
    """,
    re.VERBOSE | re.MULTILINE,
)
_BRACKET = re.compile(r"""[()\[\]{}]|"(?>(?:[^"\\\n]|\\.)*)"|'(?>(?:[^'\\\n]|\\.)*)'""")

# Plain values that are no secrets even behind a secret's name: nothing at all, or an annotation in a line of code.
_NOTHING = frozenset({"", HIDDEN, "str", "bytes", "int", "None", "null", "True", "true", "False", "false"})
_NUMBER = re.compile(r"[-+]?\d[\d_]*(?:\.\d+)?")


def is_secret(name: str) -> bool:
    """Whether *name*, as a key or an argument, says that its value is a secret."""
    words = _words(name)
    for word, following in pairwise([*words, ""]):
        if word in _INNOCENT:
            continue
        if word in _SECRET_WORDS or word.startswith(_SECRET_START) or word.endswith(_SECRET_END):
            return True
        if (word, following.rstrip("s")) in _SECRET_PAIRS:
            return True
    return bool(words) and words[-1] in _SECRET_LAST


def redact_text(text: str, patterns: Iterable[str | re.Pattern[str]] = ()) -> str:
    """Hide the secrets in a text.

    Parameters:
      text(str): A message, a traceback, a line of a log.
      patterns(Iterable): Regular expressions of your own; all that they match is hidden.

    Returns:
      str: The text with ``***`` in place of every secret.
    """
    for pattern in patterns:
        text = re.sub(pattern, HIDDEN, text)
    text = _SHAPES.sub(HIDDEN, text)
    text = _USER_INFO.sub(rf"\1{HIDDEN}@", text)
    text = _HEADER.sub(rf"\1{HIDDEN}", text)
    text = _BEARER.sub(rf"\1\2{HIDDEN}", text)
    return _redact_named(text)


def redact_value(value: Any, patterns: Iterable[str | re.Pattern[str]] = ()) -> Any:
    """Hide the secrets in a job's arguments, for people to look at.

    Parameters:
      value(object): Anything that JSON can hold; whatever else is in it is shown as text.
      patterns(Iterable): Regular expressions of your own; all that they match is hidden.

    Returns:
      object: A copy with ``***`` in place of every secret.
    """
    return _redact_value(value, tuple(patterns), 0)


def safe_url(url: str) -> str:
    """Hide user, password and secret parameters of a connection URL, however malformed it is."""
    head, at, tail = url.rpartition("@")
    if not at:
        return redact_text(url)
    scheme = re.match(r"[A-Za-z][\w+.-]*:/{0,2}", head)
    # NOTE: "user:password@host" without a scheme looks like a scheme too; only a real one is followed by a slash.
    shown = scheme[0] if scheme and scheme[0].endswith("/") else ""
    return f"{shown}{HIDDEN}@{redact_text(tail)}"


def describe(error: BaseException, patterns: Iterable[str | re.Pattern[str]] = ()) -> tuple[str, str, str]:
    """What may be kept of an error: redacted, bounded, without local variables, and fit for any database.

    Returns:
      tuple: The type's full name, the message, and the traceback.
    """
    kind = type(error)
    home = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    patterns = tuple(patterns)
    try:
        message = str(error)
    except Exception as failure:
        message = f"(its message could not be read: {type(failure).__name__})"
    try:
        traceback = "".join(TracebackException.from_exception(error, compact=True).format())
    except Exception as failure:
        traceback = f"(its traceback could not be read: {type(failure).__name__})"
    return (
        clip(_plain(home + kind.__qualname__), 512),
        clip(redact_text(_plain(clip(message, MAX_SEARCHED)), patterns), MAX_MESSAGE),
        clip(redact_text(_plain(clip(traceback, MAX_SEARCHED)), patterns), MAX_TRACEBACK),
    )


def clip(text: str, limit: int) -> str:
    """Cut a text to at most *limit* bytes of UTF-8, keeping its head and its tail."""
    if len(text) * 4 <= limit:
        return text
    encoded = text.encode("utf-8", "backslashreplace")
    if len(encoded) <= limit:
        return text
    note = f"\n[... {len(encoded) - limit} or more bytes left out ...]\n"
    room = max(0, limit - len(note.encode()))
    head, tail = encoded[: room // 2], encoded[len(encoded) - (room - room // 2) :]
    return head.decode("utf-8", "ignore") + note + tail.decode("utf-8", "ignore")


def _redact_value(value: Any, patterns: tuple[str | re.Pattern[str], ...], depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return redact_text(value, patterns)
    if depth >= MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return {
            redact_text(str(key), patterns): _redact_member(str(key), member, patterns, depth + 1)
            for key, member in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        members = list(value)
        if len(members) == 2 and isinstance(members[0], str):
            # A header, as in ("Authorization", "Bearer ...").
            return [redact_text(members[0], patterns), _redact_member(members[0], members[1], patterns, depth + 1)]
        return [_redact_value(member, patterns, depth + 1) for member in members]
    return redact_text(repr(value), patterns)


def _redact_member(name: str, value: Any, patterns: tuple[str | re.Pattern[str], ...], depth: int) -> Any:
    if not is_secret(name) or value is None or isinstance(value, bool) or value == "":
        return _redact_value(value, patterns, depth)
    if isinstance(value, int | float) and _is_count(name):
        return value
    return HIDDEN


def _redact_named(text: str) -> str:
    """Hide what stands behind a secret's name.

    A name that is none is passed without its value, which may hold names itself.
    """
    shown: list[str] = []
    position = 0
    while found := _NAME.search(text, position):
        shown.append(text[position : found.end()])
        position = found.end()
        name = found["flag"] or found["name"]
        value = _VALUE.match(text, position) if is_secret(name) else None
        if value is None:
            continue
        end = _end_of_plain(text, position, value.end()) if value["plain"] else value.end()
        if value["plain"] and _is_nothing(name, text[position:end]):
            continue
        shown.append(HIDDEN if value["plain"] else _hide_quoted(value[0]))
        position = end
    shown.append(text[position:])
    return "".join(shown)


def _end_of_plain(text: str, start: int, end: int) -> int:
    if text[start] in "([{":
        return _end_of_bracket(text, start)
    plain = text[start:end]
    return start + len(plain.rstrip(",;.:)]}\"'") or plain)


def _end_of_bracket(text: str, start: int) -> int:
    """Where the bracket that opens at *start* is closed again, or the end of its line."""
    depth = 0
    for found in _BRACKET.finditer(text, start, start + 4096):
        depth += 1 if found[0] in "([{" else -1 if found[0] in ")]}" else 0
        if not depth:
            return found.end()
    newline = text.find("\n", start)
    return len(text) if newline < 0 else newline


def _hide_quoted(quoted: str) -> str:
    opening = re.match(r"[bBrRuU]{0,2}(\\{0,8}[\"'])", quoted)
    if opening is None:
        return HIDDEN
    closed = len(quoted) > opening.end() and quoted.endswith(opening[1])
    return f"{opening[0]}{HIDDEN}{opening[1] if closed else ''}"


def _is_nothing(name: str, plain: str) -> bool:
    return plain in _NOTHING or (_is_count(name) and _NUMBER.fullmatch(plain) is not None)


def _is_count(name: str) -> bool:
    """Whether a plain number under this name counts something, as in ``max_tokens``."""
    words = _words(name)
    return "tokens" in words or ("token" in words and words[-1] != "token")


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


def _plain(text: str) -> str:
    """Without what databases refuse to store: NUL, and halves of surrogate pairs."""
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")
